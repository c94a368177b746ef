"""Edges of the training code: rates at the last step, parts that do not apply, failed completions, counts."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
from in_memory import advance, log_of, make, with_player

from psigrad.config import Optim
from psigrad.language.data.dataset_rows import Row
from psigrad.language.data.reward_view import reward_view
from psigrad.language.models import tiny
from psigrad.language.recipes import loops
from psigrad.language.rollout import collectors
from psigrad.language.rollout.types import Completion, Prompt, State, Trajectory
from psigrad.language.training.online.batching import LENGTH_PENALTY, metric_of, to_batch
from psigrad.optim import learning_rate


@pytest.mark.parametrize("kind", ["linear", "cosine", "constant"])
def test_a_run_that_is_all_warm_up_has_a_rate_at_every_step(kind):
    optim = Optim(learning_rate=1.0, warmup_steps=3, lr_scheduler_type=kind)
    assert [learning_rate(optim, step, 3) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    if kind != "constant":
        assert learning_rate(optim, 4, 3) == pytest.approx(0.0)
        half = replace(optim, warmup_steps=0)
        assert learning_rate(half, 5, 10) == pytest.approx(0.5)


def trajectory(status: str = "scored", reward: float | None = 1.0, **parts) -> Trajectory:
    written = Completion((3, 4), (-1.0, -1.0), (-1.0, -1.0), "stop", 0)
    return Trajectory(0, 0, (1, 2), written, 0, reward=reward, parts=parts, status=status)


def test_the_metric_is_the_reward_without_the_penalty_on_length():
    assert metric_of(trajectory(a=0.5, b=None, **{LENGTH_PENALTY: -0.3}), "") == 0.5
    assert metric_of(trajectory(reward=0.7, a=0.5), "") == 0.7
    assert metric_of(trajectory(a=0.5, b=0.25), "b") == 0.25


def test_a_failed_completion_keeps_its_parts_and_is_worth_its_reward_to_those_that_nobody_named():
    groups = [
        [trajectory(a=1.0, b=None), trajectory("failed", -2.0), trajectory("failed", None), trajectory("failed", 1.0, a=0.0)]
    ]
    parts = to_batch(groups).parts
    assert parts[0, 0] == 1.0 and math.isnan(parts[0, 1])
    assert parts[1].tolist() == [-2.0, -2.0] and parts[2].tolist() == [0.0, 0.0]
    assert parts[3].tolist() == [0.0, 1.0]


@pytest.fixture(scope="module")
def tokenizer():
    return tiny.tokenizer(["say a: b"], 270)


def test_tokens_are_counted_step_by_step(tokenizer):
    run = make(tokenizer, steps=3)
    state, expected = State(algorithm=run.algorithm.initial_state()), 0
    for _ in range(3):
        before = len(log_of(run).lines)
        state = advance(run, state)
        expected += sum(len(line["prompt_ids"]) + line["tokens"] for line in log_of(run).lines[before:] if "tokens" in line) or 0
        assert state.tokens > 0
    fresh = make(tokenizer, steps=3)
    totals, other = [], State(algorithm=fresh.algorithm.initial_state())
    for _ in range(3):
        other = advance(fresh, other)
        totals.append(other.tokens)
    parts = [b - a for a, b in zip([0, *totals], totals, strict=False)]
    assert all(part > 32 * 0 for part in parts) and sum(parts) == state.tokens


@pytest.mark.parametrize(
    ("iterations", "minibatches", "single"), [(1, 1, True), (2, 1, False), (1, 2, False), (3, 2, False), (2, 2, False)]
)
def test_one_pass_is_one_optimiser_step_for_each_collection(tokenizer, iterations, minibatches, single):
    assert make(tokenizer, num_iterations=iterations, num_minibatches=minibatches).single_pass is single


def test_updates_are_counted_with_the_critics(tokenizer):
    run = make(tokenizer)
    assert run.updates() == 0
    advance(run, State(algorithm=run.algorithm.initial_state()))
    assert run.updates() == run.optimizer.updates == 1


def test_each_process_draws_every_second_prompt_and_of_a_sampler_for_all_the_first_draws_them_all(monkeypatch):
    asked = []
    prompts = [Prompt(i, (i,), Row("x", prompt="p")) for i in range(4)]

    class Asked:
        plays = False

        def __init__(self, central):
            self.sampler = SimpleNamespace(central=central)

        def collect(self, prompts, *rest):
            asked.append([p.index for p in prompts])
            yield [(i, []) for i in range(len(prompts))]

    def of(rank, central):
        world = SimpleNamespace(rank=rank, size=2)
        each = [["of rank 0"], []] if central else [["a", "c"], ["b", "d"]]
        monkeypatch.setattr(collectors, "gather_trajectories", lambda world, own, with_tokens: each)
        return collectors.ScoredRollout(Asked(central), None, reward_view(), world)(prompts, None, 1, max, version=0)

    assert of(0, False) == of(1, False) == ["a", "b", "c", "d"] and asked == [[0, 2], [1, 3]]
    asked.clear()
    assert of(0, True) == of(1, True) == ["of rank 0"] and asked == [[0, 1, 2, 3]]


def test_an_evaluation_waits_for_episodes_that_are_played_ahead_and_for_nothing_else(monkeypatch):
    """An environment plays for one at a time; completions of a single turn go on beside it."""
    done = []
    monkeypatch.setattr(loops, "cycle", lambda loop, state, *rest: loop.evaluate(state))
    ahead = (SimpleNamespace(result=lambda: done.append("played")),)
    run, journal = (
        make(tiny.tokenizer(["say a: b"], 270)),
        SimpleNamespace(callbacks=SimpleNamespace(), interruptible=nullcontext),
    )
    for player in (None, object()):
        state = State(step=3, pending=ahead)
        save = SimpleNamespace(wait=None)
        loops.train_online(with_player(run, player), state, save, journal, lambda step: done.append(f"evaluated {step}"))
    assert done == ["evaluated 3", "played", "evaluated 3"]
