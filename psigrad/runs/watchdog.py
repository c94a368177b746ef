"""A thread that notices when a run hangs: it names the phase, and writes every thread's stack to the run folder."""

from __future__ import annotations

import contextlib
import faulthandler
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

STACKS = "stacks.txt"
# A phase may take so many times as long as the longest of its kind so far.
_TIMES = 10


class Watchdog:
    """Reports a phase that lasts longer than `seconds`, and than ten times the longest one of its name. It stops nothing.

    `report(phase, seconds)` is called once for each such phase, from the watchdog's thread.
    """

    def __init__(self, seconds: float, folder: Path, report: Callable[[str, float], None]) -> None:
        self._limit, self._file, self._report = seconds, folder / STACKS, report
        self._phases = ["loading"]
        self._since = time.monotonic()
        self._longest: dict[str, float] = {}
        self._told = False
        self._end = threading.Event()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch for the length of the block."""
        thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        if self._limit:
            thread.start()
        try:
            yield
        finally:
            self._end.set()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Inside the block the run is in the phase `name`."""
        self._turn()
        self._phases.append(name)
        begun = time.monotonic()
        try:
            yield
        finally:
            self._phases.pop()
            self._longest[name] = max(self._longest.get(name, 0.0), time.monotonic() - begun)
            self._turn()

    def _turn(self) -> None:
        self._phases[0] = "between the phases of a step"
        self._since, self._told = time.monotonic(), False

    def _watch(self) -> None:
        while not self._end.wait(min(5.0, self._limit / 4)):
            phase, spent = self._phases[-1], time.monotonic() - self._since
            if not self._told and spent > max(self._limit, _TIMES * self._longest.get(phase, 0.0)):
                self._told = True
                with contextlib.suppress(OSError), self._file.open("a") as stream:
                    stream.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}: {phase} for {spent:.0f} s\n")
                    stream.flush()
                    faulthandler.dump_traceback(stream)
                print(f"psigrad: {phase} has lasted {spent:.0f} s; the stacks are in {self._file}", file=sys.stderr, flush=True)
                self._report(phase, spent)
