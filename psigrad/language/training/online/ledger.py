"""Which prompts a run is given, in which order, and what became of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from psigrad.language.data.batches import order


@dataclass(frozen=True)
class Prompt:
    """One dataset row as training sees it: its index, its tokens, the row itself (text and columns for the rewards), and the
    tokens that the reference reads in place of its own.
    """

    index: int
    ids: tuple[int, ...]
    row: Any
    teacher_ids: tuple[int, ...] = ()


def prompts_from(prompts: Sequence[Prompt], seed: int, cursor: int, count: int) -> list[Prompt]:
    """Places `cursor` … `cursor + count` of the endless sequence of shuffled epochs: a pure function of its arguments."""
    n, places, picked = len(prompts), {}, []
    for place in range(cursor, cursor + count):
        epoch, offset = divmod(place, n)
        if epoch not in places:
            places[epoch] = order(n, seed, epoch)
        picked.append(prompts[places[epoch][offset]])
    return picked


ISSUED, TRAINED, PENDING = "issued", "trained", "pending"
UNSCORED, NO_SIGNAL, EARLIER = "dropped: unscored", "dropped: equal rewards", "dropped: before there was a ledger"


def opened(ledger: Mapping[str, int], cursor: int) -> dict[str, int]:
    """The ledger to go on with. Of `cursor` prompts that were issued before there was one, nothing is known."""
    if ledger or not cursor:
        return dict(ledger)
    return {ISSUED: cursor, EARLIER: cursor}


def entered(ledger: Mapping[str, int], entries: Mapping[str, int]) -> dict[str, int]:
    """The ledger with one step's prompts added to each entry; entries of 0 are left out."""
    total = Counter(ledger)
    total.update(entries)
    return {name: count for name, count in total.items() if count}


def check_balance(ledger: Mapping[str, int], cursor: int) -> None:
    """Every prompt that was issued has been trained on, dropped for a reason, or is pending.

    Raises `RuntimeError` where that is not so: a prompt was lost or counted twice, which is a fault of ours.
    """
    issued, rest = ledger.get(ISSUED, 0), sum(count for name, count in ledger.items() if name != ISSUED)
    if not issued == rest == cursor:
        raise RuntimeError(f"The ledger of prompts does not balance: {cursor} were drawn, {dict(ledger)}; please report this.")
