"""Everything that a worker has started, also what left its session: found by a mark in the environment that children inherit."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

MARK = "PSIGRAD_WORKER"


def kill_marked(mark: str) -> None:
    """Kill every process with this mark, until none is left. Without /proc (macOS) nothing is found."""
    wanted = f"{MARK}={mark}".encode()
    for _ in range(20):  # one that forks while it is looked for is found the next time
        if not (found := _marked(wanted)):
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def _marked(wanted: bytes) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0") and not _is_dead(folder):
                found.append(int(folder.name))
    return found


def _is_dead(folder: Path) -> bool:
    """Killed, and waiting for its parent to notice."""
    return (folder / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
