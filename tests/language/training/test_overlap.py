"""Groups are scored while others are still being written."""

from __future__ import annotations

import time

import pytest
from in_memory import rollout_of
from inline_scorer import InlineScorer
from tiny_rewards import marked

from psigrad.language.data.dataset_rows import Row
from psigrad.language.models import tiny
from psigrad.language.models.language_model import prepare
from psigrad.language.rewards import RewardPool, RewardSpec, resolve
from psigrad.language.rollout.samplers.embedded import EmbeddedSampler
from psigrad.language.rollout.types import Completion, Prompt, Sampler, SamplingParams


@pytest.fixture(scope="module")
def model():
    tokenizer = tiny.tokenizer(["hello world 123"] * 5, 280)
    return prepare(tiny.model("qwen3", len(tokenizer)), tokenizer)


def prompts(model, count):
    texts = [f"hello {i}" for i in range(count)]
    return [
        Prompt(i, tuple(model.tokenizer(text).input_ids), Row("x", prompt=text, columns={"mark": i}))
        for i, text in enumerate(texts)
    ]


def taking(model, sampler, scorer, given, generations=3):
    rollout = rollout_of(sampler, model, scorer)
    return rollout(given, SamplingParams(max_tokens=6), generations, lambda i, k: 100 * i + k, version=0)


@pytest.mark.parametrize("max_batch", [4, pytest.param(256, marks=pytest.mark.slow)])
def test_every_completion_gets_its_own_reward(model, max_batch):
    """Groups come in the order in which they end; trajectories stand in that of their prompts."""
    given = prompts(model, 6)
    found = taking(model, EmbeddedSampler(model, max_batch), InlineScorer([RewardSpec("marked", marked)]), given)
    assert [(t.row, t.k) for t in found] == [(i, k) for i in range(6) for k in range(3)]
    read = [model.tokenizer.decode(t.completion.ids, skip_special_tokens=True) for t in found]
    assert [t.reward for t in found] == [100 * t.row + sum(map(ord, text)) + 3 for t, text in zip(found, read, strict=True)]
    with RewardPool([RewardSpec("marked", marked)], workers=2, timeout=60.0) as pool:
        assert [t.reward for t in taking(model, EmbeddedSampler(model, max_batch), pool, given)] == [t.reward for t in found]


class Patient(Sampler):
    """Writes one request per step, and before the last waits until the scorer has been at work."""

    def __init__(self, tokens, scored, patience):
        self.tokens, self.scored, self.patience, self.gave_up = tokens, scored, patience, False

    def steps(self, requests, params, cache=None):
        for place, request in enumerate(requests):
            end = time.monotonic() + self.patience
            while place == len(requests) - 1 and not self.scored.exists() and not self.gave_up:
                time.sleep(0.01)
                self.gave_up = time.monotonic() > end
                yield []
            yield [(place, [Completion((self.tokens[0],), (0.0,), (0.0,), "stop", s) for s in request.seeds])]


class AllAtOnce(Sampler):
    def __init__(self, sampler):
        self.sampler = sampler

    def steps(self, requests, params, cache=None):
        yield list(enumerate(self.sampler.sample(requests, params)))


@pytest.mark.parametrize("streaming", [True, False])
def test_the_first_group_is_scored_before_the_last_is_written(model, tmp_path, streaming):
    """The control hides from the sampler's user that there are steps: then nothing is scored before all is written."""
    scored = tmp_path / "scored"
    (tmp_path / "touching.py").write_text(
        "from pathlib import Path\n"
        "def reward(completions, **columns):\n"
        f"    Path({str(scored)!r}).touch()\n"
        "    return [1.0] * len(completions)\n"
    )
    sampler = Patient(model.tokenizer("hello").input_ids, scored, patience=60.0 if streaming else 1.0)
    shown = sampler if streaming else AllAtOnce(sampler)
    with RewardPool([resolve(f"{tmp_path}/touching.py:reward")], timeout=60.0) as pool:
        found = taking(model, shown, pool, prompts(model, 4))
    assert [t.reward for t in found] == [1.0] * 12
    assert sampler.gave_up != streaming
