"""What a forward pass without gradient left behind, for a backward pass over the same tokens under the same weights.

On policy, the tokens that are trained on went through the very weights that train when they were sampled: layer by layer the
sampler has computed what the backward pass needs. Kept, it makes the training forward pass superfluous, a third of training's
arithmetic. Activations are a function of the tokens and the weights, so they are found by the tokens, and only while no weight
has changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

Ids = Sequence[int]
# Of each layer its output [rows, E] and what its backward pass needs [rows, …].
Layers = list[tuple[Tensor, ...]]
# Rows of one block of memory. Pieces kept one by one would lie between what sampling allocates and frees, and leave holes that
# nothing large fits into: a gigabyte where the vocabulary is large.
SLAB = 1024


class Kept:
    """Activations of sampled tokens by rows, up to `limit` bytes; beyond that, or once a weight has changed, nothing is kept."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.rows = self.bytes = 0
        self.slabs: list[Layers] = []
        self._prompts: dict[tuple[int, ...], Tensor] = {}
        self._completions: dict[tuple[tuple[int, ...], tuple[int, ...]], Tensor] = {}
        self._marks: list[tuple[int, int]] = []

    @property
    def open(self) -> bool:
        """Whether there is room for more."""
        return self.bytes <= self.limit

    def add(self, layers: Layers, weights: Iterable[nn.Parameter]) -> None:
        """Keep what a pass of the model with these `weights` computed; its rows are numbered on from `rows`."""
        marks = _marks(weights)
        self._marks = self._marks or marks
        self.bytes += sum(x.numel() * x.element_size() for layer in layers for x in layer)
        if marks != self._marks:
            self.limit = -1.0  # what came before is stale, and who numbers rows counts on them
        if self.open:
            self._copy(layers)
        else:
            self.clear()

    def _copy(self, layers: Layers) -> None:
        count, done = len(layers[0][0]), 0
        while done < count:
            place = self.rows % SLAB
            if place == 0:
                self.slabs.append([tuple(x.new_empty(SLAB, *x.shape[1:]) for x in layer) for layer in layers])
            share = min(count - done, SLAB - place)
            for slab, layer in zip(self.slabs[-1], layers, strict=True):
                for to, x in zip(slab, layer, strict=True):
                    to[place : place + share] = x[done : done + share]
            done += share
            self.rows += share

    def name(self, prompt: tuple[int, ...], prompt_rows: Tensor, completions: Iterable[tuple[tuple[int, ...], Tensor]]) -> None:
        """Say whose the rows are: those of a prompt's tokens, and of each of its completions but the last token."""
        if self.slabs:
            self._prompts[prompt] = prompt_rows
            self._completions |= {(prompt, ids): rows for ids, rows in completions}

    def clear(self) -> None:
        """Let everything go."""
        self.slabs, self._prompts, self._completions = [], {}, {}

    def find(self, prompts: Sequence[Ids], completions: Sequence[Sequence[Ids]], weights: Iterable[nn.Parameter]) -> Known | None:
        """The rows of packed prompts and the completions of each, if all of them are known and no weight has changed since."""
        if not self.slabs:
            return None
        if _marks(weights) != self._marks:
            self.clear()
            return None
        found = [self._prompts.get(tuple(prompt)) for prompt in prompts]
        for prompt, group in zip(prompts, completions, strict=True):
            found += [self._completions.get((tuple(prompt), tuple(ids))) if len(ids) else _NONE for ids in group]
        rows = [x for x in found if x is not None]
        return Known(self.slabs, torch.cat(rows)) if rows and len(rows) == len(found) else None


_NONE = torch.zeros(0, dtype=torch.long)


class Known:
    """The layers of a forward pass that need not be run, for rows in the order of their packed forward."""

    def __init__(self, slabs: list[Layers], rows: Tensor) -> None:
        self._count = len(rows)
        order = rows.argsort()
        shares = torch.bincount(rows // SLAB, minlength=len(slabs)).tolist()
        places = order.split(shares)
        self._pieces = [(slab, at, rows[at] % SLAB) for slab, at in zip(slabs, places, strict=True) if len(at)]
        if len(self._pieces) == 1:
            self._pieces = [(self._pieces[0][0], torch.arange(len(rows)), rows % SLAB)]

    def layer(self, index: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The layer's output, and what its backward pass needs, as the layer's own forward gives them."""
        y, *kept = (self._gathered(index, part) for part in range(len(self._pieces[0][0][index])))
        return y, tuple(kept)

    def _gathered(self, index: int, part: int) -> Tensor:
        first = self._pieces[0][0][index][part]
        out = torch.empty(self._count, *first.shape[1:], dtype=first.dtype)
        if len(self._pieces) == 1:
            return torch.index_select(first, 0, self._pieces[0][2], out=out)
        for slab, at, rows in self._pieces:
            out.index_copy_(0, at, slab[index][part].index_select(0, rows))
        return out


def _marks(weights: Iterable[nn.Parameter]) -> list[tuple[int, int]]:
    # an optimiser changes a parameter in place, which counts its version up
    return [(p.data_ptr(), p._version) for p in weights]
