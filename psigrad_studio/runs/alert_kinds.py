"""A run's warnings grouped by rule: first and last step, count, and whether an action is needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from psigrad.records.warnings import BY_NAME, RunWarning, Watch


def alert_of(alert: RunWarning) -> dict[str, Any]:
    """Return a warning as JSON, with the texts of its rule."""
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


def by_kind(alerts: Sequence[RunWarning], watch: Watch) -> list[dict[str, Any]]:
    """Return one entry for each rule that ever gave a warning, active ones first.

    An entry has the `count` of warnings, the first `step`, and the step `ended` (None: the rule is still active). It is `calm`,
    so that no action is needed, if it has ended, or if a solved task explains it.
    """
    found: dict[str, list[RunWarning]] = {}
    for alert in alerts:
        found.setdefault(alert.rule, []).append(alert)
    kinds = []
    for rule, times in found.items():
        worst = max(times, key=lambda alert: alert.value)
        stands = any(alert.ended is None for alert in times)
        kind = alert_of(worst) | {"count": len(times), "step": min(alert.step for alert in times)}
        kind["ended"] = None if stands else max(alert.ended or 0.0 for alert in times)
        kind["calm"] = watch.explains(rule) or not stands
        kind["says"] = watch.advice(rule)
        kinds.append(kind)
    return sorted(kinds, key=lambda kind: (kind["calm"], not kind["grave"]))
