"""Surrogates: finite differences, what they have in common at ratio 1, and the importance corrections."""

from __future__ import annotations

import math

import pytest
import torch

from psigrad.objective import Batch
from psigrad.objective.parts.advantage import best_of_group
from psigrad.objective.parts.aggregate import not_truncated, top_k
from psigrad.objective.parts.ratio import masked_importance, sequence, token, trajectory, truncated_importance
from psigrad.objective.parts.surrogate import (
    clip,
    dual_clip,
    kl_penalty,
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
