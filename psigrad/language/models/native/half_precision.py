"""AdamW for bfloat16 weights with float32 master copies, and the norm of their gradients."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor


@dataclass(frozen=True)
class MasterWeight:
    """One weight's tensors in a step: bfloat16 `stored` and `gradient`; float32 `master` and moments."""

    master: Tensor
    stored: Tensor
    gradient: Tensor
    first: Tensor
    second: Tensor
    step: int
    """The number of this step, from 1."""
    weight_decay: float


class HalfPrecision:
    """The kernels of mixed-precision training. They pass over memory twice, where PyTorch does five times: gradients are read in
    bfloat16 without a float32 copy, and weight and master are written together.
    """

    def __init__(self, call: SimpleNamespace) -> None:
        self._call = call

    def squared_norm(self, gradients: Sequence[Tensor]) -> float:
        """Σ g² over all tensors, summed in an order that does not depend on the number of threads."""
        gradients = [g.contiguous() for g in gradients]
        out, counts = ctypes.c_double(), [g.numel() for g in gradients]
        pointers = (ctypes.c_void_p * len(counts))(*(g.data_ptr() for g in gradients))
        sizes = (ctypes.c_int64 * len(counts))(*counts)
        self._call.squared_norm(ctypes.byref(out), pointers, sizes, len(counts), torch.get_num_threads())
        return out.value

    def step(self, weights: Sequence[MasterWeight], lr: float, betas: tuple[float, float], eps: float, scale: float) -> None:
        """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) with each gradient times `scale`: m ← β₁·m + (1 - β₁)·g,
        v ← β₂·v + (1 - β₂)·g², θ ← (1 - η·λ)·θ - η·m̂ / (√v̂ + ε). All tensors are contiguous.
        """
        table, factors = [], []
        for w in weights:
            table += [x.data_ptr() for x in (w.master, w.stored, w.gradient, w.first, w.second)] + [w.master.numel()]
            corrections = (1 - betas[0] ** w.step, (1 - betas[1] ** w.step) ** 0.5)
            factors += [1 - lr * w.weight_decay, lr / corrections[0], 1 / corrections[1]]
        tables = ((ctypes.c_int64 * len(table))(*table), (ctypes.c_float * len(factors))(*factors))
        rates = (1 - betas[0], betas[1], 1 - betas[1], eps, scale)
        self._call.adamw_bf16(*tables, len(weights), *rates, torch.get_num_threads())
