"""The psi slot: a function Batch -> advantage A [N,T], the factor of grad log π(a_t|s_t).

A psi lists in `needs` what it needs besides rewards: "value" (a critic's values), "action_value" (the values of a critic of
actions), "group" (several trajectories per group) or "parts" (`Batch.parts`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from psigrad.objective.batch import (
    Batch,
    centre,
    discounted_sum,
    group_size,
    group_std,
    masked_mean,
    next_chosen,
    rank_in_group,
    td_errors,
    zero_outside,
)
from psigrad.objective.lazy_torch import Tensor, torch

__all__ = [
    "action_advantage",
    "action_value",
    "batch_mean",
    "best_of_group",
    "gae",
    "group_mean",
    "k_step",
    "leave_one_out",
    "length_gae",
    "moving_average",
    "no_reward",
    "ones",
    "reward_to_go",
    "td_residual",
    "total_return",
    "whitened",
]

F = TypeVar("F", bound=Callable[..., Any])
VALUE = frozenset({"value"})
GROUP = frozenset({"group"})
ACTION_VALUE = frozenset({"action_value"})


class StatefulPsi(ABC):
    """An advantage function (psi) with memory: each call takes the state and returns the next one, which the caller stores."""

    @abstractmethod
    def initial_state(self) -> dict[str, float]:
        """Return the state before the first batch, as numbers by name."""

    @abstractmethod
    def __call__(self, batch: Batch, state: Mapping[str, float]) -> tuple[Tensor, dict[str, float]]:
        """Return (advantages [N,T], the state after this batch)."""


Psi = Callable[[Batch], Tensor] | StatefulPsi


def needs(what: frozenset[str]) -> Callable[[F], F]:
    """Return a decorator that sets a part's attribute `needs` to `what`, the part's extra inputs, such as {"value"}."""

    def mark(part: F) -> F:
        part.__dict__["needs"] = what
        return part

    return mark


def needs_of(part: object) -> frozenset[str]:
    """Return a part's attribute `needs`, which names the extra inputs that it reads, or an empty set if it has none."""
    return frozenset(getattr(part, "needs", ()))


def over_steps(x_N: Tensor, batch: Batch) -> Tensor:
    """Return [N, T]: row i has the number `x_N[i]` on each of its steps, and 0 on masked steps."""
    return zero_outside(batch.mask, x_N[:, None].expand(batch.mask.shape))


def ones(batch: Batch) -> Tensor:
    """An advantage of 1 for every step, so that the policy imitates all kept completions.

    Formula: A_t = 1

    Source: Dong et al. 2023, RAFT, arXiv:2304.06767.

    >>> show(ones(outcomes(1, 0)))
    [[1.0], [1.0]]
    """
    return batch.mask.to(batch.reward.dtype)


def no_reward(batch: Batch) -> Tensor:
    """An advantage of 0 for every step. The policy ignores rewards and learns only from the KL to the reference, its teacher.

    Formula: A_t = 0

    Source: Agarwal et al. 2024, GKD, arXiv:2306.13649.

    >>> show(no_reward(outcomes(1, 0)))
    [[0.0], [0.0]]
    """
    return torch.zeros_like(batch.reward)


@dataclass(frozen=True)
class total_return:
    """The return of the whole trajectory, for each of its steps.

    Formula: A_t = Σ_u γ^u · r_u

    Source: Williams 1992, REINFORCE; Schulman et al. 2016, arXiv:1506.02438, form 1 of Ψ.

    >>> show(total_return(gamma=0.5)(outcomes(1, steps=3)))
    [[0.25, 0.25, 0.25]]
    """

    gamma: float = 1.0
    """Discount per chosen step."""

    def __call__(self, batch: Batch) -> Tensor:
        """Return advantages [N, T]: one return for all steps of a row."""
        steps_before = (batch.mask.cumsum(1) - 1).to(batch.reward.dtype)
        return over_steps(zero_outside(batch.mask, self.gamma**steps_before * batch.reward).sum(1), batch)


@dataclass(frozen=True)
class reward_to_go:
    """The return from each step on. Earlier rewards, which the step cannot have caused, are not counted.

    Formula: A_t = G_t = Σ_{u≥t} γ^(u−t) · r_u

    Source: Sutton et al. 2000; Schulman et al. 2016, arXiv:1506.02438, form 2 of Ψ.

    >>> show(reward_to_go(gamma=0.5)(outcomes(1, steps=3)))
    [[0.25, 0.5, 1.0]]
    """

    gamma: float = 1.0
    """Discount per chosen step."""

    def __call__(self, batch: Batch) -> Tensor:
        """Return advantages [N, T]."""
        return discounted_sum(batch.reward, batch.mask, self.gamma)


def batch_mean(batch: Batch) -> Tensor:
    """The return minus the mean return of the batch.

    Formula: A_t = R_i − (1/N)·Σ_j R_j, over the N trajectories j of the batch

    Source: Williams 1992; Ahmadian et al. 2024, arXiv:2402.14740.

    >>> show(batch_mean(outcomes(1, 0, 0, 0)))
    [[0.75], [-0.25], [-0.25], [-0.25]]
    """
    return over_steps(centre(batch.sequence_reward, batch.present.long()), batch)


@dataclass(frozen=True)
class moving_average(StatefulPsi):
    """The return minus the moving average of the returns of earlier batches.

    Formula: A_t = R_i − b;  after batch n: m ← decay·m + (1 − decay)·mean_batch(R),  b = m / (1 − decay^n); m and b start at 0

    Source: Williams 1992 (reinforcement comparison); Ahmadian et al. 2024, arXiv:2402.14740.

    >>> show(moving_average()(outcomes(1, 0), {"reward_average": 0.05, "reward_batches": 1})[0])
    [[0.5], [-0.5]]
    """

    decay: float = 0.9
    """The weight of the old average in each update of the average."""

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(f"moving_average has decay={self.decay}; expected 0 <= decay < 1; 0.9 remembers about ten batches.")

    def initial_state(self) -> dict[str, float]:
        """Return the state before the first batch: an average of 0 over 0 batches."""
        return {"reward_average": 0.0, "reward_batches": 0.0}

    def __call__(self, batch: Batch, state: Mapping[str, float]) -> tuple[Tensor, dict[str, float]]:
        """Return (advantages [N, T], the state after this batch)."""
        average, batches = state["reward_average"], state["reward_batches"]
        baseline = average / (1 - self.decay**batches) if batches else 0.0
        advantage = over_steps(batch.sequence_reward - baseline, batch)
        if not batch.present.any():
            return advantage, dict(state)
        mean = float(masked_mean(batch.sequence_reward, batch.present))
        return advantage, {"reward_average": self.decay * average + (1 - self.decay) * mean, "reward_batches": batches + 1}


@needs(GROUP)
def leave_one_out(batch: Batch) -> Tensor:
    """The return minus the mean return of the K − 1 other completions of the same prompt.

    Formula: A_t = R_i − (1/(K−1))·Σ_{j≠i} R_j = K/(K−1) · (R_i − mean(R)), over the K completions j of the group

    Source: Kool et al. 2019, Buy 4 REINFORCE samples; Ahmadian et al. 2024, RLOO, arXiv:2402.14740.

    >>> show(leave_one_out(outcomes(1, 0, 0)))
    [[1.0], [-0.5], [-0.5]]
    """
    size_N = group_size(batch.group)
    scaled_N = centre(batch.sequence_reward, batch.group) * size_N / (size_N - 1).clamp(min=1)
    return over_steps(scaled_N, batch)


@dataclass(frozen=True)
class group_mean:
    """The return minus the mean return of its group, divided by the group's standard deviation if `std` is true.

    Formula: A_t = (R_i − mean(R)) / (std(R) + eps), or R_i − mean(R) if std is false

    For a group of G completions, the variance divides by G − 1.

    Source: Shao et al. 2024, GRPO, arXiv:2402.03300, section 4.1; std off: Liu et al. 2025, Dr. GRPO, arXiv:2503.20783.

    >>> show(group_mean()(outcomes(1, 0, 0, 0)))
    [[1.5], [-0.5], [-0.5], [-0.5]]
    """

    std: bool = True
    """Divide by the standard deviation (GRPO) or not (Dr. GRPO)."""
    eps: float = 1e-4
    """Added to the standard deviation; TRL's value."""
    needs: ClassVar[frozenset[str]] = GROUP

    @property
    def formula(self) -> str:
        """The formula with or without the standard deviation."""
        return f"A_t = (R_i − mean(R)) / (std(R) + {self.eps:g})" if self.std else "A_t = R_i − mean(R)"

    def __call__(self, batch: Batch) -> Tensor:
        """Return advantages [N, T]: one number for all steps of a row."""
        centred_N = centre(batch.sequence_reward, batch.group)
        if not self.std:
            return over_steps(centred_N, batch)
        scale_N = group_std(batch.sequence_reward, batch.group) + self.eps
        return over_steps(torch.where(centred_N == 0, torch.zeros_like(centred_N), centred_N / scale_N), batch)


def best_of_group(batch: Batch) -> Tensor:
    """An advantage of 1 for the best completion of each group (the first of equal ones), and 0 for all others.

    Formula: A_t = 1 if R_i is the greatest of its group, else 0

    Source: Dong et al. 2023, RAFT, arXiv:2304.06767.

    >>> show(best_of_group(outcomes(0.2, 0.9, 0.9)))
    [[0.0], [1.0], [0.0]]
    """
    best_N = rank_in_group(batch.sequence_reward, batch.group) == 0
    return over_steps(best_N.to(batch.reward.dtype), batch)


@needs(ACTION_VALUE)
def action_value(batch: Batch) -> Tensor:
    """The critic's value Q of the action taken at each step.

    Formula: A_t = Q(s_t, a_t)

    Source: Sutton et al. 2000; Schulman et al. 2016, arXiv:1506.02438, form 4 of Ψ.

    >>> show(action_value(outcomes(1, action_value=[[0.4]])))
    [[0.4]]
    """
    if batch.action_value is None:
        raise ValueError(
            "The batch has no `action_value`, which this psi reads; pass Q(s_t, a_t) from a critic of actions, or choose "
            "another psi."
        )
    return batch.action_value


@needs(VALUE | ACTION_VALUE)
def action_advantage(batch: Batch) -> Tensor:
    """The value of the step's action minus the value of its state. This needs a critic of actions and a critic of states.

    Formula: A_t = Q(s_t, a_t) − V(s_t)

    Source: Schulman et al. 2016, arXiv:1506.02438, form 5 of Ψ.

    >>> show(action_advantage(outcomes(1, value=[[0.5]], action_value=[[0.9]])))
    [[0.4]]
    """
    if batch.value is None:
        raise ValueError("The batch has no `value`, which the advantage Q − V reads; give the critic's values.")
    return action_value(batch) - batch.value


@dataclass(frozen=True)
class td_residual:
    """The one-step temporal-difference error of the critic.

    Formula: A_t = δ_t = r_t + γ·V(s_{t+1}) − V(s_t)

    Source: Schulman et al. 2016, arXiv:1506.02438, form 6 of Ψ.

    >>> show(td_residual()(outcomes(1, steps=2, value=[[0.5, 0.8]])))
    [[0.3, 0.2]]
    """

    gamma: float = 1.0
    """Discount per chosen step."""
    needs: ClassVar[frozenset[str]] = VALUE

    def __call__(self, batch: Batch) -> Tensor:
        """Return advantages [N, T]."""
        return td_errors(batch, self.gamma)


@dataclass(frozen=True)
class k_step:
    """The k-step advantage: k rewards plus the value of the state after them, minus the value of the current state.

    Formula: A_t = Σ_{l<k} γ^l · δ_{t+l} = Σ_{l<k} γ^l · r_{t+l} + γ^k · V(s_{t+k}) − V(s_t)

    Source: Schulman et al. 2016, GAE, arXiv:1506.02438, eq. 14; Mnih et al. 2016, A3C, arXiv:1602.01783.

    >>> show(k_step(k=2)(outcomes(1, steps=2, value=[[0.5, 0.8]])))
    [[0.5, 0.2]]
    """

    k: int = 5
    """The number of rewards that are summed; the critic's value replaces all later ones."""
    gamma: float = 1.0
    """Discount per chosen step."""
    needs: ClassVar[frozenset[str]] = VALUE

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"k_step has k={self.k}; expected at least 1; k=1 is td_residual.")

    def __call__(self, batch: Batch) -> Tensor:
        """Return advantages [N, T]."""
        term = total = td_errors(batch, self.gamma)
        for _ in range(min(self.k, batch.mask.shape[1]) - 1):
            term = self.gamma * next_chosen(term, batch.mask, torch.zeros_like(term[:, 0]))
            total = total + term
        return total


@dataclass(frozen=True)
class gae:
    """Generalised advantage estimation: a discounted sum of TD residuals.

    Formula: A_t = Σ_l (γ·λ)^l · δ_{t+l}, δ_t = r_t + γ·V(s_{t+1}) − V(s_t)

    Source: Schulman et al. 2016, GAE, arXiv:1506.02438, eq. 16.

    >>> show(gae(lam=0.5)(outcomes(1, steps=2, value=[[0.5, 0.8]])))
    [[0.4, 0.2]]
    """

    gamma: float = 1.0
    """Discount per chosen step."""
    lam: float = 1.0
    """λ: 0 has the most bias, 1 the most variance."""
    needs: ClassVar[frozenset[str]] = VALUE

    def __call__(self, batch: Batch) -> Tensor:
        """Return advantages [N, T]."""
        return discounted_sum(td_errors(batch, self.gamma), batch.mask, self.gamma * self.lam)


@dataclass(frozen=True)
class length_gae:
    """Generalised advantage estimation with a λ_i that grows with the length of trajectory i.

    Formula: A_t = Σ_l (γ·λ_i)^l · δ_{t+l}, δ_t = r_t + γ·V(s_{t+1}) − V(s_t), λ_i = max(0, 1 − 1/(α·|y_i|))
             |y_i| is the number of steps of trajectory i, α is `alpha`

    Source: Yue et al. 2025, VAPO, arXiv:2504.05118, section 4.2.

    >>> show(length_gae(alpha=1)(outcomes(1, steps=2, value=[[0.5, 0.8]])))
    [[0.4, 0.2]]
    """

    alpha: float = 0.05
    """α: the weights λ^l sum to α·|y|. The default is the paper's value. Trajectories of at most 1/α steps get λ = 0, so use a
    larger α, such as 2, for short trajectories.
    """
    gamma: float = 1.0
    """Discount per chosen step."""
    needs: ClassVar[frozenset[str]] = VALUE

    def __post_init__(self) -> None:
        if self.alpha <= 0:
            raise ValueError(f"length_gae has alpha={self.alpha}; expected more than 0.")

    def __call__(self, batch: Batch) -> Tensor:
        """Return advantages [N, T]."""
        length_N = batch.mask.sum(1).clamp(min=1).to(batch.reward.dtype)
        lam_N = (1 - 1 / (self.alpha * length_N)).clamp(min=0)
        return discounted_sum(td_errors(batch, self.gamma), batch.mask, self.gamma * lam_N)


@dataclass(frozen=True)
class whitened:
    """The advantages of another psi, normalised to mean 0 and standard deviation 1.

    Formula: A_t = (Ψ_t − mean(Ψ)) / (std(Ψ) + eps) over all steps of the batch, with Ψ_t the advantage before whitening

    Source: Hu et al. 2025, REINFORCE++, arXiv:2501.03262; Andrychowicz et al. 2021, arXiv:2006.05990.

    >>> show(whitened(total_return())(outcomes(1, 0)))
    [[0.707], [-0.707]]
    """

    psi: Callable[[Batch], Tensor] = reward_to_go()
    """The psi to whiten."""
    eps: float = 1e-8
    """Added to the standard deviation."""

    def __post_init__(self) -> None:
        if isinstance(self.psi, StatefulPsi):
            raise ValueError(
                f"whitened cannot wrap {type(self.psi).__name__}, which has a state; wrap another psi, such as total_return."
            )

    @property
    def needs(self) -> frozenset[str]:
        """The extra inputs that the wrapped psi reads, such as "value"."""
        return needs_of(self.psi)

    def __call__(self, batch: Batch) -> Tensor:
        """Return the advantages [N, T] of `psi`, whitened over the whole batch."""
        psi_NT = self.psi(batch)
        chosen = psi_NT[batch.mask]
        if not chosen.numel():
            return psi_NT
        above = chosen - chosen.min()  # subtracted first: equal numbers then give 0, not a rounding error divided by eps
        centred = above - above.mean()
        std = (centred.square().sum() / max(chosen.numel() - 1, 1)).sqrt()
        return psi_NT.masked_scatter(batch.mask, centred / (std + self.eps))
