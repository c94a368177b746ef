"""Adam and RMSprop on one flat vector of weights. They take the same steps as torch.optim's classes, with less overhead."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from psigrad.compiled import FlatKernels, kernels
from psigrad.optim.rules import StepSize, Update

_BETA1, _BETA2, _SMOOTHING = 0.9, 0.999, 0.99


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma & Ba 2015, arXiv:1412.6980).

    Formula: m ← β₁·m + (1 − β₁)·g,  v ← β₂·v + (1 − β₂)·g²,  θ ← θ − η·(m / (1 − β₁ᵗ)) / (√(v / (1 − β₂ᵗ)) + ε)
    """

    eps: float

    by_rows = False

    def init(self, name: str, p: Tensor) -> dict[str, Tensor]:
        """Return the initial state: step 0, and moments of 0."""
        return {"step": torch.zeros(()), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}

    def step(self, updates: Sequence[Update], step: StepSize) -> None:
        """Update the weights with a CPU kernel, in one pass over memory. If there is no kernel, use PyTorch (seven passes)."""
        # If a weight's gradient stays 0, its moments become denormal numbers, which are a hundred times as slow.
        torch.set_flush_denormal(True)
        try:
            for u in updates:
                self._step(u, step)
        finally:
            torch.set_flush_denormal(False)

    def _step(self, u: Update, step: StepSize) -> None:
        count = int(u.state["step"]) + 1
        u.state["step"].fill_(count)  # five times as fast as an addition
        rate, correction = step.lr / (1 - _BETA1**count), 1 / (1 - _BETA2**count)
        mean, square = u.state["exp_avg"], u.state["exp_avg_sq"]
        if (native := _kernels(u)) is not None:
            native.adam(u.weight, u.gradient, (mean, square), (_BETA1, _BETA2), rate, correction, self.eps, _factor(step))
            return
        gradient = _clipped(u.gradient, step)
        mean.lerp_(gradient, 1 - _BETA1)
        square.mul_(_BETA2).addcmul_(gradient, gradient, value=1 - _BETA2)
        u.weight.addcdiv_(mean, _root(square, correction).add_(self.eps), value=-rate)


@dataclass(frozen=True)
class RMSprop:
    """RMSprop (Tieleman & Hinton 2012), with α = 0.99 as in A3C (Mnih et al. 2016).

    Formula: v ← α·v + (1 − α)·g²,  θ ← θ − η·g / (√v + ε)
    """

    eps: float

    by_rows = False

    def init(self, name: str, p: Tensor) -> dict[str, Tensor]:
        """Return the initial state: a mean square of 0 for each weight."""
        return {"square_avg": torch.zeros_like(p)}

    def step(self, updates: Sequence[Update], step: StepSize) -> None:
        """Update the weights in PyTorch."""
        torch.set_flush_denormal(True)
        try:
            for u in updates:
                gradient, square = _clipped(u.gradient, step), u.state["square_avg"]
                square.mul_(_SMOOTHING).addcmul_(gradient, gradient, value=1 - _SMOOTHING)
                u.weight.addcdiv_(gradient, _root(square, 1.0).add_(self.eps), value=-step.lr)
        finally:
            torch.set_flush_denormal(False)


def _kernels(u: Update) -> FlatKernels | None:
    if u.gradient.device.type != "cpu" or not u.gradient.dtype == u.weight.dtype == torch.float32:
        return None
    found = kernels()
    return None if isinstance(found, str) else found.towers


def _factor(step: StepSize) -> float:
    """Return the factor by which gradient clipping multiplies gradients; 1 if the norm is within the limit."""
    return step.max_norm / step.norm if 0 < step.max_norm < step.norm else 1.0


def _clipped(gradient: Tensor, step: StepSize) -> Tensor:
    factor = _factor(step)
    return gradient.mul_(factor) if factor < 1 else gradient


@functools.cache
def _tiny(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(1e-30, dtype=dtype, device=device)


def _root(square: Tensor, scale: float) -> Tensor:
    """Return √(scale·v + 1e-30) for v = `square`. The 1e-30 avoids √0, for which MKL takes twenty times as long."""
    return torch.add(_tiny(square.dtype, square.device), square, alpha=scale).sqrt_()
