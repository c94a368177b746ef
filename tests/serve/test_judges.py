"""A judge behind psigrad's own server: the same verdicts as of the judge in this process."""

from __future__ import annotations

import pytest
import torch

from psigrad.language.data.dataset_rows import Row
from psigrad.language.data.templates import CHATML, prompt_ids
from psigrad.language.models import tiny
from psigrad.language.models.language_model import prepare
from psigrad.language.rollout.scoring import Unscored
from psigrad_extras.judges.rubric import Rubric
from psigrad_serve.engine.engine import SamplingEngine
from psigrad_serve.served import Served
from psigrad_serve.serving import running

QUESTIONS, ANSWERS = ["What is 1 + 1?", "Say hello.", "Name a fruit."], ["2", "no", "an apple"]


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    """One whose replies are mostly numbers."""
    tokenizer = tiny.tokenizer(["the judge says how well the answer meets the rubric 0123456789"], 320)
    tokenizer.chat_template = CHATML
    network = tiny.model("qwen3", len(tokenizer), max_length=1024, tied=False)
    row = Row("x", prompt=[{"role": "user", "content": "How well?"}])
    with torch.no_grad():
        state = network.model(torch.tensor([prompt_ids(tokenizer, row)])).last_hidden_state[0, -1]
        for number in range(6):
            (token,) = tokenizer(str(number))["input_ids"]
            network.get_output_embeddings().weight[token] += state * 0.08
    model = prepare(network, tokenizer)
    folder = tmp_path_factory.mktemp("judge")
    model.save(folder)
    engine = SamplingEngine(model, 4)
    with running(Served(engine, ["judge"])) as at:
        yield str(folder), at
    engine.close()


def test_probabilities_of_the_server_are_the_local_judge_s_verdict(judge, monkeypatch):
    folder, at = judge
    monkeypatch.setenv("OPENAI_API_KEY", at.token)
    asked = {"rubric": "right and short", "scale": 5}
    local = Rubric(model=folder, **asked)(QUESTIONS, ANSWERS)
    served = Rubric(model="judge", base_url=f"{at.url}/v1", probabilities=True, **asked)(QUESTIONS, ANSWERS)
    assert served == pytest.approx(local, abs=1e-4) and len(set(local)) == 3


def test_verdicts_by_hand_and_where_there_are_none():
    asked = Rubric(model="judge", base_url="http://x", probabilities=True, scale=4, rubric="x")
    # (1 · 0.5 + 4 · 0.25) / 0.75 / 4, the 9 being no score and " 4" one
    assert asked._weighed('[["1", -0.6931471805599453], [" 4", -1.3862943611198906], ["9", -2.0]]') == pytest.approx(0.5)
    with pytest.raises(Exception, match="would reply with something else"):
        asked._weighed('[["good", -0.1]]')


def test_a_written_verdict_goes_through_the_same_server(judge, monkeypatch):
    at = judge[1]
    monkeypatch.setenv("OPENAI_API_KEY", at.token)
    asked = {"model": "judge", "base_url": f"{at.url}/v1", "rubric": "short", "attempts": 1, "max_tokens": 4}
    (found,) = Rubric(**asked)(QUESTIONS[:1], ANSWERS[:1])
    assert isinstance(found, Unscored) and "and has no score" in found.reason
    monkeypatch.setenv("OPENAI_API_KEY", "wrong")
    (found,) = Rubric(**asked)(QUESTIONS[:1], ANSWERS[:1])
    assert isinstance(found, Unscored) and "HTTP 401" in found.reason
