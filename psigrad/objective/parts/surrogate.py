"""The surrogate slot: (logp, log_ratio, advantage) -> loss per step, all [N,T]; no mean, no metrics.

Losses are minimised, so each is minus what is to grow. One that reads whole sequences has "mask" in its `needs` and gets the mask
[N,T] as well. More are in `trust_surrogate.py`, PPO-penalty's is in `penalty.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from psigrad.objective.lazy_torch import Tensor, torch
from psigrad.objective.parts.ratio import exp_ratio

__all__ = ["clip", "dual_clip", "score", "truncated_weight", "unclipped"]

Surrogate = Callable[..., Tensor]
SEQUENCES = frozenset({"mask"})


class SilentSurrogate:
    """A surrogate without gradient where the advantage is 0."""


class RatioSurrogate(SilentSurrogate):
    """One whose gradient flows through the ratio alone."""


def score(logp: Tensor, log_ratio: Tensor, advantage: Tensor) -> Tensor:
    """The policy gradient itself.

    Formula: L_t = −A_t · log π(a_t|s_t)

    Source: Williams 1992, REINFORCE; Sutton et al. 2000, policy gradient theorem.
    """
    return -advantage * logp


def unclipped(logp: Tensor, log_ratio: Tensor, advantage: Tensor) -> Tensor:
    """The importance-weighted surrogate without a trust region.

    Formula: L_t = −ρ_t · A_t

    Source: Schulman et al. 2015, TRPO, arXiv:1502.05477.
    """
    return -exp_ratio(log_ratio) * advantage


@dataclass(frozen=True)
class clip(RatioSurrogate):
    """The clipped surrogate: no gradient once a step has moved far enough in the direction of its advantage.

    Formula: L_t = −min(ρ_t·A_t, clip(ρ_t, 1 − low, 1 + high)·A_t)

    Source: Schulman et al. 2017, PPO, arXiv:1707.06347, eq. 7; Yu et al. 2025, DAPO, arXiv:2503.14476 (low ≠ high).
    """

    low: float = 0.2
    """How far below 1 the ratio of a step with negative advantage may fall."""
    high: float = 0.2
    """How far above 1 the ratio of a step with positive advantage may rise."""

    def __post_init__(self) -> None:
        if not (0 <= self.low <= 1 and self.high >= 0):
            raise ValueError(
                f"clip has low={self.low} and high={self.high}; expected 0 <= low <= 1 and high >= 0; give distances from 1."
            )

    def __call__(self, logp: Tensor, log_ratio: Tensor, advantage: Tensor) -> Tensor:
        """[N, T] loss of each step."""
        # the minimum is the ratio held from above where A > 0 and from below where A < 0; so written, its gradient takes half the
        # operations
        least = torch.where(advantage < 0, log_ratio.new_tensor(1 - self.low), -torch.inf)
        most = torch.where(advantage > 0, log_ratio.new_tensor(1 + self.high), torch.inf)
        return -exp_ratio(log_ratio).clamp(least, most) * advantage


@dataclass(frozen=True)
class dual_clip(clip):
    """The clipped surrogate with a bound on how much a step of negative advantage may cost.

    Formula: L_t = −min(ρ_t·A_t, clip(ρ_t, 1 − low, 1 + high)·A_t) where A_t ≥ 0
             L_t = −max(min(ρ_t·A_t, clip(ρ_t, 1 − low, 1 + high)·A_t), bound·A_t) where A_t < 0

    Source: Ye et al. 2020, arXiv:1912.09729; the `delta` of TRL's GRPO.
    """

    bound: float = 3.0
    """Greatest ratio that counts for a negative advantage."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bound <= 1 + self.high:
            raise ValueError(f"dual_clip has bound={self.bound}; expected more than 1 + high = {1 + self.high}; raise it.")

    def __call__(self, logp: Tensor, log_ratio: Tensor, advantage: Tensor) -> Tensor:
        """[N, T] loss of each step."""
        clipped = super().__call__(logp, log_ratio, advantage)
        return torch.where(advantage < 0, torch.minimum(clipped, -self.bound * advantage), clipped)


@dataclass(frozen=True)
class truncated_weight(SilentSurrogate):
    """The policy gradient weighted by a truncated, detached ratio: every step keeps a gradient.

    Formula: L_t = −sg[min(ρ_t, cap)] · A_t · log π(a_t|s_t)

    Source: MiniMax 2025, CISPO, arXiv:2506.13585 (no lower bound, as they run it); cap 5 as in ScaleRL,
    arXiv:2510.13786, and TRL.
    """

    cap: float = 5.0
    """Greatest weight; TRL's `epsilon_high` of loss_type cispo."""

    def __post_init__(self) -> None:
        if self.cap <= 0:
            raise ValueError(
                f"truncated_weight has cap={self.cap}; expected more than 0; it is a bound on the ratio, not a distance from 1."
            )

    def __call__(self, logp: Tensor, log_ratio: Tensor, advantage: Tensor) -> Tensor:
        """[N, T] loss of each step. No gradient passes through the weight."""
        weight = exp_ratio(log_ratio).clamp(max=self.cap).detach()
        return -weight * advantage * logp


def silent_without_advantage(surrogate: Surrogate) -> bool:
    """Whether a step of advantage 0 surely has zero gradient; a user's own surrogate may do anything, so False."""
    inner = getattr(surrogate, "surrogate", surrogate)  # of a mask around another
    return inner in (score, unclipped) or isinstance(inner, SilentSurrogate)


def differentiates_ratio(surrogate: Surrogate) -> bool:
    """Whether the gradient flows through the ratio alone, so that without a ratio there is none."""
    inner = getattr(surrogate, "surrogate", surrogate)
    return inner is unclipped or isinstance(inner, RatioSurrogate)


def clip_fractions(surrogate: Surrogate, log_ratio: Tensor, advantage: Tensor) -> dict[str, Tensor]:
    """Which steps [N,T] lost their gradient (or were truncated), under TRL's metric names."""
    surrogate = getattr(surrogate, "surrogate", surrogate)  # the one within
    ratio = exp_ratio(log_ratio.detach())
    if isinstance(surrogate, clip):
        low = (ratio < 1 - surrogate.low) & (advantage < 0)
        high = (ratio > 1 + surrogate.high) & (advantage > 0)
        return {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high, "clip_ratio/region_mean": low | high}
    if isinstance(surrogate, truncated_weight):
        return {"cispo_clip_ratio": (ratio > surrogate.cap) & (advantage > 0)}
    return {}
