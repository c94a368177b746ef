"""The keeper, the parent process of a worker. When the worker has ended, it kills all processes that the user's code started.

Such a process may leave its session and clear its environment, but not the process tree: when its parent ends, it becomes a child
of the keeper (PR_SET_CHILD_SUBREAPER of Linux). The keeper reaps it when it ends; otherwise its process id would stay in use
while the worker runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path

from psigrad.processes.proc import die_with_parent, end_by, stat_of

_DEATH_SIGNAL, _SUBREAPER = 1, 36
# Seconds in which the worker's remaining processes must have ended.
_PATIENCE = 5.0


def keep(parent: int) -> None:
    """Fork this process: return in the child, which is the worker. This process stays as its keeper and ends with it.

    SIGTERM to the keeper, or the death of its parent, ends the worker. On other systems than Linux there is no keeper.
    """
    if not Path("/proc/self/stat").exists():
        return
    call = ctypes.CDLL(None).prctl
    call(_SUBREAPER, 1)
    own = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    worker = os.fork()
    if worker == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        die_with_parent(own)
        os.setsid()
        return

    # Linux also sends the signal if only the thread that started this process has ended
    def end_without_parent(*_: object) -> None:
        if os.getppid() != parent:
            os.kill(worker, signal.SIGKILL)

    signal.signal(signal.SIGTERM, lambda *_: os.kill(worker, signal.SIGKILL))
    signal.signal(signal.SIGUSR1, end_without_parent)
    call(_DEATH_SIGNAL, signal.SIGUSR1)
    os.closerange(3, 1 << 16)
    end_without_parent()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    _reap_until(worker)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    status = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
    _end_all()
    if status < 0:
        end_by(-status)
    os._exit(max(0, status))


def _reap_until(worker: int) -> None:
    """Wait until the worker has ended, and reap every orphan that ends before it.

    The worker itself is not reaped here. So no other process can get its id, to which the signal handlers send SIGKILL.
    """
    while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)) and ended.si_pid != worker:
        os.waitpid(ended.si_pid, 0)


def _end_all() -> None:
    """Kill all descendants of this process. All are stopped first, since a running one could start new processes meanwhile."""
    end, stopped = time.monotonic() + _PATIENCE, set[int]()
    while time.monotonic() < end:
        fresh = _below(os.getpid()) - stopped
        _send(fresh, signal.SIGSTOP)
        stopped |= fresh
        if fresh:
            continue
        _send(stopped, signal.SIGKILL)
        stopped.clear()
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


def _send(processes: set[int], number: int) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, number)


def _below(root: int) -> set[int]:
    """Return the ids of all descendants of the process `root`."""
    stats = {process: stat_of(process) for process in (int(folder.name) for folder in Path("/proc").glob("[0-9]*"))}
    found, fresh = set[int](), {root}
    while fresh:
        fresh = {process for process, stat in stats.items() if stat is not None and stat.parent in fresh}
        found |= fresh
    return found
