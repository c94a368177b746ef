"""Functions that read the state of processes from Linux's /proc, and that end a process together with its parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
from pathlib import Path
from typing import NamedTuple


class Stat(NamedTuple):
    """The state of a process: whether it has ended (a zombie or dead), its parent's id, and its start time in kernel ticks."""

    ended: bool
    parent: int
    began: str


def stat_of(process: int) -> Stat | None:
    """Return a process's state from /proc/PID/stat; None if there is no such process, or no /proc."""
    try:
        # the name is in parentheses and may itself contain parentheses
        fields = Path("/proc", str(process), "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return Stat(fields[0] in "ZX", int(fields[1]), fields[19])


def began(process: int) -> str:
    """Return the start time of a running process; empty if it has ended, even if it is still a zombie."""
    stat = stat_of(process)
    return "" if stat is None or stat.ended else stat.began


def die_with_parent(parent: int = 0) -> None:
    """Make the kernel kill this process when its parent ends, for any reason. This works on Linux alone.

    Exit at once if the parent is no longer the process `parent` (0: do not check).
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if parent and os.getppid() != parent:
        os._exit(1)


def end_by(number: int) -> None:
    """Send this process the signal `number`, so that it ends as another process did, without a core dump.

    Nothing happens if the signal does not end a process.
    """
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
