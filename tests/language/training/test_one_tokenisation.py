"""One text has one tokenisation: the reward of a text in RL is what `psigrad score` says of it, and is read at the token at which
training reads it, for plain and chat models over templates of several families.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from psigrad import api
from psigrad.config import Data, OnlineConfig
from psigrad.errors import UserError
from psigrad.language.data import pairs
from psigrad.language.data.dataset_layouts import to_turns
from psigrad.language.data.dataset_rows import Row
from psigrad.language.data.templates import prompt_ids, stop_token_ids
from psigrad.language.models import scalar_model, tiny
from psigrad.language.models.packing import Groups
from psigrad.language.recipes import reward
from psigrad.language.recipes.model_scorer import ModelScorer, answer_end, score_all
from psigrad.language.recipes.scorers import _load_model
from psigrad.language.rewards import Samples, Scored, Unscored

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
FAMILIES = ["qwen2_5", "qwen3", "llama3_1", "gemma3", "phi3", "cohere2", "lfm2", "gptoss", "deepseek_r1_distill", "glm4moe"]
OTHERS = (
    "cohere deepseekv3 diffusion_gemma gemma gemma4 gemma4_v2 gemma4_v3 gemma4_v4 gemma4_v5 idefics3 lfm2_2_5 lfm2_2_5_v2 "
    "lfm2_2_5_vl lfm2_v2 llama3 llama3_2 llava_next muse_glimmer nemotron_3_5_lightning nemotron_3_nano nemotron_3_super "
    "nemotron_3_ultra phi3_5 qwen2_5_vl qwen3_5_nothink qwen3_5_think qwen3_6 qwen3_8 qwen3_instruct_2507 qwen3_vl smolvlm"
)
SLOW = [pytest.param(family, marks=pytest.mark.slow) for family in OTHERS.split()]
PROMPTS = ["two plus two?", "say it", "say it"]
ANSWERS = ["it is four", "hello there", "the cat sat on the mat"]


def chat_tokenizer(family: str) -> Any:
    """A small tokenizer with a template of TRL's and the special tokens that it writes; "" is without a template."""
    tokenizer = tiny.tokenizer(PROMPTS + ANSWERS, 270)
    if family:
        template = (TEMPLATES / f"{family}.jinja").read_text()
        words = sorted(
            set(re.findall(r"<[|｜]?[a-zA-Z_▁]+[|｜]>|<(?:start|end)_of_turn>|<end_of_utterance>|</s>|<[|A-Z_]+>", template))
        )
        tokenizer.add_special_tokens({"additional_special_tokens": words, "bos_token": "<bos>"})
        tokenizer.chat_template = template
        if "eos_token" in template or family == "llama3":
            tokenizer.eos_token = "<|eot_id|>" if family == "llama3" else "<|endoftext|>"
    return tokenizer


@pytest.fixture(scope="module", params=["", *FAMILIES, *SLOW])
def judge(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model with a head of chance, whose score is another at every token."""
    folder, tokenizer = tmp_path_factory.mktemp(f"judge-{request.param}"), chat_tokenizer(request.param)
    base = tiny.model("qwen3", len(tokenizer), hidden=16, layers=1, heads=2, max_length=4096)
    base.save_pretrained(folder)
    torch.manual_seed(0)
    network = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    torch.nn.init.normal_(network.score.weight)
    scalar_model.prepare(network, tokenizer).save_merged(folder)
    return folder


def rewards_in_rl(folder: Path, tokenizer: Any, answers: list[list[int]], texts: list[Any], **data: Any) -> list[float]:
    """What a policy with this tokenizer gets for its tokens. The prompts go to it as they go in RL."""
    scorer = _load_model(str(folder), "judge", OnlineConfig(data=Data(**data)), tokenizer)
    rows = [to_turns(tokenizer, Row("x", prompt=prompt), data.get("plain_prompts", False)) for prompt in PROMPTS]
    samples = Samples(PROMPTS, texts, answers, prompt_ids=[prompt_ids(tokenizer, row) for row in rows])
    return [result.value for result in scorer.score(samples)]


def test_reward_in_training_scoring_and_rl_is_one_number(judge: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(judge)
    given = [{"prompt": p, "completion": a} for p, a in zip(PROMPTS, ANSWERS, strict=True)]
    said = [row["reward"] for row in reward.score_rows(str(judge), given, device="cpu")]
    model = scalar_model.load(str(judge))
    rows = [to_turns(tokenizer, Row("x", p, a, rejected=f"{a}!")) for p, a in zip(PROMPTS, ANSWERS, strict=True)]
    encoded = [pairs.encode_pair(tokenizer, row) for row in rows]
    with torch.no_grad():
        trained = model.scores(Groups([pair.prompt for pair in encoded], [[pair.chosen.ids] for pair in encoded])).tolist()
    assert trained == pytest.approx(said, abs=1e-5)
    written = [tokenizer(text, add_special_tokens=False).input_ids for text in ANSWERS]
    end = stop_token_ids(tokenizer)[0] if tokenizer.chat_template else tokenizer.eos_token_id
    ended, other = [[*ids, end] for ids in written], [[*ids, tokenizer.eos_token_id] for ids in written]
    whole = [[*ids, *(answer_end(tokenizer, not tokenizer.chat_template) or [])] for ids in written]
    for sampled in (ended, other, whole, written):  # the last was cut by the length limit
        assert rewards_in_rl(judge, tokenizer, sampled, ANSWERS) == pytest.approx(said, abs=1e-5)
    by_text = rewards_in_rl(judge, chat_tokenizer(""), written, ANSWERS)  # a policy of another family
    assert by_text == pytest.approx(said, abs=1e-5)
    messages = [[{"role": "assistant", "content": answer}] for answer in ANSWERS]  # an episode behind a plain prompt
    assert rewards_in_rl(judge, tokenizer, ended, messages) == pytest.approx(said, abs=1e-5)
    # the control: one token earlier is another reward
    early = score_all(model, [(pair.prompt, pair.chosen.ids[:-1]) for pair in encoded], 4096)
    assert min(abs(a - b) for a, b in zip(early, said, strict=True)) > 1e-3


def test_these_are_all_templates() -> None:
    """TRL's own patches, which are for its training alone, are not among them."""
    shipped = {path.stem for path in TEMPLATES.glob("*.jinja")}
    assert {name for name in shipped if not name.endswith("_training")} == {*FAMILIES, *OTHERS.split()}


@pytest.mark.parametrize("plain", [False, True])
def test_a_reward_model_of_plain_prompts_stays_one(plain: bool, tmp_path: Path) -> None:
    """What it was trained on is written in its folder, and holds whatever the policy's own prompts are."""
    tokenizer = chat_tokenizer("qwen2_5")
    base = tiny.model("qwen3", len(tokenizer), hidden=16, layers=1, heads=2)
    base.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    rows = [{"prompt": p, "chosen": a, "rejected": f"{a}!"} for p, a in zip(PROMPTS, ANSWERS, strict=True)]

    done = api.train(
        *("reward",),
        model=tmp_path / "base",
        dataset=rows,
        plain_prompts=plain,
        max_steps=1,
        eval_prompts=0,
        output_dir=tmp_path / "run",
        report=False,
    )
    given = [{"prompt": p, "completion": a} for p, a in zip(PROMPTS, ANSWERS, strict=True)]
    said = [row["reward"] for row in reward.score_rows(str(done.model), given)]
    written = [tokenizer(text, add_special_tokens=False).input_ids for text in ANSWERS]
    for policy in (False, True):
        found = rewards_in_rl(done.model, tokenizer, written, ANSWERS, plain_prompts=policy)
        assert found == pytest.approx(said, abs=1e-5)
    scorer = _load_model(str(done.model), "judge", OnlineConfig(data=Data(plain_prompts=plain)), tokenizer)
    assert isinstance(scorer, ModelScorer) and scorer.same_tokens and scorer.model.plain_prompts == plain


def test_a_text_beyond_the_reward_models_positions_is_unscored_and_not_scored_at_random(tmp_path: Path) -> None:
    """Rotary positions go on beyond the last that was trained, and give numbers."""
    tokenizer = tiny.tokenizer(PROMPTS + ANSWERS, 270)
    config = tiny.model("qwen3", len(tokenizer), hidden=16, layers=1, heads=2, max_length=16).config
    config.num_labels = 1
    scalar_model.prepare(AutoModelForSequenceClassification.from_config(config), tokenizer).save_merged(tmp_path)
    texts = ["a" * 8, "a" * 9]
    written = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    assert [len(ids) for ids in written] == [8, 9]
    scorer = _load_model(str(tmp_path), "judge", OnlineConfig(), tokenizer)
    prompt = [tokenizer("b" * 7, add_special_tokens=False).input_ids] * 2
    found = scorer.score(Samples(["b" * 7] * 2, texts, written, prompt_ids=prompt))  # with an EOS 16 and 17 tokens
    assert isinstance(found[0], Scored) and isinstance(found[1], Unscored)
    assert "the reward model judge cannot read 17 tokens, since it has 16 positions" in found[1].reason
    rows = [{"prompt": "b" * 7, "completion": text} for text in texts]
    with pytest.raises(UserError, match="cannot read 17 tokens, since it has 16 positions; shorten the row"):
        reward.score_rows(str(tmp_path), rows, device="cpu")
    assert len(reward.score_rows(str(tmp_path), rows[:1], device="cpu")) == 1
