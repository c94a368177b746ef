"""Recurrences and convolutions along sequences, and the division of a packed row into segments for a recurrence.

A segment is a range of consecutive tokens of a text. It starts at the beginning of the text or at the end of another segment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from psigrad.kernels.state_kernels import Tensors, Trees

Wave = list[tuple[int, int, int]]
"""Segments that can run in parallel: (first token, length, number of the segment that it continues, or -1)."""


class Recurrence(Protocol):
    """The state update of a recurrent layer, such as the gated delta rule or Mamba-2.

    A token whose inputs are zeros leaves the state unchanged, so shorter sequences are padded with zeros.
    """

    def scan(self, inputs: Tensors, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (outputs [N, L, ...], final states [N, ...]) for inputs [N, L, ...]. A `state` of None means zeros."""

    def step(self, inputs: Tensors, state: Tensor, slots: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Advance N sequences by one token. Return (outputs [N, ...], new states [N, ...]).

        Sequence i has row `slots[i]` of `state`, by default row i. Without gradients, `state` may be changed and returned.
        """

    def scan_trees(self, inputs: Tensors, trees: Trees) -> tuple[Tensor, Tensor] | None:
        """Return (outputs [S, ...], states) of a packed row with the inputs [S, ...]; None if no C++ kernel supports them.

        `trees` marks the segments whose final states are returned.
        """


@dataclass(frozen=True)
class ShortConvolution:
    """A causal depthwise convolution along sequences with the weight [C, K], and its activation.

    `kernel(x, windows)` computes it for x [S, C] in C++, or returns None for tensors that it does not support. Row s of `windows`
    [S, K] has the indices of the rows of x that token s reads, and -1 before the text's start.
    """

    weight: Tensor
    bias: Tensor | None
    activation: Callable[[Tensor], Tensor]
    kernel: Callable[[Tensor, Tensor], Tensor | None] = lambda x, windows: None

    def finish(self, made: Tensor) -> Tensor:
        """Add the bias, then apply the activation. `made` [S, C] has the weighted sums over the tokens' windows."""
        return self.activation(made if self.bias is None else made + self.bias)


def waves(pieces: Any) -> list[Wave]:
    """Cut a packed row (`attention.Pieces`) into segments, grouped into waves that run one after the other.

    Segments are numbered consecutively over all waves.
    """
    count, starts = len(pieces.prefixes), pieces.starts
    found: list[Wave] = []
    ends: dict[tuple[int, int], int] = {}  # the segment that ends after so many tokens of a prefix
    cuts = [
        [0, *sorted({*pieces.seen[pieces.prefix == b].tolist(), int(length)} - {0})] for b, length in enumerate(pieces.prefixes)
    ]
    for i in range(max((len(cut) - 1 for cut in cuts), default=0)):
        found.append([])
        for b, cut in enumerate(cuts):
            if i + 1 < len(cut):
                found[-1].append((int(starts[b]) + cut[i], cut[i + 1] - cut[i], ends.get((b, cut[i]), -1)))
                ends[b, cut[i + 1]] = len(ends)
    before = [ends.get((b, seen), -1) if count else -1 for b, seen in zip(pieces.prefix, pieces.seen, strict=True)]
    found.append(list(zip(starts[count:].tolist(), pieces.sequences.tolist(), before, strict=True)))
    return [wave for wave in found if any(length for _, length, _ in wave)]


def trees(each: list[Wave], every: bool) -> Trees:
    """Return the segments of the waves `each` as `Trees`, the format of the C++ kernels.

    The kernels return the final states of all segments if `every` is True, otherwise only of segments that others continue.
    """
    flat, root = [segment for wave in each for segment in wave], list[int]()
    for i, (_, _, before) in enumerate(flat):
        root.append(i if before < 0 else root[before])
    kept = range(len(flat)) if every else sorted({before for _, _, before in flat} - {-1})
    rows = {segment: row for row, segment in enumerate(kept)}
    table = [(start, length, rows.get(before, -1), rows.get(i, -1)) for i, (start, length, before) in enumerate(flat)]
    order = np.argsort(root, kind="stable")
    first = [*np.flatnonzero(np.diff(np.array(root)[order], prepend=-1)), len(flat)]
    return Trees(torch.tensor(table)[order], torch.tensor(first), len(rows))
