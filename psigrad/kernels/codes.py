"""Matrices that are quantised to codes of 4 or 8 bits, in the memory layout that the kernels read."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

WIDE = 64
"""The number of rows whose codes are interleaved in memory."""
Kind = Literal["nf4", "int8", "gguf"]
# The quantiles of a normal distribution between -1 and 1, with 0 (Dettmers et al. 2023, QLoRA, arXiv:2305.14314, appendix E).
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
BLOCKS = {"nf4": 64, "int8": 32}
"""The number of elements of a row that share a scale."""


@dataclass(frozen=True)
class CodedMatrix:
    """A quantised matrix [N, K], with N padded to a multiple of 64. A number is level · scale + offset.

    - `codes` of 4 bits are uint8 [N / 64, K / 2, 64]: a byte has two neighbours of a row, the first in the low half. Codes of 8
      bits are [N / 64, K / 2, 64, 2].
    - `scales` and `offsets` (or None) are float32 [N / 64, K / block, 64], one for each `block` elements of a row.
    - `levels`, float32 [16], are the levels of 4-bit codes. The level of an 8-bit code is the code as a signed integer.
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None
    levels: Tensor
    shape: tuple[int, int]
    block: int

    @property
    def bits(self) -> int:
        """The number of bits of a code."""
        return 4 if self.codes.dim() == 3 else 8

    @functools.cached_property
    def table(self) -> Tensor:
        """The addresses and sizes of the matrix as int64, in the order in which the kernels read them."""
        tensors = (self.codes, self.scales, self.offsets, self.levels)
        pointers = [0 if x is None else x.data_ptr() for x in tensors]
        return torch.tensor([*pointers, self.shape[0], self.block, self.bits])

    def by_torch(self, dtype: torch.dtype) -> Tensor:
        """Return the dequantised numbers [N, K], computed by PyTorch."""
        return decode(self.codes, self.scales, self.offsets, self.levels, dtype)[: self.shape[0]]


def decode(codes: Tensor, scales: Tensor, offsets: Tensor | None, levels: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the dequantised numbers [64 · ⌈N / 64⌉, K] of a `CodedMatrix`. torch.compile generates one kernel for it."""
    if codes.dim() == 3:
        halves = torch.arange(0, 8, 4, dtype=torch.uint8, device=codes.device)
        x = levels[(codes[..., None] >> halves & 15).int()]
    else:
        x = codes.view(torch.int8).float()
    pairs = codes.shape[1]
    blocks = torch.arange(pairs, device=codes.device) // (pairs // scales.shape[1])
    x = x * scales[:, blocks, :, None]
    if offsets is not None:
        x = x + offsets[:, blocks, :, None]
    return x.to(dtype).permute(0, 2, 1, 3).reshape(-1, 2 * pairs)


def lay_out(codes: Tensor, scales: Tensor, offsets: Tensor | None, levels: Sequence[float], bits: int) -> CodedMatrix:
    """Return a `CodedMatrix` in the kernels' layout, from codes [N, K] and scales and offsets [N, K / block].

    Codes of 4 bits are uint8 below 16, those of 8 bits int8.
    """
    rows, width = codes.shape
    short = -rows % WIDE

    def padded(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x, (0, 0, 0, short)).view(-1, WIDE, x.shape[1])

    pairs = padded(codes.view(torch.uint8)).unflatten(2, (-1, 2)).permute(0, 2, 1, 3)
    made = pairs[..., 0] | pairs[..., 1] << 4 if bits == 4 else pairs
    beside = [None if x is None else padded(x.float()).permute(0, 2, 1).contiguous() for x in (scales, offsets)]
    assert beside[0] is not None
    block, table = width // scales.shape[1], torch.tensor(levels or [0.0] * 16, dtype=torch.float32)
    return CodedMatrix(made.contiguous(), beside[0], beside[1], table, (rows, width), block)


def can_code(weight: Tensor, kind: Kind) -> bool:
    """Return True if a matrix [N, K] can be quantised to `kind`, for which K must be a multiple of the block size."""
    return weight.dim() == 2 and kind in BLOCKS and weight.shape[1] % BLOCKS[kind] == 0


@torch.no_grad()
def code(weight: Tensor, kind: Kind) -> CodedMatrix:
    """Quantise a matrix. Each block of a row is scaled by its largest absolute number.

    nf4 rounds to the nearest of 16 levels (in blocks of 64, as bitsandbytes). int8 rounds to the nearest of 255 evenly spaced
    levels (in blocks of 32, as GGUF's Q8_0).
    """
    block, pieces = BLOCKS[kind], []
    middles = torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(NF4)])
    for rows in weight.detach().split(max(1, (1 << 20) // weight.shape[1])):
        x = rows.float().view(len(rows), -1, block)
        scales = x.abs().amax(2) / (1 if kind == "nf4" else 127)
        shares = (x / scales[..., None]).nan_to_num_(0.0)
        if kind == "nf4":  # torch.bucketize takes twice as long
            found = torch.zeros(shares.shape, dtype=torch.uint8, device=weight.device)
            for middle in middles:
                found += shares > middle
        else:
            found = shares.round().to(torch.int8)
        pieces.append((found.view(len(rows), -1), scales))
    codes, scales = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    return lay_out(codes, scales, None, NF4 if kind == "nf4" else (), 4 if kind == "nf4" else 8)
