"""Bounds on time that hold on a machine with much else to do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

PATIENCE = 60.0
"""Seconds within which whatever is waited for comes: no claim, but what a machine with much else to do may need."""


def until(holds: Callable[[], Any], seconds: float = PATIENCE) -> Any:
    """What `holds()` gives once it is truthy."""
    deadline = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.02)
    return found


def quickest(work: Callable[[], object], enough: float, tries: int = 5) -> float:
    """Wall-clock seconds of the quickest of several tries; no more of them once one took less than `enough`.

    What else the machine does can only add to a time, so one try within a bound shows that the work takes no longer.
    """
    best = float("inf")
    for _ in range(tries):
        begun = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - begun)
        if best < enough:
            break
    return best


LIMITS = (0.4, 4.0, 20.0, 45.0)
"""Time limits to be tried in turn, in seconds: where the machine made something late that does not hang, it gets more."""


def late(*results: object) -> bool:
    """Whether a time limit ended one of these results of scoring."""
    return any("time-out" in getattr(result, "reason", "") for result in results)
