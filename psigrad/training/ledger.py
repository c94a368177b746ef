"""Which prompts a run is given, and in which order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from psigrad.data.batches import order


@dataclass(frozen=True)
class Prompt:
    """One dataset row as training sees it: its index, its tokens, the row itself (text and columns for the rewards)."""

    index: int
    ids: tuple[int, ...]
    row: Any


def prompts_from(prompts: Sequence[Prompt], seed: int, cursor: int, count: int) -> list[Prompt]:
    """Places `cursor` … `cursor + count` of the endless sequence of shuffled epochs: a pure function of its arguments."""
    n, places, picked = len(prompts), {}, []
    for place in range(cursor, cursor + count):
        epoch, offset = divmod(place, n)
        if epoch not in places:
            places[epoch] = order(n, seed, epoch)
        picked.append(prompts[places[epoch][offset]])
    return picked
