"""Gradients of vocabulary-sized weights (embedding and LM head). They are summed in place, or not stored at all.

Autograd would allocate a full gradient for each use of a weight in a forward pass.
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

# The number of gradient elements computed at a time, and the memory limit of stored uses as a share of the gradient's memory.
BLOCK_ELEMENTS = 1 << 20
HELD = 0.5

# Messages of out-of-memory errors that are plain RuntimeErrors: of PyTorch's CPU allocator, CUDA, Triton, cuBLAS and cuDNN. The
# last two do not use PyTorch's GPU allocator, which may have taken all memory of the GPU.
_OUT_OF_MEMORY = ("can't allocate memory", "CUDA error: out of memory", "[CUDA]: out of memory", "STATUS_ALLOC_FAILED")


class Use(Protocol):
    """One use of a weight [V, E] in a forward pass, with the tensors from which the weight's gradient can be recomputed."""

    @property
    def size(self) -> int:
        """The number of elements that this object stores."""

    def add_to(self, out: Tensor, rows: slice) -> None:
        """Compute the rows `rows` of the weight's gradient from this use, and add them to `out` [rows, E]."""


class Sums:
    """For each of the given `weights` (default: any weight), the sum of its gradients over all its uses in an optimiser step.

    With `recompute`, some gradients are computed in blocks when needed, not stored; see `defers`.
    """

    def __init__(self, weights: Iterable[Tensor] | None = None, *, recompute: bool = False) -> None:
        self.recompute = recompute
        self.tensors: dict[Tensor, Tensor] = {}
        self.float32: dict[Tensor, Tensor] = {}
        """The float32 sums of the gradients of half-precision weights, to which `add_wide` adds."""
        self.uses: dict[Tensor, list[Use]] = {}
        self._weights = None if weights is None else set(weights)

    def owns(self, weight: Tensor) -> bool:
        """Return True if this object sums the weight's gradients."""
        return self._weights is None or weight in self._weights

    def of(self, weight: Tensor) -> Tensor:
        """Return `weight.grad`, the tensor in which a weight's gradients are summed. If it is None, first set it to zeros."""
        if weight.grad is None:
            before = self.tensors.get(weight)
            fits = before is not None and (before.shape, before.dtype, before.device) == (
                weight.shape,
                weight.dtype,
                weight.device,
            )
            # If the previous tensor were freed, smaller tensors would fragment its memory.
            weight.grad = before.zero_() if before is not None and fits else torch.zeros_like(weight)
            self.tensors[weight] = weight.grad
        return weight.grad

    def add_wide(self, weight: Tensor, gradient: Tensor) -> None:
        """Add `gradient` to the float32 sum of a half-precision weight's gradients."""
        if weight in self.float32:
            self.float32[weight].add_(gradient)
        else:
            self.float32[weight] = gradient.float()

    def defers(self, weight: Tensor, use: Use) -> bool:
        """Store `use` if possible, so that `blocks` can compute its gradient later. Return True if it was stored.

        Otherwise the caller must add the gradient of `use` to `of(weight)`.
        """
        held = self.uses.get(weight, [])
        room = HELD * weight.numel() - use.size - sum(u.size for u in held)
        if self.recompute and weight.grad is None and room >= 0:
            self.uses[weight] = [*held, use]
            return True
        self._store(weight)
        return False

    def finish(self) -> None:
        """For each weight that has a `.grad`, add the gradients of its stored uses. Call this after the last backward pass."""
        for weight in [w for w in self.uses if w.grad is not None]:
            self._store(weight)
        self.tensors = {weight: total for weight, total in self.tensors.items() if weight.grad is total}

    def blocks(self, weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield (rows, gradient) for each block of a weight's rows, computed from the uses that `defers` stored.

        Each gradient overwrites the previous one in memory.
        """
        height = max(1, BLOCK_ELEMENTS // weight[0].numel())
        room = torch.empty_like(weight[:height])
        for start in range(0, len(weight), height):
            rows = slice(start, min(start + height, len(weight)))
            block = room[: rows.stop - start].zero_()
            for use in self.uses[weight]:
                use.add_to(block, rows)
            yield rows, block  # now the caller may change these rows of the weight

    def clear(self) -> None:
        """Drop the float32 sums, and all uses that `defers` stored."""
        self.uses, self.float32 = {}, {}

    def _store(self, weight: Tensor) -> None:
        for use in self.uses.pop(weight, []):
            use.add_to(self.of(weight), slice(0, len(weight)))


_SUMS: ContextVar[tuple[Sums, ...]] = ContextVar("sums of gradients that are written in place", default=())


@contextlib.contextmanager
def in_place(*sums: Sums) -> Iterator[None]:
    """Inside this context, let `sums` (default: a new `Sums`), not autograd, sum the gradients of vocabulary-sized weights.

    `torch.autograd.grad` and hooks on parameters do not receive these gradients.
    """
    token = _SUMS.set(sums or (Sums(),))
    try:
        yield
    finally:
        _SUMS.reset(token)


def sums_for(weight: Tensor) -> Sums | None:
    """Return the `Sums` for the gradients of a float32 or float64 `weight`; None if autograd must sum them.

    Call this in the forward pass.
    """
    return _sums_of(weight) if weight.dtype in (torch.float32, torch.float64) else None


def wide_sums_for(weight: Tensor) -> Sums | None:
    """Return the `Sums` whose `add_wide` sums the gradients of a half-precision `weight`; None if autograd must sum them."""
    return _sums_of(weight) if weight.dtype in (torch.bfloat16, torch.float16) else None


def _sums_of(weight: Tensor) -> Sums | None:
    if not (weight.is_leaf and weight.requires_grad and torch.is_grad_enabled()):
        return None
    # Only in the forward pass: a backward pass may run in another thread, in which `in_place` has no effect.
    return next((sums for sums in _SUMS.get() if sums.owns(weight)), None)


class _Rows:
    """The `Use` of an embedding table: a lookup of the rows `ids` [N]. `dy` [N, E] is the gradient of the result."""

    def __init__(self, ids: Tensor, dy: Tensor) -> None:
        self.ids, self.dy = ids, dy

    @property
    def size(self) -> int:
        """The number of elements of `dy`. The much smaller `ids` is not counted."""
        return self.dy.numel()

    @torch.no_grad()
    def add_to(self, out: Tensor, rows: slice) -> None:
        """Add the rows `rows` of the embedding table's gradient to `out` [rows, E]."""
        inside = ((self.ids >= rows.start) & (self.ids < rows.stop)).nonzero()[:, 0]
        out.index_add_(0, self.ids[inside] - rows.start, self.dy[inside])


class _Lookup(torch.autograd.Function):
    """The autograd function of `embedding`. Its backward pass adds the rows' gradients to a `Sums`."""

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
    """Return the rows `ids` [...] of a table [V, E]. The backward pass adds gradients to `sums`; the row `padding` gets none."""
    rows: Tensor = _Lookup.apply(table, ids, padding, sums)
    return rows


class PassOutOfMemoryError(MemoryError):
    """Raised by all processes, before any weight changes, if one runs out of memory in a pass. Not used with sharded weights."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return True for an out-of-memory error, even if its class is only `RuntimeError`."""
    known = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return known or (isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY))
