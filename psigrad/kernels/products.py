"""Matrix products by kernels, in decoding and in training, and the log-probs of their results."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from psigrad.kernels.codes import CodedMatrix
from psigrad.kernels.processor import multiplies_bfloat16, slow_mkl, slow_onednn

# For 4 to this number of rows, `few_rows` takes half the time of MKL, which reads the matrix once for every two rows. With fewer
# rows, or if the matrix is in the processor's nearest caches, the two are about equal.
_FEW_ROWS = 15
_WIDEST = 64  # the largest number of rows of a panel on any processor


# The number of neighbouring logits of a row whose exponentials are summed together.
STRETCH = 1024


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix [N, K] in the memory layout of `Products.multiply_packed`.

    It is cut into panels of rows, and the rows of a panel are interleaved. The last panel is padded with 0. bfloat16 numbers are
    interleaved in pairs of neighbours.
    """

    panels: Tensor
    shape: tuple[int, int]


class Products:
    """Matrix products by psigrad's kernels where they are faster, otherwise by PyTorch. Tests compare the two.

    The kernels' result for a row depends neither on the number of threads nor on the other rows and columns.
    """

    def __init__(self, call: SimpleNamespace) -> None:
        self._call = call
        self.float32 = slow_mkl()
        """True if the kernels compute products in float32 in training, in place of PyTorch."""
        self.bfloat16 = slow_onednn()
        """True if the kernels compute products in bfloat16 in training, in place of PyTorch."""
        self.packs_bfloat16 = multiplies_bfloat16()
        """True if the kernels compute products with packed bfloat16 matrices in sampling."""

    def instructions(self, dtype: torch.dtype) -> str:
        """Return the name of the CPU instructions that the kernels use for products of this dtype, such as AVX-512."""
        room = ctypes.create_string_buffer(64)
        self._call.instructions(int(dtype == torch.bfloat16), room)
        return room.value.decode()

    def of(self, a: Tensor, b: Tensor, out: Tensor | None = None, base: Tensor | None = None) -> Tensor:
        """Compute out [M, N] ← a [M, K] · b [K, N] + base, and return out. Matrices may be transposed views.

        base is [M, N], or [N] for all rows, and may be `out` itself. PyTorch computes the product if it is faster.
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
        """Compute out [M, N] ← x [M, K] · weight [N, K]ᵀ + base, and return out. base is [M, N], or a bias [N].

        With `exact` a row's result has the same bits for a few rows as for many, if the kernels compute products of many rows.
        """
        if len(x) <= _FEW_ROWS and not (exact and self.float32) and _plain(x, weight, out, base):
            self._call.few_rows(*_product(x, weight, weight.shape, out, base))
            return out
        return self.of(x, weight.t(), out, base)

    def pack(self, weight: Tensor) -> PackedMatrix:
        """Copy a matrix that `can_pack` accepts into the layout of `multiply_packed`."""
        weight, (height, width) = weight.contiguous(), weight.shape
        panels = weight.new_empty(-(-height // _WIDEST) * _WIDEST * width)
        words = width * weight.element_size() // 4
        self._call.pack_matrix(panels.data_ptr(), weight.data_ptr(), height, words, torch.get_num_threads())
        return PackedMatrix(panels, (height, width))

    def can_pack(self, weight: Tensor) -> bool:
        """Return True if a matrix [N, K] can be packed: it is float32, or bfloat16 with an even number of columns.

        bfloat16 is excluded if this processor has no instructions for it.
        """
        pairs = self.packs_bfloat16 and weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0
        return pairs or weight.dtype == torch.float32

    def multiply_packed(self, x: Tensor, weight: PackedMatrix, out: Tensor, base: Tensor | None = None) -> Tensor:
        """Compute out [M, N] ← x [M, K] · weight [N, K]ᵀ + base with a packed matrix, and return out.

        It is faster than `linear` for a matrix that is used many times. A row's result does not depend on the other rows. Raises
        `ValueError` if x, out and base do not have the matrix' dtype and contiguous rows.
        """
        kind = weight.panels.dtype
        if not _fits(x, weight.shape, out, base, kind):
            given = ", ".join(f"{tuple(t.shape)} {t.dtype}" for t in (x, out, base) if t is not None)
            raise ValueError(
                f"x, out and base are {given}. A packed matrix [N, K] of the shape {weight.shape} takes x [M, K], out [M, N] and "
                f"base [M, N] or [N], all {kind} with contiguous rows."
            )
        call = self._call.multiply_packed if kind == torch.float32 else self._call.multiply_packed_bf16
        call(*_product(x, weight.panels, weight.shape, out, base))
        return out

    def multiply_codes(self, x: Tensor, matrices: Sequence[CodedMatrix], out: Tensor, base: Tensor | None = None) -> Tensor:
        """Compute out ← x times each quantised matrix [N, K] + base, and return out. The products are side by side in `out`.

        Shapes and dtypes are those of `multiply_packed`, with the sum of the matrices' N. Raises `ValueError` if they differ.
        """
        call = self._call.multiply_codes if x.dtype == torch.float32 else self._call.multiply_codes_bf16
        height, width = sum(m.shape[0] for m in matrices), matrices[0].shape[1]
        if not _fits(x, (height, width), out, base, x.dtype):
            raise ValueError(f"x {tuple(x.shape)}, {x.dtype}, does not fit quantised matrices of the shape [{height}, {width}].")
        at, size = 0, x.element_size()
        for m in matrices:
            onto = None if base is None else base.data_ptr() + at * size
            pointers = (out.data_ptr() + at * size, x.data_ptr(), m.table.data_ptr(), onto)
            call(*pointers, len(x), width, out.stride(0), x.stride(0), _distance(base), torch.get_num_threads())
            at += m.shape[0]
        return out

    def unpack(self, matrix: CodedMatrix, dtype: torch.dtype) -> Tensor:
        """Return the dequantised numbers [N, K] of a matrix."""
        out = torch.empty(matrix.shape, dtype=dtype)
        half = int(dtype == torch.bfloat16)
        self._call.unpack_codes(half, out.data_ptr(), matrix.table.data_ptr(), matrix.shape[1], torch.get_num_threads())
        return out

    def add(self, base: Tensor, x: Tensor, factor: float = 1.0) -> Tensor:
        """Return base + factor · x for tensors [S, E], such as the residual stream and a product that is added to it."""
        out, half = torch.empty_like(x), int(x.dtype == torch.bfloat16)
        pointers = (out.data_ptr(), base.data_ptr(), x.data_ptr())
        self._call.add_rows(half, *pointers, *x.shape, factor, torch.get_num_threads())
        return out


def by_pytorch(a: Tensor, b: Tensor, out: Tensor | None = None, base: Tensor | None = None) -> Tensor:
    """Compute out ← a · b + base by PyTorch, and return out; the arguments are those of `Products.of`."""
    if base is None:
        return torch.mm(a, b, out=out) if out is not None else torch.mm(a, b)
    if base is out:
        return base.addmm_(a, b)
    return torch.addmm(base, a, b, out=out) if out is not None else torch.addmm(base, a, b)


def _readable(x: Tensor, kind: torch.dtype) -> bool:
    """Return True if x is a matrix of this dtype on the CPU with contiguous rows or columns."""
    return x.dtype == kind and x.device.type == "cpu" and x.dim() == 2 and 1 in x.stride()


def _shapes_agree(a: Tensor, b: Tensor, out: Tensor | None, base: Tensor | None) -> bool:
    """Return True if the shapes of a · b, out and base agree."""
    shape = (len(a), b.shape[1])
    return (
        a.shape[1] == len(b)
        and (out is None or (out.shape == shape and _in_rows(out, a.dtype)))
        and (base is None or (base.shape in (shape, shape[1:]) and _in_rows(base, a.dtype)))
    )


def _in_rows(x: Tensor, kind: torch.dtype) -> bool:
    return x.dtype == kind and x.stride(-1) == 1 and x.device.type == "cpu"


def _plain(x: Tensor, weight: Tensor, out: Tensor, base: Tensor | None) -> bool:
    """Return True if the kernel `few_rows` can compute the product: all tensors are float32 with contiguous rows, and fit."""
    return weight.dtype == torch.float32 and weight.is_contiguous() and _fits(x, weight.shape, out, base)


def _fits(x: Tensor, shape: Sequence[int], out: Tensor, base: Tensor | None, kind: torch.dtype = torch.float32) -> bool:
    """Return True if x, out and base fit a matrix of this shape, and have the dtype `kind` and contiguous rows."""
    tensors = (x, out) if base is None else (x, out, base)
    return (
        all(_in_rows(t, kind) for t in tensors)
        and x.shape[1] == shape[1]
        and out.shape == (x.shape[0], shape[0])
        and (base is None or base.shape in (out.shape, out.shape[1:]))
    )


def _product(x: Tensor, stored: Tensor, shape: Sequence[int], out: Tensor, base: Tensor | None) -> tuple[int | None, ...]:
    """Return a product kernel's arguments: pointers, sizes and row strides. `stored` has the matrix, whose shape is `shape`."""
    pointers = (out.data_ptr(), x.data_ptr(), stored.data_ptr(), None if base is None else base.data_ptr())
    return (*pointers, len(x), *shape, out.stride(0), x.stride(0), _distance(base), torch.get_num_threads())


def _distance(base: Tensor | None) -> int:
    """Return the row stride of `base`, which is added to a product; 0 for a bias or None."""
    return base.stride(0) if base is not None and base.dim() == 2 else 0


class LogProbs:
    """The computation of log-probs of given tokens, with the same bits as `Kernels.draw`, from logits that arrive in pieces."""

    def __init__(self, call: SimpleNamespace) -> None:
        self._call = call

    def sum_stretches(self, sums: Tensor, logits: Tensor, temperature: float) -> None:
        """Write the sums over each `STRETCH` neighbouring logits of a row, which `of` needs, to `sums`.

        `logits` is [B, n], and `sums` is [B, ⌈n / STRETCH⌉, 2], float64.
        """
        pointers = (sums.data_ptr(), logits.data_ptr())
        sizes = (*logits.shape, logits.stride(0), sums.stride(0) // 2)
        self._call.sums_of_stretches(
            int(logits.dtype == torch.bfloat16), *pointers, *sizes, 1 / temperature, torch.get_num_threads()
        )

    def of(self, logits: Tensor, sums: Tensor, temperature: float) -> Tensor:
        """Return the log-probs [B] of tokens from their logits [B], and the `sums` [B, …, 2] over their rows of logits."""
        logp = logits.float().clone()
        self._call.log_probs(logp.data_ptr(), sums.data_ptr(), *sums.shape[:2], 1 / temperature, torch.get_num_threads())
        return logp


class TowerKernels:
    """The kernels of the small networks in `psigrad.control.networks.networks`, whose weights are one flat float32 vector.

    K networks (`towers`) with the same layer sizes are computed together.
    """

    def __init__(self, call: SimpleNamespace) -> None:
        self._call = call

    def forward(self, flat: Tensor, x: Tensor, towers: int, sizes: Sequence[int]) -> Tensor:
        """Return the outputs [K, M, out] of all layers for x [M, in], concatenated as one flat tensor.

        A ReLU follows every layer but the last. `sizes` are the widths of the input and of each layer.
        """
        rows = len(x)
        hs = torch.empty(towers * rows * sum(sizes[1:]))
        shape = (ctypes.c_int64 * len(sizes))(*sizes)
        pointers = (hs.data_ptr(), flat.data_ptr(), x.data_ptr(), ctypes.addressof(shape))
        self._call.relu_towers(*pointers, len(sizes) - 1, towers, rows, torch.get_num_threads())
        return hs

    def backward(self, out: Tensor, flat: Tensor, x: Tensor, hs: Tensor, given: Tensor, sizes: Sequence[int]) -> None:
        """Write the gradient of the weights to `out`.

        `given` [K, m, out] is the gradient of the last layer's outputs for the first m rows of x. `hs` is `forward`'s result.
        """
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
        """Take a step of Adam on `weights` in place, with g = scale · gradient.

        Formula: m ← β₁·m + (1 − β₁)·g, v ← β₂·v + (1 − β₂)·g², θ ← θ − rate·m / (√(correction·v) + ε).
        """
        pointers = (weights.data_ptr(), gradient.data_ptr(), moments[0].data_ptr(), moments[1].data_ptr())
        rates = (1 - betas[0], betas[1], 1 - betas[1], rate, correction, 1e-30, epsilon, scale)
        self._call.adam(*pointers, weights.numel(), *rates)
