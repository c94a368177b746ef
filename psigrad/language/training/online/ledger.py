"""The ledger of prompts: every prompt that was drawn is trained on, dropped for a reason, or pending."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from psigrad.language.rollout.types import Collected

ISSUED, TRAINED, PENDING = "issued", "trained", "pending"
UNSCORED, NO_SIGNAL, EARLIER = "dropped: unscored", "dropped: equal rewards", "dropped: before there was a ledger"


def update_ledger(ledger: Mapping[str, int], cursor: int, collected: Collected) -> dict[str, int]:
    """Return the ledger, which stood at `cursor` prompts, with a collection's prompts added. Raises `RuntimeError` as
    `check_balance` does.
    """
    entries = enter(open_ledger(ledger, cursor), collected.entries)
    check_balance(entries, collected.cursor)
    return entries


def open_ledger(ledger: Mapping[str, int], cursor: int) -> dict[str, int]:
    """Return the ledger, or a new one in which the fate of the first `cursor` prompts is unknown."""
    if ledger or not cursor:
        return dict(ledger)
    return {ISSUED: cursor, EARLIER: cursor}


def enter(ledger: Mapping[str, int], entries: Mapping[str, int]) -> dict[str, int]:
    """Return the ledger with these entries added; entries of 0 are left out."""
    return dict(Counter(ledger) + Counter(entries))


def check_balance(ledger: Mapping[str, int], cursor: int) -> None:
    """Raise `RuntimeError` if a prompt was lost or counted twice."""
    issued, rest = ledger.get(ISSUED, 0), sum(count for name, count in ledger.items() if name != ISSUED)
    if not issued == rest == cursor:
        raise RuntimeError(f"The ledger of prompts does not balance: {cursor} were drawn, {dict(ledger)}; please report this.")
