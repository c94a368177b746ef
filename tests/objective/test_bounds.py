"""Bounds and edges of the parts: settings at the border, rows and groups without steps, batches of one, ties."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from edge_batches import rows

from psigrad.config.algorithms import resolve
from psigrad.objective import Batch, Totals
from psigrad.objective.catalog import METHODS, PPO
from psigrad.objective.parts import ratio
from psigrad.objective.parts.advantage import k_step
from psigrad.objective.parts.critic import bonus, value_loss
from psigrad.objective.parts.group_advantage import length_weighted_mean
from psigrad.objective.parts.ratio import KL, adaptive, divergence_rejection
from psigrad.objective.parts.surrogate import (
    clip,
    covariance_penalty,
    divergence_mask,
    dual_clip,
    geometric_clip,
    measure_kl,
    soft_clip,
)
from psigrad.objective.preferences.preference_loss import KahnemanTversky
from psigrad.objective.slopes import slopes


@pytest.mark.parametrize(
    ("part", "given"),
    [
        (k_step, {"k": 0}),
        (adaptive, {"initial": 0.0}),
        (adaptive, {"target": 0.0}),
        (adaptive, {"target": -0.5}),
        (adaptive, {"horizon": 0}),
        (KahnemanTversky, {"beta": 0.0}),
        (KahnemanTversky, {"desirable_weight": -1.0}),
        (KahnemanTversky, {"undesirable_weight": -1.0}),
        (clip, {"low": -0.5}),
        (clip, {"low": 1.5}),
        (soft_clip, {"negative": 0.0}),
        (soft_clip, {"positive": 0.0}),
        (divergence_mask, {"delta": 0.0}),
        (divergence_mask, {"delta": -0.1}),
        (divergence_mask, {"delta": 1.1}),
        (divergence_mask, {"cap": 0.0}),
        (divergence_mask, {"cap": -0.5}),
    ],
)
def test_settings_beyond_the_border_are_refused(part, given):
    with pytest.raises(ValueError, match=r"expected|above 0"):
        part(**given)


@pytest.mark.parametrize(
    ("part", "given"),
    [
        (k_step, {"k": 1}),
        (adaptive, {"horizon": 1}),
        (clip, {"low": 0.0}),
        (clip, {"low": 1.0}),
        (divergence_mask, {"delta": 1.0}),
    ],
)
def test_settings_at_the_border_are_taken(part, given):
    part(**given)


def test_k1_in_the_loss_is_refused_whatever_the_string_is_made_of():
    estimator = "".join(["k", "1"])  # equal to the literal, and not the same object
    with pytest.raises(ValueError, match="whose gradient is 0 in expectation"):
        KL(where="loss", estimator=estimator)


def test_defaults_are_those_of_their_sources():
    assert dual_clip().bound == 3.0
    for name in ("ppo", "ppo_penalty"):
        assert METHODS[name].defaults["num_generations"] == 1


# What has no steps


def test_a_row_without_steps_leaves_ratios_and_losses_finite():
    mask = torch.tensor([[True, True], [False, False]])
    logp, old = torch.tensor([[-1.0, -2.0], [0.0, 0.0]]), torch.tensor([[-1.5, -2.0], [0.0, 0.0]])
    found = ratio.sequence(logp, old, mask)
    torch.testing.assert_close(found, torch.tensor([[0.25, 0.25], [0.0, 0.0]]))
    loss = geometric_clip()(logp, logp - old, torch.tensor([[1.0, 1.0], [0.0, 0.0]]), mask)
    torch.testing.assert_close(loss, torch.tensor([[-math.exp(0.2), -math.exp(0.2)], [0.0, 0.0]]))


def test_a_row_without_steps_is_in_nobodys_group():
    """The least int64 is a number that no group has."""
    batch = rows([[1, 0], [0, 0], [0, 1]], group=[5, 5, 7], reward=[[1.0, 0.0], [0.0, 0.0], [0.0, 2.0]])
    assert batch.group.tolist() == [5, -(2**63), 7] and not batch.is_full
    assert rows([[1, 1]], group=[5], reward=[[1.0, 0.0]]).group.tolist() == [5]


def test_a_group_without_steps_has_no_advantage():
    batch = rows([[1, 1], [0, 0]], group=[0, 1], reward=[[0.0, 1.0], [0.0, 0.0]])
    assert torch.equal(length_weighted_mean(batch), torch.zeros(2, 2))


@pytest.mark.parametrize(("gap", "kept"), [(0.1, True), (0.16, False)])
def test_a_sequence_of_one_step_is_judged_by_that_step(gap, kept):
    """exp(gap) − 1 − gap is 0.005 and 0.014, on either side of the limit."""
    batch = rows([[1]], logp_old=[[-1.0]], logp_sampler=torch.tensor([[-1.0 - gap]]))
    assert bool(divergence_rejection(limit=0.01)(batch)[0, 0]) is kept


def test_no_steps_have_moved_nowhere():
    nothing = torch.zeros(1, 2)
    assert measure_kl(nothing, nothing, torch.zeros(1, 2, dtype=torch.bool)) == 0.0
    one = torch.tensor([[True, False]])
    assert measure_kl(torch.tensor([[0.5, 9.0]]), nothing, one) == pytest.approx(math.exp(0.5) - 1.5)


@pytest.mark.parametrize("tokens", [1, 2])
def test_closed_slopes_divide_the_entropy_by_the_steps(tokens):
    method = replace(resolve("reinforce"), kl=None, entropy=bonus(0.5))
    batch = rows([[1]], reward=[[1.0]])
    prepared = method.prepare(batch, method.initial_state())
    assert slopes(method, prepared, Totals(1, tokens, tokens)).entropy == pytest.approx(-0.5 / tokens)


def test_closed_slopes_need_rows_that_are_all_kept():
    method = replace(resolve("reinforce"), kl=None)
    prepared = method.prepare(rows([[1, 1], [1, 1]], reward=[[0.0, 1.0], [0.0, 0.0]]), method.initial_state())
    dropped = replace(prepared, keep=torch.tensor([True, False]))
    assert slopes(method, dropped, Totals(1, 2, 2)) is None
    assert slopes(method, prepared, Totals(2, 4, 4)) is not None
    idle = replace(prepared, needs_gradient=torch.tensor([True, False]))  # all rows count, one has nothing to teach
    assert not idle.is_full and slopes(method, idle, Totals(2, 4, 4)) is not None


@pytest.mark.parametrize("moved", [-0.3, -0.05, 0.05, 0.3])
@pytest.mark.parametrize("target", [-1.0, -0.24, 0.0, 0.24, 1.0])
def test_the_slope_of_a_clipped_critic_is_that_of_autograd(moved, target):
    method = replace(PPO, critic=value_loss(0.5, 0.2), kl=None)
    batch = rows([[1]], reward=[[target]], value=torch.tensor([[0.0]]))
    prepared = method.prepare(batch, method.initial_state())
    totals = method.totals(prepared)
    value = torch.tensor([[moved]], requires_grad=True)
    method.critic_loss(prepared, value, totals).value.backward()
    closed = slopes(method, prepared, totals)
    torch.testing.assert_close(closed.value(value.detach()), value.grad)


# Sums over batches


def test_marks_are_a_share_of_the_steps_and_one_at_least():
    batch = rows([[1, 1, 1, 1]] * 2 + [[0] * 4], logp_old=torch.linspace(-3, -1, 12).view(3, 4).tolist())
    advantage = torch.linspace(-1, 1, 12).view(3, 4)
    for share, count in ((1e-3, 1), (0.25, 2), (0.5, 4), (0.9, 7)):
        marked = covariance_penalty(share=share).marks(batch, advantage)
        assert int(marked.sum()) == count and not marked[2].any()
    empty = rows([[0, 0]])
    assert not covariance_penalty().marks(empty, torch.zeros(1, 2)).any()


def test_the_gap_of_a_batch_without_steps_is_0():
    method = replace(resolve("reinforce"), kl=None, keep=())
    batch = Batch(
        torch.zeros(1, 0, dtype=torch.bool),
        torch.zeros(1, 0),
        torch.zeros(1, 0),
        torch.tensor([0]),
        logp_sampler=torch.zeros(1, 0),
    )
    metrics = method.prepare(batch, method.initial_state()).metrics
    assert metrics["sampling/sampling_logp_difference/max"] == 0.0


# Preferences and reward models


# What they say
