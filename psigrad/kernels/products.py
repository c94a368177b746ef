"""Matrix products: decoding's, where a few rows are multiplied by the same matrix at every step, and training's, of any shape."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from psigrad.kernels.codes import CodedMatrix
from psigrad.kernels.processor import multiplies_bfloat16, slow_mkl, slow_onednn

# Up to so many rows `few_rows` takes half the time of MKL, which for 4 to 15 rows reads the matrix once per two rows. With fewer
# rows, or a matrix in the nearest caches, the two are about equal.
_FEW_ROWS = 15
_WIDEST = 64  # the most rows of a panel on any processor


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix [N, K] in the layout of `Products.multiply_packed`: panels of as many rows as a tile of sums is wide, interleaved;
    the last panel is filled with 0. bfloat16 numbers stand in pairs of neighbours.
    """

    panels: Tensor
    shape: tuple[int, int]


class Products:
    """Products by our kernels where they are faster, by PyTorch otherwise; tests compare the two.

    What the kernels compute for a row depends neither on the number of threads nor on the other rows and columns.
    """

    def __init__(self, call: SimpleNamespace) -> None:
        self._call = call
        self.float32 = slow_mkl()
        """Whether the kernels compute training's products in float32."""
        self.bfloat16 = slow_onednn()
        """Whether the kernels compute training's products in bfloat16."""
        self.packs_bfloat16 = multiplies_bfloat16()
        """Whether the kernels compute sampling's products in bfloat16, with packed matrices."""

    def instructions(self, dtype: torch.dtype) -> str:
        """What multiplies numbers of this type: AVX2, AVX-512, NEON, and in bfloat16 also AVX-512 bfloat16 or AMX tiles."""
        room = ctypes.create_string_buffer(64)
        self._call.instructions(int(dtype == torch.bfloat16), room)
        return room.value.decode()

    def of(self, a: Tensor, b: Tensor, out: Tensor | None = None, base: Tensor | None = None) -> Tensor:
        """out [M, N] ← a [M, K] · b [K, N] + base, which is [M, N], or [N] for all rows, and may be `out` itself. Matrices may be
        transposed ones.
        """
        kind = a.dtype
        mine = (self.float32 and kind == torch.float32) or (self.bfloat16 and kind == torch.bfloat16)
        if not (mine and _readable(a, kind) and _readable(b, kind) and _shapes_agree(a, b, out, base)):
            return by_pytorch(a, b, out, base)
        if out is None:
            out = a.new_empty(len(a), b.shape[1])
        pointers = (out.data_ptr(), a.data_ptr(), b.data_ptr(), None if base is None or base is out else base.data_ptr())
        strides = (out.stride(0), *a.stride(), *b.stride(), _distance(base))
        call = self._call.product if kind == torch.float32 else self._call.product_bf16
        call(*pointers, len(a), *b.shape[::-1], *strides, base is out, torch.get_num_threads())
        return out

    def linear(self, x: Tensor, weight: Tensor, out: Tensor, base: Tensor | None = None, *, exact: bool = False) -> Tensor:
        """out [M, N] ← x [M, K] · weight [N, K]ᵀ + base, which is [M, N] or a bias [N]; `exact` ones have the bits that they have
        among many rows, where those are the kernels'.
        """
        if len(x) <= _FEW_ROWS and not (exact and self.float32) and _plain(x, weight, out, base):
            self._call.few_rows(*_product(x, weight, weight.shape, out, base))
            return out
        return self.of(x, weight.t(), out, base)

    def pack(self, weight: Tensor) -> PackedMatrix:
        """Pack a matrix that `can_pack` accepts, for `multiply_packed`."""
        height, width = weight.shape
        panels = weight.new_empty(-(-height // _WIDEST) * _WIDEST * width)
        words = width * weight.element_size() // 4
        self._call.pack_matrix(panels.data_ptr(), weight.data_ptr(), height, words, torch.get_num_threads())
        return PackedMatrix(panels, (height, width))

    def can_pack(self, weight: Tensor) -> bool:
        """Whether packing a matrix [N, K] is possible and pays: float32, or bfloat16 with an even number of columns."""
        pairs = self.packs_bfloat16 and weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0
        return (pairs or weight.dtype == torch.float32) and weight.is_contiguous()

    def multiply_packed(self, x: Tensor, weight: PackedMatrix, out: Tensor, base: Tensor | None = None) -> Tensor:
        """As `linear`, with a packed matrix: for a matrix that is used many times. x, out and base have the matrix' type and
        contiguous rows, or `ValueError` is raised. A row's result does not depend on the other rows.
        """
        kind = weight.panels.dtype
        if not _fits(x, weight.shape, out, base, kind):
            shapes = [tuple(t.shape) for t in (x, out, base) if t is not None]
            raise ValueError(
                f"A packed matrix {weight.shape} in {kind} can't be multiplied with rows, result and base of {shapes}, {x.dtype}."
            )
        call = self._call.multiply_packed if kind == torch.float32 else self._call.multiply_packed_bf16
        call(*_product(x, weight.panels, weight.shape, out, base))
        return out

    def multiply_codes(self, x: Tensor, matrices: Sequence[CodedMatrix], out: Tensor, base: Tensor | None = None) -> Tensor:
        """As `multiply_packed`, with matrices in codes whose products lie side by side in `out`."""
        call = self._call.multiply_codes if x.dtype == torch.float32 else self._call.multiply_codes_bf16
        height, width = sum(m.shape[0] for m in matrices), matrices[0].shape[1]
        if not _fits(x, (height, width), out, base, x.dtype):
            raise ValueError(f"Matrices in codes [{height}, {width}] can't be multiplied with {tuple(x.shape)}, {x.dtype}.")
        at, size = 0, x.element_size()
        for m in matrices:
            onto = None if base is None else base.data_ptr() + at * size
            pointers = (out.data_ptr() + at * size, x.data_ptr(), m.table.data_ptr(), onto)
            call(*pointers, len(x), width, out.stride(0), x.stride(0), _distance(base), torch.get_num_threads())
            at += m.shape[0]
        return out

    def unpack(self, matrix: CodedMatrix, dtype: torch.dtype) -> Tensor:
        """The numbers [N, K] of a matrix in codes."""
        out = torch.empty(matrix.shape, dtype=dtype)
        half = int(dtype == torch.bfloat16)
        self._call.unpack_codes(half, out.data_ptr(), matrix.table.data_ptr(), matrix.shape[1], torch.get_num_threads())
        return out


def by_pytorch(a: Tensor, b: Tensor, out: Tensor | None = None, base: Tensor | None = None) -> Tensor:
    """The same as `Products.of`, by PyTorch."""
    if base is None:
        return torch.mm(a, b, out=out) if out is not None else torch.mm(a, b)
    if base is out:
        return base.addmm_(a, b)
    return torch.addmm(base, a, b, out=out) if out is not None else torch.addmm(base, a, b)


def _readable(x: Tensor, kind: torch.dtype) -> bool:
    """Whether x is a matrix of this type in memory with contiguous rows or columns."""
    return x.dtype == kind and x.device.type == "cpu" and x.dim() == 2 and 1 in x.stride()


def _shapes_agree(a: Tensor, b: Tensor, out: Tensor | None, base: Tensor | None) -> bool:
    """Whether the shapes of a · b, out and base agree."""
    shape = (len(a), b.shape[1])
    return (
        a.shape[1] == len(b)
        and (out is None or (out.shape == shape and _in_rows(out, a.dtype)))
        and (base is None or (base.shape in (shape, shape[1:]) and _in_rows(base, a.dtype)))
    )


def _in_rows(x: Tensor, kind: torch.dtype) -> bool:
    return x.dtype == kind and x.stride(-1) == 1 and x.device.type == "cpu"


def _plain(x: Tensor, weight: Tensor, out: Tensor, base: Tensor | None) -> bool:
    """Whether `few_rows` can compute the product. PyTorch computes the others, or refuses them."""
    return weight.dtype == torch.float32 and weight.is_contiguous() and _fits(x, weight.shape, out, base)


def _fits(x: Tensor, shape: Sequence[int], out: Tensor, base: Tensor | None, kind: torch.dtype = torch.float32) -> bool:
    """Whether x, out and base fit a matrix of this shape, have this type and contiguous rows."""
    tensors = (x, out) if base is None else (x, out, base)
    return (
        all(_in_rows(t, kind) for t in tensors)
        and x.shape[1] == shape[1]
        and out.shape == (x.shape[0], shape[0])
        and (base is None or base.shape in (out.shape, out.shape[1:]))
    )


def _product(x: Tensor, stored: Tensor, shape: Sequence[int], out: Tensor, base: Tensor | None) -> tuple[int | None, ...]:
    """Pointers, sizes and row strides of a product with a matrix of this shape, which lies in `stored`."""
    pointers = (out.data_ptr(), x.data_ptr(), stored.data_ptr(), None if base is None else base.data_ptr())
    return (*pointers, len(x), *shape, out.stride(0), x.stride(0), _distance(base), torch.get_num_threads())


def _distance(base: Tensor | None) -> int:
    """The row stride of what is added; 0 for a bias."""
    return base.stride(0) if base is not None and base.dim() == 2 else 0


class TowerKernels:
    """The kernels of `psigrad.control.networks.networks` on a flat vector of float32 numbers."""

    def __init__(self, call: SimpleNamespace) -> None:
        self._call = call

    def forward(self, flat: Tensor, x: Tensor, towers: int, sizes: Sequence[int]) -> Tensor:
        """What all layers give for x [M, in], layer after layer, each [K, M, out]; a ReLU behind all but the last."""
        rows = len(x)
        hs = torch.empty(towers * rows * sum(sizes[1:]))
        shape = (ctypes.c_int64 * len(sizes))(*sizes)
        pointers = (hs.data_ptr(), flat.data_ptr(), x.data_ptr(), ctypes.addressof(shape))
        self._call.relu_towers(*pointers, len(sizes) - 1, towers, rows, torch.get_num_threads())
        return hs

    def backward(self, out: Tensor, flat: Tensor, x: Tensor, hs: Tensor, given: Tensor, sizes: Sequence[int]) -> None:
        """The gradient into `out`, given that of the last layer [K, m, out] for the first m states of `forward`'s."""
        towers, states, _ = given.shape
        shape = (ctypes.c_int64 * len(sizes))(*sizes)
        pointers = (out.data_ptr(), flat.data_ptr(), x.data_ptr(), hs.data_ptr(), given.data_ptr(), ctypes.addressof(shape))
        self._call.relu_towers_gradient(*pointers, len(sizes) - 1, towers, len(x), states, torch.get_num_threads())

    def adam(
        self,
        weights: Tensor,
        gradient: Tensor,
        moments: tuple[Tensor, Tensor],
        betas: tuple[float, float],
        rate: float,
        correction: float,
        epsilon: float,
        scale: float,
    ) -> None:
        """m ← β₁·m + (1 − β₁)·g, v ← β₂·v + (1 − β₂)·g², θ ← θ − rate·m / (√(correction·v) + ε), with g the gradient times
        `scale`.
        """
        pointers = (weights.data_ptr(), gradient.data_ptr(), moments[0].data_ptr(), moments[1].data_ptr())
        rates = (1 - betas[0], betas[1], 1 - betas[1], rate, correction, 1e-30, epsilon, scale)
        self._call.adam(*pointers, weights.numel(), *rates)
