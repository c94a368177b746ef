"""The keep slot: Batch -> bool [N], which trajectories are trained on, or bool [N,T], which steps the surrogate sees.

Filters act after the advantage and see the plain rewards (without a KL penalty). Dropped rows count in no total. Dropped steps
count in the totals and in the KL term, as in the papers: the fewer steps are left, the smaller the loss. A filter whose `needs`
have "advantage" is called with the advantage [N,T] too; one with "entropy" reads the batch's `entropy`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from psigrad.objective import stats
from psigrad.objective.batch import Batch
from psigrad.objective.lazy_torch import Tensor, torch

__all__ = ["clip_covariance", "has_signal", "not_truncated", "top_entropy", "top_k"]

Keep = Callable[..., Tensor]


def has_signal(batch: Batch) -> Tensor:
    """Drop groups whose rewards are all equal; the trainer collects others in their place.

    Formula: keep i  ⇔  min(M) < max(M) in the group of i, M the batch's `metric`, or the rewards where it has none

    The test is exact equality. A standard deviation of floats is not 0 for eight rewards of 0.1. The paper tests correctness:
    with a penalty on length a group of right answers would differ, and teach length alone.

    Source: Yu et al. 2025, DAPO, arXiv:2503.14476, section 3.2 (dynamic sampling).
    """
    return ~stats.all_equal(batch.sequence_reward if batch.metric is None else batch.metric, batch.group)


def not_truncated(batch: Batch) -> Tensor:
    """Drop trajectories that were cut by the length limit: their reward says little about them.

    Formula: keep i  ⇔  trajectory i ended by itself

    Source: Yu et al. 2025, DAPO, arXiv:2503.14476, section 3.4 (overlong filtering); TRL mask_truncated_completions.
    """
    if batch.truncated is None:
        raise ValueError("The batch has no `truncated`, which the filter not_truncated reads; give it or leave the filter out.")
    return ~batch.truncated


@dataclass(frozen=True)
class top_k:
    """Keep the k best trajectories of each group (the earlier of equals first).

    Formula: keep i  ⇔  R_i is among the k greatest of its group

    Source: Dong et al. 2023, RAFT, arXiv:2304.06767.
    """

    k: int = 1
    """Trajectories kept per group."""

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"top_k has k={self.k}; expected at least 1.")

    def __call__(self, batch: Batch) -> Tensor:
        """[N] True for the k best completions of each group."""
        return stats.rank_in_group(batch.sequence_reward, batch.group) < self.k


@dataclass(frozen=True)
class top_entropy:
    """Train on the steps at which the policy was least sure, over the whole batch.

    Formula: keep t  ⇔  H(π_old(·|s_t)) is at least the (1 − share) quantile of all steps

    Source: Wang et al. 2025, Beyond the 80/20 rule, arXiv:2506.01939; TRL top_entropy_quantile.
    """

    share: float = 0.2
    """Share of the steps that are kept; TRL's top_entropy_quantile."""
    needs: ClassVar[frozenset[str]] = frozenset({"entropy"})

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"top_entropy has share={self.share}; expected more than 0 and at most 1.")

    def __call__(self, batch: Batch) -> Tensor:
        """[N, T] True on the steps of greatest entropy."""
        if batch.entropy is None:
            raise ValueError("The batch has no `entropy`, which the filter top_entropy reads; give the entropy of each step.")
        ordered = batch.entropy[batch.mask].sort().values
        if not len(ordered):
            return batch.mask
        # rounded first: (n − 1)·(1 − 0.2) is a whole number but for the last bits
        place = math.ceil(round((len(ordered) - 1) * (1 - self.share), 6))
        return batch.mask & (batch.entropy >= ordered[place])


@dataclass(frozen=True)
class clip_covariance:
    """Leave out a few of the steps that cost most entropy: likely ones with a high advantage, or unlikely ones with a low.

    Formula: with C_t = (log π_old(a_t|s_t) − mean(log π_old))·(A_t − mean(A)): of the steps with low < C_t < high, share · all
             steps, drawn at random, are left out

    The draw is by a hash of the log-probs: the same batch, in whatever order, leaves out the same steps.

    Source: Cui et al. 2025, Clip-Cov, arXiv:2505.22617; verl's clip_cov (which computes C_t anew for every micro-batch).
    """

    share: float = 2e-4
    """Steps left out, as a share of all; at least one. verl's clip_cov_ratio."""
    low: float = 1.0
    """Least covariance of a step that may be left out."""
    high: float = 5.0
    """Greatest."""
    needs: ClassVar[frozenset[str]] = frozenset({"advantage"})

    def __post_init__(self) -> None:
        if not 0 < self.share < 1 or self.low >= self.high:
            raise ValueError(
                f"clip_covariance has share={self.share}, low={self.low}, high={self.high}; expected 0 < share < 1, low < high."
            )

    def __call__(self, batch: Batch, advantage: Tensor) -> Tensor:
        """[N, T] False on the steps that are left out."""
        cost = stats.step_covariance(batch.logp_old, advantage, batch.mask)
        places = ((cost > self.low) & (cost < self.high) & batch.mask).flatten().nonzero()[:, 0]
        count = max(int(self.share * int(batch.mask.sum())), 1)
        bits = batch.logp_old.float().view(torch.int32).long()
        keys = stats.scramble(bits.flatten()[places] + bits.sum())
        kept = batch.mask.flatten().clone()
        kept[places[keys.argsort(stable=True)[:count]]] = False
        return kept.view(batch.mask.shape)
