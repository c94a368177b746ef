"""Checks for rows that reward functions cannot judge, because the gold (the row's answer) is missing or unreadable.

The checks run before the first training step.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from psigrad.errors import UserError
from psigrad.language.rewards.golds import blank
from psigrad.language.rewards.resolve import RewardSpec
from psigrad.language.rewards.reward_pool import RewardPool
from psigrad.language.rewards.reward_worker import needed_columns
from psigrad.language.rollout.scoring import Failure, Samples


@dataclass(frozen=True)
class RowCheck:
    """A reward function's `check_row`, wrapped as a reward function so that it runs in a `RewardPool`.

    It returns None for a row that can be judged, and otherwise a `Failure`.
    """

    function: Any

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[Failure | None]:
        """Return one result per row: None if it can be judged, otherwise a `Failure` with the reason."""
        return [self._one({name: values[i] for name, values in columns.items()}) for i in range(len(completions))]

    def _one(self, row: dict[str, Any]) -> Failure | None:
        try:
            self.function.check_row(row)
        except UserError as error:
            return Failure(str(error))
        return None


def row_faults(specs: Sequence[RewardSpec], rows: Sequence[Samples], **settings: Any) -> list[str]:
    """Return one text per row: the reason why a reward function cannot judge it; empty if all can.

    The checks are the functions' methods `check_row(row)`, which receive the columns and raise `UserError`. They run in the
    processes of a `RewardPool` with these settings, so that no row can hang the caller. If all functions have `quick_check`,
    their checks cannot hang and run in this process.
    """
    checks = [RewardSpec(spec.name, RowCheck(spec.function)) for spec in specs if hasattr(spec.function, "check_row")]
    if rows and not all(getattr(spec.function, "quick_check", False) for spec in specs if hasattr(spec.function, "check_row")):
        with RewardPool(checks, **settings) as pool:
            scoring = pool.begin()
            for some in rows:
                scoring.add(some)
            return scoring.faults()
    faults: list[str] = []
    for some in rows:
        given = [[f"{check.name}: {why}" if why else "" for why in check.function(**some.arguments)] for check in checks]
        faults += [next(filter(None, of_row), "") for of_row in zip(*given, strict=True)] if given else [""] * len(some)
    return faults


def missing_golds(
    specs: Sequence[RewardSpec], weights: Sequence[float], rows: Iterable[Mapping[str, Any]], there: Container[str]
) -> list[str]:
    """Return one text per row: the name of a needed but empty column, or "" if the row can be judged.

    A row can be judged if it has all the columns that one function with a weight other than 0 needs. Only the dataset's columns,
    `there`, are checked. If a function needs another column, the settings are wrong, which its first call reports.
    """
    needs = [
        [name for name in needed_columns(spec.function) if name in there]
        for spec, weight in zip(specs, weights, strict=True)
        if weight
    ]
    found = []
    for row in rows:
        lacking = [next((name for name in own if blank(row.get(name))), "") for own in needs]
        found.append(lacking[0] if lacking and all(lacking) else "")
    return found
