"""What a forward pass without gradient left behind, for a backward pass over the same tokens under the same weights.

On policy, the tokens that are trained on went through the very weights that train when they were sampled: layer by layer the
sampler has computed what the backward pass needs, and behind the head the log-probs of what it drew. Kept, that makes the
training forward pass superfluous, a third of training's arithmetic. Activations are a function of the tokens and the weights, so
they are found by the tokens, and only while no weight has changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from psigrad.models.fused.blocks import Block, Layers, Parts, native

Ids = Sequence[int]
Version = tuple[int, int]
# The first part of a layer that is computed token by token from attention's output.
BEHIND_ATTENTION = 4
# Log-probs of several heads or temperatures, which are no one's.
_SEVERAL = ((0, 0), float("nan"))
# Rows of one block of memory. Pieces kept one by one would lie between what sampling allocates and frees, and leave holes that
# nothing large fits into: a gigabyte where the vocabulary is large. In blocks of 1024 rows the last, half empty, takes as much.
SLAB = 256


@dataclass(frozen=True)
class CachedLogProbs:
    """Log-probs [M] of tokens under a head at a softmax temperature."""

    logps: Tensor
    temperature: float
    mark: Version

    def under(self, head: Tensor, temperature: float) -> Tensor | None:
        """They, if they are those of this head, unchanged, at this temperature."""
        return self.logps if (self.mark, self.temperature) == (version_of(head), temperature) else None


@dataclass(frozen=True)
class CachedCompletion:
    """A completion: its ids [T], the rows [T - 1] of all but the last token, its log-probs [T]."""

    ids: tuple[int, ...]
    rows: np.ndarray
    logps: np.ndarray


class ActivationCache:
    """Activations of sampled tokens by rows, up to `limit` bytes; beyond that, or once a weight has changed, nothing is kept."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.rows = self.bytes = 0
        self.slabs: list[Block] = []
        self._taken: list[int] = []  # rows of each slab
        self._prompts: dict[tuple[int, ...], np.ndarray] = {}
        self._completions: dict[tuple[tuple[int, ...], tuple[int, ...]], CachedCompletion] = {}
        self._marks: list[Version] = []
        self._head = _SEVERAL

    @property
    def open(self) -> bool:
        """Whether there is room for more."""
        return self.bytes <= self.limit

    def start(self, count: int) -> int:
        """The number of the first of so many rows, if they are kept next; the others follow it. They stand in one slab wherever
        they are no more than it holds.
        """
        for slab, taken in enumerate(self._taken):
            if taken + count <= SLAB:
                return slab * SLAB + taken
        return len(self._taken) * SLAB

    def room(self, count: int, parts: Parts) -> tuple[Block, int] | None:
        """Where so many rows will be kept next, to be computed in place and then `add`ed: from which row of which slab on. None
        where they take more than a slab.
        """
        if count > SLAB:
            return None
        slab, place = divmod(self.start(count), SLAB)
        return self._slab(slab, parts), place

    def add(self, count: int, parts: Parts, now: list[Version], layers: Layers | None = None) -> None:
        """Keep so many rows that a pass computed: of `layers`, or in place in their `room`; `now` are its weights' versions."""
        self._marks = self._marks or now
        self.bytes += count * parts.row
        if not self.open or now != self._marks:
            self.clear()
            return
        first, done = self.start(count), 0
        while done < count:
            slab, place = divmod(first + done, SLAB)
            block, share = self._slab(slab, parts), min(count - done, SLAB - place)
            if layers is not None:
                block.write(place, layers, done, share)
            self._taken[slab] = place + share
            done += share
        self.rows += count

    def _slab(self, index: int, parts: Parts) -> Block:
        if index == len(self.slabs):
            self.slabs.append(Block(parts, SLAB))
            self._taken.append(0)
        return self.slabs[index]

    def name(self, prompt: tuple[int, ...], prompt_rows: np.ndarray, completions: Iterable[CachedCompletion]) -> None:
        """Say whose the rows are: those of a prompt's tokens, and of its completions."""
        if self.slabs:
            self._prompts[prompt] = prompt_rows
            self._completions |= {(prompt, written.ids): written for written in completions}

    def said_by(self, head: Tensor, temperature: float) -> None:
        """Say which head, at which softmax temperature, the log-probs of the completions named next are of."""
        head_now = (version_of(head), temperature)
        self._head = head_now if self._head == head_now or not self._completions else _SEVERAL

    def clear(self) -> None:
        """Let everything go, and keep nothing more: who numbers rows counts on those before."""
        self.limit = -1.0
        self.slabs, self._taken, self._prompts, self._completions = [], [], {}, {}

    def find(self, prompts: Sequence[Ids], completions: Sequence[Sequence[Ids]], weights: Iterable[Tensor]) -> CacheHit | None:
        """The rows of packed prompts and the completions of each, if all of them are known and no weight has changed since."""
        if not self.slabs:
            return None
        if versions(weights) != self._marks:
            self.clear()
            return None
        keys = [(tuple(p), tuple(ids)) for p, group in zip(prompts, completions, strict=True) for ids in group if len(ids)]
        before, written = [self._prompts.get(tuple(p)) for p in prompts], [self._completions.get(key) for key in keys]
        rows = [x for x in before if x is not None] + [x.rows for x in written if x is not None]
        if not rows or len(rows) < len(before) + len(written):
            return None
        logps = np.concatenate([_NOTHING, *(x.logps for x in written if x is not None)])
        mark, temperature = self._head
        return CacheHit(
            self.slabs, torch.from_numpy(np.concatenate(rows)), CachedLogProbs(torch.from_numpy(logps), temperature, mark)
        )


_NOTHING = np.zeros(0, dtype=np.float32)


class CacheHit:
    """The layers of a forward pass that need not be run, for rows in the order of their packed forward; what was `said` there.

    Each tensor is gathered when it is asked for, so that copies of one layer at a time lie beside the slabs.
    """

    def __init__(self, slabs: list[Block], rows: Tensor, said: CachedLogProbs) -> None:
        self.said = said
        self.last = slabs[0].parts.layers - 1
        self._rows, self._parts = rows, slabs[0].parts
        self._slabs, self._where = slabs, torch.stack([slab.addresses() for slab in slabs], dim=2)

    def output(self, index: int, wanted: Tensor | None = None) -> Tensor:
        """The layer's output, of the tokens `wanted` or of all."""
        return self._gathered([(index, 0, self._of(wanted))])[0]

    def behind(self, index: int, wanted: Tensor | None = None) -> tuple[Tensor | None, list[Tensor]]:
        """What the layer's backward pass needs: its input, which for the first is not kept, and all else; of the tokens `wanted`
        what it computed behind attention.
        """
        some, parts = self._of(wanted), range(1, len(self._parts.kinds))
        asked = [(index, part, some if part >= BEHIND_ATTENTION else self._rows) for part in parts]
        if index == 0:
            return None, self._gathered(asked)
        x, *own = self._gathered([(index - 1, 0, self._rows), *asked])
        return x, own

    def _gathered(self, wanted: list[tuple[int, int, Tensor]]) -> list[Tensor]:
        """Of every (layer, part, rows) the rows."""
        kinds = [self._parts.kinds[part] for _, part, _ in wanted]
        out = [torch.empty(len(rows), width, dtype=kind) for (*_, rows), (width, kind) in zip(wanted, kinds, strict=True)]
        layers, parts = zip(*((layer, part) for layer, part, _ in wanted), strict=True)
        native().gather(out, self._where[layers, parts], [rows for *_, rows in wanted], SLAB)
        return out

    def _of(self, wanted: Tensor | None) -> Tensor:
        return self._rows if wanted is None else self._rows.index_select(0, wanted)


def versions(weights: Iterable[Tensor]) -> list[Version]:
    """Of weights, equal while none of them has changed."""
    return [version_of(p) for p in weights]


def version_of(weight: Tensor) -> Version:
    """Of a weight: an optimiser changes it in place, which counts its version up."""
    return weight.data_ptr(), weight._version
