"""Products of matrices: those of decoding, where few rows meet one matrix again and again, and those of training, of any two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from psigrad.native.processor import slow_mkl

# Rows up to which `few_rows` takes half the time of MKL, which reads a matrix once for every two of 4 to 15 rows; where the
# matrix lies in the nearest caches, and with fewer rows, the two are about equal.
_FEW_ROWS = 15
_WIDEST = 64  # rows of a panel on any processor


@dataclass(frozen=True)
class Turned:
    """A matrix [N, K] as `Products.through` reads it: float32, in panels of as many of its rows side by side as a tile of sums is
    wide, the last filled up with 0.
    """

    panels: Tensor
    shape: tuple[int, int]


class Products:
    """Products in float32 by the kernels where they are the faster; PyTorch's are what they are tested against, and what computes
    all others. The kernels' numbers depend neither on the threads nor on how many rows and columns there are.
    """

    def __init__(self, call: SimpleNamespace) -> None:
        self._call = call
        self.own = slow_mkl()
        """Whether training's products are the kernels'."""

    def of(self, a: Tensor, b: Tensor, out: Tensor | None = None, base: Tensor | None = None) -> Tensor:
        """out [M, N] ← a [M, K] · b [K, N] + base, which is [M, N], or [N] for all rows, and may be `out` itself. Matrices may be
        transposed ones.
        """
        if not (self.own and _readable(a) and _readable(b) and _shaped(a, b, out, base)):
            return by_pytorch(a, b, out, base)
        if out is None:
            out = a.new_empty(len(a), b.shape[1])
        pointers = (out.data_ptr(), a.data_ptr(), b.data_ptr(), None if base is None or base is out else base.data_ptr())
        strides = (out.stride(0), *a.stride(), *b.stride(), _distance(base))
        self._call.product(*pointers, len(a), *b.shape[::-1], *strides, base is out, torch.get_num_threads())
        return out

    def linear(self, x: Tensor, weight: Tensor, out: Tensor, base: Tensor | None = None) -> Tensor:
        """out [M, N] ← x [M, K] · weight [N, K]ᵀ + base, which is [M, N] or a bias [N]."""
        if len(x) <= _FEW_ROWS and _plain(x, weight, out, base):
            self._call.few_rows(*_product(x, weight, weight.shape, out, base))
            return out
        return self.of(x, weight.t(), out, base)

    def turned(self, weight: Tensor) -> Turned:
        """A matrix [N, K], float32 and contiguous, for `through`."""
        height, width = weight.shape
        panels = torch.empty(-(-height // _WIDEST) * _WIDEST * width)
        self._call.turned(panels.data_ptr(), weight.data_ptr(), height, width, torch.get_num_threads())
        return Turned(panels, (height, width))

    def through(self, x: Tensor, weight: Turned, out: Tensor, base: Tensor | None = None) -> Tensor:
        """As `linear`, for x, out and base in float32 and contiguous in their rows: where one matrix meets some rows again and
        again. A row's numbers do not depend on the others. Raises `ValueError` where they do not fit.
        """
        if not _fits(x, weight.shape, out, base):
            shapes = [tuple(t.shape) for t in (x, out, base) if t is not None]
            raise ValueError(
                f"A turned matrix {weight.shape} meets rows, result and base of {shapes}, {x.dtype}; float32 is needed."
            )
        self._call.through_panels(*_product(x, weight.panels, weight.shape, out, base))
        return out


def by_pytorch(a: Tensor, b: Tensor, out: Tensor | None = None, base: Tensor | None = None) -> Tensor:
    """As `Products.of`, by PyTorch."""
    if base is None:
        return torch.mm(a, b, out=out) if out is not None else torch.mm(a, b)
    if base is out:
        return base.addmm_(a, b)
    return torch.addmm(base, a, b, out=out) if out is not None else torch.addmm(base, a, b)


def _readable(x: Tensor) -> bool:
    """Whether it is a matrix of float32 numbers in memory that stand side by side in its rows or its columns."""
    return x.dtype == torch.float32 and x.device.type == "cpu" and x.dim() == 2 and 1 in x.stride()


def _shaped(a: Tensor, b: Tensor, out: Tensor | None, base: Tensor | None) -> bool:
    """Whether a·b, and what it is to be written and added to, fit."""
    shape = (len(a), b.shape[1])
    return (
        a.shape[1] == len(b)
        and (out is None or (out.shape == shape and _in_rows(out)))
        and (base is None or (base.shape in (shape, shape[1:]) and _in_rows(base)))
    )


def _in_rows(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.stride(-1) == 1 and x.device.type == "cpu"


def _plain(x: Tensor, weight: Tensor, out: Tensor, base: Tensor | None) -> bool:
    """Whether `few_rows` can compute a product; PyTorch computes what it can't, or refuses it."""
    return weight.dtype == torch.float32 and weight.is_contiguous() and _fits(x, weight.shape, out, base)


def _fits(x: Tensor, shape: Sequence[int], out: Tensor, base: Tensor | None) -> bool:
    """Whether a matrix of this shape maps x to out, with the base, all in float32 and contiguous in their rows."""
    tensors = (x, out) if base is None else (x, out, base)
    return (
        all(map(_in_rows, tensors))
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
