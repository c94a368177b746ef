"""What a forward pass without gradient left behind, for a backward pass over the same tokens under the same weights.

On policy, the tokens that are trained on went through the very weights that train when they were sampled: layer by layer the
sampler has computed what the backward pass needs, and behind the head the log-probs of what it drew. Kept, that makes the
training forward pass superfluous, a third of training's arithmetic. Activations are a function of the tokens and the weights, so
they are found by the tokens, and only while no weight has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from psigrad.native.kernels import Kernels, kernels

Ids = Sequence[int]
Mark = tuple[int, int]
# Of each layer its output [rows, E] and what its backward pass needs [rows, …].
Layers = list[tuple[Tensor, ...]]
# The first of them that is computed token by token from attention's output.
BEHIND_ATTENTION = 4
# Log-probs of several heads or temperatures, which are no one's.
_SEVERAL = ((0, 0), float("nan"))
# Rows of one block of memory. Pieces kept one by one would lie between what sampling allocates and frees, and leave holes that
# nothing large fits into: a gigabyte where the vocabulary is large. In blocks of 1024 rows the last, half empty, takes as much.
SLAB = 256


@dataclass(frozen=True)
class Said:
    """Log-probs [M] of tokens under a head at a softmax temperature."""

    logps: Tensor
    temperature: float
    mark: Mark

    def under(self, head: Tensor, temperature: float) -> Tensor | None:
        """They, if they are those of this head, unchanged, at this temperature."""
        return self.logps if (self.mark, self.temperature) == (mark_of(head), temperature) else None


@dataclass(frozen=True)
class Written:
    """A completion: its ids [T], the rows [T - 1] of all but the last token, its log-probs [T]."""

    ids: tuple[int, ...]
    rows: Tensor
    logps: Tensor


class Kept:
    """Activations of sampled tokens by rows, up to `limit` bytes; beyond that, or once a weight has changed, nothing is kept."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.rows = self.bytes = 0
        self.slabs: list[Layers] = []
        self._taken: list[int] = []  # rows of each slab
        self._prompts: dict[tuple[int, ...], Tensor] = {}
        self._completions: dict[tuple[tuple[int, ...], tuple[int, ...]], Written] = {}
        self._marks: list[Mark] = []
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

    def room(self, count: int, fresh: Callable[[int], Layers]) -> Layers | None:
        """Where so many rows will be kept next, to be computed in place; None where they take more than a slab. `fresh` makes
        the layers of a slab.
        """
        if count > SLAB:
            return None
        slab, place = divmod(self.start(count), SLAB)
        if slab == len(self.slabs):
            self.slabs.append(fresh(SLAB))
            self._taken.append(0)
        return _some(self.slabs[slab], place, count)

    def add(self, layers: Layers, weights: Iterable[nn.Parameter]) -> None:
        """Keep what a pass of the model with these `weights` computed, from row `start` on; where it was computed in its `room`
        it stands there already.
        """
        now = marks(weights)
        self._marks = self._marks or now
        self.bytes += sum(x.numel() * x.element_size() for layer in layers for x in layer)
        if self.open and now == self._marks:
            self._take(layers)
        else:
            self.clear()

    def _take(self, layers: Layers) -> None:
        count, done = len(layers[0][0]), 0
        first = self.start(count)
        while done < count:
            slab, place = divmod(first + done, SLAB)
            if slab == len(self.slabs):
                self.slabs.append([tuple(x.new_empty(SLAB, *x.shape[1:]) for x in layer) for layer in layers])
                self._taken.append(0)
            share = min(count - done, SLAB - place)
            to, given = _some(self.slabs[slab], place, share), _some(layers, done, share)
            if to[0][0].data_ptr() != given[0][0].data_ptr():
                _native().slabs.write([x for layer in to for x in layer], [x for layer in given for x in layer])
            self._taken[slab] = place + share
            done += share
        self.rows += count

    def name(self, prompt: tuple[int, ...], prompt_rows: Tensor, completions: Iterable[Written]) -> None:
        """Say whose the rows are: those of a prompt's tokens, and of its completions."""
        if self.slabs:
            self._prompts[prompt] = prompt_rows
            self._completions |= {(prompt, written.ids): written for written in completions}

    def said_by(self, head: Tensor, temperature: float) -> None:
        """Say which head, at which softmax temperature, the log-probs of the completions named next are of."""
        head_now = (mark_of(head), temperature)
        self._head = head_now if self._head == head_now or not self._completions else _SEVERAL

    def clear(self) -> None:
        """Let everything go, and keep nothing more: who numbers rows counts on those before."""
        self.limit = -1.0
        self.slabs, self._taken, self._prompts, self._completions = [], [], {}, {}

    def find(self, prompts: Sequence[Ids], completions: Sequence[Sequence[Ids]], weights: Iterable[nn.Parameter]) -> Known | None:
        """The rows of packed prompts and the completions of each, if all of them are known and no weight has changed since."""
        if not self.slabs:
            return None
        if marks(weights) != self._marks:
            self.clear()
            return None
        keys = [(tuple(p), tuple(ids)) for p, group in zip(prompts, completions, strict=True) for ids in group if len(ids)]
        before, written = [self._prompts.get(tuple(p)) for p in prompts], [self._completions.get(key) for key in keys]
        rows = [x for x in before if x is not None] + [x.rows for x in written if x is not None]
        if not rows or len(rows) < len(before) + len(written):
            return None
        logps = torch.cat([_NOTHING, *(x.logps for x in written if x is not None)])
        mark, temperature = self._head
        return Known(self.slabs, torch.cat(rows), Said(logps, temperature, mark))


_NOTHING = torch.zeros(0)


class Known:
    """The layers of a forward pass that need not be run, for rows in the order of their packed forward; what was `said` there.

    Each tensor is gathered when it is asked for, so that copies of one layer at a time lie beside the slabs.
    """

    def __init__(self, slabs: list[Layers], rows: Tensor, said: Said) -> None:
        self.said = said
        self.last = len(slabs[0]) - 1
        self._slabs, self._rows = slabs, rows

    def output(self, index: int, wanted: Tensor | None = None) -> Tensor:
        """The layer's output, of the tokens `wanted` or of all."""
        return self._gathered(index, 0, self._of(wanted))

    def parts(self, index: int, wanted: Tensor | None = None) -> tuple[Tensor, ...]:
        """What the layer's backward pass needs besides its input; of the tokens `wanted` what it computed behind attention."""
        rows = [self._rows] * BEHIND_ATTENTION + [self._of(wanted)] * len(self._slabs[0][index])
        return tuple(self._gathered(index, part, rows[part]) for part in range(1, len(self._slabs[0][index])))

    def _of(self, wanted: Tensor | None) -> Tensor:
        return self._rows if wanted is None else self._rows.index_select(0, wanted)

    def _gathered(self, index: int, part: int, rows: Tensor) -> Tensor:
        return _native().slabs.gather([slab[index][part] for slab in self._slabs], rows)


def _some(layers: Layers, start: int, count: int) -> Layers:
    return [tuple(x[start : start + count] for x in layer) for layer in layers]


def _native() -> Kernels:
    native = kernels()
    assert not isinstance(native, str), "only the fused decoder keeps anything"
    return native


def marks(weights: Iterable[Tensor]) -> list[Mark]:
    """Of weights, equal while none of them has changed."""
    return [mark_of(p) for p in weights]


def mark_of(weight: Tensor) -> Mark:
    """Of a weight: an optimiser changes it in place, which counts its version up."""
    return weight.data_ptr(), weight._version
