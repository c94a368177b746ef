"""The critic slot, which fits V to the returns, and the entropy slot, a bonus for a policy of high entropy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from psigrad.objective.batch import Batch
from psigrad.objective.lazy_torch import Tensor, torch


@dataclass(frozen=True)
class value_loss:
    """Half the squared error of the critic V against its target G.

    Formula: value error = ½·max((V − G)², (clip(V, V_old − ε, V_old + ε) − G)²), or ½·(V − G)² if `clip` is None
             V = V(s_t), G = Â_t + V_old(s_t), V_old is V before the update, ε = `clip`; `coefficient` is c_V in the loss
             Â_t is the advantage from `returns` or, if this is None, the method's own advantage before whitening

    Source: Schulman et al. 2017, PPO, arXiv:1707.06347, eq. 9; the clip is that of OpenAI's baselines.

    >>> show(value_loss(clip=0.2)(row(1), row(0), row(2)))
    [[1.62]]
    """

    coefficient: float = 0.1
    """c_V; TRL's vf_coef."""
    clip: float | None = None
    """ε: once V has moved by ε from V_old, moving further does not lower the loss. TRL's cliprange_value. None: no clip."""
    returns: Callable[[Batch], Tensor] | None = None
    """A psi that estimates R_t − V_old(s_t), such as gae(lam=1). The critic's λ can then differ from the policy's (decoupled
    GAE, Yuan et al. 2025, VC-PPO, arXiv:2503.01491). None: the method's own psi, before whitening.
    """

    def __call__(self, value: Tensor, value_old: Tensor, returns: Tensor) -> Tensor:
        """Return the per-step loss [N,T], not yet multiplied by the coefficient. The argument `returns` is the target G."""
        error = (value - returns) ** 2
        if self.clip is not None:
            near = value_old + (value - value_old).clamp(-self.clip, self.clip)
            error = torch.maximum(error, (near - returns) ** 2)
        return error / 2


@dataclass(frozen=True)
class bonus:
    """The mean entropy of the policy over all steps, subtracted from the loss.

    Formula: − c_H · (1 / number of steps) · Σ_t H(π(·|s_t))

    Source: Williams and Peng 1991; Mnih et al. 2016, A3C, arXiv:1602.01783; TRL entropy_coef.
    """

    coefficient: float = 0.01
    """c_H, the weight of the bonus."""


PARTS: dict[str, tuple[type[Any], ...]] = {"critic": (value_loss,), "entropy": (bonus,)}
