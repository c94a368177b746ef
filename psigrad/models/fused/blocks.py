"""What a decoder's layers make of many rows, a layer's parts one after another: where they are for a kernel that goes through all
layers is an addition, and the memory is taken and given back layer by layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from psigrad.native.kernels import Kernels, kernels

# Of each layer its output [rows, E] and what its backward pass needs [rows, …].
Layers = list[tuple[Tensor, ...]]
_ALIGNED = 64  # bytes


@dataclass(frozen=True)
class Parts:
    """What each of `layers` makes of a row: tensors of `kinds`, their width and type."""

    layers: int
    kinds: tuple[tuple[int, torch.dtype], ...]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of a row of each part."""
        return tuple(width * kind.itemsize for width, kind in self.kinds)

    @property
    def row(self) -> int:
        """Bytes of a row in all layers."""
        return self.layers * sum(self.sizes)


class Block:
    """Room for `rows` rows of every part of every layer."""

    def __init__(self, parts: Parts, rows: int) -> None:
        self.parts, self.rows = parts, rows
        whole = [math.ceil(rows * size / _ALIGNED) * _ALIGNED for size in parts.sizes]
        # a piece for each layer: as one it would be so large that it fits into no hole that others left
        self._memory = [torch.empty(sum(whole), dtype=torch.uint8) for _ in range(parts.layers)]
        self._starts = np.cumsum([0, *whole[:-1]])
        self._places = self._starts + np.array([[x.data_ptr()] for x in self._memory])
        self._sizes = np.array(parts.sizes)

    def addresses(self, start: int = 0) -> Tensor:
        """[layers, parts] of their row `start`, int64."""
        return torch.from_numpy(self._places + self._sizes * start)

    def part(self, layer: int, index: int, start: int = 0, count: int | None = None) -> Tensor:
        """A part's rows [count, width] from `start` on; all that follow where no count is given."""
        width, kind = self.parts.kinds[index]
        count, size = self.rows - start if count is None else count, self.parts.sizes[index]
        first = int(self._starts[index]) + start * size
        return self._memory[layer][first : first + count * size].view(kind).view(count, width)

    def layers(self) -> Layers:
        """All of it."""
        return [tuple(self.part(i, j) for j in range(len(self.parts.kinds))) for i in range(self.parts.layers)]

    def write(self, start: int, layers: Layers, first: int, count: int) -> None:
        """Rows from `start` on ← `count` rows of `layers` from `first` on. Raises `ValueError` where they are other parts."""
        given = [x for layer in layers for x in layer]
        kinds = [kind for _ in range(self.parts.layers) for kind in self.parts.kinds]
        whole = all(x.is_contiguous() and len(x) >= first + count for x in given)
        if not whole or [(x.shape[1], x.dtype) for x in given] != kinds:
            raise ValueError(
                f"Rows {first} to {first + count} of tensors {[(tuple(x.shape), x.dtype, x.stride()) for x in given]} were to be "
                f"written to {kinds}; they must be alike, and contiguous."
            )
        sizes = self.parts.sizes * self.parts.layers
        there = [x.data_ptr() + first * size for x, size in zip(given, sizes, strict=True)]
        native().copy(self.addresses(start).flatten().tolist(), there, [count * size for size in sizes])


def native() -> Kernels:
    """The kernels, without which there are no blocks: only the fused decoder makes them."""
    found = kernels()
    assert not isinstance(found, str), found
    return found
