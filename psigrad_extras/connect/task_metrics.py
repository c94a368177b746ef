"""Metrics with confidence intervals, computed from the documents that lm-eval logged. This module does not import lm-eval."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from psigrad.intervals import Interval, mean_interval, paired_difference


@dataclass(frozen=True)
class TaskMetric:
    """A metric of a task for the model, the baseline, and their difference, with 95 % intervals over documents."""

    task: str
    metric: str
    documents: int
    model: Interval
    baseline: Interval | None = None
    difference: Interval | None = None
    """Model minus baseline on the same documents (`paired_difference`)."""


def metrics_of(own: Mapping[str, Any], other: Mapping[str, Any] | None = None) -> Iterator[TaskMetric]:
    """Yield each metric for which every document has a number, from lm-eval's results of a model and an optional baseline.

    lm-eval logs a document once for each filter of its task, such as strict and flexible extraction of the answer. If a task has
    several filters, each has its own metrics, with lm-eval's names: "exact_match,strict-match".
    """
    for task, samples in own["samples"].items():
        by_filter = _split_filters(samples)
        theirs = _split_filters([] if other is None else other["samples"][task])
        for name, logged in by_filter.items():
            for metric in logged[0]["metrics"]:
                values: list[Any] = [sample.get(metric) for sample in logged]
                if not all(isinstance(value, int | float) for value in values):
                    continue
                shown = f"{metric},{name}" if len(by_filter) > 1 else metric
                if other is None:
                    yield TaskMetric(task, shown, len(values), _interval(values))
                    continue
                before = [sample[metric] for sample in theirs[name]]
                change = paired_difference(before, values)
                yield TaskMetric(task, shown, len(values), _interval(values), _interval(before), change)


def _split_filters(samples: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Return the logged documents by filter, or {} if there are none."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for sample in samples:
        found.setdefault(sample.get("filter", ""), []).append(sample)
    return found


def _interval(values: Sequence[float]) -> Interval:
    found = [float(value) for value in values]
    return Interval(sum(found) / len(found), *mean_interval(found))
