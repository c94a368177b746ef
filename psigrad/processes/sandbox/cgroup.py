"""Control groups (cgroups), the only limits on processes and memory that apply to a whole process tree.

They are used if this process may make them: version 2 if its controllers can be delegated, otherwise version 1. Source:
Documentation/admin-guide of Linux. A group's name contains its owner's process id and start time, since process ids are reused.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from psigrad.processes.proc import began
from psigrad.processes.sandbox.executor import SandboxError

ROOT = Path("/sys/fs/cgroup")
_NUMBERS = itertools.count()


@cache
def homes() -> dict[str, Path]:
    """Return {controller ("pids" or "memory"): the folder for its groups}, without controllers whose groups can't be made."""
    found = {}
    if (ROOT / "cgroup.controllers").is_file():
        return _homes_v2()
    for controller in ("pids", "memory"):
        place = ROOT / controller / "psigrad"
        with contextlib.suppress(OSError):
            place.mkdir(exist_ok=True)
            if os.access(place, os.W_OK):
                found[controller] = place
    return found


def _homes_v2() -> dict[str, Path]:
    place = ROOT / "psigrad"
    try:
        (ROOT / "cgroup.subtree_control").write_text("+pids +memory")
        place.mkdir(exist_ok=True)
        (place / "cgroup.subtree_control").write_text("+pids +memory")
    except OSError:
        return {}
    return {"pids": place, "memory": place}


class Group:
    """The control groups of one program. If none can be made, `files` is empty and they limit nothing."""

    def __init__(self, folders: list[Path]) -> None:
        self._folders = folders

    @property
    def files(self) -> list[Path]:
        """The files to which a process must write its id to join the groups."""
        return [folder / "cgroup.procs" for folder in self._folders]

    def out_of_memory(self) -> bool:
        """Return True if the kernel killed a process of the group for lack of memory."""
        for folder in self._folders:
            for name, key in (("memory.events", "oom_kill"), ("memory.oom_control", "oom_kill")):
                with contextlib.suppress(OSError, ValueError):
                    lines = dict(line.split() for line in (folder / name).read_text().splitlines())
                    if int(lines.get(key, 0)):
                        return True
        return False

    def processes(self) -> list[int]:
        """Return the ids of the processes that are now in the groups."""
        found: set[int] = set()
        for file in self.files:
            with contextlib.suppress(OSError):
                found |= {int(line) for line in file.read_text().split()}
        return sorted(found)


@contextlib.contextmanager
def limit_group(processes: int, memory_bytes: int) -> Iterator[Group]:
    """Yield a group of at most `processes` processes and `memory_bytes` bytes. Kill the processes left in it after the block.

    Raise `SandboxError` if the machine has control groups, but this one cannot be made or limited.
    """
    sweep()
    name, made = f"{os.getpid()}-{began(os.getpid())}-{next(_NUMBERS)}", list[Path]()
    limits = (
        ("pids.max", processes),
        ("memory.max", memory_bytes),
        ("memory.swap.max", 0),
        ("memory.limit_in_bytes", memory_bytes),
        ("memory.memsw.limit_in_bytes", memory_bytes),
    )
    group = Group(made)
    try:
        try:
            for folder in dict.fromkeys(home / name for home in homes().values()):
                folder.mkdir()
                made.append(folder)
                for file, value in limits:
                    if (folder / file).exists():
                        (folder / file).write_text(str(value))
        except OSError as error:
            raise SandboxError(f"The limits of a sandbox could not be set ({error}); nothing was run in it.") from error
        yield group
    finally:
        _remove(group, made)


def sweep() -> None:
    """Remove the groups that psigrad processes left when they were killed, and kill the processes in those groups."""
    for place in {ROOT / "psigrad", *(ROOT / controller / "psigrad" for controller in ("pids", "memory"))}:
        for folder in place.glob("*-*-*") if os.access(place, os.W_OK) else ():
            owner, since, _ = folder.name.split("-")
            if began(int(owner)) != since:
                _remove(Group([folder]), [folder])


def _remove(group: Group, folders: list[Path]) -> None:
    for attempt in range(50):
        for process in group.processes():
            with contextlib.suppress(OSError):
                os.kill(process, 9)
        for folder in list(folders):
            with contextlib.suppress(OSError):
                folder.rmdir()
            if not folder.exists():
                folders.remove(folder)
        if not folders:
            return
        time.sleep(0.002 * (attempt + 1))
