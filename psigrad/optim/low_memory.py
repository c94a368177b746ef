"""Rounding to bfloat16, and an AdamW that can store its moments in 8 bits and can do without float32 masters."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from psigrad.compiled import AdamWWeight, gpu_kernels
from psigrad.optim.rules import StepSize, Update, adamw_kernels
from psigrad.seeds import derive

BLOCK = 256
"""The number of neighbouring elements of a weight whose moments share a scale."""
_LEAST = 4096
# The number of elements that torch updates at a time, a multiple of BLOCK. A step needs up to 60 bytes of temporary memory for
# each element: 0.25 GB for a chunk, but 40 GB for a whole embedding of 600 million elements.
CHUNK = 1 << 22
# Smaller weights have float32 masters without a split, because one launch of a fused kernel updates all of these together.
SPLIT = 1 << 20
# Embeddings have no 8-bit moments, as in transformers, because their rows learn at very different rates.
_EMBEDDING = re.compile(r"embed|wte|wpe", re.IGNORECASE)


@functools.cache
def levels(signed: bool) -> Tensor:
    """Return the 256 values (levels) to which an 8-bit moment is rounded, after division by its block's largest |moment|.

    Source: dynamic tree quantisation (Dettmers et al. 2022, arXiv:2110.02861), as in bitsandbytes. `signed` is True for
    first moments.
    """
    found = [0.0, 1.0]
    for i in range(7):
        # The midpoints of equal parts of [0.1, 1] · 10⁻ⁱ.
        parts = 2 ** (6 - i + (not signed))
        middles = [10.0**-i * (0.1 + 0.9 * (part + 0.5) / parts) for part in range(parts)]
        found += [*middles, *(-middle for middle in middles if signed)]
    return torch.tensor(sorted(found), dtype=torch.float32)


@functools.cache
def middles(signed: bool) -> Tensor:
    """Return, for each level, the largest number that is rounded to it."""
    own = levels(signed)
    found = torch.cat([(own[1:] + own[:-1]) / 2, torch.tensor([math.inf])])
    # If a small second moment became 0, as in bitsandbytes, the next step of its weight could be far too large.
    found[0] = found[0] if signed else 0.0
    return found


def encode(x: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Quantise numbers [blocks, 256] to (codes [blocks, 256] uint8, scales [blocks]). A code is an index of `levels`."""
    scales = x.abs().amax(1)
    shares = (x / scales[:, None]).nan_to_num_(0.0)
    return torch.bucketize(shares, middles(signed)[:-1].to(x.device)).to(torch.uint8), scales


def decode(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """Return level times scale for each code: approximately the numbers [blocks, 256] that `encode(…, signed)` quantised."""
    return levels(signed).to(codes.device)[codes.int()] * scales[:, None]


def round_stochastically(x: Tensor, seed: int, first: int = 0) -> Tensor:
    """Round each number of x [n] to one of its two bfloat16 neighbours, at random, so that the expected value is x.

    `first` is the index of x[0] in the parameter.
    """
    i = _counted(first, x).bitwise_xor_(_signed(seed))
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        i.bitwise_xor_((i >> shift).bitwise_and_((1 << 32 - shift) - 1)).mul_(_signed(factor))
    return _round_up_from(((i >> 16) ^ i).bitwise_and_(0xFFFF), x)


def dither(x: Tensor, first: int = 0) -> Tensor:
    """Round each number of x [n] to one of its two bfloat16 neighbours, by a threshold that depends only on its index.

    `first` is the index of x[0] in the parameter.
    Formula: |x_i| = a + f·(b − a), between its neighbours a < b, becomes b if f + u_i ≥ 1, otherwise a. The threshold u_i is
             the fractional part, to 16 bits, of φ·(`first` + i), with φ = 0.618….
    """
    # Rounding to nearest would lose the small movements of fine-tuning for many steps. Random thresholds would add noise.
    return _round_up_from(_thresholds(first, x), x)


def _counted(first: int, x: Tensor) -> Tensor:
    return torch.arange(x.numel(), dtype=torch.int32, device=x.device).add_(_signed(first))


def _thresholds(first: int, x: Tensor) -> Tensor:
    """Return 2¹⁶·u_i, the thresholds of `dither(x, first)`, as int32 [n]."""
    return _counted(first, x).mul_(_signed(0x9E3779B9)).bitwise_right_shift_(16).bitwise_and_(0xFFFF)


def _round_up_from(draw: Tensor, x: Tensor) -> Tensor:
    """Return x in bfloat16. |x| is rounded up if `draw` + the lower 16 bits of x ≥ 2¹⁶, otherwise down. Overwrites `draw`."""
    return draw.add_(x.view(torch.int32)).bitwise_right_shift_(16).to(torch.int16).view(torch.bfloat16)


def _signed(number: int) -> int:
    """Return the int32 that has the lower 32 bits of `number`."""
    return ((number + (1 << 31)) & 0xFFFFFFFF) - (1 << 31)


def split(master: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
    """Split float32 numbers `master` [n] into (`dither(master, first)`, their lower 16 bits as int16). `join` is the inverse."""
    return dither(master, first), master.view(torch.int32).to(torch.int16)


def join(stored: Tensor, remainder: Tensor, first: int = 0) -> Tensor:
    """Return the float32 numbers [n] that `split` divided into `stored` and a 16-bit `remainder`. `first` must be the same."""
    low = remainder.int().bitwise_and_(0xFFFF)
    carried = _thresholds(first, stored).add_(low).bitwise_right_shift_(16)
    return (stored.view(torch.int16).int() - carried).bitwise_left_shift_(16).bitwise_or_(low).view(torch.float32)


@functools.cache
def _first_thresholds(device: torch.device) -> Tensor:
    return _thresholds(0, torch.empty(SPLIT, dtype=torch.bool, device=device))


def copy_masters(weights: Sequence[tuple[Tensor, Tensor, int]]) -> None:
    """Copy float32 masters to their weights. `weights` has (weight, master, `first` as in `dither`).

    For a bfloat16 weight, the master is rounded as by `dither`; for a float16 weight, to the nearest number.
    """
    small = []
    for weight, master, first in weights:
        native = adamw_kernels(weight.dtype, weight.device.type) if weight.is_contiguous() and master.is_contiguous() else None
        if native is not None:
            native.dither(weight, master, first)
        elif weight.dtype != torch.bfloat16 or not weight.is_contiguous():
            weight.copy_(master if weight.dtype != torch.bfloat16 else dither(master.reshape(-1), first).view(weight.shape))
        elif weight.numel() < SPLIT and not first:
            small.append((weight.view(-1), master.reshape(-1).view(torch.int32)))
        else:
            flat, whole = weight.view(-1), master.reshape(-1)
            for start in range(0, len(flat), CHUNK):
                flat[start : start + CHUNK] = dither(whole[start : start + CHUNK], first + start)
    if small:
        draws = _first_thresholds(small[0][0].device)
        sums = torch._foreach_add([bits for _, bits in small], [draws[: len(bits)] for _, bits in small])
        torch._foreach_copy_([x.view(torch.int16) for x, _ in small], [total.view(torch.int16)[1::2] for total in sums])


def has_remainder(p: Tensor) -> bool:
    """Return True for a large bfloat16 weight on a GPU: AdamW stores its master as the weight and a remainder (`split`)."""
    return p.dtype == torch.bfloat16 and p.device.type != "cpu" and p.numel() >= SPLIT


def has_codes(name: str, p: Tensor) -> bool:
    """Return True if a parameter has at least 4,096 elements and is not an embedding: it can then have 8-bit moments."""
    return p.numel() >= _LEAST and not _EMBEDDING.search(name)


@dataclass(frozen=True)
class LowMemoryAdamW:
    """AdamW that saves memory.

    With `eight_bits`, moments are 8-bit codes. With `remainders`, the float32 master is the bfloat16 weight plus a stored 16-bit
    remainder (`split`). A bfloat16 weight without a master is rounded stochastically (Zamirai et al. 2020, arXiv:2010.06192).
    """

    betas: tuple[float, float]
    eps: float
    eight_bits: bool
    seed: int
    remainders: bool = False

    @property
    def by_rows(self) -> bool:
        """True if blocks of rows can be updated separately. 8-bit moments and stochastic rounding need the whole weight."""
        return self.remainders and not self.eight_bits

    def init(self, name: str, p: Tensor) -> dict[str, Tensor]:
        """Return the initial state, all 0: `step`, moments (float32, or codes with scales), and a `remainder` if `remainders`."""
        coded, state = self.eight_bits and has_codes(name, p), {"step": torch.zeros(())}  # on the host, where it is read
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = torch.zeros(p.shape, dtype=torch.uint8 if coded else torch.float32, device=p.device)
            if coded:
                state[f"{key}_scale"] = torch.zeros(-(-p.numel() // BLOCK), device=p.device)
        return {**state, "remainder": torch.zeros(p.shape, dtype=torch.int16, device=p.device)} if self.remainders else state

    def step(self, updates: Sequence[Update], step: StepSize) -> None:
        """Update each parameter, with the C++ kernel if it supports the parameter, otherwise with `_step_without_kernel`."""
        weights = [self._weight(u) for u in updates]
        native = [w for w in weights if _has_kernel(w)]
        if native:
            found = adamw_kernels(torch.bfloat16, "cpu")
            assert found is not None
            found.adamw_low_memory(native, step.lr, self.betas, self.eps, 1 / step.divisor, _tables())
        for u, w in zip(updates, weights, strict=True):
            if not _has_kernel(w):
                self._step_without_kernel(w, u.state.get("remainder"), step)

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
            u.first,
        )

    def _step_without_kernel(self, w: AdamWWeight, remainder: Tensor | None, step: StepSize) -> None:
        """Update a weight with the Triton kernel if it supports the weight, otherwise in torch, in chunks."""
        triton = gpu_kernels(w.weight) if remainder is not None and w.scales is None and w.weight.is_contiguous() else None
        if triton is not None:
            triton.adamw(w.weight, remainder, w.gradient, (w.exp_avg, w.exp_avg_sq), step=w.step, lr=step.lr, betas=self.betas,
                         eps=self.eps, weight_decay=w.weight_decay, divisor=step.divisor, first=w.first)  # fmt: skip
            return
        weight, whole = w.weight, w.weight.reshape(-1)  # reshape copies a weight that is not contiguous
        flat = [x.view(-1) for x in (w.gradient, w.exp_avg, w.exp_avg_sq)]
        for first in range(0, whole.numel(), CHUNK):
            part = slice(first, first + CHUNK)
            g, *moments = (x[part] for x in flat)
            x = whole[part].float() if remainder is None else join(whole[part], remainder.view(-1)[part], w.first + first)
            if remainder is not None and w.scales is None:
                self._step_fused(x, g.float(), moments, w, step)
            else:
                scales = [None, None] if w.scales is None else [s[first // BLOCK : (first + CHUNK) // BLOCK] for s in w.scales]
                x = self._step_chunk(x, g.float() / step.divisor, moments, scales, w, step)
            if remainder is not None:
                whole[part], remainder.view(-1)[part] = split(x, w.first + first)
            else:
                whole[part] = x if w.master is not None else round_stochastically(x, w.seed, first)
        if not weight.is_contiguous():
            weight.copy_(whole.view_as(weight))
        if w.master is not None and w.stored is not None:
            copy_masters([(w.stored, w.master, w.first)])

    def _step_chunk(
        self, x: Tensor, g: Tensor, stored: list[Tensor], scales: Sequence[Tensor | None], w: AdamWWeight, step: StepSize
    ) -> Tensor:
        """Return `x`, a chunk of the weight `w`, after an AdamW step with its gradient `g`.

        Its moments (`stored`, with `scales` if they have 8 bits) are updated in place.
        """
        beta1, beta2 = self.betas
        moments = [m if s is None else decode(_blocks(m), s, i == 0).view(-1)[: len(x)]
                   for i, (m, s) in enumerate(zip(stored, scales, strict=True))]  # fmt: skip
        first, second = moments[0].lerp(g, 1 - beta1), moments[1] * beta2 + (1 - beta2) * g * g
        corrections = (1 - beta1**w.step, (1 - beta2**w.step) ** 0.5)
        x = x * (1 - step.lr * w.weight_decay)
        x -= step.lr / corrections[0] * first / (second.sqrt() / corrections[1] + self.eps)
        for i, (m, s, new) in enumerate(zip(stored, scales, (first, second), strict=True)):
            codes, scale = (new, None) if s is None else encode(_blocks(new), i == 0)
            m.copy_(codes.view(-1)[: len(x)])
            if s is not None and scale is not None:
                s.copy_(scale)
        return x

    def _step_fused(self, x: Tensor, g: Tensor, moments: list[Tensor], w: AdamWWeight, step: StepSize) -> None:
        """Update `x`, a chunk of the master of `w`, and its `moments` in place with torch's fused AdamW. `g` is x's gradient."""
        fused: Any = adamw
        count, divisor = torch.full((), w.step - 1.0, device=x.device), torch.full((), step.divisor, device=x.device)
        fused([x], [g], moments[:1], moments[1:], [], [count], fused=True, grad_scale=divisor if step.divisor != 1.0 else None,
              amsgrad=False, beta1=self.betas[0], beta2=self.betas[1], lr=step.lr, weight_decay=w.weight_decay, eps=self.eps,
              maximize=False)  # fmt: skip


def _blocks(x: Tensor) -> Tensor:
    """Reshape x [n] to [blocks, 256], with the last block padded with zeros."""
    return torch.nn.functional.pad(x, (0, -x.numel() % BLOCK)).view(-1, BLOCK)


def _has_kernel(w: AdamWWeight) -> bool:
    contiguous = all(x.is_contiguous() for x in (w.master, w.stored) if x is not None)
    kinds = (torch.float32, torch.bfloat16)
    return contiguous and w.gradient.dtype in kinds and adamw_kernels(torch.bfloat16, w.weight.device.type) is not None


@functools.cache
def _tables() -> tuple[Tensor, ...]:
    """Return lookup tables for the C++ kernel: `levels`, `middles` and cells for first moments, then for second ones."""
    # A cell is the interval of floats with the same upper 16 bits, from 2^-24 to 1. There is no middle below 2^-24. The table of
    # cells has the lowest level to which a cell's numbers can be rounded.
    edges = ((torch.arange((24 << 7) + 2) + (103 << 7)) << 16).to(torch.int32).view(torch.float32)
    found: list[Tensor] = []
    for signed in (True, False):
        low = torch.bucketize(edges[:-1], middles(signed)[:-1], right=True)
        low[0] = torch.bucketize(torch.zeros(()), middles(signed)[:-1])
        high = torch.bucketize(-edges[1:], middles(signed)[:-1], right=True)
        found += [levels(signed), middles(signed), torch.cat([low, high]).to(torch.uint8)]
    return tuple(found)
