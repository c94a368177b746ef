"""The keep slot: Batch -> bool [N], which trajectories are trained on. Filters act after the advantage and see the plain rewards
(without a KL penalty). Dropped rows count in no total.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from psigrad.objective import stats
from psigrad.objective.batch import Batch

__all__ = ["has_signal", "not_truncated", "top_k"]

Keep = Callable[[Batch], Tensor]


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
