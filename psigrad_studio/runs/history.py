"""One run's metrics, read while they are written: points by key, seconds and tokens by step, and the state of the run."""

from __future__ import annotations

import math
import os
import socket
import statistics
import threading
import time
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from psigrad.records.rows import figures, number, parse_row, parse_step
from psigrad.records.warnings import RunWarning, SignalNames, Watch
from psigrad_studio.runs.files import Tail, content
from psigrad_studio.runs.tokens import is_deep

BYTES_AT_ONCE = 1 << 20
MOST_KEYS, MOST_EVENTS = 400, 200
# The maximum number of bytes in a line of metrics, and in all stored events.
LONGEST_LINE, EVENT_BYTES = 1 << 20, 1 << 20
SILENT_SECONDS = 120.0


@dataclass
class Series:
    """The points (step, value) of one metric, in order of steps."""

    steps: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))


class History:
    """A run's metrics, timings and events. `read` reads new rows; all other methods use the rows read so far."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = threading.RLock()
        files = (path / f"{name}.jsonl" for name in ("metrics", "timings", "events"))
        self._metrics, self._timings, self._events = (Tail(file, LONGEST_LINE) for file in files)
        self.generation = 0
        self._clear()

    def _clear(self) -> None:
        self.series: dict[str, Series] = {}
        self.seconds = Series()
        """The seconds that all steps up to each step took together."""
        self.tokens = Series()
        self.version, self.last_step, self.whole = 0, 0.0, False
        self.written = 0.0
        self.watch = Watch()
        self._names = SignalNames()
        self.events: list[dict[str, Any]] = []
        self.code: Any = None
        """Hashes of the user's code with which the run was last started."""
        self._event_bytes = array("q")

    def read(self, most: int = BYTES_AT_ONCE) -> bool:
        """Read new rows, up to about `most` bytes. Return False if more remain.

        If the run was resumed from a checkpoint, and its files were truncated, they are read again from the start.
        """
        with self.lock:
            tails = (self._metrics, self._timings, self._events)
            restarted = [tail.restarted() for tail in tails]
            if any(restarted):
                self._metrics, self._timings, self._events = (Tail(tail.path, LONGEST_LINE) for tail in tails)
                self.generation += 1
                self._clear()
            before = self._metrics.offset + self._timings.offset + self._events.offset
            for _, line in self._events.lines(most):
                if (event := parse_row(line)) is not None and not is_deep(event):
                    self._told(event, len(line))
            for _, line in self._timings.lines(most):
                if (row := parse_step(line)) is not None:
                    self._timed(row)
            for _, line in self._metrics.lines(most):
                if (row := parse_step(line)) is not None:
                    self._measured(row["step"], figures(row))
            taken = self._metrics.offset + self._timings.offset + self._events.offset - before
            self.version += taken > 0
            self.whole = taken < most
            self.written = max((_modified(tail.path) for tail in tails), default=0.0)
            return self.whole

    def catch_up(self, seconds: float) -> bool:
        """Call `read` until no rows remain, or `seconds` have passed."""
        deadline = time.monotonic() + seconds
        while not self.read():
            if time.monotonic() > deadline:
                return False
        return True

    def _told(self, event: dict[str, Any], size: int) -> None:
        """Store an event, and drop the oldest events if there are too many."""
        if event.get("kind") in ("started", "resumed"):
            self.code = event.get("code")
        self._event_bytes.append(size)
        first = max(0, len(self._event_bytes) - MOST_EVENTS)
        while sum(self._event_bytes[first:]) > EVENT_BYTES:
            first += 1
        self.events = [*self.events, event][first:]
        self._event_bytes = self._event_bytes[first:]

    def _measured(self, step: int, found: Mapping[str, float]) -> None:
        known = (key for key in found if key in self._names or len(self._names) < MOST_KEYS)
        named = {self._names.of(key): found[key] for key in known}
        for name, value in named.items():
            self._add(name, step, value)
        self.last_step = max(self.last_step, step)
        if (seen := named.get("num_tokens")) is not None:
            _point(self.tokens, step, seen)
        self.watch.update(step, named)

    def _add(self, name: str, step: float, value: float) -> None:
        series = self.series.get(name)
        if series is None:
            if len(self.series) >= MOST_KEYS:
                return
            series = self.series[name] = Series()
        _point(series, step, value)

    def _timed(self, row: Mapping[str, Any]) -> None:
        step, spent = row["step"], number(row.get("step_time"))
        if not math.isfinite(spent):
            return
        so_far = self.seconds.values[-1] if self.seconds.values else 0.0
        _point(self.seconds, step, so_far + spent)
        for key in ("step_time", "tokens_per_second"):
            if math.isfinite(value := number(row.get(key))) and "time/eval" not in row:
                self._add(self._names.of(key), step, value)
        for key, raw in row.items():
            if key.startswith("time/") and math.isfinite(value := number(raw)):
                self._add(self._names.of(key), step, value)

    def at(self, axis: str, steps: array[float]) -> list[float]:
        """Return the seconds (`axis` "time") or the tokens ("tokens") of the run up to each of these ascending steps.

        Return the steps themselves if these numbers are not known.
        """
        known = self.seconds if axis == "time" else self.tokens
        if axis == "step" or not known.steps:
            return list(steps)
        found, i = [], 0
        for step in steps:
            while i + 1 < len(known.steps) and known.steps[i + 1] <= step:
                i += 1
            found.append(known.values[i] if known.steps[i] <= step else 0.0)
        return found

    @property
    def state(self) -> str:
        """Return running, finished, stopped or failed (the process ended without an event)."""
        last = next((e.get("kind") for e in reversed(self.events) if e.get("kind") in _KINDS), None)
        if last in ("finished", "stopped"):
            return str(last)
        alive = _holder_lives(self.path)
        if alive is None:
            alive = time.time() - self.written < SILENT_SECONDS
        return "running" if alive else "failed" if last else "stopped"

    def alerts(self, state: str) -> list[RunWarning]:
        """Return the warnings of all rules, and one more if a running run has written nothing for too long."""
        found = self.watch.alerts()
        usual = statistics.median(self.series["step_time"].values[-100:]) if "step_time" in self.series else 0.0
        silent = time.time() - self.written
        if state == "running" and silent > max(SILENT_SECONDS, 10 * usual):
            found.insert(0, RunWarning("silent", self.last_step, None, self.last_step, silent))
        return found


_KINDS = ("started", "resumed", "saved", "finished", "stopped")


def _point(series: Series, step: float, value: float) -> None:
    """Add a point to a series. It replaces a point of the same step, and is ignored if a later step exists."""
    if series.steps and step <= series.steps[-1]:
        if step == series.steps[-1]:
            series.values[-1] = value
        return
    series.steps.append(step)
    series.values.append(value)


def _modified(path: Path) -> float:
    try:
        return path.stat(follow_symlinks=False).st_mtime
    except OSError:
        return 0.0


def _holder_lives(path: Path) -> bool | None:
    """Return True if the process that holds a run's lock is alive; None if that cannot be determined on this machine.

    This function does not try to take the lock, because a trainer that starts at that moment would fail with an error.
    """
    words = content(path / ".lock", 4096).decode("utf-8", "replace").split()
    if len(words) < 4 or words[0] != "process" or not words[1].isdecimal() or words[3].rstrip(",") != socket.gethostname():
        return None
    try:
        os.kill(int(words[1]), 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return _is_locked(path / ".lock")


def _is_locked(path: Path) -> bool:
    """Return True if Linux lists a lock on the file, or if there is no such list.

    The process number alone is not enough: another process may have reused it.
    """
    try:
        inode, held = path.stat().st_ino, Path("/proc/locks").read_text()
    except OSError:
        return True
    return any(f":{inode} " in line for line in held.splitlines())
