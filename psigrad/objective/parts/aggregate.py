"""The aggregate slot, which sets the weight of each step, and the keep slot, which filters trajectories and steps.

aggregate: (mask [N,T], totals) -> weights [N,T]; the loss is Σ weights · per-step loss. `totals` counts the sequences and steps
of the whole optimiser step.

keep: Batch -> bool [N], the trajectories that are trained on, or bool [N,T], the steps that the surrogate sees. A dropped step
still counts in the totals and in the KL term. A filter with "entropy" in its `needs` reads `Batch.entropy`. A filter with
"advantage" in its `needs` is also passed the advantage [N,T].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from psigrad.objective.batch import Batch, Totals, all_equal, rank_in_group, scramble, step_covariance
from psigrad.objective.lazy_torch import Tensor, torch

Aggregate = Callable[[Tensor, Totals], Tensor]


def token_mean(mask: Tensor, totals: Totals) -> Tensor:
    """The mean over all steps of all sequences. A long sequence weighs more.

    Formula: w_t = 1 / (number of steps in all sequences)

    Source: Yu et al. 2025, DAPO, arXiv:2503.14476, section 3.3; TRL loss_type "dapo".

    >>> show(token_mean(outcomes(1, 0, steps=[3, 1]).mask, Totals(sequences=2, tokens=4)))
    [[0.25, 0.25, 0.25], [0.25, 0.0, 0.0]]
    """
    return mask.to(torch.float64) / max(totals.tokens, 1)


def sequence_mean(mask: Tensor, totals: Totals) -> Tensor:
    """The mean over the steps of each sequence, then over sequences.

    Formula: w_t = 1 / (number of sequences · |y|), where |y| is the sequence's number of steps

    Source: Shao et al. 2024, GRPO, arXiv:2402.03300, eq. 3; TRL loss_type "grpo".

    >>> show(sequence_mean(outcomes(1, 0, steps=[3, 1]).mask, Totals(sequences=2, tokens=4)))
    [[0.167, 0.167, 0.167], [0.5, 0.0, 0.0]]
    """
    return mask.to(torch.float64) / mask.sum(1, keepdim=True).clamp(min=1) / max(totals.sequences, 1)


def sequence_sum(mask: Tensor, totals: Totals) -> Tensor:
    """The sum over the steps of each sequence, then the mean over sequences.

    Formula: w_t = 1 / (number of sequences)

    Source: Williams 1992; Ahmadian et al. 2024, Back to Basics, arXiv:2402.14740.

    >>> show(sequence_sum(outcomes(1, 0, steps=[3, 1]).mask, Totals(sequences=2, tokens=4)))
    [[0.5, 0.5, 0.5], [0.5, 0.0, 0.0]]
    """
    return mask.to(torch.float64) / max(totals.sequences, 1)


@dataclass(frozen=True)
class fixed_length:
    """The sum over the steps of each sequence, divided by a constant n, then the mean over sequences. No length bias.

    Formula: w_t = 1 / (n · number of sequences)

    Source: Liu et al. 2025, Dr. GRPO, arXiv:2503.20783, section 3.2; TRL loss_type "dr_grpo", where n is max_completion_length.

    >>> show(fixed_length(n=4)(outcomes(1, 0, steps=[3, 1]).mask, Totals(sequences=2, tokens=4)))
    [[0.125, 0.125, 0.125], [0.125, 0.0, 0.0]]
    """

    n: int = 1024
    """The constant, usually max_completion_length. It only scales the gradient."""

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"fixed_length has n={self.n}; expected at least 1; the usual choice is max_completion_length.")

    def __call__(self, mask: Tensor, totals: Totals) -> Tensor:
        """Return the weights [N, T] by which the losses of the steps are multiplied."""
        return sequence_sum(mask, totals) / self.n


Keep = Callable[..., Tensor]


def has_signal(batch: Batch) -> Tensor:
    """Drop each group whose trajectories all have the same reward.

    Formula: keep i  ⇔  min(M) < max(M) in the group of i
             M_i is the reward of i without the penalty of `soft_overlong`; with `--filter-metric NAME`, the value of reward NAME

    Source: Yu et al. 2025, DAPO, arXiv:2503.14476, section 3.2 (dynamic sampling).

    >>> has_signal(outcomes(1, 1)).tolist()
    [False, False]
    """
    return ~all_equal(batch.sequence_reward if batch.metric is None else batch.metric, batch.group)


def not_truncated(batch: Batch) -> Tensor:
    """Drop trajectories that were cut by the length limit, since the reward of an unfinished answer says little about it.

    Formula: keep i  ⇔  trajectory i ended by itself

    Source: Yu et al. 2025, DAPO, arXiv:2503.14476, section 3.4 (overlong filtering); TRL mask_truncated_completions.

    >>> not_truncated(outcomes(1, 0, truncated=[False, True])).tolist()
    [True, False]
    """
    if batch.truncated is None:
        raise ValueError("The batch has no `truncated`, which the filter not_truncated reads; give it or remove the filter.")
    return ~batch.truncated


@dataclass(frozen=True)
class top_k:
    """Keep the k trajectories of each group with the greatest returns R. Among equal returns, the earlier trajectory wins.

    Formula: keep i  ⇔  R_i is among the k greatest of its group

    Source: Dong et al. 2023, RAFT, arXiv:2304.06767.

    >>> top_k(k=1)(outcomes(0.2, 0.9)).tolist()
    [False, True]
    """

    k: int = 1
    """Trajectories kept per group."""

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"top_k has k={self.k}; expected at least 1.")

    def __call__(self, batch: Batch) -> Tensor:
        """Return [N]: True for the k trajectories of each group with the greatest returns."""
        return rank_in_group(batch.sequence_reward, batch.group) < self.k


@dataclass(frozen=True)
class top_entropy:
    """Train only on the batch's steps at which the policy was least sure.

    Formula: keep t  ⇔  H(π_old(·|s_t)) is at least the (1 − share) quantile of this entropy over all steps of the batch

    Source: Wang et al. 2025, Beyond the 80/20 rule, arXiv:2506.01939; TRL top_entropy_quantile.

    >>> top_entropy(share=0.5)(outcomes(1, steps=2, entropy=[[0.1, 2.0]])).tolist()
    [[False, True]]
    """

    share: float = 0.2
    """Share of the steps that are kept; TRL's top_entropy_quantile."""
    needs: ClassVar[frozenset[str]] = frozenset({"entropy"})

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"top_entropy has share={self.share}; expected more than 0 and at most 1.")

    def __call__(self, batch: Batch) -> Tensor:
        """Return [N, T]: True on the steps of greatest entropy."""
        if batch.entropy is None:
            raise ValueError("The batch has no `entropy`, which the filter top_entropy reads; give the entropy of each step.")
        ordered = batch.entropy[batch.mask].sort().values
        if not len(ordered):
            return batch.mask
        # Round first: (n − 1)·(1 − 0.2) is an integer only up to rounding errors.
        place = math.ceil(round((len(ordered) - 1) * (1 - self.share), 6))
        return batch.mask & (batch.entropy >= ordered[place])


@dataclass(frozen=True)
class clip_covariance:
    """Drop at random a few tokens that would lower the policy's entropy.

    Formula: C_t = (log π_old(a_t|s_t) − mean(log π_old))·(A_t − mean(A)), with means over all tokens of the batch
             of the tokens with low < C_t < high, drop share · (number of all tokens) at random, but at least one

    Source: Cui et al. 2025, Clip-Cov, arXiv:2505.22617; verl's clip_cov.

    >>> clip_covariance(share=0.5)(outcomes(1, 0, logp_old=[[-0.1], [-3.0]]), row(2, -2).T).tolist()
    [[True], [False]]
    """

    share: float = 2e-4
    """The share of all tokens to drop; at least one token. verl's clip_cov_ratio."""
    low: float = 1.0
    """Only tokens with a covariance above this can be dropped."""
    high: float = 5.0
    """Only tokens with a covariance below this can be dropped."""
    needs: ClassVar[frozenset[str]] = frozenset({"advantage"})

    def __post_init__(self) -> None:
        if not 0 < self.share < 1 or self.low >= self.high:
            raise ValueError(
                f"clip_covariance has share={self.share}, low={self.low}, high={self.high}; expected 0 < share < 1, low < high."
            )

    def __call__(self, batch: Batch, advantage: Tensor) -> Tensor:
        """Return [N, T]: False on the dropped steps."""
        cost = step_covariance(batch.logp_old, advantage, batch.mask)
        places = ((cost > self.low) & (cost < self.high) & batch.mask).flatten().nonzero()[:, 0]
        count = max(int(self.share * int(batch.mask.sum())), 1)
        # a hash, so that the choice does not depend on the order of the rows
        bits = batch.logp_old.float().view(torch.int32).long()
        keys = scramble(bits.flatten()[places] + bits.sum())
        kept = batch.mask.flatten().clone()
        kept[places[keys.argsort(stable=True)[:count]]] = False
        return kept.view(batch.mask.shape)


PARTS: dict[str, tuple[Callable[..., Tensor] | type[Any], ...]] = {
    "aggregate": (fixed_length, sequence_mean, sequence_sum, token_mean),
    "keep": (clip_covariance, has_signal, not_truncated, top_entropy, top_k),
}
