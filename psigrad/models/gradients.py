"""Gradients that are added up where they lie.

For every use of a weight autograd makes a whole gradient, and then adds it to the sum. An embedding that is also the head is used
twice, and each gradient is as large as the vocabulary is long. Inside `in_place` such uses write into the sum themselves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

Sums = dict[Tensor, Tensor]
_SUMS: ContextVar[Sums | None] = ContextVar("sums of gradients that are written in place", default=None)


@contextlib.contextmanager
def in_place(sums: Sums | None = None) -> Iterator[None]:
    """Where losses are made whose `backward()` only has to fill in `.grad`. `torch.autograd.grad` and hooks on parameters would
    miss what is written there.

    `sums` keeps the tensors from one optimiser step to the next, by their weights: whenever one as large as a vocabulary is let
    go, smaller ones settle in its place, and it has to be made elsewhere.
    """
    token = _SUMS.set({} if sums is None else sums)
    try:
        yield
    finally:
        _SUMS.reset(token)


def sums_for(weight: Tensor) -> Sums | None:
    """Where the sum of the gradients of `weight` may be written to, None where it may not: in half precision it would lose the
    small ones. Forward passes ask, since backward passes may run in another thread, which knows nothing of `in_place`.
    """
    whole = weight.dtype in (torch.float32, torch.float64)
    return _SUMS.get() if whole and weight.is_leaf and weight.requires_grad and torch.is_grad_enabled() else None


def sum_of(weight: Tensor, sums: Sums) -> Tensor:
    """The sum of the gradients of `weight`, 0 where there is none yet, in the tensor of the step before if there is one."""
    if weight.grad is None:
        before = sums.get(weight)
        fits = before is not None and (before.shape, before.dtype, before.device) == (weight.shape, weight.dtype, weight.device)
        weight.grad = before.zero_() if before is not None and fits else torch.zeros_like(weight)
        sums[weight] = weight.grad
    return weight.grad


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
        sum_of(ctx.table, ctx.sums).index_add_(0, ids.flatten(), dy.flatten(0, -2))
        return None, None, None, None


def embedding(table: Tensor, ids: Tensor, padding: int | None, sums: Sums) -> Tensor:
    """Rows of a table [V, E] by `ids` [...], with gradients that go to `sums`; that of `padding` does not learn from it."""
    rows: Tensor = _Lookup.apply(table, ids, padding, sums)
    return rows
