"""A decoder's matrices as decoding reads them, step after step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from psigrad.models.fused.activation_cache import Version, versions
from psigrad.native.products import Products, TurnedMatrix

# Sequences from which on a turned matrix is met sooner than the matrix itself, by so much that turning it pays.
WORTH_TURNING = 8
LIMIT = 1 << 30  # bytes


class PackedWeights:
    """Matrices of layers, by index, each turned for `Products.through` once for every value it takes, up to `limit` bytes."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.bytes, self.limit = 0, limit
        self._layers: dict[int, tuple[list[Version], list[TurnedMatrix]]] = {}
        self._table: tuple[list[Version], Tensor] | None = None

    def of(
        self, index: int, rows: int, weights: Sequence[Tensor], groups: Sequence[Sequence[Tensor]], products: Products
    ) -> list[TurnedMatrix] | None:
        """Of layer `index` the matrices of each group as one, one under the other; None where there is no room for them, or where
        `rows` are so few that they are better met as they are. `weights` are those that they are, or were cast from.
        """
        have = self._layers.get(index)
        if have is not None and have[0] == versions(weights):
            return have[1]
        if rows < WORTH_TURNING:
            return None
        if not all(products.can_turn(x) for group in groups for x in group):
            return None
        if have is None:
            more = sum(x.numel() * x.element_size() for group in groups for x in group)
            if self.bytes + more > self.limit:
                return None
            self.bytes += more
        turned = [products.turned(torch.cat(tuple(group)) if len(group) > 1 else group[0]) for group in groups]
        self._layers[index] = (versions(weights), turned)
        return turned

    def table(self, now: list[Version], make: Callable[[], Tensor | None]) -> Tensor | None:
        """Where all layers' weights stand, worked out by `make` whenever they are not as they were: `now` are their versions."""
        if self._table is None or self._table[0] != now:
            made = make()
            self._table = None if made is None else (now, made)
        return None if self._table is None else self._table[1]
