"""Episodes at their own pace: who answers when changes no token, no log-prob's last bit, no reward and no message."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from hostile_environments import Counting, Sleepy
from tiny_jobs import online_config

from psigrad import seeds
from psigrad.config import Evaluation
from psigrad.language.data.dataset_rows import Row
from psigrad.language.data.templates import CHATML, prompt_ids
from psigrad.language.episodes import episodes as played_episodes
from psigrad.language.episodes.environment_pool import EnvironmentPool
from psigrad.language.episodes.environments import InProcess
from psigrad.language.episodes.episodes import Episodes, play
from psigrad.language.models import tiny
from psigrad.language.models.language_model import prepare
from psigrad.language.recipes import online
from psigrad.language.rollout.samplers.embedded import EmbeddedSampler
from psigrad.language.rollout.samplers.transformers_backend import TransformersSampler
from psigrad.language.rollout.types import NextTurn, SamplingParams

PARAMS = SamplingParams(max_tokens=6, stop_token_ids=tuple(range(140, 280)))
ROWS = [
    Row("a", prompt="say a:", columns={"name": "a"}),
    Row("b", prompt=[{"role": "user", "content": "b"}], columns={"name": "b"}),
]


class Paced(InProcess):
    """Answers each call some looks later, drawn at random; `slow` names episodes that answer only when nobody else is left."""

    paced = True

    def __init__(self, factory, seed=0, slow=()):
        super().__init__(factory)
        self.rng, self.slow, self.now, self.due, self.asked = random.Random(seed), slow, 0, {}, []

    def submit(self, calls):
        super().submit(calls)
        self.asked += [(call.number, len(call.turns)) for call in calls if call.turns]
        self.due |= {c.number: self.now + (1000 if c.number in self.slow else self.rng.randint(1, 3)) for c in calls}

    def answers(self, seconds):
        if not self.due:
            return {}
        self.now = max(self.now + 1, min(self.due.values()))
        there = [number for number, due in self.due.items() if due <= self.now]
        self.rng.shuffle(there)
        return {number: self._said.pop(number) for number in there if self.due.pop(number)}


class Counted(Counting):
    """Four turns, each with a reward and an answer of another length."""

    def step(self, text):
        self.count = getattr(self, "count", 0) + 1
        return f"{len(text)} " * self.count, float(len(text)), self.count == 4


@pytest.fixture(scope="module")
def models():
    tokenizer = tiny.tokenizer(["say a: turn 1 2 3 user assistant more"], 280)
    tokenizer.chat_template = CHATML
    made = {name: tiny.model(name, len(tokenizer), hidden=32, layers=2, heads=2, max_length=256) for name in ("qwen3", "gpt2")}
    return {name: prepare(model, tokenizer) for name, model in made.items()}


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(played_episodes, "LINGER", (0.0, 0.0))


def go(model, playing, *, sampler=EmbeddedSampler, count=6, **rules):
    return play(
        Episodes(playing, **rules),
        sampler(model),
        [(n, tuple(prompt_ids(model.tokenizer, row)), row) for n, row in enumerate(ROWS)],
        PARAMS,
        num_generations=count,
        seed_of=lambda i, k: 100 * i + k,
        tokenizer=model.tokenizer,
        version=0,
        max_length=model.max_length,
    )


@pytest.mark.parametrize(
    ("name", "sampler"), [("qwen3", EmbeddedSampler), ("gpt2", EmbeddedSampler), ("gpt2", TransformersSampler)]
)
def test_the_same_seeds_give_the_same_episodes_whatever_the_pace(name, sampler, models):
    model = models[name]
    expected = go(model, InProcess(Counted), sampler=sampler)
    found = [go(model, Paced(Counted, seed), sampler=sampler) for seed in range(4)]
    assert all(other == found[0] for other in found[1:]), "to the last bit"
    for mine, theirs in zip(found[0], expected, strict=True):
        assert (mine.completion.ids, mine.mask, mine.messages) == (theirs.completion.ids, theirs.mask, theirs.messages)
        assert (mine.step_rewards, mine.text, mine.turns) == (theirs.step_rewards, theirs.text, theirs.turns)
        assert mine.completion.logprobs == pytest.approx(theirs.completion.logprobs, abs=2e-5)
        assert mine.completion.logprobs == mine.completion.sampling_logprobs
    assert {t.turns for t in expected} > {4}, "some are cut before their last turn"


def test_control_seeds_that_count_who_came_before_give_other_episodes(models, monkeypatch):
    drawn = iter(range(10**6))
    turn = property(lambda self: NextTurn(self.heard, seeds.derive(1, next(drawn) % 64)))
    monkeypatch.setattr(played_episodes.LiveEpisode, "next_turn", turn)
    found = [[t.completion.ids for t in go(models["qwen3"], Paced(Counted, seed))] for seed in range(2)]
    assert found[0] != found[1]


def test_control_the_log_probs_of_sampling_depend_on_the_company_in_their_last_bits(models, monkeypatch):
    monkeypatch.setattr(played_episodes, "settle", lambda sampler, made, params: made)
    monkeypatch.setattr(models["gpt2"].module_kernels, "on", False)  # products of psigrad's kernels depend on no other row
    monkeypatch.setattr(models["gpt2"], "module_kernels", None)
    found = [go(models["gpt2"], Paced(Counted, seed)) for seed in range(4)]
    assert [t.completion.ids for t in found[0]] == [t.completion.ids for t in found[1]]
    assert any(
        a.completion.logprobs != b.completion.logprobs for other in found[1:] for a, b in zip(found[0], other, strict=True)
    )


def test_log_probs_that_are_no_rounding_apart_stay_for_training_to_see(models, monkeypatch):
    monkeypatch.setattr(EmbeddedSampler, "log_probs", lambda self, prompt, ids, params: [[-9.0] * len(x) for x in ids])
    found, expected = go(models["qwen3"], Paced(Counted)), go(models["qwen3"], InProcess(Counted))
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.completion.logprobs == pytest.approx(theirs.completion.logprobs, abs=2e-5)


@pytest.mark.parametrize("together", [False, True])
def test_nobody_waits_for_a_slow_environment_but_where_all_are_to_stay_together(together, models):
    playing = Paced(Counted, slow=(0,))
    found = go(models["qwen3"], playing, together=together)
    last = {number: place for place, (number, turn) in enumerate(playing.asked)}
    others = [turn for number, turn in playing.asked[: playing.asked.index((0, 2)) if (0, 2) in playing.asked else None]]
    assert found[0].turns > 1 and (max(others) == 1) == together
    assert (last[0] == len(playing.asked) - 1) or together


def test_real_processes_and_sleeps_give_what_this_process_gives(models):
    with EnvironmentPool(Sleepy, workers=2, timeout=60.0) as pool:
        found = [go(models["qwen3"], pool) for _ in range(2)]
    assert found[0] == found[1]
    expected = go(models["qwen3"], InProcess(Sleepy))
    assert [(t.completion.ids, t.step_rewards, t.text) for t in found[0]] == [
        (t.completion.ids, t.step_rewards, t.text) for t in expected
    ]


def test_a_run_is_the_same_to_the_last_bit_however_long_answers_take(job, tmp_path):
    def run(name, **settings):
        config = replace(online_config(job, tmp_path / name, max_steps=3), environment=Sleepy, reward=(), max_turns=3)
        config = replace(config, environment_workers=2, evaluation=Evaluation(eval_prompts=0), **settings)
        folder = online.run(config).folder
        return [(folder / file).read_bytes() for file in ("metrics.jsonl", "rollouts.jsonl", "model/model.safetensors")]

    first = run("first")
    assert run("second") == first
    assert json.loads(first[0].splitlines()[-1])["turns/mean"] > 1
    assert run("other", max_turn_length=4) != first, "negative control: what is sampled differently is told from it"
