"""What a forward pass without gradient left behind, for a backward pass over the same tokens under the same weights.

On policy, the tokens that are trained on went through the very weights that train when they were sampled: layer by layer the
sampler has computed what the backward pass needs. Kept, it makes the training forward pass superfluous, a third of training's
arithmetic. Activations are a function of the tokens and the weights, so they are found by the tokens, and only while no weight
has changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Ids = Sequence[int]


@dataclass(frozen=True)
class Pass:
    """One forward pass over S rows: of each layer its output [S, E] and what its backward pass needs [S, …]."""

    first: int
    layers: list[tuple[Tensor, ...]]


class Kept:
    """Activations of sampled tokens by rows, up to `limit` bytes; beyond that nothing is kept at all."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.rows = self.bytes = 0
        self.passes: list[Pass] = []
        self._prompts: dict[tuple[int, ...], Tensor] = {}
        self._completions: dict[tuple[tuple[int, ...], tuple[int, ...]], Tensor] = {}
        self._marks: list[tuple[int, int]] = []

    @property
    def open(self) -> bool:
        """Whether there is room for more."""
        return self.bytes <= self.limit

    def add(self, layers: list[tuple[Tensor, ...]], weights: Iterable[nn.Parameter]) -> int:
        """Keep a pass of the model with these `weights`; the number of its first row."""
        marks, first = _marks(weights), self.rows
        if self.passes and marks != self._marks:
            self.clear()
            self.bytes = 0
        self._marks = marks
        self.bytes += sum(x.numel() * x.element_size() for layer in layers for x in layer)
        self.rows += len(layers[0][0])
        if self.open:
            self.passes.append(Pass(first, layers))
        else:
            self.clear()
        return first

    def name(self, prompt: tuple[int, ...], prompt_rows: Tensor, completions: Iterable[tuple[tuple[int, ...], Tensor]]) -> None:
        """Say whose the rows are: those of a prompt's tokens, and of each of its completions but the last token."""
        if self.passes:
            self._prompts[prompt] = prompt_rows
            self._completions |= {(prompt, ids): rows for ids, rows in completions}

    def clear(self) -> None:
        """Let everything go."""
        self.passes, self._prompts, self._completions = [], {}, {}

    def find(self, prompts: Sequence[Ids], completions: Sequence[Sequence[Ids]], weights: Iterable[nn.Parameter]) -> Known | None:
        """The rows of packed prompts and the completions of each, if all of them are known and no weight has changed since."""
        if not self.passes:
            return None
        if _marks(weights) != self._marks:
            self.clear()
            return None
        found = [self._prompts.get(tuple(prompt)) for prompt in prompts]
        for prompt, group in zip(prompts, completions, strict=True):
            found += [self._completions.get((tuple(prompt), tuple(ids))) if len(ids) else _NONE for ids in group]
        rows = [x for x in found if x is not None]
        return Known(self.passes, torch.cat(rows)) if rows and len(rows) == len(found) else None


_NONE = torch.zeros(0, dtype=torch.long)


class Known:
    """The layers of a forward pass that need not be run, for rows in the order of their packed forward."""

    def __init__(self, passes: list[Pass], rows: Tensor) -> None:
        self._count = len(rows)
        order = rows.argsort()
        bounds = torch.tensor([p.first for p in passes[1:]], dtype=torch.long)
        shares = torch.bincount(torch.bucketize(rows, bounds, right=True), minlength=len(passes)).tolist()
        self._pieces = [
            (p, place, rows[place] - p.first) for p, place in zip(passes, order.split(shares), strict=True) if len(place)
        ]

    def layer(self, index: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The layer's output, and what its backward pass needs, as the layer's own forward gives them."""
        y, *kept = (self._gathered(index, part) for part in range(len(self._pieces[0][0].layers[index])))
        return y, tuple(kept)

    def _gathered(self, index: int, part: int) -> Tensor:
        like = self._pieces[0][0].layers[index][part]
        out = torch.empty(self._count, *like.shape[1:], dtype=like.dtype)
        for p, place, rows in self._pieces:
            out.index_copy_(0, place, p.layers[index][part].index_select(0, rows))
        return out


def _marks(weights: Iterable[nn.Parameter]) -> list[tuple[int, int]]:
    # an optimiser changes a parameter in place, which counts its version up
    return [(p.data_ptr(), p._version) for p in weights]
