"""AdamW with little memory: 8-bit moments, bfloat16 weights without float32 masters, or both."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from psigrad.compiled import AdamWWeight
from psigrad.optim.rules import StepSize, Update, adamw_kernels
from psigrad.seeds import derive

BLOCK = 256
"""The number of neighbours whose moments share a scale."""
_LEAST = 4096
_EMBEDDING = re.compile(r"embed|wte|wpe", re.IGNORECASE)


@functools.cache
def levels(signed: bool) -> Tensor:
    """Return the 256 levels to which a moment, divided by the largest of its block, is rounded.

    They are 0, 1, and for each power of ten 10⁻ⁱ, i = 0 … 6, the middles of equal parts of [0.1, 1] · 10⁻ⁱ. There are as many
    parts as codes are left. This is dynamic tree quantisation (Dettmers et al. 2022, arXiv:2110.02861) as in bitsandbytes. The
    second moment has no sign, so its levels are twice as dense.
    """
    found = [0.0, 1.0]
    for i in range(7):
        parts = 2 ** (6 - i + (not signed))
        middles = [10.0**-i * (0.1 + 0.9 * (part + 0.5) / parts) for part in range(parts)]
        found += [*middles, *(-middle for middle in middles if signed)]
    return torch.tensor(sorted(found), dtype=torch.float32)


@functools.cache
def middles(signed: bool) -> Tensor:
    """Return the upper bound of each level; the last one is infinity.

    A second moment above 0 stays above 0, unlike in bitsandbytes: the next step is divided by its root and little else.
    """
    own = levels(signed)
    found = torch.cat([(own[1:] + own[:-1]) / 2, torch.tensor([math.inf])])
    found[0] = found[0] if signed else 0.0
    return found


def encode(x: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Encode numbers [blocks, 256] as (codes [blocks, 256] of uint8, scales [blocks]): each the nearest level times the scale."""
    scales = x.abs().amax(1)
    shares = (x / scales[:, None]).nan_to_num_(0.0)
    return torch.bucketize(shares, middles(signed)[:-1].to(x.device)).to(torch.uint8), scales


def decode(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """Decode codes and scales, the inverse of `encode`."""
    return levels(signed).to(codes.device)[codes.int()] * scales[:, None]


def round_stochastically(x: Tensor, seed: int) -> Tensor:
    """Round x [n] to bfloat16: each number to one of its two neighbours, with probabilities such that the mean is x.

    Number i's draw depends on `seed` and i alone.
    """
    i = torch.arange(x.numel(), device=x.device) ^ seed
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        i = ((i ^ (i >> shift)) * factor) & 0xFFFFFFFF
    draw = (i ^ (i >> 16)) & 0xFFFF
    bits = (x.view(torch.int32).long() & 0xFFFFFFFF) + draw
    high = (bits >> 16) & 0xFFFF
    return torch.where(high >= 1 << 15, high - (1 << 16), high).to(torch.int16).view(torch.bfloat16)


def has_codes(name: str, p: Tensor) -> bool:
    """Return True if 8-bit moments are used for a parameter: one of at least 4,096 numbers that is not an embedding."""
    return p.numel() >= _LEAST and not _EMBEDDING.search(name)


@dataclass(frozen=True)
class LowMemoryAdamW:
    """AdamW with 8-bit moments, without float32 masters, or both.

    With `eight_bits` the moments are codes in blocks of 256 numbers. Embeddings keep float32 moments as in transformers, since
    their rows learn at very different rates. A bfloat16 weight is stepped without a master: θ ← θ - η·m̂ / (√v̂ + ε) is rounded
    up or down at random, so that steps smaller than a 256th of a weight are right on average (Zamirai et al. 2020,
    arXiv:2010.06192). Draws depend on `seed`, the weight's name and the step.
    """

    betas: tuple[float, float]
    eps: float
    eight_bits: bool
    seed: int

    by_rows = False

    def init(self, name: str, p: Tensor) -> dict[str, Tensor]:
        """Return zero moments, in float32 or as codes with their scales."""
        coded, state = self.eight_bits and has_codes(name, p), {"step": torch.zeros((), device=p.device)}
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = torch.zeros(p.shape, dtype=torch.uint8 if coded else torch.float32, device=p.device)
            if coded:
                state[f"{key}_scale"] = torch.zeros(-(-p.numel() // BLOCK), device=p.device)
        return state

    def step(self, updates: Sequence[Update], step: StepSize) -> None:
        """Step by the kernels where possible, otherwise by torch."""
        weights = [self._weight(u) for u in updates]
        native = [w for w in weights if _has_kernel(w)]
        if native:
            found = adamw_kernels(torch.bfloat16, "cpu")
            assert found is not None
            found.adamw_low_memory(native, step.lr, self.betas, self.eps, 1 / step.divisor, _tables())
        for w in weights:
            if not _has_kernel(w):
                self._step_by_torch(w, step)

    def _weight(self, u: Update) -> AdamWWeight:
        u.state["step"] += 1
        count, half = int(u.state["step"]), u.weight.dtype == torch.bfloat16
        return AdamWWeight(
            None if half else u.weight,
            u.weight if half else u.stored,
            u.gradient.contiguous(),
            u.state["exp_avg"],
            u.state["exp_avg_sq"],
            count,
            u.weight_decay,
            (u.state["exp_avg_scale"], u.state["exp_avg_sq_scale"]) if "exp_avg_scale" in u.state else None,
            derive(self.seed, "round", u.name, count) & 0xFFFFFFFF,
        )

    def _step_by_torch(self, w: AdamWWeight, step: StepSize) -> None:
        """Take the same step by torch, for other devices and as the oracle of the kernel."""
        weight, (beta1, beta2) = w.weight, self.betas
        x, g = weight.float().flatten(), w.gradient.float().flatten() / step.divisor
        moments = [w.exp_avg.flatten(), w.exp_avg_sq.flatten()]
        if w.scales is not None:
            moments = [decode(_blocks(m), s, i == 0).flatten()[: x.numel()]
                       for i, (m, s) in enumerate(zip(moments, w.scales, strict=True))]  # fmt: skip
        first, second = moments[0].lerp(g, 1 - beta1), moments[1] * beta2 + (1 - beta2) * g * g
        x *= 1 - step.lr * w.weight_decay
        corrections = (1 - beta1**w.step, (1 - beta2**w.step) ** 0.5)
        x -= step.lr / corrections[0] * first / (second.sqrt() / corrections[1] + self.eps)
        weight.copy_((x if w.master is not None else round_stochastically(x, w.seed)).view_as(weight))
        if w.master is not None and w.stored is not None:
            w.stored.copy_(w.master)
        for i, (stored, new) in enumerate(((w.exp_avg, first), (w.exp_avg_sq, second))):
            if w.scales is None:
                stored.copy_(new.view_as(stored))
                continue
            codes, scale = encode(_blocks(new), i == 0)
            stored.copy_(codes.flatten()[: x.numel()].view_as(stored))
            w.scales[i].copy_(scale)


def _blocks(x: Tensor) -> Tensor:
    """Reshape [n] to [blocks, 256], with the last block padded by 0."""
    return torch.nn.functional.pad(x, (0, -x.numel() % BLOCK)).view(-1, BLOCK)


def _has_kernel(w: AdamWWeight) -> bool:
    contiguous = all(x.is_contiguous() for x in (w.master, w.stored) if x is not None)
    kinds = (torch.float32, torch.bfloat16)
    return contiguous and w.gradient.dtype in kinds and adamw_kernels(torch.bfloat16, w.weight.device.type) is not None


@functools.cache
def _tables() -> tuple[Tensor, ...]:
    """Return tables for the signed moment, then the unsigned one: levels, middles, and the first possible level of each cell."""
    # A cell is a value of a float's upper 16 bits, from 2^-24 to 1. There is no middle below 2^-24.
    edges = ((torch.arange((24 << 7) + 2) + (103 << 7)) << 16).to(torch.int32).view(torch.float32)
    found: list[Tensor] = []
    for signed in (True, False):
        low = torch.bucketize(edges[:-1], middles(signed)[:-1], right=True)
        low[0] = torch.bucketize(torch.zeros(()), middles(signed)[:-1])
        high = torch.bucketize(-edges[1:], middles(signed)[:-1], right=True)
        found += [levels(signed), middles(signed), torch.cat([low, high]).to(torch.uint8)]
    return tuple(found)
