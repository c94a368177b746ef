"""Caches that are valid while no weight changes: the activations of sampled tokens, and packed weight matrices.

In on-policy training, the sampler and the trainer run the same tokens through the same weights. With the sampler's activations
in a cache, training skips its forward pass, a third of the computation.

Packed matrices have the memory layout that decoding kernels read.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from psigrad.kernels.codes import CodedMatrix
from psigrad.kernels.kernels import Heads, Kernels, kernels, table_sizes
from psigrad.kernels.products import PackedMatrix, Products

Ids = Sequence[int]
T = TypeVar("T")
Version = tuple[int, int]
# The index in `Layer.kinds` of the first tensor that is computed after attention, and so only for output rows.
FIRST_PART_AFTER_ATTENTION = 4
# The marker that completions have log-probs of several heads or temperatures, so that they cannot be reused.
_MIXED = ((0, 0), float("nan"))
# The number of rows of one block of memory. Smaller blocks would fragment the heap between sampling's allocations, which wasted a
# gigabyte with a large vocabulary. With 1024 rows, the partly empty last block wastes as much.
SLAB = 256
# For each layer, its output [rows, E] and the tensors of its backward pass [rows, …].
Layers = list[tuple[Tensor, ...]]
_ALIGNED = 64  # bytes
# The limits of the packed matrices of all layers, and of the packed head, in bytes.
LIMIT, HEAD_LIMIT = 1 << 30, 1 << 29
# The request at which the head is packed. Packing takes as long as this many products with few rows, and makes later products
# three times as fast.
_PAYS = 4


@dataclass(frozen=True)
class RowLayout:
    """The layout of a cache row: for each layer, the (width, dtype) of each cached tensor."""

    kinds: tuple[tuple[tuple[int, torch.dtype], ...], ...]

    @cached_property
    def sizes(self) -> np.ndarray:
        """The number of bytes in a row of each tensor, [layers, tensors]; 0 for a tensor that the layer does not have."""
        sizes = [[width * kind.itemsize for width, kind in layer] for layer in self.kinds]
        return np.array([row + [0] * (max(map(len, sizes)) - len(row)) for row in sizes])

    @property
    def row_bytes(self) -> int:
        """The total number of bytes in a row, over all tensors and layers."""
        return int(self.sizes.sum())


class Block:
    """A block of memory that stores `rows` rows of every tensor in a `RowLayout`."""

    def __init__(self, layout: RowLayout, rows: int) -> None:
        self.layout, self.rows = layout, rows
        whole = -(-rows * layout.sizes // _ALIGNED) * _ALIGNED
        # One allocation per layer. A single large one would not fit into any free part of the heap.
        self._memory = [torch.empty(int(size), dtype=torch.uint8) for size in whole.sum(1)]
        self._starts = whole.cumsum(1) - whole
        self._places = self._starts + np.array([[x.data_ptr()] for x in self._memory])

    def addresses(self, start: int = 0) -> Tensor:
        """Return the memory addresses of row `start` in all tensors, int64 [layers, tensors]."""
        return torch.from_numpy(self._places + self.layout.sizes * start)

    def part(self, layer: int, index: int, start: int = 0, count: int | None = None) -> Tensor:
        """Return `count` rows of tensor `index` of layer `layer`, from row `start` on; all rows from there if `count` is None."""
        width, kind = self.layout.kinds[layer][index]
        count, size = self.rows - start if count is None else count, int(self.layout.sizes[layer, index])
        first = int(self._starts[layer, index]) + start * size
        return self._memory[layer][first : first + count * size].view(kind).view(count, width)

    def layers(self) -> Layers:
        """Return all tensors of all layers."""
        return [tuple(self.part(i, j) for j in range(len(layer))) for i, layer in enumerate(self.layout.kinds)]

    def write(self, start: int, layers: Layers, first: int, count: int) -> None:
        """Copy rows `first` to `first + count` of each tensor in `layers` into this block, starting at its row `start`."""
        given = [x for layer in layers for x in layer]
        kinds = [kind for layer in self.layout.kinds for kind in layer]
        whole = all(x.is_contiguous() and len(x) >= first + count for x in given)
        if not whole or [(x.shape[1], x.dtype) for x in given] != kinds:
            raise ValueError(
                f"Rows {first} to {first + count} of tensors {[(tuple(x.shape), x.dtype, x.stride()) for x in given]} can't be "
                f"written to a block with (width, dtype) {kinds}. Pass contiguous tensors with these rows, widths and dtypes."
            )
        known = np.array([[j < len(layer) for j in range(self.layout.sizes.shape[1])] for layer in self.layout.kinds])
        sizes = self.layout.sizes[known].tolist()
        there = [x.data_ptr() + first * size for x, size in zip(given, sizes, strict=True)]
        native().copy(self.addresses(start)[torch.from_numpy(known)].tolist(), there, [count * size for size in sizes])


def native() -> Kernels:
    """Return the C++ kernels. They are available here, since only the fused decoder, which needs them, fills caches."""
    found = kernels()
    assert not isinstance(found, str), found
    return found


@dataclass(frozen=True)
class CachedLogProbs:
    """The cached log-probs [M] of tokens, with the temperature and the version of the LM head that they were computed with."""

    logps: Tensor
    temperature: float
    version: Version

    def for_head(self, head: Tensor, temperature: float) -> Tensor | None:
        """Return `logps` if they were computed with the current weights of `head` at this `temperature`; otherwise None."""
        return self.logps if (self.version, self.temperature) == (version_of(head), temperature) else None


@dataclass(frozen=True)
class CachedCompletion:
    """A sampled completion: `ids` [T], `logps` [T], row indices `rows` [T - 1]. The last token has no row: it was never read."""

    ids: tuple[int, ...]
    rows: np.ndarray
    logps: np.ndarray


class ActivationCache:
    """A cache of the activations of sampled tokens, one row per token, up to `limit` bytes. Its memory blocks are called slabs.

    Once the limit is exceeded or a weight changes, it is emptied for good.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.rows = self.bytes = 0
        self.slabs: list[Block] = []
        self._taken: list[int] = []  # rows of each slab
        self._prompts: dict[tuple[int, ...], np.ndarray] = {}
        self._completions: dict[tuple[tuple[int, ...], tuple[int, ...]], CachedCompletion] = {}
        self._versions: list[Version] = []
        self._head = _MIXED

    @property
    def open(self) -> bool:
        """True while the cache stores rows, that is, until its limit is exceeded or a weight changes."""
        return self.bytes <= self.limit

    def next_row(self, count: int) -> int:
        """Return the index of the first of `count` new rows. They go into a slab with room for all, or else a new slab."""
        for slab, taken in enumerate(self._taken):
            if taken + count <= SLAB:
                return slab * SLAB + taken
        return len(self._taken) * SLAB

    def reserve(self, count: int, parts: RowLayout) -> tuple[Block, int] | None:
        """Reserve memory for `count` rows. Return (slab, first row in the slab); None if `count` exceeds `SLAB`.

        The caller writes the rows there and then calls `add`.
        """
        if count > SLAB:
            return None
        slab, place = divmod(self.next_row(count), SLAB)
        return self._slab(slab, parts), place

    def add(self, count: int, parts: RowLayout, now: list[Version], layers: Layers | None = None) -> None:
        """Add `count` rows, copied from `layers`. `now` are the versions of the weights that were used.

        If `layers` is None, the rows are already in the memory that `reserve` returned.
        """
        self._versions = self._versions or now
        self.bytes += count * parts.row_bytes
        if not self.open or now != self._versions:
            self.clear()
            return
        first, done = self.next_row(count), 0
        while done < count:
            slab, place = divmod(first + done, SLAB)
            block, fits = self._slab(slab, parts), min(count - done, SLAB - place)
            if layers is not None:
                block.write(place, layers, done, fits)
            self._taken[slab] = place + fits
            done += fits
        self.rows += count

    def _slab(self, index: int, parts: RowLayout) -> Block:
        if index == len(self.slabs):
            self.slabs.append(Block(parts, SLAB))
            self._taken.append(0)
        return self.slabs[index]

    def register(self, prompt: tuple[int, ...], prompt_rows: np.ndarray, completions: Iterable[CachedCompletion]) -> None:
        """Store completions of `prompt`, so that `find` can return them. `prompt_rows` [P] are the prompt's cache row indices."""
        if self.slabs:
            self._prompts[prompt] = prompt_rows
            self._completions |= {(prompt, written.ids): written for written in completions}

    def set_head(self, head: Tensor, temperature: float) -> None:
        """Set the LM head and the temperature with which the log-probs in later `register` calls were computed."""
        head_now = (version_of(head), temperature)
        self._head = head_now if self._head == head_now or not self._completions else _MIXED

    def clear(self) -> None:
        """Free all rows, and store none from now on."""
        self.limit = -1.0  # since callers still hold indices of freed rows, which new rows would reuse
        self.slabs, self._taken, self._prompts, self._completions = [], [], {}, {}

    def find(self, prompts: Sequence[Ids], completions: Sequence[Sequence[Ids]], weights: Iterable[Tensor]) -> CacheHit | None:
        """Return the cached activations of packed prompts and completions; None if some are missing or a weight has changed."""
        if not self.slabs:
            return None
        if versions(weights) != self._versions:
            self.clear()
            return None
        keys = [(tuple(p), tuple(ids)) for p, group in zip(prompts, completions, strict=True) for ids in group if len(ids)]
        before, written = [self._prompts.get(tuple(p)) for p in prompts], [self._completions.get(key) for key in keys]
        rows = [x for x in before if x is not None] + [x.rows for x in written if x is not None]
        if not rows or len(rows) < len(before) + len(written):
            return None
        logps = np.concatenate([_NOTHING, *(x.logps for x in written if x is not None)])
        version, temperature = self._head
        return CacheHit(
            self.slabs, torch.from_numpy(np.concatenate(rows)), CachedLogProbs(torch.from_numpy(logps), temperature, version)
        )


_NOTHING = np.zeros(0, dtype=np.float32)


class CacheHit:
    """The cached activations and log-probs of one packed forward pass, in the order of its tokens."""

    def __init__(self, slabs: list[Block], rows: Tensor, logps: CachedLogProbs) -> None:
        self.logps = logps
        self.last = len(slabs[0].layout.kinds) - 1
        self._rows, self._parts = rows, slabs[0].layout
        self._slabs, self._where = slabs, torch.stack([slab.addresses() for slab in slabs], dim=2)

    def output(self, index: int, target_rows: Tensor | None = None, part: int = 0) -> Tensor:
        """Return a tensor of layer `index` at the tokens `target_rows` [W]; None: all tokens.

        `part` is the tensor's index in `Layer.kinds`; 0: the layer's output.
        """
        return self._gather([(index, part, self._of(target_rows))])[0]

    def saved_for_backward(self, index: int, target_rows: Tensor | None = None) -> tuple[Tensor | None, list[Tensor]]:
        """Return (the input of layer `index`, the tensors that `Layer.forward` stored).

        The first layer's input is None. Tensors computed after attention have only the rows `target_rows`.
        """
        some, parts = self._of(target_rows), range(1, len(self._parts.kinds[index]))
        asked = [(index, part, some if part >= FIRST_PART_AFTER_ATTENTION else self._rows) for part in parts]
        if index == 0:
            return None, self._gather(asked)
        x, *own = self._gather([(index - 1, 0, self._rows), *asked])
        return x, own

    def _gather(self, target_rows: list[tuple[int, int, Tensor]]) -> list[Tensor]:
        """Return one tensor of cached rows for each (layer, tensor's index in `Layer.kinds`, row indices) in `target_rows`."""
        kinds = [self._parts.kinds[layer][part] for layer, part, _ in target_rows]
        out = [torch.empty(len(rows), width, dtype=kind) for (*_, rows), (width, kind) in zip(target_rows, kinds, strict=True)]
        layers, parts = zip(*((layer, part) for layer, part, _ in target_rows), strict=True)
        native().gather(out, self._where[layers, parts], [rows for *_, rows in target_rows], SLAB)
        return out

    def _of(self, target_rows: Tensor | None) -> Tensor:
        return self._rows if target_rows is None else self._rows.index_select(0, target_rows)


def versions(weights: Iterable[Tensor]) -> list[Version]:
    """Return the versions of these weights. Two results are equal if and only if no weight has changed in between."""
    return [version_of(p) for p in weights]


def version_of(weight: Tensor) -> Version:
    """Return a weight's address and PyTorch's version counter, which an in-place change (an optimiser's step) increments."""
    return weight.data_ptr(), weight._version


@dataclass(frozen=True)
class Projection:
    """The matrices that multiply the same input, with their biases and LoRA matrices. Their outputs are concatenated."""

    matrices: Sequence[Tensor | CodedMatrix]
    bias: Tensor | None
    low: tuple[Tensor, Tensor] | None
    """The LoRA matrices A and s·B of all matrices: A stacked, s·B as a block diagonal, each padded to an even rank."""

    @property
    def each(self) -> list[Tensor]:
        """The tensors that `pack` must pack: the matrices that are not quantised, and the LoRA matrices."""
        return [x for x in (*self.matrices, *(self.low or ())) if isinstance(x, Tensor)]

    def pack(self, products: Products) -> PackedProjection:
        """Pack the matrices with `products`, for the decoding kernels. Quantised matrices already have the kernels' layout."""
        low = None if self.low is None else (products.pack(self.low[0]), products.pack(self.low[1]))
        coded = [x for x in self.matrices if isinstance(x, CodedMatrix)]
        if coded:  # a group's matrices have the same input, so all of them are coded
            return PackedProjection(None, self.bias, low, coded, torch.cat([x.table for x in coded]))
        plain = [x for x in self.matrices if isinstance(x, Tensor)]
        return PackedProjection(products.pack(torch.cat(plain) if len(plain) > 1 else plain[0]), self.bias, low)


@dataclass(frozen=True)
class PackedProjection:
    """A `Projection` in the form that the decoding kernels read: its weights are packed (`matrix`) or quantised (`coded`)."""

    matrix: PackedMatrix | None
    bias: Tensor | None
    low: tuple[PackedMatrix, PackedMatrix] | None
    coded: Sequence[CodedMatrix] = ()
    table: Tensor | None = None
    """The addresses and sizes of the quantised matrices (`CodedMatrix.table`), one after the other."""

    @property
    def addresses(self) -> tuple[int, int]:
        """(address of the packed matrix, address of the table of quantised matrices); 0 for the one that the projection lacks."""
        return (0 if self.matrix is None else self.matrix.panels.data_ptr(), 0 if self.table is None else self.table.data_ptr())

    @property
    def rank(self) -> int:
        """The sum of the ranks of the matrices' LoRA adapters, each rounded up to an even number."""
        return 0 if self.low is None else self.low[0].shape[0]

    def multiply(self, x: Tensor, out: Tensor, residual: Tensor | None, products: Products) -> Tensor:
        """Write the concatenated products of x and all matrices, plus `residual`, biases and LoRA terms, to `out`; return it."""
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
    """A cache of packed weight matrices by layer, up to `limit` bytes. A layer is packed again after its weights change.

    `may_dequantise` allows it to dequantise quantised matrices before packing them; see `dequantises`.
    """

    def __init__(self, limit: int = LIMIT, may_dequantise: bool = True) -> None:
        self.bytes, self.limit, self.may_dequantise = 0, limit, may_dequantise
        self._layers: dict[Hashable, tuple[list[Version], list[PackedProjection]]] = {}
        self._refused: set[Hashable] = set()
        self._table: tuple[Hashable, list[Version], Any] | None = None
        self._head: tuple[Version, int, PackedMatrix | None] = ((0, 0), 0, None)

    @cached_property
    def dequantises(self) -> bool:
        """True if quantised matrices are dequantised before packing. Sampling is then 1.5 times as fast, with equal results.

        This requires `may_dequantise`, and free memory of at least four times `limit`.
        """
        from psigrad.language.models.free_memory import available_memory  # imported here: few models are quantised

        return self.may_dequantise and available_memory() >= 4 * self.limit

    def of(
        self, key: Hashable, weights: Sequence[Tensor], make: Callable[[], Sequence[Projection]], products: Products
    ) -> list[PackedProjection] | None:
        """Return the packed matrices of the layer `key`; None at the memory limit or if a matrix can't be packed.

        On the first call, or if `weights` have changed, the result of `make` is packed.
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

    def head(self, weight: Tensor, products: Products) -> PackedMatrix | None:
        """Return the packed LM head; None if it cannot be packed, or if it has been used too few times to be worth packing."""
        asked_of, asked, packed = self._head
        asked = 1 + (asked if asked_of == version_of(weight) else 0)
        packed = None if asked == 1 else packed
        # PyTorch multiplies float32 faster, unless `products.float32`.
        own = products.can_pack(weight) and (products.float32 or weight.dtype != torch.float32)
        if asked == _PAYS and own and weight.nbytes <= HEAD_LIMIT:
            packed = products.pack(weight)
        self._head = (version_of(weight), asked, packed)
        return packed

    def table(self, key: Hashable, now: list[Version], make: Callable[[], T | None]) -> T | None:
        """Return the last result of `make` while `key` and the weight versions `now` stay the same. None is never cached."""
        if self._table is None or self._table[:2] != (key, now):
            made = make()
            self._table = None if made is None else (key, now, made)
        return None if self._table is None else self._table[2]


class CachedPrompt:
    """The keys and values of a prompt in float32: for each layer first all keys, then all values."""

    def __init__(self, length: int, heads: Sequence[Heads]) -> None:
        sizes = np.array([table_sizes(length, one) for one in heads])
        ends = sizes.cumsum().reshape(sizes.shape)
        self.length = length
        self.tables = torch.empty(int(ends[-1, -1]))
        self.addresses = self.tables.data_ptr() + (ends - sizes) * self.tables.element_size()
        """[layers, 2] the addresses of each layer's keys and values."""


def prompt_addresses(prompts: list[CachedPrompt], layers: int) -> Tensor:
    """Return the memory addresses [layers, 2, G] of the keys and values of G prompts."""
    found = np.array([p.addresses for p in prompts], dtype=np.int64).reshape(-1, layers, 2)
    return torch.from_numpy(found.transpose(1, 2, 0).copy())
