"""Bounds on time that hold on a machine with much else to do."""

from __future__ import annotations

import time
from collections.abc import Callable


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
