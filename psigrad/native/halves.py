"""bfloat16 weights that are stepped through float32 masters: their gradients' norm, and AdamW's step."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Half:
    """A weight on its way through a step: bfloat16 `stored` and `gradient`; float32 `master` and moments."""

    master: Tensor
    stored: Tensor
    gradient: Tensor
    first: Tensor
    second: Tensor
    step: int
    """Which step this is, from 1."""
    weight_decay: float


class Halves:
    """What PyTorch does in five passes over memory, the kernels do in two: gradients are read as they are, never widened in a
    copy of their own, and a weight is written beside its master.
    """

    def __init__(self, call: SimpleNamespace) -> None:
        self._call = call

    def squared_norm(self, gradients: Sequence[Tensor]) -> float:
        """Σ g² over all of them, summed in an order that does not depend on the threads."""
        gradients = [g.contiguous() for g in gradients]
        out, counts = ctypes.c_double(), [g.numel() for g in gradients]
        pointers = (ctypes.c_void_p * len(counts))(*(g.data_ptr() for g in gradients))
        sizes = (ctypes.c_int64 * len(counts))(*counts)
        self._call.squared_norm(ctypes.byref(out), pointers, sizes, len(counts), torch.get_num_threads())
        return out.value

    def step(self, weights: Sequence[Half], lr: float, betas: tuple[float, float], eps: float, scale: float) -> None:
        """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) along each gradient times `scale`: m ← β₁·m + (1 - β₁)·g,
        v ← β₂·v + (1 - β₂)·g², θ ← (1 - η·λ)·θ - η·m̂ / (√v̂ + ε). All tensors are contiguous.
        """
        table, factors = [], []
        for w in weights:
            table += [x.data_ptr() for x in (w.master, w.stored, w.gradient, w.first, w.second)] + [w.master.numel()]
            corrections = (1 - betas[0] ** w.step, (1 - betas[1] ** w.step) ** 0.5)
            factors += [1 - lr * w.weight_decay, lr / corrections[0], 1 / corrections[1]]
        tables = ((ctypes.c_int64 * len(table))(*table), (ctypes.c_float * len(factors))(*factors))
        rates = (1 - betas[0], betas[1], 1 - betas[1], eps, scale)
        self._call.adamw_halves(*tables, len(weights), *rates, torch.get_num_threads())
