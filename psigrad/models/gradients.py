"""Gradients that are added up where they lie, or not stored at all.

For every use of a weight autograd makes a whole gradient, and then adds it to the sum. An embedding that is also the head is used
twice, and each gradient is as large as the vocabulary is long. Inside `in_place` such uses write into the sum themselves; and
where the sum is to be recomputed, what they need for it is kept instead, some numbers per token, and rows of the gradient are
made when they are asked for.
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

# Numbers of a gradient that are made at a time, and the share of a gradient's numbers that its uses may hold on to.
BLOCK_ELEMENTS = 1 << 20
HELD = 0.5


class Use(Protocol):
    """A use of a weight [V, E] whose gradient can be made more than once."""

    @property
    def size(self) -> int:
        """Numbers that it holds on to."""
        ...

    def add_to(self, out: Tensor, rows: slice) -> None:
        """Add those rows of its gradient to `out` [rows, E]."""
        ...


class Sums:
    """The sums of the gradients of `weights` (None: of any).

    Each sum keeps its tensor from one optimiser step to the next: whenever one as large as a vocabulary is let go, smaller ones
    settle in its place, and it has to be made elsewhere. With `recompute` there is no such tensor where every use of a weight in
    the step can make its gradient again.
    """

    def __init__(self, weights: Iterable[Tensor] | None = None, *, recompute: bool = False) -> None:
        self.recompute = recompute
        self.tensors: dict[Tensor, Tensor] = {}
        self.uses: dict[Tensor, list[Use]] = {}
        self._weights = None if weights is None else set(weights)

    def owns(self, weight: Tensor) -> bool:
        """Whether the weight is one of theirs."""
        return self._weights is None or weight in self._weights

    def of(self, weight: Tensor) -> Tensor:
        """The sum of a weight's gradients, 0 where there is none yet, in the tensor of the step before if there is one."""
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

    def puts_off(self, weight: Tensor, use: Use) -> bool:
        """Whether the use's gradient will be made when it is asked for; else it is for the caller to add."""
        held = self.uses.get(weight, [])
        room = HELD * weight.numel() - use.size - sum(u.size for u in held)
        if self.recompute and weight.grad is None and room >= 0:
            self.uses[weight] = [*held, use]
            return True
        self._store(weight)
        return False

    def settle(self) -> None:
        """The backward passes of a step are over: where autograd made a sum of its own, nothing lies beside it."""
        for weight in [w for w in self.uses if w.grad is not None]:
            self._store(weight)
        self.tensors = {weight: total for weight, total in self.tensors.items() if weight.grad is total}

    def blocks(self, weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """The gradient of a weight whose uses were put off, some rows at a time, which the next overwrite. Rows of the weight
        that have been given may change.
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
        """What was put off is not wanted any more."""
        self.uses = {}

    def _store(self, weight: Tensor) -> None:
        for use in self.uses.pop(weight, []):
            use.add_to(self.of(weight), slice(0, len(weight)))


_SUMS: ContextVar[tuple[Sums, ...]] = ContextVar("sums of gradients that are written in place", default=())


@contextlib.contextmanager
def in_place(*sums: Sums) -> Iterator[None]:
    """Where losses are made whose `backward()` only has to fill in `.grad`, or `sums`. `torch.autograd.grad` and hooks on
    parameters would miss what is written there.
    """
    token = _SUMS.set(sums or (Sums(),))
    try:
        yield
    finally:
        _SUMS.reset(token)


def sums_for(weight: Tensor) -> Sums | None:
    """Where the gradients of `weight` may be added up, None where they may not: in half precision a sum would lose small ones.
    Forward passes ask, since backward passes may run in another thread, which knows nothing of `in_place`.
    """
    whole = weight.dtype in (torch.float32, torch.float64)
    if not (whole and weight.is_leaf and weight.requires_grad and torch.is_grad_enabled()):
        return None
    return next((sums for sums in _SUMS.get() if sums.owns(weight)), None)


class _Rows:
    """Rows `ids` [N] of a table, with the gradient of each [N, E]."""

    def __init__(self, ids: Tensor, dy: Tensor) -> None:
        self.ids, self.dy = ids, dy

    @property
    def size(self) -> int:
        """Numbers of the gradient."""
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
        if not ctx.sums.puts_off(ctx.table, use):
            ctx.sums.of(ctx.table).index_add_(0, use.ids, use.dy)
        return None, None, None, None


def embedding(table: Tensor, ids: Tensor, padding: int | None, sums: Sums) -> Tensor:
    """Rows of a table [V, E] by `ids` [...], with gradients that go to `sums`; that of `padding` does not learn from it."""
    rows: Tensor = _Lookup.apply(table, ids, padding, sums)
    return rows
