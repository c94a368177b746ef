"""What of trajectories reaches the batch, and the edges: parts that do not apply, failed completions, counts."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from in_memory import advance, make, trajectory, with_player

from psigrad.config import Optim
from psigrad.errors import UserError
from psigrad.language.models import tiny
from psigrad.language.recipes import loops
from psigrad.language.rollout.types import Completion, State, Trajectory
from psigrad.language.training.online.batching import LENGTH_PENALTY, metric_of, minibatches, to_batch
from psigrad.language.training.online.collect import collect, group_scored, penalise_truncated
from psigrad.objective.parts import group_advantage
from psigrad.optim import learning_rate
from psigrad.step import Clock


@pytest.mark.parametrize("kind", ["linear", "cosine", "constant"])
def test_a_run_that_is_all_warm_up_has_a_rate_at_every_step(kind):
    optim = Optim(learning_rate=1.0, warmup_steps=3, lr_scheduler_type=kind)
    assert [learning_rate(optim, step, 3) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    if kind != "constant":
        assert learning_rate(optim, 4, 3) == pytest.approx(0.0)
        half = replace(optim, warmup_steps=0)
        assert learning_rate(half, 5, 10) == pytest.approx(0.5)


def test_the_metric_is_the_reward_without_the_penalty_on_length():
    assert metric_of(trajectory(a=0.5, b=None, **{LENGTH_PENALTY: -0.3}), "") == 0.5
    assert metric_of(trajectory(reward=0.7, a=0.5), "") == 0.7
    assert metric_of(trajectory(a=0.5, b=0.25), "b") == 0.25


def test_without_the_penalty_on_length_the_metric_has_the_weights_of_the_reward():
    """A function of weight 0, which is only logged, must not keep a group whose rewards are equal."""
    one, other = (trajectory(a=0.5, logged=logged, **{LENGTH_PENALTY: -0.3}) for logged in (0.0, 1.0))
    weights = {"a": 3.0, "logged": 0.0, LENGTH_PENALTY: 1.0}
    assert metric_of(one, "", weights) == metric_of(other, "", weights) == 1.5
    assert to_batch([[one, other]], "", weights).metric.tolist() == [1.5, 1.5]
    assert to_batch([[one, other]]).metric.tolist() == [0.5, 1.5]


def test_a_failed_completion_keeps_its_parts_and_is_worth_its_reward_to_those_that_nobody_named():
    groups = [
        [trajectory(a=1.0, b=None), trajectory(-2.0, "failed"), trajectory(None, "failed"), trajectory(1.0, "failed", a=0.0)]
    ]
    parts = to_batch(groups).parts
    assert parts[0, 0] == 1.0 and math.isnan(parts[0, 1])
    assert parts[1].tolist() == [-2.0, -2.0] and parts[2].tolist() == [0.0, 0.0]
    assert parts[3].tolist() == [0.0, 1.0]


def test_tokens_are_counted_step_by_step(tokenizer):
    run = make(tokenizer, steps=3)
    state = State(algorithm=run.algorithm.initial_state())
    for _ in range(3):
        state = advance(run, state)
        assert state.tokens > 0
    fresh = make(tokenizer, steps=3)
    totals, other = [], State(algorithm=fresh.algorithm.initial_state())
    for _ in range(3):
        other = advance(fresh, other)
        totals.append(other.tokens)
    parts = [b - a for a, b in zip([0, *totals], totals, strict=False)]
    assert all(part > 0 for part in parts) and sum(parts) == state.tokens


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


def test_dynamic_sampling_compares_all_but_the_penalty_on_length_or_the_reward_that_is_named():
    short, long = trajectory(1.0, exact=1.0, soft_overlong=0.0), trajectory(0.6, exact=1.0, soft_overlong=-0.4)
    assert metric_of(short) == metric_of(long) == 1.0
    assert metric_of(trajectory(0.6, exact=0.6)) == 0.6
    assert metric_of(trajectory(1.5, exact=1.0, format=0.5), "format") == 0.5
    assert metric_of(trajectory(1.0, exact=1.0, format=None), "format") == 0.0
    assert metric_of(trajectory(-1.0, "failed"), "exact") == -1.0
    assert metric_of(trajectory(-0.5, "failed", exact=-1.0, format=0.5), "format") == 0.5
    assert metric_of(trajectory(-0.9, "failed", exact=-0.5, soft_overlong=-0.4)) == -0.5
    assert metric_of(trajectory(-1.5, "failed", missing_eos=-0.5), "exact") == -1.5
    with pytest.raises(UserError, match=r"filter_metric is 'acc'.+expected one of exact, format"):
        metric_of(trajectory(1.5, exact=1.0, format=0.5), "acc")
    assert to_batch([[short, long]]).metric.tolist() == [1.0, 1.0]


def test_rewards_of_steps_and_of_single_functions_reach_the_batch():
    """A reward of 0 for a step is one too; an outcome of 0 beside rewards of steps is none."""

    def row(ids: int, reward: float, steps: tuple[tuple[int, float], ...] = (), status: str = "scored", **parts) -> Trajectory:
        written = Completion(tuple(range(2, 2 + ids)), (0.0,) * ids, (0.0,) * ids, "stop", 0)
        return Trajectory(0, 0, (1,), written, 0, reward=reward, status=status, parts=parts, step_rewards=steps)

    rows = [
        row(4, 1.5, ((0, 0.5), (2, 0.0), (3, 1.0)), exact=1.0),
        row(3, 2.0, ((1, 0.5),), exact=None, style=2.0),
        row(2, 0.0, exact=0.0, style=1.0),
        row(1, -1.0, status="failed"),
    ]
    batch = to_batch([rows], reward_weights={"style": 0.5})
    assert batch.rewarded.int().tolist() == [[1, 0, 1, 1], [0, 1, 1, 0], [0, 1, 0, 0], [1, 0, 0, 0]]
    assert batch.reward.tolist() == [[0.5, 0.0, 0.0, 1.0], [0.0, 0.5, 1.5, 0.0], [0.0, 0.0, 0.0, 0.0], [-1.0, 0.0, 0.0, 0.0]]
    nan = math.nan
    expected = torch.tensor([[1.0, nan], [nan, 2.0], [0.0, 1.0], [-1.0, -1.0]])
    assert torch.equal(batch.parts.nan_to_num(-9.0), expected.nan_to_num(-9.0)) and batch.part_weights == (1.0, 0.5)
    assert to_batch([[row(2, 1.0)]]).parts is None


def test_minibatches_are_whole_groups_and_cover_the_batch_once(tokenizer):
    parts = minibatches(4, 3, 0, 0, 0)
    assert sorted(map(len, parts)) == [1, 1, 2] and sorted(torch.cat(parts).tolist()) == [0, 1, 2, 3]
    others = [minibatches(4, 3, 0, step, 0) for step in range(1, 6)]
    assert any(not torch.equal(a, b) for other in others for a, b in zip(parts, other, strict=True))
    assert minibatches(0, 3, 0, 0, 0) == []


def test_the_batch_has_the_reward_on_each_last_token(tokenizer):
    run = make(tokenizer)
    collected = collect(run, 0, 0, Clock())
    groups = list(group_scored(collected.trajectories, 4, 2))
    batch = to_batch(groups)
    for n, t in enumerate(t for g in groups for t in g):
        size = len(t.completion.ids)
        assert batch.mask[n].tolist() == [True] * size + [False] * (batch.mask.shape[1] - size)
        assert batch.reward[n, size - 1] == pytest.approx(t.reward) and float(batch.reward[n].abs().sum()) == pytest.approx(
            abs(t.reward)
        )
        assert batch.logp_old[n, :size].tolist() == pytest.approx(list(t.completion.logprobs))
        assert bool(batch.truncated[n]) == (t.completion.finish_reason == "length")


def test_methods_that_compare_values_of_one_part_see_the_penalty_for_no_end():
    """Both answers are right; one was cut, and one failed. Of [0, -0.5, 0] the mean is -1/6, so the cut one is pushed down."""
    ended, cut, failed = (
        trajectory(1.0, exact=1.0),
        trajectory(1.0, exact=1.0),
        trajectory(-1.0, "failed"),
    )
    cut = replace(cut, completion=replace(cut.completion, finish_reason="length"))
    batch = to_batch([[penalise_truncated(t, 0.5) for t in (ended, cut, failed)]])
    assert batch.parts.tolist() == [[1.0, 0.0], [1.0, -0.5], [-1.0, 0.0]]
    pushed = group_advantage.decoupled_group_mean()(batch)[:, 0]
    assert pushed[1] < pushed[0]
