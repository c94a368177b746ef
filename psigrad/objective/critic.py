"""The critic slot: the loss that fits V to the returns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["explained_variance", "value_loss"]


def explained_variance(value: Tensor, returns: Tensor, mask: Tensor) -> float:
    """How much of the returns' variance the critic foresaw: 1 all of it, 0 as much as their mean does, below 0 less.

    Formula: 1 − Var(R − V) / Var(R), over the steps where mask [N,T] is True; 0 where the returns do not vary
    """
    chosen, missed = returns[mask].double(), (returns - value)[mask].double()
    variance = float(chosen.var(correction=0)) if chosen.numel() else 0.0
    return 1 - float(missed.var(correction=0)) / variance if variance > 0 else 0.0


@dataclass(frozen=True)
class value_loss:
    """Squared error of the critic against the return A_t + V_old(s_t), mean over all steps.

    Formula: c_V · ½·(V(s_t) − R_t)², and with clip ε: c_V · ½·max((V − R)², (clip(V, V_old − ε, V_old + ε) − R)²)

    Source: Schulman et al. 2017, PPO, arXiv:1707.06347, eq. 9; the clip is that of OpenAI's baselines.
    """

    coefficient: float = 0.1
    """c_V; TRL's vf_coef."""
    clip: float | None = None
    """ε: how far V may move from V_old with credit; TRL's cliprange_value. None: no clip."""

    def __call__(self, value: Tensor, value_old: Tensor, returns: Tensor) -> Tensor:
        """Per-step loss [N,T] before the coefficient."""
        error = (value - returns) ** 2
        if self.clip is not None:
            near = value_old + (value - value_old).clamp(-self.clip, self.clip)
            error = torch.maximum(error, (near - returns) ** 2)
        return error / 2
