"""The C++ kernels of AdamW in mixed precision, as functions of weights."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from psigrad.compiled import AdamWWeight


class HalfPrecision:
    """The kernels of AdamW in mixed precision.

    They read gradients in bfloat16 without a float32 copy, and write weight and master together. A step passes over memory twice,
    PyTorch's five times.
    """

    def __init__(self, call: SimpleNamespace) -> None:
        self._call = call

    def squared_norm(self, gradients: Sequence[Tensor]) -> float:
        """Return Σ g² over all tensors, summed in an order that does not depend on the number of threads."""
        gradients = [g.contiguous() for g in gradients]
        out, counts = ctypes.c_double(), [g.numel() for g in gradients]
        pointers = (ctypes.c_void_p * len(counts))(*(g.data_ptr() for g in gradients))
        sizes = (ctypes.c_int64 * len(counts))(*counts)
        self._call.squared_norm(ctypes.byref(out), pointers, sizes, len(counts), torch.get_num_threads())
        return out.value

    def adamw(self, weights: Sequence[AdamWWeight], lr: float, betas: tuple[float, float], eps: float, scale: float) -> None:
        """Take a step of AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101), with each gradient multiplied by `scale`.

        Formula: m ← β₁·m + (1 - β₁)·g, v ← β₂·v + (1 - β₂)·g², θ ← (1 - η·λ)·θ - η·m̂ / (√v̂ + ε). Each weight must have a
        master, and all tensors must be contiguous.
        """
        table = []
        for w in weights:
            assert w.master is not None and w.stored is not None
            table += [x.data_ptr() for x in (w.master, w.stored, w.gradient, w.exp_avg, w.exp_avg_sq)] + [w.master.numel()]
        rates = (1 - betas[0], betas[1], 1 - betas[1], eps, scale)
        tables = ((ctypes.c_int64 * len(table))(*table), _factors(weights, lr, betas))
        self._call.adamw_bf16(*tables, len(weights), *rates, torch.get_num_threads())

    def adamw_low_memory(
        self,
        weights: Sequence[AdamWWeight],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        scale: float,
        codes: Sequence[Tensor],
    ) -> None:
        """Take a step of AdamW, like `adamw`, for weights without a master or with moments in 8-bit codes.

        For each moment, `codes` has the levels of its codes, the middles between them, and a table that speeds up the search for
        the nearest level (see adamw.cpp).
        """
        table = []
        for w in weights:
            tensors = (w.master, w.stored, w.gradient, w.exp_avg, w.exp_avg_sq, *(w.scales or (None, None)))
            table += [0 if x is None else x.data_ptr() for x in tensors]
            table += [w.weight.numel(), w.gradient.dtype == torch.bfloat16, w.seed]
        tables = ((ctypes.c_int64 * len(table))(*table), _factors(weights, lr, betas))
        known = (ctypes.c_int64 * len(codes))(*(x.data_ptr() for x in codes))
        rates = (1 - betas[0], betas[1], 1 - betas[1], eps, scale)
        self._call.adamw_frugal(*tables, len(weights), known, *rates, torch.get_num_threads())


def _factors(weights: Sequence[AdamWWeight], lr: float, betas: tuple[float, float]) -> Any:
    """Return 1 - η·λ, η / (1 - β₁ᵗ) and 1 / √(1 - β₂ᵗ) of each weight, as C floats."""
    found = []
    for w in weights:
        corrections = (1 - betas[0] ** w.step, (1 - betas[1] ** w.step) ** 0.5)
        found += [1 - lr * w.weight_decay, lr / corrections[0], 1 / corrections[1]]
    return (ctypes.c_float * len(found))(*found)
