"""What Linux knows of processes, and does for them: their state in /proc, and that one ends with its parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
from pathlib import Path
from typing import NamedTuple


class Stat(NamedTuple):
    """Of a process: whether only its remains are there, its parent, and when it began, in the kernel's ticks."""

    ended: bool
    parent: int
    began: str


def stat_of(process: int) -> Stat | None:
    """From /proc/PID/stat; None where there is no such process, or no /proc."""
    try:
        # the name stands in parentheses and may hold some
        fields = Path("/proc", str(process), "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return Stat(fields[0] in "ZX", int(fields[1]), fields[19])


def began(process: int) -> str:
    """When a process that runs began; empty where it has ended, though its parent may not have noticed yet."""
    stat = stat_of(process)
    return "" if stat is None or stat.ended else stat.began


def die_with_parent(parent: int = 0) -> None:
    """Have the kernel kill this process when its parent ends, however that ends; end at once where it is not `parent` any more.
    Only Linux knows such a thing.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if parent and os.getppid() != parent:
        os._exit(1)


def end_by(number: int) -> None:
    """End this process by a signal, as another one was. Nothing happens if the signal does not end a process."""
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
