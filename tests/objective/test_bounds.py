"""Bounds and edges of the parts: settings at the border, rows and groups without steps, batches of one, ties."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from psigrad.config.algorithms import resolve, resolve_loss
from psigrad.objective import Batch, PolicyOutputs, Totals
from psigrad.objective.batch import _holes, discounted_sum, step_covariance
from psigrad.objective.catalog import GRPO, METHODS, PPO
from psigrad.objective.explain import explain
from psigrad.objective.parts import ratio
from psigrad.objective.parts.advantage import gae, k_step
from psigrad.objective.parts.critic import bonus, value_loss
from psigrad.objective.parts.group_advantage import _choose_ratio, decoupled_group_mean, length_weighted_mean
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
from psigrad.objective.preferences.preference_catalog import ONLINE_DPO
from psigrad.objective.preferences.preference_loss import KahnemanTversky, Labelled, Pairs, correct
from psigrad.objective.preferences.reward_model import (
    BradleyTerry,
    calibration,
    process_loss,
)
from psigrad.objective.slopes import slopes
from psigrad.objective.trust_region import step

DPO = resolve_loss("dpo")


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


@pytest.mark.parametrize("beta", [math.inf, math.nan, 0.0])
def test_a_beta_must_be_a_finite_number_above_0(beta):
    with pytest.raises(ValueError, match="expected a number above 0"):
        replace(DPO, beta=beta)


def test_k1_in_the_loss_is_refused_whatever_the_string_is_made_of():
    estimator = "".join(["k", "1"])  # equal to the literal, and not the same object
    with pytest.raises(ValueError, match="whose gradient is 0 in expectation"):
        KL(where="loss", estimator=estimator)


def test_defaults_are_those_of_their_sources():
    assert dual_clip().bound == 3.0
    for name in ("ppo", "ppo_penalty"):
        assert METHODS[name].defaults["num_generations"] == 1


def rows(mask, logp_old=None, group=None, reward=None, **given) -> Batch:
    mask = torch.tensor(mask, dtype=torch.bool)
    logp_old = torch.full(mask.shape, -1.0) if logp_old is None else torch.tensor(logp_old)
    reward = torch.zeros(mask.shape) if reward is None else torch.tensor(reward)
    return Batch(mask, reward, logp_old, torch.tensor(group or [0] * len(mask)), **given)


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


def test_more_are_drawn_than_there_are():
    counts = torch.tensor([0.0, 1.0, 3.0], dtype=torch.float64)
    assert _choose_ratio(counts, counts, 3).tolist() == [0.0, 0.0, 1.0]


@pytest.mark.parametrize(("tokens", "divisor"), [(0, 1), (1, 1), (2, 2)])
def test_the_entropy_bonus_is_a_mean_over_steps(tokens, divisor):
    method = replace(GRPO, kl=None, entropy=bonus(0.5), keep=())
    batch = rows([[1, 1], [1, 1]], reward=[[0.0, 1.0], [0.0, 0.0]])
    prepared, totals = method.prepare(batch, method.initial_state()), Totals(2, tokens, 4)
    with_bonus, without = (
        float(m.loss(prepared, PolicyOutputs(batch.logp_old, entropy=torch.ones(2, 2)), totals, prepared.state).value)
        for m in (method, replace(method, entropy=None))
    )
    assert with_bonus - without == pytest.approx(-0.5 * 4 / divisor)


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


def test_totals_add_up():
    assert Totals(1, 2, 3) + Totals(4, 5, 6) == Totals(5, 7, 9)


def test_parts_are_divided_by_their_deviation_plus_eps():
    parts = torch.tensor([[1.0], [0.0], [0.0], [0.0]])
    batch = rows([[1]] * 4, parts=parts, part_weights=(1.0,))
    eps, centred = 0.5, parts[:, 0] - 0.25
    own = centred / (parts[:, 0].std() + eps)
    expected = own / (own.std() + eps)
    torch.testing.assert_close(decoupled_group_mean(eps=eps)(batch)[:, 0], expected)


def test_marks_are_a_share_of_the_steps_and_one_at_least():
    batch = rows([[1, 1, 1, 1]] * 2 + [[0] * 4], logp_old=torch.linspace(-3, -1, 12).view(3, 4).tolist())
    advantage = torch.linspace(-1, 1, 12).view(3, 4)
    for share, count in ((1e-3, 1), (0.25, 2), (0.5, 4), (0.9, 7)):
        marked = covariance_penalty(share=share).marks(batch, advantage)
        assert int(marked.sum()) == count and not marked[2].any()
    empty = rows([[0, 0]])
    assert not covariance_penalty().marks(empty, torch.zeros(1, 2)).any()


def test_steps_outside_have_no_covariance():
    x, y = torch.tensor([[1.0, 2.0, 9.0]]), torch.tensor([[2.0, 6.0, -9.0]])
    found = step_covariance(x, y, torch.tensor([[True, True, False]]))
    assert found.tolist() == [[1.0, 1.0, 0.0]]


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 40, 700])
def test_returns_skip_holes(steps):
    generator = torch.Generator().manual_seed(steps)
    x, mask = torch.randn(5, steps, generator=generator, dtype=torch.float64), torch.rand(5, steps, generator=generator) > 0.4
    expected = torch.zeros_like(x)
    for n in range(5):
        total = 0.0
        for t in reversed(range(steps)):
            if mask[n, t]:
                expected[n, t] = total = float(x[n, t]) + 0.9 * total
    torch.testing.assert_close(discounted_sum(x, mask, 0.9), expected)
    brute = any(bool(mask[n, t]) and not bool(mask[n, t - 1]) for n in range(5) for t in range(1, steps))
    assert _holes(mask) == brute


def test_two_steps_have_a_hole_where_the_first_is_left_out():
    assert _holes(torch.tensor([[False, True]])) and not _holes(torch.tensor([[True, False]]))
    assert not _holes(torch.tensor([[True, True]])) and not _holes(torch.tensor([[False]]))


def test_a_step_along_which_nothing_curves_is_not_taken():
    gradient = torch.tensor([1.0, 0.0])
    taken = step(gradient, lambda v: torch.zeros_like(v), lambda shift: (1.0, 0.0), max_kl=0.1)
    assert (taken.improvement, taken.kl, taken.tries) == (0.0, 0.0, 0) and not taken.shift.any()


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


def test_ties_count_half():
    assert correct(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 1.0, 5.0])).tolist() == [0.5, 1.0, 0.0]


@pytest.mark.parametrize("total", [0, 1, 2, 3])
def test_shares_divide_by_the_total_or_by_1(total):
    divisor = max(total, 1)
    pair = Pairs(
        torch.tensor([-1.0]),
        torch.tensor([-2.0]),
        torch.tensor([3]),
        torch.tensor([3]),
        torch.tensor([-1.5]),
        torch.tensor([-1.5]),
    )
    terms = DPO.loss(pair, total, 3).terms
    assert float(terms["loss"]) == pytest.approx(math.log1p(math.exp(-0.1)) / divisor)
    assert float(terms["rewards/chosen"]) == pytest.approx(0.05 / divisor)
    labelled = Labelled(torch.tensor([-1.0]), torch.tensor([-1.5]), torch.tensor([True]), torch.tensor(0.0))
    value = float(KahnemanTversky().loss(labelled, total, min(total, 1)).value)
    assert value == pytest.approx((1 - 1 / (1 + math.exp(-0.05))) / divisor)
    logits, labels = torch.tensor([0.5]), torch.tensor([1.0])
    chance = 1 / (1 + math.exp(-0.5))
    found = process_loss(logits, labels, total)
    assert float(found.value) == pytest.approx(-math.log(chance) / divisor)
    assert float(found.terms["accuracy"]) == pytest.approx(1 / divisor)
    means = BradleyTerry().loss(torch.tensor([2.0]), torch.tensor([1.0]), None, total).terms
    assert float(means["mean_reward"]) == pytest.approx(1.5 / divisor) and float(means["margin"]) == pytest.approx(1 / divisor)


@pytest.mark.parametrize("name", ["chosen", "rejected", "margin"])
def test_rewards_of_another_shape_are_refused(name):
    given = {"chosen": torch.zeros(2), "rejected": torch.zeros(2), "margin": torch.zeros(2)}
    wrong = {"chosen": torch.zeros(2, 1), "rejected": torch.zeros(2, 1), "margin": torch.zeros(3)}[name]
    given[name] = wrong
    if name == "chosen":
        given["rejected"] = given["margin"] = wrong
    with pytest.raises(ValueError, match=f"{name} has shape"):
        BradleyTerry().loss(given["chosen"], given["rejected"], given["margin"], 2)


def test_steps_need_labels_of_their_shape():
    with pytest.raises(ValueError, match="logits has shape"):
        process_loss(torch.zeros(2), torch.zeros(3), 2)


def test_bins_of_the_calibration():
    chances = [0.5, 0.55, 0.65, 0.66, 0.95, 0.999]
    leads = torch.tensor([math.log(p / (1 - p)) for p in chances], dtype=torch.float64)
    leads[3] = -leads[3]
    found = calibration(leads, bins=5)
    assert found.counts == (2, 2, 2)
    assert found.lower == pytest.approx((0.5, 0.6, 0.9))
    assert found.confidence == pytest.approx((0.525, 0.655, 0.9745))
    assert found.accuracy == (0.75, 0.5, 1.0)
    assert calibration(torch.tensor([50.0]), bins=5).lower == pytest.approx((0.9,)), "certainty is in the last bin"


@pytest.mark.parametrize(("name", "reference"), [("dpo", True), ("simpo", False), ("kto", True)])
def test_whether_a_reference_is_needed_is_a_property(name, reference):
    loss = resolve_loss(name)
    assert loss.needs_reference is reference
    if name != "kto":
        online = replace(ONLINE_DPO, loss=loss)
        assert online.needs_reference is reference and online.needs_critic is False


# What they say


def test_two_methods_of_one_name_are_told_apart():
    other = replace(GRPO, kl=None)
    text = explain(GRPO, other)
    assert "grpo (1)" in text and "grpo (2)" in text
    apart = explain(GRPO, replace(other, name="mine"))
    assert "(1)" not in apart and "mine" in apart


def test_a_lambda_of_1_needs_no_discount():
    assert gae().gamma == 1.0 and gae().lam == 1.0


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_pass_at_k_needs_one_more_than_k(k):
    """Of k alone nothing is learned: one of them is right, or none is."""
    method = resolve("pass_at_k")
    assert replace(method, psi=replace(method.psi, k=k)).min_group_size == k + 1
