"""Being asked to stop: the first SIGTERM, SIGHUP (the terminal is gone) or Ctrl-C is served between steps, the second at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType
from typing import Any

_SAID = b"\npsigrad: Stopping once what is under way has ended, and saving; Ctrl-C again stops at once.\n"


class StopSignal:
    """While its block runs, the first SIGTERM, SIGHUP or SIGINT only sets `requested` (and `number`); the second raises
    KeyboardInterrupt. Who pressed Ctrl-C is told so.

    The process then exits with 128 + the signal's number: 143 (SIGTERM), 129 (SIGHUP), 130 (SIGINT). Outside the main thread,
    where no handler can be set, it does nothing.
    """

    def __init__(self) -> None:
        self.number = 0
        self._before: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether a stop was asked for."""
        return self.number != 0

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                self._before[number] = signal.signal(number, self._asked)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: set by something that is not Python
        self._before.clear()

    def _asked(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.number = number
        if number == signal.SIGINT and os.environ.get("RANK", "0") == "0":
            with contextlib.suppress(OSError):
                os.write(2, _SAID)  # not print: the signal may come in the middle of one
