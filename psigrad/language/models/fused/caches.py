"""Data that is reused between passes while no weight changes: activations of sampling, and packed matrices.

Activations serve the backward pass over the same tokens. A decoder's matrices are packed once in the layout of decoding and used
at every step.

On policy, the sampler runs the same tokens through the same weights as training. It has already computed the activations that the
backward pass needs, and the log-probs of the tokens that it drew. With both in the cache, training skips its forward pass, which
is a third of its arithmetic. Activations depend only on tokens and weights. They are looked up by token ids, and the cache
empties itself once a weight has changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from psigrad.kernels.codes import CodedMatrix
from psigrad.kernels.kernels import Kernels, kernels
from psigrad.kernels.products import PackedMatrix, Products

Ids = Sequence[int]
Version = tuple[int, int]
# The first tensor of a layer that is computed row by row from attention's output. `Layer.kinds` lists all of them.
FIRST_PART_AFTER_ATTENTION = 4
# The marker of log-probs from several heads or temperatures, which are unusable.
_MIXED = ((0, 0), float("nan"))
# The number of rows of one block of memory. Single pieces would fragment the heap between sampling's allocations: a gigabyte of
# holes with a large vocabulary. With blocks of 1024 rows, the last half-empty one wastes as much.
SLAB = 256
# For each layer, its output [rows, E] and the tensors of its backward pass [rows, …].
Layers = list[tuple[Tensor, ...]]
_ALIGNED = 64  # bytes
# packing the head takes as long as this many products; packed products are three times as fast for few rows
LIMIT, HEAD_LIMIT = 1 << 30, 1 << 29
_PAYS = 4  # packing the head takes as long as this many products, which are three times as fast for few rows


@dataclass(frozen=True)
class RowLayout:
    """The tensors that each of `layers` layers computes for a row: `kinds` has the width and dtype of each."""

    layers: int
    kinds: tuple[tuple[int, torch.dtype], ...]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The bytes of a row of each tensor."""
        return tuple(width * kind.itemsize for width, kind in self.kinds)

    @property
    def row_bytes(self) -> int:
        """The bytes of a row in all layers."""
        return self.layers * sum(self.sizes)


class Block:
    """The memory for `rows` rows of every tensor of every layer."""

    def __init__(self, parts: RowLayout, rows: int) -> None:
        self.parts, self.rows = parts, rows
        whole = [math.ceil(rows * size / _ALIGNED) * _ALIGNED for size in parts.sizes]
        # One allocation per layer: a single one would be too large for any free hole in the heap.
        self._memory = [torch.empty(sum(whole), dtype=torch.uint8) for _ in range(parts.layers)]
        self._starts = np.cumsum([0, *whole[:-1]])
        self._places = self._starts + np.array([[x.data_ptr()] for x in self._memory])
        self._sizes = np.array(parts.sizes)

    def addresses(self, start: int = 0) -> Tensor:
        """Return the addresses [layers, tensors] of row `start`, int64."""
        return torch.from_numpy(self._places + self._sizes * start)

    def part(self, layer: int, index: int, start: int = 0, count: int | None = None) -> Tensor:
        """Return rows [count, width] of one tensor from `start`; all the following rows if no count is given."""
        width, kind = self.parts.kinds[index]
        count, size = self.rows - start if count is None else count, self.parts.sizes[index]
        first = int(self._starts[index]) + start * size
        return self._memory[layer][first : first + count * size].view(kind).view(count, width)

    def layers(self) -> Layers:
        """Return all tensors of all layers."""
        return [tuple(self.part(i, j) for j in range(len(self.parts.kinds))) for i in range(self.parts.layers)]

    def write(self, start: int, layers: Layers, first: int, count: int) -> None:
        """Copy `count` rows of `layers`, starting at `first`, to the rows starting at `start`.

        Raises `ValueError` if their widths or dtypes differ from this block's.
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
    """Return the kernels, which must exist: only the fused decoder creates blocks."""
    found = kernels()
    assert not isinstance(found, str), found
    return found


@dataclass(frozen=True)
class CachedLogProbs:
    """Log-probs [M] of tokens, with the softmax temperature and the version of the head that computed them."""

    logps: Tensor
    temperature: float
    version: Version

    def for_head(self, head: Tensor, temperature: float) -> Tensor | None:
        """Return the log-probs if they belong to this head, unchanged, at this temperature; otherwise None."""
        return self.logps if (self.version, self.temperature) == (version_of(head), temperature) else None


@dataclass(frozen=True)
class CachedCompletion:
    """A completion: its ids [T], the cache's rows [T - 1] of all its tokens but the last, and its log-probs [T]."""

    ids: tuple[int, ...]
    rows: np.ndarray
    logps: np.ndarray


class ActivationCache:
    """A cache of the activations of sampled tokens, one row per token, up to `limit` bytes.

    It empties itself and stores nothing more once the limit is exceeded or a weight has changed.
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
        """True if the limit has not been exceeded."""
        return self.bytes <= self.limit

    def next_row(self, count: int) -> int:
        """Return the index of the first of the next `count` rows. The others follow it, in the same slab if they fit."""
        for slab, taken in enumerate(self._taken):
            if taken + count <= SLAB:
                return slab * SLAB + taken
        return len(self._taken) * SLAB

    def reserve(self, count: int, parts: RowLayout) -> tuple[Block, int] | None:
        """Return the slab and row of the next `count` rows, for a kernel that writes them in place; call `add` afterwards.

        Return None if they do not fit into a slab.
        """
        if count > SLAB:
            return None
        slab, place = divmod(self.next_row(count), SLAB)
        return self._slab(slab, parts), place

    def add(self, count: int, parts: RowLayout, now: list[Version], layers: Layers | None = None) -> None:
        """Store the next `count` rows: copied from `layers`, or already written at the place from `reserve`.

        `now` are the versions of the weights that computed them.
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
        """Register rows under their tokens: `prompt_rows` [P] of the prompt, and those of each of its completions."""
        if self.slabs:
            self._prompts[prompt] = prompt_rows
            self._completions |= {(prompt, written.ids): written for written in completions}

    def set_head(self, head: Tensor, temperature: float) -> None:
        """Set the head and softmax temperature of the log-probs in the completions that are registered next."""
        head_now = (version_of(head), temperature)
        self._head = head_now if self._head == head_now or not self._completions else _MIXED

    def clear(self) -> None:
        """Free everything and store nothing more, since the caller's row indices depend on the earlier rows."""
        self.limit = -1.0
        self.slabs, self._taken, self._prompts, self._completions = [], [], {}, {}

    def find(self, prompts: Sequence[Ids], completions: Sequence[Sequence[Ids]], weights: Iterable[Tensor]) -> CacheHit | None:
        """Return the cached activations of packed prompts and completions; None unless all exist and no weight has changed."""
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
    """The cached activations and log-probs of one packed forward pass, in its order of rows.

    Tensors are gathered on request, so that only one layer's copies exist next to the slabs.
    """

    def __init__(self, slabs: list[Block], rows: Tensor, logps: CachedLogProbs) -> None:
        self.logps = logps
        self.last = slabs[0].parts.layers - 1
        self._rows, self._parts = rows, slabs[0].parts
        self._slabs, self._where = slabs, torch.stack([slab.addresses() for slab in slabs], dim=2)

    def output(self, index: int, wanted: Tensor | None = None) -> Tensor:
        """Return the layer's output [W, E] of the tokens `wanted` [W], or of all."""
        return self._gather([(index, 0, self._of(wanted))])[0]

    def saved_for_backward(self, index: int, wanted: Tensor | None = None) -> tuple[Tensor | None, list[Tensor]]:
        """Return the tensors of the layer's backward pass: its input (None for the first layer) and those of `Layer.forward`.

        Tensors that are computed from attention's output are restricted to the tokens `wanted`.
        """
        some, parts = self._of(wanted), range(1, len(self._parts.kinds))
        asked = [(index, part, some if part >= FIRST_PART_AFTER_ATTENTION else self._rows) for part in parts]
        if index == 0:
            return None, self._gather(asked)
        x, *own = self._gather([(index - 1, 0, self._rows), *asked])
        return x, own

    def _gather(self, wanted: list[tuple[int, int, Tensor]]) -> list[Tensor]:
        """Gather the rows of each (layer, part, rows)."""
        kinds = [self._parts.kinds[part] for _, part, _ in wanted]
        out = [torch.empty(len(rows), width, dtype=kind) for (*_, rows), (width, kind) in zip(wanted, kinds, strict=True)]
        layers, parts = zip(*((layer, part) for layer, part, _ in wanted), strict=True)
        native().gather(out, self._where[layers, parts], [rows for *_, rows in wanted], SLAB)
        return out

    def _of(self, wanted: Tensor | None) -> Tensor:
        return self._rows if wanted is None else self._rows.index_select(0, wanted)


def versions(weights: Iterable[Tensor]) -> list[Version]:
    """Return the versions of weights, which are equal as long as none has changed."""
    return [version_of(p) for p in weights]


def version_of(weight: Tensor) -> Version:
    """Return a weight's address and version. An in-place change, such as an optimiser's step, increments the version."""
    return weight.data_ptr(), weight._version


@dataclass(frozen=True)
class Factors:
    """The matrices that are applied to one input, and the terms added to their outputs, which are stored side by side."""

    matrices: Sequence[Tensor | CodedMatrix]
    bias: Tensor | None
    low: tuple[Tensor, Tensor] | None
    """A and s·B of all their adapters: A's stacked, B's along the diagonal, each with an even number of ranks."""

    @property
    def each(self) -> list[Tensor]:
        """All matrices to be packed; coded ones stay unchanged."""
        return [x for x in (*self.matrices, *(self.low or ())) if isinstance(x, Tensor)]

    def pack(self, products: Products) -> PackedFactors:
        """Return the packed factors."""
        low = None if self.low is None else (products.pack(self.low[0]), products.pack(self.low[1]))
        coded = [x for x in self.matrices if isinstance(x, CodedMatrix)]
        if coded:  # a group's matrices have the same input, so all of them are coded
            return PackedFactors(None, self.bias, low, coded, torch.cat([x.table for x in coded]))
        plain = [x for x in self.matrices if isinstance(x, Tensor)]
        return PackedFactors(products.pack(torch.cat(plain) if len(plain) > 1 else plain[0]), self.bias, low)


@dataclass(frozen=True)
class PackedFactors:
    """`Factors` whose matrices are packed, or coded."""

    matrix: PackedMatrix | None
    bias: Tensor | None
    low: tuple[PackedMatrix, PackedMatrix] | None
    coded: Sequence[CodedMatrix] = ()
    table: Tensor | None = None
    """The table of the coded matrices, in the kernels' form."""

    @property
    def addresses(self) -> tuple[int, int]:
        """The addresses of the packed matrix and of the table of coded ones; 0 if absent."""
        return (0 if self.matrix is None else self.matrix.panels.data_ptr(), 0 if self.table is None else self.table.data_ptr())

    @property
    def rank(self) -> int:
        """The total rank of the adapters."""
        return 0 if self.low is None else self.low[0].shape[0]

    def multiply(self, x: Tensor, out: Tensor, residual: Tensor | None, products: Products) -> Tensor:
        """Compute out ← x through the matrices, plus the residual stream, the bias and the adapters' terms."""
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
        self._head: tuple[Version, int, PackedMatrix | None] = ((0, 0), 0, None)

    def of(
        self, key: Hashable, weights: Sequence[Tensor], make: Callable[[], Sequence[Factors]], products: Products
    ) -> list[PackedFactors] | None:
        """Return the packed matrices of layer `key`, from the result of `make`.

        Return None if the memory limit is reached, or if a matrix can't be packed. `weights` are the stored tensors that the
        matrices are, or were cast from. Packing pays for a single sequence too: all layers in one call took 0.8 of the time.
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
        """Return the packed LM head once it has been requested so often that packing pays.

        Return None before that, if it exceeds `HEAD_LIMIT`, and if PyTorch multiplies with it.
        """
        asked_of, asked, packed = self._head
        asked = 1 + (asked if asked_of == version_of(weight) else 0)
        packed = None if asked == 1 else packed
        own = products.can_pack(weight) and (products.float32 or weight.dtype != torch.float32)
        if asked == _PAYS and own and weight.nbytes <= HEAD_LIMIT:
            packed = products.pack(weight)
        self._head = (version_of(weight), asked, packed)
        return packed

    def table(self, key: Hashable, now: list[Version], make: Callable[[], Tensor | None]) -> Tensor | None:
        """Return the addresses of all layers' weights. `make` recomputes them if `key` or the versions `now` have changed."""
        if self._table is None or self._table[:2] != (key, now):
            made = make()
            self._table = None if made is None else (key, now, made)
        return None if self._table is None else self._table[2]
