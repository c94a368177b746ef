"""A decoder's matrices in the layout that decoding reads, packed once and used at every step."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from psigrad.language.models.fused.activation_cache import Version, versions
from psigrad.language.models.native.codes import CodedMatrix
from psigrad.language.models.native.products import PackedMatrix, Products

LIMIT = 1 << 30  # bytes


@dataclass(frozen=True)
class Factors:
    """The matrices that are applied to one input, and what is added to their outputs, which lie side by side."""

    matrices: Sequence[Tensor | CodedMatrix]
    bias: Tensor | None
    low: tuple[Tensor, Tensor] | None
    """A and s·B of all their adapters: A's stacked, B's along the diagonal, with an even number of ranks."""

    @property
    def each(self) -> list[Tensor]:
        """All matrices that are packed: those in codes are as they are."""
        return [x for x in (*self.matrices, *(self.low or ())) if isinstance(x, Tensor)]

    def pack(self, products: Products) -> PackedFactors:
        """The same, packed."""
        low = None if self.low is None else (products.pack(self.low[0]), products.pack(self.low[1]))
        coded = [x for x in self.matrices if isinstance(x, CodedMatrix)]
        if coded:  # of one group all are, having the same input
            return PackedFactors(None, self.bias, low, coded, torch.cat([x.table for x in coded]))
        plain = [x for x in self.matrices if isinstance(x, Tensor)]
        return PackedFactors(products.pack(torch.cat(plain) if len(plain) > 1 else plain[0]), self.bias, low)


@dataclass(frozen=True)
class PackedFactors:
    """`Factors` whose matrices are packed, or in codes."""

    matrix: PackedMatrix | None
    bias: Tensor | None
    low: tuple[PackedMatrix, PackedMatrix] | None
    coded: Sequence[CodedMatrix] = ()
    table: Tensor | None = None
    """Of the matrices in codes, as the kernels take it."""

    @property
    def addresses(self) -> tuple[int, int]:
        """Of the packed matrix, or of the table of those in codes."""
        return (0 if self.matrix is None else self.matrix.panels.data_ptr(), 0 if self.table is None else self.table.data_ptr())

    @property
    def rank(self) -> int:
        """Of the adapters together."""
        return 0 if self.low is None else self.low[0].shape[0]

    def multiply(self, x: Tensor, out: Tensor, residual: Tensor | None, products: Products) -> Tensor:
        """out ← x through the matrices, plus the residual stream, the bias and what the adapters add."""
        base = self.bias if residual is None else residual
        if self.matrix is None:
            products.multiply_codes(x, self.coded, out, base)
        else:
            products.multiply_packed(x, self.matrix, out, base)
        if residual is not None and self.bias is not None:
            out += self.bias
        if self.low is not None:
            low = products.multiply_packed(x, self.low[0], x.new_empty(len(x), self.rank))
            products.multiply_packed(low, self.low[1], out, out)
        return out


class PackedWeights:
    """Packed matrices by layer, up to `limit` bytes. A layer is packed again whenever its values have changed."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.bytes, self.limit = 0, limit
        self._layers: dict[Hashable, tuple[list[Version], list[PackedFactors]]] = {}
        self._refused: set[Hashable] = set()
        self._table: tuple[Hashable, list[Version], Tensor] | None = None

    def of(
        self, key: Hashable, weights: Sequence[Tensor], make: Callable[[], Sequence[Factors]], products: Products
    ) -> list[PackedFactors] | None:
        """The packed matrices of layer `key`, of what `make` gives.

        None if the memory limit is reached, or if a matrix can't be packed. `weights` are the stored tensors that the matrices
        are, or were cast from. It pays for a single sequence too: through all layers in one call it took 0.8 of the time.
        """
        have = self._layers.get(key)
        if have is not None and have[0] == versions(weights):
            return have[1]
        if key in self._refused:
            return None
        made = make()
        each = [x for factors in made for x in factors.each]
        more = sum(x.numel() * x.element_size() for x in each) if have is None else 0
        if self.bytes + more > self.limit or not all(products.can_pack(x) for x in each):
            self._refused.add(key)
            return None
        self.bytes += more
        self._layers[key] = (versions(weights), [factors.pack(products) for factors in made])
        return self._layers[key][1]

    def table(self, key: Hashable, now: list[Version], make: Callable[[], Tensor | None]) -> Tensor | None:
        """The addresses of all layers' weights. `make` computes them again when `key` or the versions `now` are not those of last
        time.
        """
        if self._table is None or self._table[:2] != (key, now):
            made = make()
            self._table = None if made is None else (key, now, made)
        return None if self._table is None else self._table[2]
