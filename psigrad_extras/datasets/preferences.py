"""Conversion of human feedback (rankings, ratings) into preference pairs, with counts of dropped rows.

Columns have TRL's names and are text or conversational. Other columns stay in the rows. Every `UserError` names row and column.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from psigrad.errors import UserError
from psigrad.language.data.dataset_rows import BadRow, RowError, show, validate

Raw = Mapping[str, Any]

# Columns that compare the two answers of a pair. They have no meaning for a single answer.
_OF_PAIRS = ("margin", "score_chosen", "score_rejected")


@dataclass(frozen=True)
class Converted:
    """The converted rows, and the counts of dropped pairs and prompts."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    ties: int = 0
    """Pairs of equal rank or rating (within the tie threshold), or of equal texts."""
    alone: int = 0
    """Prompts whose answers allow no comparison: there is a single one, or all have the same label."""


def from_rankings(rows: Iterable[Raw], source: str = "rows") -> Converted:
    """Return the preference pairs of rows with `prompt`, `completions` and `ranking`: a rank for each completion, 1 is best.

    Every two completions of different rank are a pair. Equal ranks are a tie. Raises `UserError` naming row and column.
    """
    return _pairs(rows, source, "ranking", lambda a, b: b - a, margin=False)


def from_ratings(
    rows: Iterable[Raw], source: str = "rows", *, scale: int = 10, tie: float = 0.0, margin: bool = True
) -> Converted:
    """Return the preference pairs of rows with `prompt`, `completions` and `ratings` from 1 to `scale`.

    In each pair, the completion with the higher rating is chosen. Ratings that differ by at most `tie` are a tie. With `margin`,
    the difference is stored in the column `margin`, which the reward model's loss reads. Raises `UserError` naming row and
    column.
    """
    if not scale > 1 or not 0 <= tie < math.inf:
        raise UserError(f"The ratings have scale={scale} and tie={tie}; expected a scale above 1 and a tie of 0 or more.")
    return _pairs(rows, source, "ratings", lambda a, b: a - b, margin=margin, tie=tie, scale=scale)


def group_by_prompt(rows: Iterable[Raw], column: str, source: str = "rows") -> list[dict[str, Any]]:
    """Group rows with one `completion` and a number in `column` by prompt, in order of first appearance.

    Other columns are kept if all rows of a prompt agree on them, such as `tools`.
    """
    found: dict[str, dict[str, Any]] = {}
    for i, row in enumerate(rows, 1):
        for name in ("prompt", "completion", column):
            _column(row, name, f"{source}:{i}", f"prompt, completion and {column}")
        rest = {key: value for key, value in row.items() if key not in ("prompt", "completion", column)}
        start = {"prompt": row["prompt"], "completions": [], f"{column}s": [], **rest}
        group = found.setdefault(_key(row["prompt"]), start)
        for name in set(group) - {"prompt", "completions", f"{column}s"}:
            if name not in rest or rest[name] != group[name]:
                del group[name]
        group["completions"].append(row["completion"])
        group[f"{column}s"].append(row[column])
    return list(found.values())


def split_pairs(rows: Iterable[Raw], source: str = "rows") -> list[dict[str, Any]]:
    """Split each pair into two labelled rows, for KTO. Without `prompt`, the shared start of both answers is the prompt.

    Raises `UserError` naming row and column.
    """
    made = []
    for i, raw in enumerate(rows, 1):
        row = validate(raw, "preference", f"{source}:{i}")
        own = {key: value for key, value in row.columns.items() if key not in _OF_PAIRS}
        for answer, label in ((row.completion, True), (row.rejected, False)):
            made.append({"prompt": row.prompt, **own, "completion": answer, "label": label})
    return made


def _pairs(
    rows: Iterable[Raw],
    source: str,
    column: str,
    lead: Callable[[Any, Any], float],
    *,
    margin: bool,
    tie: float = 0.0,
    scale: int = 0,
) -> Converted:
    made: list[dict[str, Any]] = []
    ties = alone = 0
    for i, row in enumerate(rows, 1):
        completions, values = _check_completions(row, column, f"{source}:{i}")
        if scale and (wrong := [value for value in values if not 1 <= value <= scale]):
            _fail(f"{source}:{i}", column, f"has {wrong[0]!r}; expected numbers from 1 to {scale}")
        own = {key: value for key, value in row.items() if key not in ("completions", column)}
        alone += len(completions) < 2
        for a, b in itertools.combinations(range(len(completions)), 2):
            by = lead(values[a], values[b])
            # 1.3 − 1.2 is a little more than 0.1.
            if abs(by) <= tie + 1e-9 or completions[a] == completions[b]:
                ties += 1
                continue
            best, worst = (a, b) if by > 0 else (b, a)
            pair = {**own, "chosen": completions[best], "rejected": completions[worst]}
            pair |= {"margin": float(abs(by))} if margin else {}
            made.append(pair)
    return Converted(made, ties, alone)


def _check_completions(row: Raw, column: str, place: str) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return (the completions, their ranks or ratings). Raises `UserError` for a completion that does not fit the prompt."""
    for name in ("prompt", "completions", column):
        _column(row, name, place, f"prompt, completions and {column}")
    completions, values = row["completions"], row[column]
    if not isinstance(completions, list) or not isinstance(values, list) or len(completions) != len(values):
        _fail(place, column, "must be a list with one number for each completion")
    if not completions:
        _fail(place, "completions", "is an empty list; it must hold the answers to compare")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            _fail(place, column, f"has {show(value)}; expected numbers")
    own = {key: value for key, value in row.items() if key not in ("completions", column)}
    for k, completion in enumerate(completions):
        try:
            validate({**own, "completion": completion}, "prompt-completion", place)
        except RowError as error:
            at = error.bad.column.replace("completion", f"completions[{k}]", 1)
            raise RowError(BadRow(place, at, error.bad.reason)) from None
    return completions, values


def _column(row: Raw, name: str, place: str, expected: str) -> None:
    if not isinstance(row, Mapping):
        _fail(place, "", f"is {show(row)}; a row must be an object with named columns")
    if row.get(name) is None:
        _fail(place, name, f"is missing; the row must have the columns {expected}")


def _key(prompt: Any) -> str:
    """Return a text that is equal for equal prompts, even if the keys of their messages are in another order."""
    return json.dumps(prompt, sort_keys=True, default=repr)


def _fail(place: str, column: str, reason: str) -> NoReturn:
    raise RowError(BadRow(place, column, reason))
