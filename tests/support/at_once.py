"""Calls that begin together, each in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def at_once(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Return the results of work(0), …, work(count - 1), or raise what one of them raised."""
    start = threading.Barrier(count)

    def call(n: int) -> Any:
        start.wait()
        return work(n)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(call, range(count)))
