"""Optimiser steps on a network whose parameters are one flat vector.

The two optimisers are `torch.optim`'s, written out: on one small vector those spend ten times as long on bookkeeping as on
numbers. `tests/control/test_steps.py` holds them against the originals.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from psigrad.language.models.native.kernels import kernels
from psigrad.language.models.native.towers import TowerKernels
from psigrad.runs.state import MAX_NONFINITE, NonFiniteError

_BETA1, _BETA2, _SMOOTHING = 0.9, 0.999, 0.99


class FlatOptimizer:
    """Adam or RMSprop with the gradient's norm clipped; a step whose gradient is not finite is left out.

    Formula: m ← β₁·m + (1 − β₁)·g,  v ← β₂·v + (1 − β₂)·g²,  θ ← θ − η·(m / (1 − β₁ᵗ)) / (√(v / (1 − β₂ᵗ)) + ε)
             RMSprop: v ← α·v + (1 − α)·g²,  θ ← θ − η·g / (√v + ε)

    Source: Kingma and Ba 2015, arXiv:1412.6980; Tieleman and Hinton 2012, as in A3C (Mnih et al. 2016), α = 0.99.
    """

    def __init__(self, flat: nn.Parameter, kind: Literal["adam", "rmsprop"], epsilon: float, max_grad_norm: float) -> None:
        self.flat, self.kind, self.epsilon, self.max_grad_norm = flat, kind, epsilon, max_grad_norm
        self.mean, self.square = torch.zeros_like(flat, requires_grad=False), torch.zeros_like(flat, requires_grad=False)
        self._scratch, self._tiny = torch.empty_like(self.mean), self.mean.new_tensor(1e-30)
        self.steps = self.nonfinite = 0

    @torch.no_grad()
    def step(self, gradient: Tensor, rate: float) -> float:
        """Step down the gradient (which may be clipped in place) at `rate`; its norm before clipping.

        Raises `NonFiniteError` after three in a row that are not finite.
        """
        norm = float(torch.linalg.vector_norm(gradient))
        if not math.isfinite(norm):
            self.nonfinite += 1
            if self.nonfinite >= MAX_NONFINITE:
                raise NonFiniteError(
                    f"The gradient was not finite for {self.nonfinite} updates in a row; none of them was applied. Lower "
                    "learning_rate, or look at the environment's rewards and observations."
                )
            return float(norm)
        self.nonfinite = 0
        clip = self.max_grad_norm / norm if 0 < self.max_grad_norm < norm else 1.0
        self.steps += 1
        # a weight behind a dead unit gets no gradient, its moments decay below 1e-38, and there arithmetic takes a hundred
        # times as long
        torch.set_flush_denormal(True)
        try:
            self._apply(gradient, rate, clip)
        finally:
            torch.set_flush_denormal(False)
        return float(norm)

    def _apply(self, gradient: Tensor, rate: float, clip: float) -> None:
        if self.kind == "adam" and (native := self._native(gradient)) is not None:
            size, correction = rate / (1 - _BETA1**self.steps), 1 / (1 - _BETA2**self.steps)
            moments, betas = (self.mean, self.square), (_BETA1, _BETA2)
            native.adam(self.flat, gradient, moments, betas, size, correction, self.epsilon, clip)
            return
        if clip < 1:
            gradient.mul_(clip)
        if self.kind == "adam":
            self.mean.lerp_(gradient, 1 - _BETA1)
            self.square.mul_(_BETA2).addcmul_(gradient, gradient, value=1 - _BETA2)
            spread = self._root(1 / (1 - _BETA2**self.steps)).add_(self.epsilon)
            self.flat.addcdiv_(self.mean, spread, value=-rate / (1 - _BETA1**self.steps))
        else:
            self.square.mul_(_SMOOTHING).addcmul_(gradient, gradient, value=1 - _SMOOTHING)
            spread = self._root(1.0).add_(self.epsilon)
            self.flat.addcdiv_(gradient, spread, value=-rate)

    def _native(self, gradient: Tensor) -> TowerKernels | None:
        """One pass over memory in place of seven."""
        found = kernels() if gradient.device.type == "cpu" and gradient.dtype == self.flat.dtype == torch.float32 else "PyTorch's"
        return None if isinstance(found, str) else found.towers

    def _root(self, scale: float) -> Tensor:
        """√(scale·v); of the zeros behind dead units MKL's square root takes twenty times as long as of other numbers."""
        return torch.add(self._tiny, self.square, alpha=scale, out=self._scratch).sqrt_()

    def tensors(self) -> dict[str, Tensor]:
        """What must survive a stop besides the weights."""
        return {"mean": self.mean, "square": self.square, "steps": torch.tensor(self.steps)}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `tensors`."""
        self.mean.copy_(tensors["mean"])
        self.square.copy_(tensors["square"])
        self.steps = int(tensors["steps"])
