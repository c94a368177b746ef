"""Values worked by hand where a fault nearby gives another number, and steps that have become impossible."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from psigrad.config.algorithms import resolve
from psigrad.objective import Batch, PolicyOutputs, catalog
from psigrad.objective.batch import terminal
from psigrad.objective.parts.ratio import KL, divergence_rejection, truncated_importance
from psigrad.objective.parts.surrogate import divergence_mask

INF = float("inf")


def outcomes(rewards, steps=2, **given) -> Batch:
    """One group, each row with its reward on its last step."""
    mask = torch.ones(len(rewards), steps, dtype=torch.bool)
    old = given.pop("logp_old", torch.full(mask.shape, -1.0))
    return Batch(mask, terminal(torch.tensor(rewards), mask), old, torch.zeros(len(rewards)).long(), **given)


@pytest.mark.parametrize(("gap", "weight"), [(0.139, 0.0), (0.138, 1.0), (-0.139, 1.0), (-0.145, 0.0)])
def test_a_sequence_is_rejected_by_k3_of_the_trainer_over_the_sampler(gap, weight):
    """One step: e^0.139 − 1 − 0.139 = 0.010124 is above 0.01 and e^−0.139 − 1 + 0.139 = 0.009228 below it."""
    one = outcomes([0.0], 1, logp_old=torch.tensor([[-1.0 + gap]]), logp_sampler=torch.tensor([[-1.0]]))
    assert divergence_rejection(0.01)(one).tolist() == [[weight]]


def test_the_weight_of_dppo_is_capped():
    """log π = −10, ρ = 30, A = 1: L = −min(30, 20)·1·(−10) = 200, and 300 without the cap."""
    loss = divergence_mask()(torch.tensor([[-10.0]]), torch.tensor([[math.log(30)]]), torch.tensor([[1.0]]))
    assert loss.item() == pytest.approx(200)


@pytest.mark.parametrize(
    ("preset", "sampler", "expected"),
    [
        # π = 1/2 on both steps. Within 0.3 of 1/5 and of 4/5, and not of 0.81: L = −w·A, w = π/π_sampler, A = 1 and −1
        ("prime_ipo", (0.2, 0.81), [[-2.5, 0.0], [2.5, 0.0]]),
        ("prime_ipo", (0.8, 0.1), [[-0.625, 0.0], [0.625, 0.0]]),
        # W = 1/4 / (1/2·1/4) = 2: φ = 4·e^−3 for A > 0, 8·e^−2 for A < 0; L = −φ·A·log π
        ("vespo", (0.5, 0.25), [[4 * math.exp(-3) * math.log(2)] * 2, [-8 * math.exp(-2) * math.log(2)] * 2]),
    ],
)
def test_a_step_is_weighted_by_its_samplers_probability_and_not_by_the_old_one(preset, sampler, expected):
    logp, old = torch.full((2, 2), math.log(0.5)), torch.full((2, 2), -3.0)
    given = {"mask": torch.ones(2, 2, dtype=torch.bool), "logp_sampler": torch.tensor(sampler).log().expand(2, 2)}
    part = resolve(preset).surrogate
    loss = part(logp, logp - old, torch.tensor([[1.0], [-1.0]]).expand(2, 2), **{name: given[name] for name in part.needs})
    torch.testing.assert_close(loss, torch.tensor(expected))
    with pytest.raises(ValueError, match="would count them twice; set correction=None"):
        replace(resolve(preset), correction=truncated_importance())


def test_log_probs_of_half_precision_do_not_round_the_weights():
    """Seven steps of −A·log π = 1 with weight 1/7: 1. In bfloat16 1/7 is 0.142578, and the sum 0.998."""
    method = replace(resolve("reinforce_reward_to_go"), aggregate=resolve("dapo").aggregate)
    one = outcomes([1.0], 7)
    prepared = method.prepare(one, {})
    logp = torch.full((1, 7), -1.0, dtype=torch.bfloat16)
    loss = method.loss(prepared, PolicyOutputs(logp), method.totals(prepared), {})
    assert loss.value.dtype == torch.float32 and loss.value.item() == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("name", catalog.METHODS)
def test_a_step_that_has_become_impossible_gives_finite_numbers(name):
    """log π is −∞ now and was −1: ρ = 0, and 0·∞ would be no number, in value or gradient."""
    method = resolve({"preset": "pass_at_k", "psi": {"k": 2}} if name == "pass_at_k" else name)
    steps = torch.full((4, 3), -1.0)
    parts = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 1.0], [0.25, 0.0]])
    known = {"logp_old": steps, "logp_ref": steps - 0.1, "logp_sampler": steps, "entropy": -steps, "parts": parts}
    known |= {"value": 0.1 * steps, "action_value": 0.1 * steps, "truncated": torch.zeros(4, dtype=torch.bool)}
    one = outcomes([1.0, 0.0, 1.0, 0.25], 3, **known)
    state = method.initial_state()
    prepared = method.prepare(one, state)
    logp = (steps + 0.01 * torch.arange(12).view(4, 3)).masked_fill(torch.arange(12).view(4, 3) % 5 == 1, -INF).requires_grad_()
    outputs = PolicyOutputs(logp, -steps, 0.1 * steps, 0.1 * steps)
    loss = method.loss(prepared, outputs, method.totals(prepared), prepared.state)
    assert all(map(math.isfinite, [loss.value.item(), *(float(term) for term in loss.terms.values())]))
    if loss.value.requires_grad:
        loss.value.backward()
        assert bool(logp.grad.isfinite().all())


def test_negative_control_an_impossible_step_without_the_bound(monkeypatch):
    monkeypatch.setattr("psigrad.objective.policy_gradient.LEAST_LOGP", -INF)
    with pytest.raises(AssertionError):
        test_a_step_that_has_become_impossible_gives_finite_numbers("cispo")


def test_a_reference_that_nobody_reads_may_be_infinite():
    rows = outcomes([1.0, 0.0], logp_ref=torch.tensor([[-INF, -1.0], [-1.0, -1.0]]))
    for where, estimator in (("loss", "k3"), ("reward", "k1")):
        unread = replace(resolve("grpo"), kl=KL(where, estimator, 0.0))
        assert bool(unread.prepare(rows, {}).advantage.isfinite().all())
        with pytest.raises(ValueError, match="logp_ref of rows"):  # negative control
            read = replace(resolve("grpo"), kl=KL(where, estimator, 0.1))
            read.prepare(rows, read.initial_state())
