"""AdamW in little memory: moments of 8 bits, bfloat16 weights without float32 masters, or both."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from psigrad.kernels.kernels import FrugalWeight
from psigrad.optim.rules import AdamW, native_half_precision, steps_natively
from psigrad.seeds import derive

BLOCK = 256
"""Neighbours whose moments share a scale."""
_LEAST = 4096
_WHOLE = re.compile(r"embed|wte|wpe", re.IGNORECASE)
_MOMENTS = ("exp_avg", "exp_avg_sq")


@functools.cache
def levels(signed: bool) -> Tensor:
    """The 256 numbers that a moment, over the largest of its block, is rounded to: 0, 1, and of each power of ten 10⁻ⁱ,
    i = 0 … 6, the middles of so many equal parts of [0.1, 1] · 10⁻ⁱ as there are codes left (dynamic tree quantisation, Dettmers
    et al. 2022, arXiv:2110.02861, as bitsandbytes has it). Those of the second moment, which has no sign, are twice as many.
    """
    found = [0.0, 1.0]
    for i in range(7):
        parts = 2 ** (6 - i + (not signed))
        middles = [10.0**-i * (0.1 + 0.9 * (part + 0.5) / parts) for part in range(parts)]
        found += [*middles, *(-middle for middle in middles if signed)]
    return torch.tensor(sorted(found), dtype=torch.float32)


@functools.cache
def middles(signed: bool) -> Tensor:
    """Where one level ends and the next begins; infinity behind the last. A second moment above 0 stays above 0, unlike
    bitsandbytes': by its root, and little else, the next step is divided.
    """
    own = levels(signed)
    found = torch.cat([(own[1:] + own[:-1]) / 2, torch.tensor([math.inf])])
    found[0] = found[0] if signed else 0.0
    return found


def encode(x: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """(codes [blocks, 256] of uint8, scales [blocks]) of numbers [blocks, 256]: each the nearest level times the scale."""
    scales = x.abs().amax(1)
    shares = (x / scales[:, None]).nan_to_num_(0.0)
    return torch.bucketize(shares, middles(signed)[:-1].to(x.device)).to(torch.uint8), scales


def decode(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """The inverse of `encode`."""
    return levels(signed).to(codes.device)[codes.int()] * scales[:, None]


def round_by_chance(x: Tensor, seed: int) -> Tensor:
    """x [n] in bfloat16, each number one of its two neighbours, with chances by which the mean is x. Number i's draw depends on
    `seed` and i alone.
    """
    i = torch.arange(x.numel(), device=x.device) ^ seed
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        i = ((i ^ (i >> shift)) * factor) & 0xFFFFFFFF
    draw = (i ^ (i >> 16)) & 0xFFFF
    bits = (x.view(torch.int32).long() & 0xFFFFFFFF) + draw
    high = (bits >> 16) & 0xFFFF
    return torch.where(high >= 1 << 15, high - (1 << 16), high).to(torch.int16).view(torch.bfloat16)


class FrugalAdamW(AdamW):
    """As `AdamW`, in less memory.

    With `eight_bits` moments of at least 4,096 numbers have 8 bits, in blocks of 256, but for embeddings, whose rows learn
    at very different rates: as transformers does. Weights in `bare` have no master: θ ← θ - η·m̂ / (√v̂ + ε) is rounded to
    bfloat16 up or down by chance, so that steps smaller than a 256th of a weight happen as often as is right (Zamirai et al.
    2020, arXiv:2010.06192). Draws depend on `seed`, the weight's name and the step.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        low_precision: Mapping[str, Tensor] | None = None,
        *,
        eight_bits: bool = False,
        bare: Mapping[str, Tensor] | None = None,
        seed: int = 0,
    ) -> None:
        self.bare, self.seed = dict(bare or {}), seed
        self.coarse = {n for n, p in parameters.items() if eight_bits and p.numel() >= _LEAST and not _WHOLE.search(n)}
        super().__init__(parameters, betas, eps, weight_decay, low_precision)

    def _fresh(self, name: str, p: Tensor) -> dict[str, Tensor]:
        if name not in self.coarse and name not in self.bare:
            return super()._fresh(name, p)
        kind, device = torch.uint8 if name in self.coarse else torch.float32, p.device
        state = {"step": torch.zeros((), device=device)}
        for key in _MOMENTS:
            state[key] = torch.zeros(p.shape, dtype=kind, device=device)
            if name in self.coarse:
                state[f"{key}_scale"] = torch.zeros(-(-p.numel() // BLOCK), device=device)
        return state

    @torch.no_grad()
    def step(self, lr: float, blocks: Mapping[str, Iterable[tuple[slice, Tensor]]] | None = None, *, shrink: float = 1.0) -> None:
        """See `Stepper`; it takes no blocks."""
        assert not blocks, "moments in blocks need whole gradients"
        small = self.coarse | self.bare.keys()
        held = {name: p.grad for name, p in self.parameters.items() if name in small}
        kept = {name: p.grad for name, p in self.low_precision.items() if name in small}
        jobs = []
        for name in held:
            gradient = held[name] if kept.get(name) is None else kept[name]
            if gradient is not None:
                jobs.append(self._job(name, gradient))
            # what is stepped here is not the other rule's
            self.parameters[name].grad = None
            if name in self.low_precision:
                self.low_precision[name].grad = None
        super().step(lr, shrink=shrink)
        native = [job for job in jobs if _is_native(job)]
        if native:
            decays = [self.weight_decay if job.weight.dim() > 1 else 0.0 for job in native]
            native_half_precision().step_frugally(native, decays, lr, self.betas, self.eps, 1 / shrink, _tables())
        for job in jobs:
            if not _is_native(job):
                self._step_by_torch(job, lr, shrink)
            if job.master is not None and job.stored is not None and not _is_native(job):
                job.stored.copy_(job.master)
        torch.autograd.graph.increment_version([x for job in jobs for x in (job.master, job.stored) if x is not None])
        for name, gradient in held.items():
            self.parameters[name].grad = gradient
        for name, gradient in kept.items():
            self.low_precision[name].grad = gradient

    def _job(self, name: str, gradient: Tensor) -> FrugalWeight:
        state, bare = self.state[name], self.bare.get(name)
        state["step"] += 1
        step = int(state["step"])
        seed = derive(self.seed, "round", name, step) & 0xFFFFFFFF
        scales = (state["exp_avg_scale"], state["exp_avg_sq_scale"]) if name in self.coarse else None
        master, stored = (self.parameters[name], self.low_precision.get(name)) if bare is None else (None, bare)
        return FrugalWeight(master, stored, gradient.contiguous(), state["exp_avg"], state["exp_avg_sq"], scales, step, seed)

    def _step_by_torch(self, job: FrugalWeight, lr: float, shrink: float) -> None:
        """The same step in torch's words, for other devices, and to tell whether the kernel is right."""
        weight, (beta1, beta2) = job.weight, self.betas
        x, g = weight.float().flatten(), job.gradient.float().flatten() / shrink
        moments = [job.first.flatten(), job.second.flatten()]
        if job.scales is not None:
            moments = [decode(_blocks(m), s, i == 0).flatten()[: x.numel()]
                       for i, (m, s) in enumerate(zip(moments, job.scales, strict=True))]  # fmt: skip
        first, second = moments[0].lerp(g, 1 - beta1), moments[1] * beta2 + (1 - beta2) * g * g
        x *= 1 - lr * (self.weight_decay if weight.dim() > 1 else 0.0)
        corrections = (1 - beta1**job.step, (1 - beta2**job.step) ** 0.5)
        x -= lr / corrections[0] * first / (second.sqrt() / corrections[1] + self.eps)
        weight.copy_((x if job.master is not None else round_by_chance(x, job.seed)).view_as(weight))
        for i, (held, made) in enumerate(((job.first, first), (job.second, second))):
            if job.scales is None:
                held.copy_(made.view_as(held))
                continue
            codes, scale = encode(_blocks(made), i == 0)
            held.copy_(codes.flatten()[: x.numel()].view_as(held))
            job.scales[i].copy_(scale)


def _blocks(x: Tensor) -> Tensor:
    """[n] -> [blocks, 256], the last filled with 0."""
    return torch.nn.functional.pad(x, (0, -x.numel() % BLOCK)).view(-1, BLOCK)


def _is_native(job: FrugalWeight) -> bool:
    wide = all(x.is_contiguous() for x in (job.master, job.stored) if x is not None)
    kinds = (torch.float32, torch.bfloat16)
    return wide and job.gradient.dtype in kinds and steps_natively(torch.bfloat16, job.weight.device.type)


@functools.cache
def _tables() -> tuple[Tensor, ...]:
    """Of the signed moment and of the other: levels, middles, and the first level that a number of each cell may have."""
    # a cell is what a float's upper 16 bits say, from 2^-24 to 1: below there is no middle
    edges = ((torch.arange((24 << 7) + 2) + (103 << 7)) << 16).to(torch.int32).view(torch.float32)
    found: list[Tensor] = []
    for signed in (True, False):
        low = torch.bucketize(edges[:-1], middles(signed)[:-1], right=True)
        low[0] = torch.bucketize(torch.zeros(()), middles(signed)[:-1])
        high = torch.bucketize(-edges[1:], middles(signed)[:-1], right=True)
        found += [levels(signed), middles(signed), torch.cat([low, high]).to(torch.uint8)]
    return tuple(found)
