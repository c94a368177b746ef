"""Triton kernels for a GPU: AdamW on weights with a remainder, and log-probs from logits. Each makes one pass over memory.

In PyTorch's operations, such a step of AdamW launches 57 kernels for a chunk of a weight, and the log-probs of a chunk of logits
make three float32 copies of it.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# The number of elements that one program of a kernel reads at a time.
_ELEMENTS, _COLUMNS = 1024, 4096


@triton.jit
def _adamw(
    stored, remainder, gradient, exp_avg, exp_avg_sq, count, first, divisor,
    decay, part1, beta2, part2, rate, correction, eps, WIDTH: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    inside = at < count
    # the master's bits, and the thresholds of `low_memory.dither`
    threshold = (((first + at).to(tl.uint32) * tl.full([], 0x9E3779B9, tl.uint32)) >> 16).to(tl.int32)
    high = tl.load(stored + at, inside, 0.0).to(tl.int16, bitcast=True).to(tl.int32)
    low = tl.load(remainder + at, inside, 0).to(tl.int32) & 0xFFFF
    x = (((high - ((threshold + low) >> 16)) << 16) | low).to(tl.float32, bitcast=True)
    g = tl.load(gradient + at, inside, 0.0).to(tl.float32) / divisor
    m, v = tl.load(exp_avg + at, inside, 0.0), tl.load(exp_avg_sq + at, inside, 0.0)
    m, v = m + part1 * (g - m), beta2 * v + part2 * g * g
    x = x - decay * x - rate * m / (tl.sqrt(v) / correction + eps)
    bits = x.to(tl.int32, bitcast=True)
    tl.store(stored + at, ((bits + threshold) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), inside)
    tl.store(remainder + at, bits.to(tl.int16), inside)
    tl.store(exp_avg + at, m, inside)
    tl.store(exp_avg_sq + at, v, inside)


def adamw(
    stored: Tensor,
    remainder: Tensor,
    gradient: Tensor,
    moments: tuple[Tensor, Tensor],
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    divisor: float,
    first: int,
) -> None:
    """Take step number `step` of AdamW in place on float32 masters, stored as `low_memory.split` divides them.

    The gradient is divided by `divisor`. `first` is the index of the first element in the unsharded weight.
    Formula: m ← β₁m + (1 − β₁)g,  v ← β₂v + (1 − β₂)g²,  θ ← (1 − ηλ)θ − η/(1 − β₁ᵗ) · m / (√v/√(1 − β₂ᵗ) + ε).
    """
    count = stored.numel()
    rate, correction = lr / (1 - betas[0] ** step), (1 - betas[1] ** step) ** 0.5
    kernel: Any = _adamw[(triton.cdiv(count, _ELEMENTS),)]
    kernel(
        *(stored, remainder, gradient, *moments, count, first, divisor),
        *(lr * weight_decay, 1 - betas[0], betas[1], 1 - betas[1], rate, correction, eps),
        WIDTH=_ELEMENTS,
    )


@triton.jit
def _log_probs(logits, ids, out, best, count, stride, scale, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    # m, Σ eᶻ⁻ᵐ, Σ eᶻ⁻ᵐ(z − m) and the first index of m, of all columns so far; m starts finite, since −∞ − −∞ is NaN
    top, total, mean, index = -1e30, 0.0, 0.0, 0
    for start in range(0, SIZE, WIDTH):
        at = start + tl.arange(0, WIDTH)
        z = tl.load(logits + row * stride + at, at < SIZE, -float("inf")).to(tl.float32) * scale
        highest, place = tl.max(z, 0, return_indices=True)
        index = tl.where(highest > top, start + place, index)
        higher = tl.maximum(top, highest)
        below = tl.maximum(z - higher, -1e4, propagate_nan=tl.PropagateNan.ALL)  # 0 · log 0 = 0
        share = tl.exp(below)
        drop = tl.maximum(top - higher, -1e4)
        mean = (mean + drop * total) * tl.exp(drop) + tl.sum(share * below, 0)
        total = total * tl.exp(drop) + tl.sum(share, 0)
        top = higher
    chosen = tl.load(logits + row * stride + tl.load(ids + row)).to(tl.float32)
    tl.store(out + row, chosen * scale - top - tl.log(total))
    tl.store(out + count + row, chosen)
    tl.store(out + 2 * count + row, tl.log(total) - mean / total)
    tl.store(best + row, index)


def log_probs(logits: Tensor, ids: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (log-probs of the tokens `ids` [rows], their logits, entropies, most probable tokens), [rows] each.

    The distributions are softmax(logits / temperature), for logits [rows, V].
    """
    out, best = logits.new_empty(3, len(logits), dtype=torch.float32), torch.empty_like(ids)
    kernel: Any = _log_probs[(len(logits),)]
    given = (logits, ids, out, best, len(logits), logits.stride(0), 1 / temperature)
    kernel(*given, SIZE=logits.shape[1], WIDTH=_COLUMNS, num_warps=8)
    return *out, best


@triton.jit
def _logit_gradient(logits, ids, normaliser, slope, stride, size, scale, WIDTH: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    place, inside = logits + row * stride + at, at < size
    given = tl.load(slope + row)
    share = tl.exp(tl.load(place, inside, 0.0).to(tl.float32) * scale - tl.load(normaliser + row))
    back = tl.where(at == tl.load(ids + row), given, 0.0) - given * share
    tl.store(place, back.to(logits.dtype.element_ty), inside)


def logit_gradient(logits: Tensor, ids: Tensor, normaliser: Tensor, slope: Tensor, temperature: float) -> None:
    """Overwrite logits z [rows, V] by slope · (e_a − softmax(z / temperature)), for the tokens a = `ids` [rows].

    `normaliser` [rows] is the log-sum-exp of z / temperature.
    """
    kernel: Any = _logit_gradient[(len(logits), triton.cdiv(logits.shape[1], _COLUMNS))]
    kernel(logits, ids, normaliser, slope, logits.stride(0), logits.shape[1], 1 / temperature, WIDTH=_COLUMNS, num_warps=8)
