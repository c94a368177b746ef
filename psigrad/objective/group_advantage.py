"""More of the psi slot: advantages of a completion among those of its group, beside the means of `advantage`.

All read one number per trajectory, its summed reward R_i, and give it to each of its steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from psigrad.objective import stats
from psigrad.objective.advantage import GROUP, needs, over_steps
from psigrad.objective.batch import Batch

__all__ = ["group_mean_batch_std", "length_weighted_mean", "over_group_mean", "pass_at_k"]


@dataclass(frozen=True)
class group_mean_batch_std:
    """The return minus the mean return of its group, divided by the standard deviation of all returns of the batch.

    Formula: A_t = (R_i − mean_group(R)) / (std_batch(R) + eps)

    An easy or a hard prompt is not scaled up as by the standard deviation of its own group.

    Source: Hu et al. 2025, REINFORCE++, arXiv:2501.03262 (global normalisation); TRL scale_rewards "batch".
    """

    eps: float = 1e-4
    """Added to the standard deviation; TRL's value."""
    needs: ClassVar[frozenset[str]] = GROUP

    def __call__(self, batch: Batch) -> Tensor:
        """[N, T] advantages: one number for all steps of a row."""
        reward_N = batch.sequence_reward
        scale_N = stats.group_std(reward_N, batch.present.long()) + self.eps
        return over_steps(stats.centred(reward_N, batch.group) / scale_N, batch)


@needs(GROUP)
def length_weighted_mean(batch: Batch) -> Tensor:
    """The return minus the mean return of its group weighted by length, the baseline of least variance when the squared norm of
    a completion's score grows with its length.

    Formula: A_t = R_i − Σ_j |y_j|·R_j / Σ_j |y_j|

    The baseline contains R_i: the expected gradient is not exactly that of the reward, as with the plain mean.

    Source: Hao et al. 2025, OPO, arXiv:2505.23585.
    """
    least_N = stats.group_min(batch.sequence_reward, batch.group)  # first, so that equal returns leave exact zeros
    above_N, length_N = batch.sequence_reward - least_N, batch.mask.sum(1).to(batch.reward.dtype)
    mean_N = stats.group_sum(length_N * above_N, batch.group) / stats.group_sum(length_N, batch.group).clamp(min=1)
    return over_steps(above_N - mean_N, batch)


@needs(GROUP)
def over_group_mean(batch: Batch) -> Tensor:
    """The return minus the mean return of its group, divided by that mean: rare successes weigh more.

    Formula: A_t = (R_i − mean(R)) / mean(R), and 0 in a group whose mean is 0

    For rewards of 0 and 1 the expected gradient is that of Σ_{k<G} pass@k / k, the first G − 1 terms of the logarithm of the
    success rate. Rewards must not be negative.

    Source: Tajwar et al. 2026, MaxRL, arXiv:2602.02710.
    """
    reward_N = batch.sequence_reward
    if bool((reward_N < 0).any()):
        raise ValueError(
            f"A return is {float(reward_N.min()):g} and over_group_mean divides by their mean; expected none below 0; shift the "
            "rewards, or choose group_mean."
        )
    mean_N = stats.group_sum(reward_N, batch.group) / stats.group_size(batch.group)
    centred_N = stats.centred(reward_N, batch.group)
    return over_steps(torch.where(mean_N > 0, centred_N / mean_N.clamp(min=torch.finfo(mean_N.dtype).tiny), 0.0), batch)


@dataclass(frozen=True)
class pass_at_k:
    """The mean, over all choices of k completions that hold this one, of how much better than usual their best is.

    Formula: with G completions of which m are wrong, P = 1 − C(m, k)/C(G, k) and σ = √(P·(1 − P)):
             A_t = (1 − P)/σ where y is right, (1 − P − C(m − 1, k − 1)/C(G − 1, k − 1))/σ where it is wrong, and 0 where σ = 0

    It rewards a group for having one right answer among k, not for repeating it.

    Source: Chen et al. 2025, Pass@k training, arXiv:2508.10751, section 2.4 (the analytical form).
    """

    k: int = 4
    """Completions of which one must be right; fewer than a group has, since with all of them σ is always 0."""
    right: float = 0.5
    """A completion is right where its return is above this."""
    needs: ClassVar[frozenset[str]] = GROUP

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"pass_at_k has k={self.k}; expected at least 1.")

    def __call__(self, batch: Batch) -> Tensor:
        """[N, T] advantages: one number for all steps of a row."""
        size_N = stats.group_size(batch.group)
        if bool((size_N[batch.present] <= self.k).any()):
            smallest = int(size_N[batch.present].min())
            raise ValueError(f"pass_at_k has k={self.k} and a group has {smallest} completions; lower k or sample more.")
        right_N = batch.sequence_reward > self.right
        wrong_N = stats.group_sum((~right_N).long(), batch.group)
        failed_N = _choose_ratio(wrong_N, size_N, self.k)
        scale_N = (failed_N * (1 - failed_N)).sqrt()
        others_N = _choose_ratio(wrong_N - 1, size_N - 1, self.k - 1)
        above_N = torch.where(right_N, failed_N, failed_N - others_N)
        advantage_N = torch.where(scale_N > 0, above_N / scale_N.clamp(min=torch.finfo(scale_N.dtype).tiny), 0.0)
        return over_steps(advantage_N.to(batch.reward.dtype), batch)


def _choose_ratio(of_N: Tensor, among_N: Tensor, k: int) -> Tensor:
    """C(of, k) / C(among, k) as float64; 0 where `of` < k."""
    ratio_N = torch.ones(of_N.shape, dtype=torch.float64, device=of_N.device)
    for i in range(k):
        ratio_N = ratio_N * (of_N - i).clamp(min=0) / (among_N - i).clamp(min=1)
    return ratio_N
