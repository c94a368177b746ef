"""From what people give (rankings, ratings) to what is trained on (pairs), with what was left out counted."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from psigrad.errors import UserError

Raw = Mapping[str, Any]


@dataclass(frozen=True)
class Converted:
    """Rows of another form, and what did not make it."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    ties: int = 0
    """Pairs of equal rank or rating (within the tie threshold)."""
    alone: int = 0
    """Prompts with a single answer, which nothing can be compared with."""


def from_rankings(rows: Iterable[Raw], source: str = "rows") -> Converted:
    """Every ordered pair of rows with `prompt`, `completions` and `ranking`: a rank for each completion, 1 is best.

    Equal ranks are a tie. Raises `UserError` naming row and column.
    """
    return _pairs(rows, source, "ranking", lambda a, b: b - a, margin=False, tie=0.0)


def from_ratings(
    rows: Iterable[Raw], source: str = "rows", *, scale: int = 10, tie: float = 0.0, margin: bool = True
) -> Converted:
    """Every ordered pair of rows with `prompt`, `completions` and `ratings` from 1 to `scale`, the higher rating chosen.

    Ratings that differ by at most `tie` are a tie. With `margin` the difference stands in the column of that name, which the
    reward model's loss reads. Raises `UserError` naming row and column.
    """

    def better(a: float, b: float) -> float:
        return a - b

    return _pairs(_rated(rows, source, scale), source, "ratings", better, margin=margin, tie=tie)


def _rated(rows: Iterable[Raw], source: str, scale: int) -> Iterable[Raw]:
    for i, row in enumerate(rows, 1):
        for rating in row.get("ratings") or ():
            if isinstance(rating, bool) or not isinstance(rating, int | float) or not 1 <= rating <= scale:
                raise UserError(f"{source}:{i}: column 'ratings' has {rating!r}; expected numbers from 1 to {scale}.")
        yield row


def grouped(rows: Iterable[Raw], column: str, source: str = "rows") -> list[dict[str, Any]]:
    """Rows with one `completion` and a number in `column` each, brought together by prompt; order of first appearance."""
    found: dict[str, dict[str, Any]] = {}
    for i, row in enumerate(rows, 1):
        for name in ("prompt", "completion", column):
            if row.get(name) is None:
                raise UserError(f"{source}:{i}: column {name!r} is missing; expected prompt, completion and {column}.")
        group = found.setdefault(repr(row["prompt"]), {"prompt": row["prompt"], "completions": [], f"{column}s": []})
        group["completions"].append(row["completion"])
        group[f"{column}s"].append(row[column])
    return list(found.values())


def unpaired(rows: Iterable[Raw]) -> list[dict[str, Any]]:
    """Each pair as two labelled rows: the form that KTO takes."""
    made = []
    for row in rows:
        own = {key: value for key, value in row.items() if key not in ("chosen", "rejected")}
        made.append({**own, "completion": row["chosen"], "label": True})
        made.append({**own, "completion": row["rejected"], "label": False})
    return made


def _pairs(
    rows: Iterable[Raw], source: str, column: str, lead: Callable[[Any, Any], float], *, margin: bool, tie: float
) -> Converted:
    made: list[dict[str, Any]] = []
    ties = alone = 0
    for i, row in enumerate(rows, 1):
        completions, values = _checked(row, column, f"{source}:{i}")
        alone += len(completions) < 2
        for a, b in itertools.combinations(range(len(completions)), 2):
            by = lead(values[a], values[b])
            if abs(by) <= tie or completions[a] == completions[b]:
                ties += 1
                continue
            best, worst = (a, b) if by > 0 else (b, a)
            pair = {"prompt": row["prompt"], "chosen": completions[best], "rejected": completions[worst]}
            made.append(pair | ({"margin": float(abs(by))} if margin else {}))
    return Converted(made, ties, alone)


def _checked(row: Raw, column: str, place: str) -> tuple[Sequence[Any], Sequence[Any]]:
    for name in ("prompt", "completions", column):
        if row.get(name) is None:
            raise UserError(f"{place}: column {name!r} is missing; expected prompt, completions and {column}.")
    completions, values = row["completions"], row[column]
    if not isinstance(completions, list) or not isinstance(values, list) or len(completions) != len(values):
        raise UserError(f"{place}: column {column!r} must be a list with one number for each of the completions.")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UserError(f"{place}: column {column!r} has {value!r}; expected numbers.")
    return completions, values
