"""Surrogates: finite differences, what they have in common at ratio 1, and the importance corrections."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from edge_batches import gradient, rows, world

from psigrad.config.algorithms import resolve
from psigrad.objective import Batch
from psigrad.objective.catalog import PPO_PENALTY
from psigrad.objective.parts.advantage import best_of_group, group_mean
from psigrad.objective.parts.aggregate import not_truncated, top_k
from psigrad.objective.parts.off_policy import off_policy_mask
from psigrad.objective.parts.ratio import masked_importance, sequence, token, trajectory, truncated_importance
from psigrad.objective.parts.surrogate import (
    adapt,
    clip,
    clip_fractions,
    covariance_penalty,
    divergence_mask,
    dual_clip,
    geometric_clip,
    kl_penalty,
    measure_kl,
    score,
    truncated_weight,
    unclipped,
)

G = torch.Generator().manual_seed(1)
SHAPE = (6, 5)
LOGP = torch.randn(SHAPE, generator=G, dtype=torch.float64) - 2
OLD = LOGP + 0.5 * torch.randn(SHAPE, generator=G, dtype=torch.float64)
ADVANTAGE = torch.randn(SHAPE, generator=G, dtype=torch.float64)
MASK = torch.ones(SHAPE, dtype=torch.bool)
SURROGATES = [score, unclipped, clip(0.2, 0.3), dual_clip(0.2, 0.3, 1.4), kl_penalty(0.5)]


def named(part):
    """The name of a function, the text of anything else."""
    return getattr(part, "__name__", None) or str(part)


@pytest.mark.parametrize("surrogate", SURROGATES, ids=named)
@pytest.mark.parametrize("ratio", [token, trajectory], ids=["token", "trajectory"])
def test_gradcheck(surrogate, ratio) -> None:
    leaf = LOGP.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda p: surrogate(p, ratio(p, OLD, MASK), ADVANTAGE), leaf)


def test_gradcheck_of_the_detached_weight_with_the_weight_held_constant() -> None:
    weight = (LOGP - OLD).exp().clamp(max=1.1)
    leaf = LOGP.clone().requires_grad_()
    truncated_weight(1.1)(leaf, leaf - OLD, ADVANTAGE).sum().backward()
    torch.testing.assert_close(leaf.grad, -weight * ADVANTAGE, rtol=0, atol=1e-14)
    assert torch.autograd.gradcheck(lambda p: -weight * ADVANTAGE * p, LOGP.clone().requires_grad_())


@pytest.mark.parametrize("surrogate", [*SURROGATES, truncated_weight(5.0)], ids=named)
def test_at_ratio_1_every_surrogate_has_the_policy_gradient(surrogate) -> None:
    leaf = LOGP.clone().requires_grad_()
    surrogate(leaf, leaf - LOGP, ADVANTAGE).sum().backward()
    torch.testing.assert_close(leaf.grad, -ADVANTAGE, rtol=0, atol=1e-12)


def test_the_stop_gradient_sequence_ratio_equals_the_plain_one_under_a_sequence_mean() -> None:
    advantage = ADVANTAGE[:, :1].expand(SHAPE)
    mask = torch.arange(5) < torch.tensor([5, 4, 3, 2, 1, 5])[:, None]
    length = mask.sum(1, keepdim=True)

    def loss(p: torch.Tensor, stop_gradient: bool) -> torch.Tensor:
        p, old = torch.where(mask, p, 0.0), torch.where(mask, OLD, 0.0)
        log_ratio = sequence(p, old, mask) if stop_gradient else ((p - old).sum(1, keepdim=True) / length).expand(SHAPE)
        return (clip(0.05, 0.05)(p, log_ratio, advantage) * mask / length).sum()

    a, b = LOGP.clone().requires_grad_(), LOGP.clone().requires_grad_()
    first, second = loss(a, True), loss(b, False)
    first.backward(), second.backward()
    assert first.item() == pytest.approx(second.item(), abs=1e-12)
    torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-12)
    assert (a.grad == 0).any() and a.grad.any()


def tiny_batch(**more: torch.Tensor) -> Batch:
    mask = torch.tensor([[True, True], [True, False], [True, True]])
    zeros = torch.zeros(3, 2, dtype=torch.float64)
    reward = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 0.5]], dtype=torch.float64)
    return Batch(mask, reward, zeros, torch.zeros(3).long(), **more)


def test_importance_corrections_by_hand() -> None:
    # Trainer / sampler ratios per step: row 0: 2 and 4; row 1: 1/2; row 2: 1 and 3.
    sampler = -torch.tensor([[2.0, 4.0], [0.5, 77.0], [1.0, 3.0]], dtype=torch.float64).log()
    batch = tiny_batch(logp_sampler=sampler)
    assert truncated_importance(3.0, "token")(batch).tolist() == [[2, 3], [0.5, 0], [1, pytest.approx(3)]]
    assert truncated_importance(5.0, "sequence")(batch).tolist() == [[5, 5], [0.5, 0], [pytest.approx(3)] * 2]
    assert masked_importance(3.5, "token")(batch).tolist() == [[2, 0], [0.5, 0], [1, pytest.approx(3)]]
    assert masked_importance(5.0, "sequence")(batch).tolist() == [[0, 0], [0.5, 0], [pytest.approx(3)] * 2]


def test_filters_by_hand() -> None:
    batch = tiny_batch(truncated=torch.tensor([False, True, False]))
    assert not_truncated(batch).tolist() == [True, False, True]
    assert top_k(1)(batch).tolist() == [True, False, False]
    assert top_k(2)(batch).tolist() == [True, True, False]
    assert best_of_group(batch).tolist() == [[1, 1], [0, 0], [0, 0]]


def test_ranks_are_counted_inside_each_group() -> None:
    reward = torch.tensor([[5.0], [1.0], [6.0], [2.0], [7.0]])
    batch = Batch(torch.ones(5, 1, dtype=torch.bool), reward, torch.zeros(5, 1), torch.tensor([0, 1, 0, 1, 0]))
    assert top_k(1)(batch).tolist() == [False, False, False, True, True]
    assert top_k(2)(batch).tolist() == [False, True, True, True, True]
    assert best_of_group(batch).flatten().tolist() == [0, 0, 0, 1, 1]


def test_parts_with_impossible_parameters_are_refused() -> None:
    for build in (
        lambda: clip(low=1.5), lambda: clip(high=-0.1), lambda: dual_clip(bound=1.0), lambda: truncated_weight(0.0),
        lambda: kl_penalty(-1.0), lambda: top_k(0), lambda: truncated_importance(0.0), lambda: masked_importance(level="word"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="expected"):
            build()


def test_clip_range_may_be_as_wide_as_one_likes() -> None:
    wide = clip(1.0, math.inf)
    assert torch.equal(wide(LOGP, LOGP - OLD, ADVANTAGE), unclipped(LOGP, LOGP - OLD, ADVANTAGE))


def test_no_steps_have_moved_nowhere():
    nothing = torch.zeros(1, 2)
    assert measure_kl(nothing, nothing, torch.zeros(1, 2, dtype=torch.bool)) == 0.0
    one = torch.tensor([[True, False]])
    assert measure_kl(torch.tensor([[0.5, 9.0]]), nothing, one) == pytest.approx(math.exp(0.5) - 1.5)


def test_marks_are_a_share_of_the_steps_and_one_at_least():
    batch = rows([[1, 1, 1, 1]] * 2 + [[0] * 4], logp_old=torch.linspace(-3, -1, 12).view(3, 4).tolist())
    advantage = torch.linspace(-1, 1, 12).view(3, 4)
    for share, count in ((1e-3, 1), (0.25, 2), (0.5, 4), (0.9, 7)):
        marked = covariance_penalty(share=share).marks(batch, advantage)
        assert int(marked.sum()) == count and not marked[2].any()
    empty = rows([[0, 0]])
    assert not covariance_penalty().marks(empty, torch.zeros(1, 2)).any()


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


def test_the_penalty_follows_the_kl_after_the_update():
    mask = torch.tensor([[True, True, False], [True, False, False]])
    old, now = torch.zeros(2, 3), torch.tensor([[0.1, -0.2, 9.0], [0.3, 9.0, 9.0]])
    moved = torch.tensor([0.1, -0.2, 0.3])
    expected = float((moved.exp() - 1 - moved).mean())
    assert measure_kl(now, old, mask) == pytest.approx(expected, rel=1e-5)
    penalty = kl_penalty(1.0, target=expected / 2)
    assert adapt(penalty, {"penalty_coefficient": 1.0}, expected) == {"penalty_coefficient": 2.0}


def test_a_surrogate_of_whole_sequences_reads_no_padding():
    rows, now = world()
    for surrogate in (geometric_clip(), off_policy_mask(), off_policy_mask(geometric_clip(), 0.01)):
        method = replace(resolve("gmpo"), surrogate=surrogate)
        found = gradient(method, rows, now)
        noisy = gradient(method, replace(rows, logp_old=rows.logp_old + 7.0 * ~rows.mask), now + 5.0 * ~rows.mask)
        torch.testing.assert_close(found, noisy, rtol=0, atol=0)
        assert (found[~rows.mask] == 0).all() and (found != 0).any()


def test_cispo_counts_as_truncated_what_was_to_grow():
    log_ratio = torch.tensor([[2.0, 2.0, -2.0, 0.0]])
    advantage = torch.tensor([[1.0, -1.0, 1.0, 1.0]])
    assert clip_fractions(truncated_weight(5.0), log_ratio, advantage)["cispo_clip_ratio"].tolist() == [
        [True, False, False, False]
    ]


def test_a_penalty_follows_the_steps_that_were_trained_on_alone():
    """Two rows of two steps, the second row filtered out and the first with one step: it moved by ln 2 there, k3 = 1 − ln 2 =
    0.307, above 1.5 · 0.15, so that the coefficient doubles. Over the three steps it would be 0.102, over all four places 0.169:
    then it would stay.
    """
    method = replace(PPO_PENALTY, surrogate=kl_penalty(3.0, 0.15), critic=None, psi=group_mean(), kl=None)
    mask = torch.tensor([[True, False], [True, True]])
    batch = Batch(mask, torch.tensor([[1.0, 0.0], [0.0, 0.0]]), torch.full((2, 2), -1.0), torch.zeros(2).long())
    prepared = replace(method.prepare(batch, method.initial_state()), keep=torch.tensor([True, False]))
    moved = torch.full((2, 2), -1.0)
    moved[0, 0] += math.log(2)
    assert method.adapt(prepared, moved) == {"penalty_coefficient": 6.0}
