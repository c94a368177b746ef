"""A decoder's matrices in the layout that decoding reads, packed once and used at every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from psigrad.language.models.fused.activation_cache import Version, versions
from psigrad.language.models.native.products import PackedMatrix, Products

# With fewer rows per step than this, packing a matrix costs more than it saves.
MIN_ROWS_TO_PACK = 8
LIMIT = 1 << 30  # bytes


class PackedWeights:
    """Packed matrices by layer, up to `limit` bytes. A matrix is packed again whenever its values have changed."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.bytes, self.limit = 0, limit
        self._layers: dict[int, tuple[list[Version], list[PackedMatrix]]] = {}
        self._table: tuple[list[Version], Tensor] | None = None

    def of(
        self, index: int, rows: int, weights: Sequence[Tensor], groups: Sequence[Sequence[Tensor]], products: Products
    ) -> list[PackedMatrix] | None:
        """The packed matrices of layer `index`: one for each group, whose matrices are stacked.

        None if the memory limit is reached, if a matrix can't be packed, or if there are fewer than `MIN_ROWS_TO_PACK` `rows` and
        nothing is packed yet. `weights` are the stored tensors that the matrices are, or were cast from.
        """
        have = self._layers.get(index)
        if have is not None and have[0] == versions(weights):
            return have[1]
        if rows < MIN_ROWS_TO_PACK:
            return None
        if not all(products.can_pack(x) for group in groups for x in group):
            return None
        if have is None:
            more = sum(x.numel() * x.element_size() for group in groups for x in group)
            if self.bytes + more > self.limit:
                return None
            self.bytes += more
        packed = [products.pack(torch.cat(tuple(group)) if len(group) > 1 else group[0]) for group in groups]
        self._layers[index] = (versions(weights), packed)
        return packed

    def table(self, now: list[Version], make: Callable[[], Tensor | None]) -> Tensor | None:
        """The addresses of all layers' weights. `make` computes them again when the versions `now` are not those of last time."""
        if self._table is None or self._table[0] != now:
            made = make()
            self._table = None if made is None else (now, made)
        return None if self._table is None else self._table[1]
