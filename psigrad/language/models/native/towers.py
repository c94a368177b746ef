"""Control's small networks in one call each: layers with ReLUs, their gradient, and Adam's step."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import SimpleNamespace

import torch
from torch import Tensor


class TowerKernels:
    """The kernels of `psigrad.control.networks.networks` on a flat vector of float32 numbers."""

    def __init__(self, call: SimpleNamespace) -> None:
        self._call = call

    def forward(self, flat: Tensor, x: Tensor, towers: int, sizes: Sequence[int]) -> Tensor:
        """What all layers give for x [M, in], layer after layer, each [K, M, out]; a ReLU behind all but the last."""
        rows = len(x)
        hs = torch.empty(towers * rows * sum(sizes[1:]))
        shape = (ctypes.c_int64 * len(sizes))(*sizes)
        pointers = (hs.data_ptr(), flat.data_ptr(), x.data_ptr(), ctypes.addressof(shape))
        self._call.relu_towers(*pointers, len(sizes) - 1, towers, rows, torch.get_num_threads())
        return hs

    def backward(self, out: Tensor, flat: Tensor, x: Tensor, hs: Tensor, given: Tensor, sizes: Sequence[int]) -> None:
        """The gradient into `out`, given that of the last layer [K, m, out] for the first m states of `forward`'s."""
        towers, states, _ = given.shape
        shape = (ctypes.c_int64 * len(sizes))(*sizes)
        pointers = (out.data_ptr(), flat.data_ptr(), x.data_ptr(), hs.data_ptr(), given.data_ptr(), ctypes.addressof(shape))
        self._call.relu_towers_gradient(*pointers, len(sizes) - 1, towers, len(x), states, torch.get_num_threads())

    def adam(
        self,
        weights: Tensor,
        gradient: Tensor,
        moments: tuple[Tensor, Tensor],
        betas: tuple[float, float],
        rate: float,
        correction: float,
        epsilon: float,
        scale: float,
    ) -> None:
        """m ← β₁·m + (1 − β₁)·g, v ← β₂·v + (1 − β₂)·g², θ ← θ − rate·m / (√(correction·v) + ε), with g the gradient times
        `scale`.
        """
        pointers = (weights.data_ptr(), gradient.data_ptr(), moments[0].data_ptr(), moments[1].data_ptr())
        rates = (1 - betas[0], betas[1], 1 - betas[1], rate, correction, 1e-30, epsilon, scale)
        self._call.adam(*pointers, weights.numel(), *rates)
