"""Memory for the activations of all layers, row by row.

A kernel that runs all layers finds each tensor's row by one addition. Memory is allocated and freed one layer at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from psigrad.language.models.native.kernels import Kernels, kernels

# For each layer, its output [rows, E] and what its backward pass needs [rows, …].
Layers = list[tuple[Tensor, ...]]
_ALIGNED = 64  # bytes


@dataclass(frozen=True)
class RowLayout:
    """The tensors that each of `layers` layers computes for a row: `kinds` gives the width and type of each."""

    layers: int
    kinds: tuple[tuple[int, torch.dtype], ...]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of a row of each tensor."""
        return tuple(width * kind.itemsize for width, kind in self.kinds)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in all layers."""
        return self.layers * sum(self.sizes)


class Block:
    """Memory for `rows` rows of every tensor of every layer."""

    def __init__(self, parts: RowLayout, rows: int) -> None:
        self.parts, self.rows = parts, rows
        whole = [math.ceil(rows * size / _ALIGNED) * _ALIGNED for size in parts.sizes]
        # one allocation per layer: a single one would be too large for any free hole in the heap
        self._memory = [torch.empty(sum(whole), dtype=torch.uint8) for _ in range(parts.layers)]
        self._starts = np.cumsum([0, *whole[:-1]])
        self._places = self._starts + np.array([[x.data_ptr()] for x in self._memory])
        self._sizes = np.array(parts.sizes)

    def addresses(self, start: int = 0) -> Tensor:
        """The addresses [layers, tensors] of row `start`, int64."""
        return torch.from_numpy(self._places + self._sizes * start)

    def part(self, layer: int, index: int, start: int = 0, count: int | None = None) -> Tensor:
        """Rows [count, width] of one tensor from `start` on; all that follow if no count is given."""
        width, kind = self.parts.kinds[index]
        count, size = self.rows - start if count is None else count, self.parts.sizes[index]
        first = int(self._starts[index]) + start * size
        return self._memory[layer][first : first + count * size].view(kind).view(count, width)

    def layers(self) -> Layers:
        """All tensors of all layers."""
        return [tuple(self.part(i, j) for j in range(len(self.parts.kinds))) for i in range(self.parts.layers)]

    def write(self, start: int, layers: Layers, first: int, count: int) -> None:
        """Copy `count` rows of `layers`, from `first` on, to the rows from `start` on. Raises `ValueError` if their widths or
        types differ from this block's.
        """
        given = [x for layer in layers for x in layer]
        kinds = [kind for _ in range(self.parts.layers) for kind in self.parts.kinds]
        whole = all(x.is_contiguous() and len(x) >= first + count for x in given)
        if not whole or [(x.shape[1], x.dtype) for x in given] != kinds:
            raise ValueError(
                f"Rows {first} to {first + count} of tensors {[(tuple(x.shape), x.dtype, x.stride()) for x in given]} can't be "
                f"written to {kinds}: widths and types must be equal, and the tensors contiguous."
            )
        sizes = self.parts.sizes * self.parts.layers
        there = [x.data_ptr() + first * size for x, size in zip(given, sizes, strict=True)]
        native().copy(self.addresses(start).flatten().tolist(), there, [count * size for size in sizes])


def native() -> Kernels:
    """The kernels, which exist: only the fused decoder makes blocks."""
    found = kernels()
    assert not isinstance(found, str), found
    return found
