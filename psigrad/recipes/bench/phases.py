"""Seconds of a step by phase, and the peak memory of a process."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Phases:
    """Seconds by name within one step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin

    def around(self, owner: Any, method: str, name: str) -> None:
        """Time every call of a method."""
        original = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self(name):
                return original(*args, **kwargs)

        setattr(owner, method, timed)


def peak_mb() -> float:
    """The largest resident set of this process so far, in MiB."""
    try:
        status = Path("/proc/self/status").read_text()
        return int(next(line for line in status.splitlines() if "VmHWM" in line).split()[1]) / 1024
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / (1 << 20 if sys.platform == "darwin" else 1 << 10)
