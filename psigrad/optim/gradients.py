"""Gradients of vocabulary-sized weights, added in place or not stored at all.

Autograd makes a full gradient for every use of a weight, and then adds it to the sum. An embedding that is tied to the head is
used twice, and each gradient is as large as the weight. Inside `in_place` each use adds to the sum directly. With `recompute` the
sum is not stored either: each use keeps a few numbers per token, and rows of the gradient are computed on demand.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

# How many numbers of a gradient are computed at a time; the memory that its uses may hold, as a share of the gradient's.
BLOCK_ELEMENTS = 1 << 20
HELD = 0.5


class Use(Protocol):
    """A use of a weight [V, E] whose gradient can be computed again."""

    @property
    def size(self) -> int:
        """How many numbers it keeps in memory."""
        ...

    def add_to(self, out: Tensor, rows: slice) -> None:
        """Add these rows of its gradient to `out` [rows, E]."""
        ...


class Sums:
    """Sums of the gradients of `weights` (None: of any weight).

    A sum keeps its tensor between optimiser steps: a freed block of that size gets fragmented by smaller tensors. With
    `recompute` there is no tensor, as long as every use of the weight in the step can compute its gradient again.
    """

    def __init__(self, weights: Iterable[Tensor] | None = None, *, recompute: bool = False) -> None:
        self.recompute = recompute
        self.tensors: dict[Tensor, Tensor] = {}
        self.wide: dict[Tensor, Tensor] = {}
        """Float32 sums of the gradients of half-precision weights, of the uses that asked for one."""
        self.uses: dict[Tensor, list[Use]] = {}
        self._weights = None if weights is None else set(weights)

    def owns(self, weight: Tensor) -> bool:
        """Whether this object sums the weight's gradients."""
        return self._weights is None or weight in self._weights

    def of(self, weight: Tensor) -> Tensor:
        """The sum of a weight's gradients, 0 at first. It reuses the tensor of the step before."""
        if weight.grad is None:
            before = self.tensors.get(weight)
            fits = before is not None and (before.shape, before.dtype, before.device) == (
                weight.shape,
                weight.dtype,
                weight.device,
            )
            weight.grad = before.zero_() if before is not None and fits else torch.zeros_like(weight)
            self.tensors[weight] = weight.grad
        return weight.grad

    def add_wide(self, weight: Tensor, gradient: Tensor) -> None:
        """Add to the float32 sum of a half-precision weight's gradients."""
        if weight in self.wide:
            self.wide[weight].add_(gradient)
        else:
            self.wide[weight] = gradient.float()

    def defers(self, weight: Tensor, use: Use) -> bool:
        """Whether the use's gradient is left for `blocks` to compute; if not, the caller adds it to the sum now."""
        held = self.uses.get(weight, [])
        room = HELD * weight.numel() - use.size - sum(u.size for u in held)
        if self.recompute and weight.grad is None and room >= 0:
            self.uses[weight] = [*held, use]
            return True
        self._store(weight)
        return False

    def settle(self) -> None:
        """End the backward passes of a step: deferred gradients join the sums that autograd has made of the same weights."""
        for weight in [w for w in self.uses if w.grad is not None]:
            self._store(weight)
        self.tensors = {weight: total for weight, total in self.tensors.items() if weight.grad is total}

    def blocks(self, weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """The gradient of a weight with deferred uses, a block of rows at a time; each block overwrites the one before.

        The caller may change rows of the weight after their block was given.
        """
        height = max(1, BLOCK_ELEMENTS // weight[0].numel())
        room = torch.empty_like(weight[:height])
        for start in range(0, len(weight), height):
            rows = slice(start, min(start + height, len(weight)))
            block = room[: rows.stop - start].zero_()
            for use in self.uses[weight]:
                use.add_to(block, rows)
            yield rows, block

    def forget(self) -> None:
        """Drop all deferred uses, and the float32 sums."""
        self.uses, self.wide = {}, {}

    def _store(self, weight: Tensor) -> None:
        for use in self.uses.pop(weight, []):
            use.add_to(self.of(weight), slice(0, len(weight)))


_SUMS: ContextVar[tuple[Sums, ...]] = ContextVar("sums of gradients that are written in place", default=())


@contextlib.contextmanager
def in_place(*sums: Sums) -> Iterator[None]:
    """Inside this context, `backward()` adds to `.grad` or `sums` directly. `torch.autograd.grad` and hooks on parameters do not
    see those gradients.
    """
    token = _SUMS.set(sums or (Sums(),))
    try:
        yield
    finally:
        _SUMS.reset(token)


def sums_for(weight: Tensor) -> Sums | None:
    """The `Sums` that take the gradients of `weight`; None if autograd must, as in half precision, where a sum loses small terms.

    Forward passes call this: backward passes may run in another thread, where `in_place` is not set.
    """
    return _sums_of(weight) if weight.dtype in (torch.float32, torch.float64) else None


def wide_sums_for(weight: Tensor) -> Sums | None:
    """The `Sums` whose `add_wide` takes the gradients of a half-precision `weight`; None if autograd must."""
    return _sums_of(weight) if weight.dtype in (torch.bfloat16, torch.float16) else None


def _sums_of(weight: Tensor) -> Sums | None:
    if not (weight.is_leaf and weight.requires_grad and torch.is_grad_enabled()):
        return None
    return next((sums for sums in _SUMS.get() if sums.owns(weight)), None)


class _Rows:
    """Rows `ids` [N] of a table, with the gradient of each [N, E]."""

    def __init__(self, ids: Tensor, dy: Tensor) -> None:
        self.ids, self.dy = ids, dy

    @property
    def size(self) -> int:
        """How many numbers the gradient has."""
        return self.dy.numel()

    @torch.no_grad()
    def add_to(self, out: Tensor, rows: slice) -> None:
        """Add rows of the table's gradient to `out`."""
        inside = ((self.ids >= rows.start) & (self.ids < rows.stop)).nonzero()[:, 0]
        out.index_add_(0, self.ids[inside] - rows.start, self.dy[inside])


class _Lookup(torch.autograd.Function):
    """Rows of a table, whose gradients go to those rows of the sum."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, ids: Tensor, padding: int | None, sums: Sums) -> Tensor:
        ctx.table, ctx.padding, ctx.sums = table, padding, sums
        ctx.save_for_backward(ids)
        return F.embedding(ids, table)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[None, ...]:
        (ids,) = ctx.saved_tensors
        if ctx.padding is not None:
            dy = dy.masked_fill((ids == ctx.padding)[..., None], 0.0)
        use = _Rows(ids.flatten(), dy.flatten(0, -2))
        if not ctx.sums.defers(ctx.table, use):
            ctx.sums.of(ctx.table).index_add_(0, use.ids, use.dy)
        return None, None, None, None


def embedding(table: Tensor, ids: Tensor, padding: int | None, sums: Sums) -> Tensor:
    """Rows of a table [V, E] by `ids` [...], with gradients that go to `sums`; that of `padding` does not learn from it."""
    rows: Tensor = _Lookup.apply(table, ids, padding, sums)
    return rows
