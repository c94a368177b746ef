"""Several threads that wait at one place for what comes in."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Self, TypeVar

T = TypeVar("T")


class Watch:
    """A lock, as a context manager. Of the threads that wait, one looks for all of them, without the lock; the others sleep until
    it has seen something.
    """

    def __init__(self) -> None:
        self._stirred = threading.Condition(threading.Lock())
        self._looking = False

    def __enter__(self) -> Self:
        self._stirred.acquire()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stirred.release()

    def look(self, look: Callable[[], T], seconds: float) -> T | None:
        """What `look` finds; None where another thread looks meanwhile, after it has or so many seconds have passed. The caller
        has the lock, and has it again afterwards; `look` waits for `seconds` at most. With 0 seconds everybody may look.
        """
        if self._looking and seconds:
            self._stirred.wait(seconds)
            return None
        waits = bool(seconds)
        self._looking = self._looking or waits
        self._stirred.release()
        try:
            return look()
        finally:
            self._stirred.acquire()
            if waits:
                self._looking = False
                self._stirred.notify_all()
