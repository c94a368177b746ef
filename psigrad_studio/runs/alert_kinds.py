"""A run's alerts by kind: the first and the last step, how often, and whether there is anything to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from psigrad.records.warnings import BY_NAME, Alert
from psigrad_studio.runs.history import Series

SOLVED = 0.9
# What a policy does that has nothing left to learn.
CALM = frozenset({"entropy", "dead_groups", "flat_reward", "grad_norm"})
_SCORES = ("held_out", "reward", "accuracy")


def alert_of(alert: Alert) -> dict[str, Any]:
    """An alert with the texts of its rule."""
    rule = BY_NAME[alert.rule]
    return {
        "rule": alert.rule,
        "title": rule.title,
        "says": rule.advice,
        "signal": rule.signal,
        "grave": rule.grave,
        "step": alert.step,
        "ended": alert.ended,
        "worst_step": alert.worst_step,
        "value": alert.value,
    }


def solved(series: Mapping[str, Series]) -> float | None:
    """The score of a solved task, 0.9 or more of 1: the mean of the last three held-out metrics, or else rewards. Else None."""
    name = next((name for name in _SCORES if name in series and series[name].values), None)
    values = [] if name is None else series[name].values
    score = sum(values[-3:]) / len(values[-3:]) if values and max(values) <= 1 else 0.0
    return score if score >= SOLVED else None


def by_kind(alerts: Sequence[Alert], score: float | None) -> list[dict[str, Any]]:
    """One entry for each rule that was ever raised, those that stand first: `count` times, from `step` to `ended` (None: it
    stands). It is `calm` where it has ended, or where a task solved with `score` explains it.
    """
    found: dict[str, list[Alert]] = {}
    for alert in alerts:
        found.setdefault(alert.rule, []).append(alert)
    kinds = []
    for rule, times in found.items():
        worst = max(times, key=lambda alert: alert.value)
        stands = any(alert.ended is None for alert in times)
        explained = score is not None and rule in CALM
        kind = alert_of(worst) | {"count": len(times), "step": min(alert.step for alert in times)}
        kind["ended"] = None if stands else max(alert.ended or 0.0 for alert in times)
        kind["calm"] = explained or not stands
        if explained:
            kind["says"] = f"Nothing to do: the task is solved ({score:.2g} of 1), and there is little left to learn from."
        kinds.append(kind)
    return sorted(kinds, key=lambda kind: (kind["calm"], not kind["grave"]))
