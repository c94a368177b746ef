"""Checks for rows that reward functions cannot judge: without a gold, or with an unreadable one.

The checks run before the first step.
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
    """A function's `check_row` in the form of a reward: None for a row that it can judge, a `Failure` for another."""

    function: Any

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[Failure | None]:
        """Return the fault of each row."""
        return [self._one({name: values[i] for name, values in columns.items()}) for i in range(len(completions))]

    def _one(self, row: dict[str, Any]) -> Failure | None:
        try:
            self.function.check_row(row)
        except UserError as error:
            return Failure(str(error))
        return None


def row_faults(specs: Sequence[RewardSpec], rows: Sequence[Samples], **settings: Any) -> list[str]:
    """Return for each row of the samples the reason why it cannot be judged; empty if it can.

    The checks are the functions' methods `check_row(row)`, which receive the columns and raise `UserError`. They run in the
    processes of a `RewardPool` with these settings, so that no row can hang the caller. Checks with `quick_check` cannot hang,
    and run in this process if there are no others.
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
    """Return for each row its missing gold: a needed column that is empty. Return "" if a weighted function has all of its own.

    A needed column that is not `there` in any row is a mistake in the settings, which the function's first call reports.
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
