"""A worker for Ray that takes half a second for each job."""

from __future__ import annotations

import time


class Sleeper:
    """Says when it began and ended."""

    def ready(self) -> bool:
        return True

    def sleep(self) -> tuple[float, float]:
        begin = time.monotonic()
        time.sleep(0.5)
        return begin, time.monotonic()
