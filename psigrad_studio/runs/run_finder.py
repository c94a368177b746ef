"""The search for run folders. A run is identified by a hash of its path, so that no text of a request becomes a path."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DEPTH, MOST, MOST_FOLDERS = 5, 2000, 20_000
_SKIPPED = frozenset({"checkpoints", "model", "settings", "data"})
SCAN_SECONDS = 1.0


@dataclass(frozen=True)
class RunPlace:
    """A run folder: its identifier, its name relative to the folder of runs, and its path."""

    id: str
    name: str
    path: Path


class RunFinder:
    """The run folders below `root`. A folder is a run if it contains a known file, such as metrics.

    The search runs at most once a second. Links are not followed.
    """

    def __init__(self, root: Path, marks: tuple[str, ...] = ("metrics.jsonl", "events.jsonl")) -> None:
        self.root, self.marks = root, marks
        self._lock = threading.Lock()
        self._scanned = -SCAN_SECONDS
        self._places: dict[str, RunPlace] = {}
        self.more = False
        """True if there are more runs than `MOST`, or more folders than `MOST_FOLDERS`. The rest is skipped."""

    def places(self) -> dict[str, RunPlace]:
        """Return all runs by identifier, sorted by name."""
        with self._lock:
            if time.monotonic() - self._scanned >= SCAN_SECONDS:
                self.more = False
                found = sorted(self._found(), key=lambda place: place.name)
                self.more |= len(found) > MOST
                self._places = {place.id: place for place in found[:MOST]}
                self._scanned = time.monotonic()
            return self._places

    def _found(self) -> Iterator[RunPlace]:
        try:
            root = self.root.resolve(strict=True)
        except OSError:
            return
        count = 0
        for number, (folder, folders, files) in enumerate(os.walk(root)):
            if number >= MOST_FOLDERS:
                self.more = True
                return
            path = Path(folder)
            depth = len(path.relative_to(root).parts)
            is_run = any(name in files for name in self.marks)
            if is_run:
                yield _place(root, path)
                count += 1
            if depth >= DEPTH or (is_run and depth) or count > MOST:
                folders.clear()
            folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in _SKIPPED)


def _place(root: Path, path: Path) -> RunPlace:
    name = path.relative_to(root).as_posix()
    name = root.name if name == "." else name
    printable = name.encode("utf-8", "backslashreplace").decode()
    return RunPlace(hashlib.sha256(os.fsencode(path)).hexdigest()[:16], printable, path)
