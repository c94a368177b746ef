"""More parts for the psi slot: advantages that compare a completion with its group. `advantage.py` has the simpler ones.

Most of them compute one advantage per trajectory, from the trajectory's summed reward R_i, and assign it to each of its steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from psigrad.objective.batch import Batch, centre, discounted_sum, group_min, group_size, group_std, group_sum, zero_outside
from psigrad.objective.lazy_torch import Tensor, torch
from psigrad.objective.parts.advantage import GROUP, needs, over_steps

__all__ = [
    "decoupled_group_mean",
    "group_mean_batch_std",
    "length_weighted_mean",
    "over_group_mean",
    "pass_at_k",
    "process_group_mean",
]


@dataclass(frozen=True)
class group_mean_batch_std:
    """The return minus the mean return of its group, divided by the standard deviation of all returns of the batch.

    Formula: A_t = (R_i − mean_group(R)) / (std_batch(R) + eps)

    Source: Hu et al. 2025, REINFORCE++, arXiv:2501.03262 (global normalisation); TRL scale_rewards "batch".

    >>> show(group_mean_batch_std()(outcomes(1, 0, 0, 0)))
    [[1.5], [-0.5], [-0.5], [-0.5]]
    """

    eps: float = 1e-4
    """Added to the standard deviation; TRL's value."""
    needs: ClassVar[frozenset[str]] = GROUP

    def __call__(self, batch: Batch) -> Tensor:
        """Return advantages [N, T]: one number for all steps of a row."""
        reward_N = batch.sequence_reward
        scale_N = group_std(reward_N, batch.present.long()) + self.eps
        return over_steps(centre(reward_N, batch.group) / scale_N, batch)


@needs(GROUP)
def length_weighted_mean(batch: Batch) -> Tensor:
    """The return minus a baseline: the mean return of its group, weighted by the lengths of the completions.

    Formula: A_t = R_i − Σ_j |y_j|·R_j / Σ_j |y_j|, over the completions j of the group, with |y_j| steps

    Source: Hao et al. 2025, OPO, arXiv:2505.23585.

    >>> show(length_weighted_mean(outcomes(1, 0, steps=[3, 1])))
    [[0.25, 0.25, 0.25], [-0.75, 0.0, 0.0]]
    """
    least_N = group_min(batch.sequence_reward, batch.group)  # subtracted first: equal returns then give exact zeros
    above_N, length_N = batch.sequence_reward - least_N, batch.mask.sum(1).to(batch.reward.dtype)
    mean_N = group_sum(length_N * above_N, batch.group) / group_sum(length_N, batch.group).clamp(min=1)
    return over_steps(above_N - mean_N, batch)


@needs(GROUP)
def over_group_mean(batch: Batch) -> Tensor:
    """The return minus the mean return of its group, divided by that mean: rare successes weigh more.

    Formula: A_t = (R_i − mean(R)) / mean(R), and 0 in a group whose mean is 0

    Errors: ValueError if a return is negative.

    Source: Tajwar et al. 2026, MaxRL, arXiv:2602.02710.

    >>> show(over_group_mean(outcomes(1, 0, 0, 0)))
    [[3.0], [-1.0], [-1.0], [-1.0]]
    """
    reward_N = batch.sequence_reward
    if bool((reward_N < 0).any()):
        raise ValueError(
            f"A return is {float(reward_N.min()):g} but over_group_mean divides by the mean, so none may be below 0; shift the "
            "rewards, or choose group_mean."
        )
    mean_N = group_sum(reward_N, batch.group) / group_size(batch.group)
    centred_N = centre(reward_N, batch.group)
    return over_steps(torch.where(mean_N > 0, centred_N / mean_N.clamp(min=torch.finfo(mean_N.dtype).tiny), 0.0), batch)


@dataclass(frozen=True)
class pass_at_k:
    """The mean advantage of all subsets of k completions that contain this completion.

    Formula: A_t = (1 − P)/σ if R_i > `right`, else (1 − P − C(m − 1, k − 1)/C(G − 1, k − 1))/σ; A_t = 0 if σ = 0
             P = 1 − C(m, k)/C(G, k), σ = √(P·(1 − P)), and C is the binomial coefficient
             m of the group's G completions are wrong: their R_i is at most `right`

    A subset is right if one of its completions is right. P is the share of right subsets.

    Source: Chen et al. 2025, Pass@k training, arXiv:2508.10751, section 2.4 (the analytical form).

    >>> show(pass_at_k(k=2)(outcomes(1, 0, 0, 0)))
    [[1.0], [-0.333], [-0.333], [-0.333]]
    """

    k: int = 4
    """k, the number of completions of which one must be right. It must be less than the group's size, otherwise σ is always 0."""
    right: float = 0.5
    """A completion is right if its return is above this."""
    needs: ClassVar[frozenset[str]] = GROUP

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"pass_at_k has k={self.k}; expected at least 1.")

    def __call__(self, batch: Batch) -> Tensor:
        """Return advantages [N, T]: one number for all steps of a row."""
        size_N = group_size(batch.group)
        if bool((size_N[batch.present] <= self.k).any()):
            smallest = int(size_N[batch.present].min())
            raise ValueError(f"pass_at_k has k={self.k} and a group has {smallest} completions; lower k or sample more.")
        right_N = batch.sequence_reward > self.right
        wrong_N = group_sum((~right_N).long(), batch.group)
        failed_N = _choose_ratio(wrong_N, size_N, self.k)
        scale_N = (failed_N * (1 - failed_N)).sqrt()
        others_N = _choose_ratio(wrong_N - 1, size_N - 1, self.k - 1)
        above_N = torch.where(right_N, failed_N, failed_N - others_N)
        advantage_N = torch.where(scale_N > 0, above_N / scale_N.clamp(min=torch.finfo(scale_N.dtype).tiny), 0.0)
        return over_steps(advantage_N.to(batch.reward.dtype), batch)


@dataclass(frozen=True)
class decoupled_group_mean:
    """The weighted sum of the rewards, each standardised within the group. The sum is divided by its own standard deviation.

    Formula: A_t = S_i / (std_batch(S) + eps), S_i = Σ_k w_k · (r_ik − mean_group(r_k)) / (std_group(r_k) + eps)
             r_ik is the value of reward function k for completion i, and w_k the weight of this function

    A KL penalty in the reward is ignored.

    Source: Liu et al. 2026, GDPO, arXiv:2601.05242; TRL multi_objective_aggregation "normalize_then_sum".

    >>> show(decoupled_group_mean()(outcomes(1, 1, 0, parts=[[1, 0], [0.5, 0.5], [0, 0]])))
    [[0.299], [0.816], [-1.115]]
    """

    eps: float = 1e-4
    """Added to the standard deviations; TRL's value."""
    needs: ClassVar[frozenset[str]] = GROUP | {"parts"}

    def __call__(self, batch: Batch) -> Tensor:
        """Return advantages [N, T]: one number for all steps of a row."""
        if batch.parts is None:
            raise ValueError(
                "The batch has no `parts`, which decoupled_group_mean reads; give the rewards of K functions as [N, K]."
            )
        weights = batch.part_weights or (1.0,) * batch.parts.shape[1]
        total_N = torch.zeros_like(batch.sequence_reward)
        ids, index_N = torch.unique(batch.group, return_inverse=True)
        alone_N = len(ids) + torch.arange(len(index_N), device=index_N.device)
        for weight, part_N in zip(weights, batch.parts.to(total_N.dtype).unbind(1), strict=True):
            applies_N = batch.present & ~part_N.isnan()
            own_N = torch.where(applies_N, index_N, alone_N)
            part_N = part_N.nan_to_num()
            centred_N, scale_N = centre(part_N, own_N), group_std(part_N, own_N) + self.eps
            total_N += torch.where(centred_N == 0, 0.0, weight * centred_N / scale_N)
        # The mean over the batch is 0 already, as each group's mean is. Subtracting it would turn zeros into rounding errors.
        return over_steps(total_N / (group_std(total_N, batch.present.long()) + self.eps), batch)


@dataclass(frozen=True)
class process_group_mean:
    """Process supervision: step rewards are standardised over the group, then summed from each token to the end.

    Formula: A_t = Σ_{u ≥ t, u rewarded} (r_u − mean(r)) / (std(r) + eps), mean and std over all rewarded tokens of the group

    Source: Shao et al. 2024, DeepSeekMath (GRPO), arXiv:2402.03300, section 4.1.3.

    >>> show(process_group_mean()(outcomes(1, 0, steps=2, rewarded=[[True, True], [True, True]])))
    [[1.0, 1.5], [-1.0, -0.5]]
    """

    std: bool = True
    """True: divide by the standard deviation."""
    eps: float = 1e-4
    """Added to the standard deviation; TRL's value for GRPO."""
    needs: ClassVar[frozenset[str]] = GROUP

    def __call__(self, batch: Batch) -> Tensor:
        """Return advantages [N, T]."""
        rewarded_NT = batch.rewarded
        if rewarded_NT is None:
            last_NT = batch.mask & (batch.mask.cumsum(1) == batch.mask.sum(1, keepdim=True))
            rewarded_NT = last_NT | (batch.mask & (batch.reward != 0))
        group_M = batch.group[:, None].expand(batch.mask.shape)[rewarded_NT]
        reward_M = batch.reward[rewarded_NT]
        if not len(reward_M):
            return torch.zeros_like(batch.reward)
        scaled_M = centre(reward_M, group_M)
        if self.std:
            scaled_M = scaled_M / (group_std(reward_M, group_M) + self.eps)
        standardised_NT = torch.zeros_like(batch.reward).masked_scatter(rewarded_NT, scaled_M)
        return discounted_sum(zero_outside(batch.mask, standardised_NT), batch.mask, 1.0)


def _choose_ratio(of_N: Tensor, among_N: Tensor, k: int) -> Tensor:
    """Return C(of_N, k) / C(among_N, k) [N], ratios of binomial coefficients, in float64; 0 where `of_N` < k."""
    ratio_N = torch.ones(of_N.shape, dtype=torch.float64, device=of_N.device)
    for i in range(k):
        ratio_N = ratio_N * (of_N - i).clamp(min=0) / (among_N - i).clamp(min=1)
    return ratio_N
