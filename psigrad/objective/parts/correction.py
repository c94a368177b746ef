"""The correction slot: Batch -> detached weights [N,T] on the policy loss, for the gap between sampler and trainer.

They multiply the surrogate only, not the KL term.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from psigrad.objective.batch import Batch, zero_outside
from psigrad.objective.lazy_torch import Tensor, torch
from psigrad.objective.parts.ratio import exp_ratio

__all__ = ["divergence_rejection", "masked_importance", "truncated_importance"]

Correction = Callable[[Batch], Tensor]
Level = Literal["token", "sequence", "geometric"]
LEVELS: tuple[Level, ...] = ("token", "sequence", "geometric")


def _sampler_ratio(batch: Batch, level: Level) -> Tensor:
    """π_old / π_sampler [N,T]: per step, or the product or the geometric mean over the sequence, given to each of its steps."""
    gap = _gap(batch)
    if level != "token":
        gap = gap.sum(1, keepdim=True).expand(gap.shape)
    if level == "geometric":
        gap = gap / batch.mask.sum(1, keepdim=True).clamp(min=1)
    return zero_outside(batch.mask, exp_ratio(gap))


def _gap(batch: Batch) -> Tensor:
    """log π_old − log π_sampler [N, T]."""
    if batch.logp_sampler is None:
        raise ValueError(
            "The batch has no `logp_sampler`, which an importance correction reads; let the sampler report its "
            "log-probabilities or set correction to null."
        )
    return batch.logp_old - batch.logp_sampler


def _check(name: str, floor: float, cap: float, level: str) -> None:
    if not 0 <= floor < cap or level not in LEVELS:
        raise ValueError(
            f"{name} has floor={floor}, cap={cap} and level={level!r}; expected 0 <= floor < cap and level 'token', "
            "'sequence' or 'geometric'."
        )


@dataclass(frozen=True)
class truncated_importance:
    """Importance weights between trainer and sampler, cut at a cap, and at a floor where there is one.

    Formula: c_t = sg[clip(w_t, floor, cap)], w_t = π_old(a_t|s_t) / π_sampler(a_t|s_t), or its product over the sequence, or its
             geometric mean

    Source: Yao et al. 2025, Your efficient RL framework secretly brings you off-policy RL training (TIS); TRL "token_truncate",
    "sequence_truncate".
    """

    cap: float = 3.0
    """Greatest weight; TRL's vllm_importance_sampling_clip_max."""
    level: Level = "token"
    """One weight per step, or one per sequence: the product of its steps' or their geometric mean."""
    floor: float = 0.0
    """Least weight."""

    def __post_init__(self) -> None:
        _check("truncated_importance", self.floor, self.cap, self.level)

    def __call__(self, batch: Batch) -> Tensor:
        """[N, T] weights, truncated at `cap` and `floor`."""
        return _sampler_ratio(batch, self.level).clamp(self.floor, self.cap)


@dataclass(frozen=True)
class masked_importance:
    """Importance weights between trainer and sampler; steps or sequences outside of the bounds are left out.

    Formula: c_t = sg[w_t] if floor ≤ w_t ≤ cap else 0, with w_t = π_old(a_t|s_t) / π_sampler(a_t|s_t), or its product over the
             sequence, or its geometric mean

    IcePop is level "token" with floor 0.5 and cap 5.

    Source: Liu et al. 2025, When speed kills stability (MIS); TRL "token_mask", "sequence_mask" (TRL's default). Ling team 2025,
    Every step evolves, arXiv:2510.18855 (IcePop).
    """

    cap: float = 3.0
    """Weights above this become 0; TRL's vllm_importance_sampling_clip_max."""
    level: Level = "sequence"
    """One weight per step, or one per sequence: the product of its steps' or their geometric mean."""
    floor: float = 0.0
    """Weights below this become 0."""

    def __post_init__(self) -> None:
        _check("masked_importance", self.floor, self.cap, self.level)

    def __call__(self, batch: Batch) -> Tensor:
        """[N, T] weights, 0 where the ratio is above `cap` or below `floor`."""
        ratio = _sampler_ratio(batch, self.level)
        return torch.where((ratio >= self.floor) & (ratio <= self.cap), ratio, torch.zeros_like(ratio))


@dataclass(frozen=True)
class divergence_rejection:
    """Sequences on which sampler and trainer are too far apart are left out; all others count as they are.

    Formula: c_t = 1 if (1/|y|)·Σ_u (w_u − 1 − log w_u) ≤ limit else 0, with w_u = π_old(a_u|s_u) / π_sampler(a_u|s_u)

    The mean is the k3 estimate of KL(π_sampler‖π_old) per step: never negative, so that differences do not cancel as they do in a
    product of ratios.

    Source: verl, rollout correction (rejection by k3 over a sequence); Schulman 2020, Approximating KL divergence.
    """

    limit: float = 0.01
    """Greatest mean divergence of a sequence, in nats per step."""

    def __post_init__(self) -> None:
        if self.limit <= 0:
            raise ValueError(f"divergence_rejection has limit={self.limit}; expected more than 0 nats per step.")

    def __call__(self, batch: Batch) -> Tensor:
        """[N, T] 1, or 0 on the sequences that are left out."""
        gap = _gap(batch)
        k3 = zero_outside(batch.mask, exp_ratio(gap) - 1 - gap)
        mean_N = k3.sum(1, keepdim=True) / batch.mask.sum(1, keepdim=True).clamp(min=1)
        return (batch.mask & (mean_N <= self.limit)).to(gap.dtype)
