"""Products of matrices: those of decoding, where few rows meet one matrix again and again, and those of training, of any two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from psigrad.native.processor import plain_bfloat16, slow_mkl

# Rows up to which `few_rows` takes half the time of MKL, which reads a matrix once for every two of 4 to 15 rows; where the
# matrix lies in the nearest caches, and with fewer rows, the two are about equal.
_FEW_ROWS = 15
_WIDEST = 64  # rows of a panel on any processor


@dataclass(frozen=True)
class TurnedMatrix:
    """A matrix [N, K] as `Products.through` reads it: in panels of as many of its rows side by side as a tile of sums is wide,
    the last filled up with 0; bfloat16 in pairs of neighbours.
    """

    panels: Tensor
    shape: tuple[int, int]


class Products:
    """Products by the kernels where they are the faster; PyTorch's are what they are tested against, and what computes all
    others. The kernels' numbers depend neither on the threads nor on how many rows and columns there are.
    """

    def __init__(self, call: SimpleNamespace) -> None:
        self._call = call
        self.own = slow_mkl()
        """Whether training's products in float32 are the kernels'."""
        self.halves = plain_bfloat16()
        """Whether all products in bfloat16 are."""

    def of(self, a: Tensor, b: Tensor, out: Tensor | None = None, base: Tensor | None = None) -> Tensor:
        """out [M, N] ← a [M, K] · b [K, N] + base, which is [M, N], or [N] for all rows, and may be `out` itself. Matrices may be
        transposed ones.
        """
        kind = a.dtype
        mine = (self.own and kind == torch.float32) or (self.halves and kind == torch.bfloat16)
        if not (mine and _readable(a, kind) and _readable(b, kind) and _shaped(a, b, out, base)):
            return by_pytorch(a, b, out, base)
        if out is None:
            out = a.new_empty(len(a), b.shape[1])
        pointers = (out.data_ptr(), a.data_ptr(), b.data_ptr(), None if base is None or base is out else base.data_ptr())
        strides = (out.stride(0), *a.stride(), *b.stride(), _distance(base))
        call = self._call.product if kind == torch.float32 else self._call.half_product
        call(*pointers, len(a), *b.shape[::-1], *strides, base is out, torch.get_num_threads())
        return out

    def linear(self, x: Tensor, weight: Tensor, out: Tensor, base: Tensor | None = None) -> Tensor:
        """out [M, N] ← x [M, K] · weight [N, K]ᵀ + base, which is [M, N] or a bias [N]."""
        if len(x) <= _FEW_ROWS and _plain(x, weight, out, base):
            self._call.few_rows(*_product(x, weight, weight.shape, out, base))
            return out
        return self.of(x, weight.t(), out, base)

    def turned(self, weight: Tensor) -> TurnedMatrix:
        """A matrix that `can_turn`, for `through`."""
        height, width = weight.shape
        panels = weight.new_empty(-(-height // _WIDEST) * _WIDEST * width)
        words = width * weight.element_size() // 4
        self._call.turned(panels.data_ptr(), weight.data_ptr(), height, words, torch.get_num_threads())
        return TurnedMatrix(panels, (height, width))

    def can_turn(self, weight: Tensor) -> bool:
        """Whether a matrix [N, K] can be turned and it is worth it: of float32, or of an even number of columns in bfloat16."""
        pairs = self.halves and weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0
        return (pairs or weight.dtype == torch.float32) and weight.is_contiguous()

    def through(self, x: Tensor, weight: TurnedMatrix, out: Tensor, base: Tensor | None = None) -> Tensor:
        """As `linear`, for x, out and base of the matrix' type and contiguous in their rows: where one matrix meets some rows
        again and again. A row's numbers do not depend on the others. Raises `ValueError` where they do not fit.
        """
        kind = weight.panels.dtype
        if not _fits(x, weight.shape, out, base, kind):
            shapes = [tuple(t.shape) for t in (x, out, base) if t is not None]
            raise ValueError(f"A turned matrix {weight.shape} in {kind} meets rows, result and base of {shapes}, {x.dtype}.")
        call = self._call.through_panels if kind == torch.float32 else self._call.through_half_panels
        call(*_product(x, weight.panels, weight.shape, out, base))
        return out


def by_pytorch(a: Tensor, b: Tensor, out: Tensor | None = None, base: Tensor | None = None) -> Tensor:
    """As `Products.of`, by PyTorch."""
    if base is None:
        return torch.mm(a, b, out=out) if out is not None else torch.mm(a, b)
    if base is out:
        return base.addmm_(a, b)
    return torch.addmm(base, a, b, out=out) if out is not None else torch.addmm(base, a, b)


def _readable(x: Tensor, kind: torch.dtype) -> bool:
    """Whether it is a matrix of such numbers in memory that stand side by side in its rows or its columns."""
    return x.dtype == kind and x.device.type == "cpu" and x.dim() == 2 and 1 in x.stride()


def _shaped(a: Tensor, b: Tensor, out: Tensor | None, base: Tensor | None) -> bool:
    """Whether a·b, and what it is to be written and added to, fit."""
    shape = (len(a), b.shape[1])
    return (
        a.shape[1] == len(b)
        and (out is None or (out.shape == shape and _in_rows(out, a.dtype)))
        and (base is None or (base.shape in (shape, shape[1:]) and _in_rows(base, a.dtype)))
    )


def _in_rows(x: Tensor, kind: torch.dtype) -> bool:
    return x.dtype == kind and x.stride(-1) == 1 and x.device.type == "cpu"


def _plain(x: Tensor, weight: Tensor, out: Tensor, base: Tensor | None) -> bool:
    """Whether `few_rows` can compute a product; PyTorch computes what it can't, or refuses it."""
    return weight.dtype == torch.float32 and weight.is_contiguous() and _fits(x, weight.shape, out, base)


def _fits(x: Tensor, shape: Sequence[int], out: Tensor, base: Tensor | None, kind: torch.dtype = torch.float32) -> bool:
    """Whether a matrix of this shape maps x to out, with the base, all of a type and contiguous in their rows."""
    tensors = (x, out) if base is None else (x, out, base)
    return (
        all(_in_rows(t, kind) for t in tensors)
        and x.shape[1] == shape[1]
        and out.shape == (x.shape[0], shape[0])
        and (base is None or base.shape in (out.shape, out.shape[1:]))
    )


def _product(x: Tensor, stored: Tensor, shape: Sequence[int], out: Tensor, base: Tensor | None) -> tuple[int | None, ...]:
    """Pointers, sizes and distances of rows of a product with a matrix of this shape that is `stored` somehow."""
    pointers = (out.data_ptr(), x.data_ptr(), stored.data_ptr(), None if base is None else base.data_ptr())
    return (*pointers, len(x), *shape, out.stride(0), x.stride(0), _distance(base), torch.get_num_threads())


def _distance(base: Tensor | None) -> int:
    """Between the rows of what is added."""
    return base.stride(0) if base is not None and base.dim() == 2 else 0
