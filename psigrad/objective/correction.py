"""The correction slot: Batch -> detached weights [N,T] on the policy loss, for the gap between sampler and trainer.

They multiply the surrogate only, not the KL term.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from psigrad.objective.batch import Batch, zero_outside
from psigrad.objective.ratio import exp_ratio

__all__ = ["masked_importance", "truncated_importance"]

Correction = Callable[[Batch], Tensor]
Level = Literal["token", "sequence"]


def _sampler_ratio(batch: Batch, level: Level) -> Tensor:
    """π_old / π_sampler [N,T]: per step, or the product over the sequence given to each of its steps."""
    if batch.logp_sampler is None:
        raise ValueError(
            "The batch has no `logp_sampler`, which an importance correction reads; let the sampler report its "
            "log-probabilities or set correction to null."
        )
    gap = batch.logp_old - batch.logp_sampler
    if level == "sequence":
        gap = gap.sum(1, keepdim=True).expand(gap.shape)
    return zero_outside(batch.mask, exp_ratio(gap))


def _check(name: str, cap: float, level: str) -> None:
    if cap <= 0 or level not in ("token", "sequence"):
        raise ValueError(f"{name} has cap={cap} and level={level!r}; expected a cap above 0 and level 'token' or 'sequence'.")


@dataclass(frozen=True)
class truncated_importance:
    """Importance weights between trainer and sampler, cut at a cap.

    Formula: c_t = sg[min(π_old(a_t|s_t) / π_sampler(a_t|s_t), cap)], or the product over the sequence at level sequence

    Source: Yao et al. 2025, Your efficient RL framework secretly brings you off-policy RL training (TIS); TRL "token_truncate",
    "sequence_truncate".
    """

    cap: float = 3.0
    """Greatest weight; TRL's vllm_importance_sampling_clip_max."""
    level: Level = "token"
    """One weight per step, or one per sequence."""

    def __post_init__(self) -> None:
        _check("truncated_importance", self.cap, self.level)

    def __call__(self, batch: Batch) -> Tensor:
        """[N, T] weights, truncated at `cap`."""
        return _sampler_ratio(batch, self.level).clamp(max=self.cap)


@dataclass(frozen=True)
class masked_importance:
    """Importance weights between trainer and sampler; steps or sequences above a cap are left out.

    Formula: c_t = sg[w_t] if w_t ≤ cap else 0, with w_t = π_old(a_t|s_t) / π_sampler(a_t|s_t), or its product over the sequence

    Source: Liu et al. 2025, When speed kills stability (MIS); TRL "token_mask", "sequence_mask" (TRL's default).
    """

    cap: float = 3.0
    """Weights above this become 0; TRL's vllm_importance_sampling_clip_max."""
    level: Level = "sequence"
    """One weight per step, or one per sequence."""

    def __post_init__(self) -> None:
        _check("masked_importance", self.cap, self.level)

    def __call__(self, batch: Batch) -> Tensor:
        """[N, T] weights, 0 where the ratio is above `cap`."""
        ratio = _sampler_ratio(batch, self.level)
        return torch.where(ratio <= self.cap, ratio, torch.zeros_like(ratio))
