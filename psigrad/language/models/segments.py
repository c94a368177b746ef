"""The division of a packed row into segments for a recurrence. Each segment continues at most one other segment."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from psigrad.kernels.state_kernels import Trees

Wave = list[tuple[int, int, int]]
"""Segments that can run in parallel: (first token, length, number of the segment that it continues, or -1)."""


def waves(pieces: Any) -> list[Wave]:
    """Cut a packed row (`attention.Pieces`) into segments, and return them in waves.

    A segment continues a segment of an earlier wave, or none. Segments are numbered consecutively over all waves. A prefix is cut
    where its sequences start.
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
    """Return the segments of `waves` as the C++ kernels read them.

    If `every`, the kernels return the states after all segments; otherwise only after those that another segment continues.
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
