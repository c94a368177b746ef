"""Rows for environments on a server. A row has a seed, and the server's first observation for that seed as its prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from psigrad import seeds
from psigrad.errors import UserError
from psigrad.language.episodes.environments import Observation

SEED, RESET = "seed", "reset"
"""The columns of a row with the seed for the server, and with an object of its other arguments."""
Open = Callable[..., str]
"""A function that starts an episode with these arguments and returns the server's first observation."""


def begin(row: Mapping[str, Any], opened: Open) -> Observation | None:
    """Start a row's episode. Return its first observation, or None if it is the row's prompt.

    Raises `ValueError` if the server's first observation differs from the row's prompt.
    """
    more = {SEED: row[SEED]} if row.get(SEED) is not None else {}
    opening = opened(**more, **(row.get(RESET) or {}))
    if row.get("opening") is None:
        return [{"role": "user", "content": opening}] if opening else None
    if opening != row["opening"]:
        before = row["opening"][:80]
        raise ValueError(
            f"for the same seed the server's first observation was {before!r} and is now {opening[:80]!r}; use a server whose "
            "first observation depends only on the seed"
        )
    return None


def rows_of(count: int, seed: int, kind: str, server: str, opened: Open) -> list[Mapping[str, Any]]:
    """Return a row for each of `count` seeds. Raises `UserError` if the server's first observation is empty."""
    rows: list[Mapping[str, Any]] = []
    for number in range(count):
        drawn = seeds.derive(seed, kind, number) % 2**31
        opening = opened(**{SEED: drawn})
        if not opening:
            raise UserError(f"The server {server} starts its episodes without a prompt; give a dataset with prompts (--dataset).")
        rows.append({"prompt": [{"role": "user", "content": opening}], SEED: drawn, "opening": opening})
    return rows
