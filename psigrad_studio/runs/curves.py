"""Curves for the page: all points, or only those that the page does not have yet. Curves with too many points are thinned."""

from __future__ import annotations

import itertools
import math
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from psigrad.records.signals import SIGNAL_BY_NAME
from psigrad_studio.runs.history import History, Series
from psigrad_studio.runs.run_cache import RunCache

MOST_POINTS = 50_000
SECONDS = 1.0


def curves(
    cache: RunCache, run: str, generation: int, have: Mapping[str, int], names: Sequence[str] | None, axis: str
) -> dict[str, Any]:
    """Return a run's curves, without the points that the page already has: `have` maps a curve to their number.

    These numbers are ignored if they are of another `generation`, that is, from before the run was restarted.
    """
    history = cache.history(run)
    history.catch_up(SECONDS)
    with history.lock:
        mine = have if generation == history.generation else {}
        wanted = [name for name in history.series if _usual(name)] if names is None else names
        grids: dict[bytes, int] = {}
        # A step's timings are written after its metrics, so the newest point may have no time yet.
        waits = axis == "time" and len(history.seconds.steps) > 0 and history.state == "running"
        end = history.seconds.steps[-1] if waits else math.inf
        found = {n: _curve(history, history.series[n], mine.get(n, 0), axis, grids, end) for n in wanted if n in history.series}
        return {
            "id": run,
            "generation": history.generation,
            "version": history.version,
            "whole": history.whole,
            "keys": list(history.series),
            "grids": [array("d", steps).tolist() for steps in grids],
            "curves": found,
        }


def _usual(name: str) -> bool:
    """Return True if a metric is shown by default: the main metrics, and the mean of each reward function."""
    return name in SIGNAL_BY_NAME or (name.startswith("rewards/") and name.endswith("/mean"))


def _curve(history: History, series: Series, have: int, axis: str, grids: dict[bytes, int], end: float) -> dict[str, Any]:
    """Return one curve from point `have` to step `end`.

    Curves share most of their steps, so the steps are stored in `grids` and referenced by index.
    """
    count = bisect_right(series.steps, end)
    first = have if 0 <= have <= count else 0
    steps, values = series.steps[first:count], series.values[first:count]
    if len(steps) > MOST_POINTS:
        kept = thinned(values, MOST_POINTS)
        steps, values = array("d", (steps[i] for i in kept)), array("d", (values[i] for i in kept))
    return {
        "first": first,
        "count": count,
        "steps": grids.setdefault(steps.tobytes(), len(grids)),
        "x": None if axis == "step" else history.at(axis, steps),
        "values": [v if math.isfinite(v) else None for v in values.tolist()],
    }


def thinned(values: Sequence[float], most: int) -> list[int]:
    """Return the indices of the points that a thinned curve keeps: minimum and maximum in each of `most` / 2 sections, in order.

    So all extremes stay visible.
    """
    y = np.asarray(values, float)
    edges = np.linspace(0, len(y), most // 2 + 1).astype(int)
    kept = []
    for start, end in itertools.pairwise(edges.tolist()):
        part = y[start:end]
        known = np.isfinite(part)
        if not known.any():
            kept += [start] if end > start else []
            continue
        low, high = np.where(known, part, np.inf).argmin(), np.where(known, part, -np.inf).argmax()
        kept += sorted({int(start + low), int(start + high)})
    return [int(i) for i in kept]
