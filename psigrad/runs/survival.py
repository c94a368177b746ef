"""What keeps the promises of a run when something goes wrong: it is told to stop, its program is left, it stalls, or freed
memory stays with the process.

A run uses it by three names: `supervise` around a command, `exits_are_errors` and `StopSignal` around a run. `Watchdog` and
`Trimmer` are called once a step.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from psigrad import redaction
from psigrad.errors import UserError
from psigrad.processes.proc import die_with_parent, end_by

STACKS = "stacks.txt"
# A phase may take so many times as long as the longest of its kind so far.
_TIMES = 10
_HELD = {"memory_bytes": "VmRSS", "peak_memory_bytes": "VmHWM", "anonymous_bytes": "RssAnon"}
_FORWARDED = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
# Seconds in which the same signal may come to a supervised process twice.
_TWICE = 0.3
_supervised = False


def supervise(work: Callable[[], int]) -> int:
    """Run a command in a forked child and return its exit status, which is 0 only if `work` returned 0.

    Code of the user in the command may leave the process by `os._exit(0)`, `posix.execv` or an exit handler; only a parent can
    tell that from the end. Signals to this process reach the child, whose terminal, process group and folder are the same. It
    ends with this process, and its death by a signal is this one's.

    Without Linux, under a debugger, and beside other threads there is no child.
    """
    if not sys.platform.startswith("linux") or sys.gettrace() is not None or threading.active_count() > 1:
        return work()
    read, write = os.pipe()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # or both would write what is left in it
    own, before = os.getpid(), signal.pthread_sigmask(signal.SIG_BLOCK, {*_FORWARDED, signal.SIGCHLD})
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child = os.fork()
    if child == 0:
        os.close(read)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return _work_below(own, work, write)
    os.close(write)
    code = os.waitstatus_to_exitcode(_wait_for(child))
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    os.set_blocking(read, False)
    with contextlib.suppress(BlockingIOError), os.fdopen(read, "rb", buffering=0) as stream:
        returned = stream.read(1)
    if code < 0:
        end_by(-code)
    if code == 0 and not returned:
        redaction.say("Code that the command runs or imports ended the process before the command was finished.")
        return 1
    return code or returned[0]


def _work_below(parent: int, work: Callable[[], int], write: int) -> int:
    global _supervised
    _supervised = True
    die_with_parent(parent)
    own, status = os.getpid(), work()
    if os.getpid() == own:
        os.write(write, bytes([status]))
    return status


def _wait_for(child: int) -> int:
    """Forward signals until the child has ended, and return its wait status. The terminal sends its signals to both."""
    while True:
        found = signal.sigwaitinfo({*_FORWARDED, signal.SIGCHLD})
        if found.si_signo != signal.SIGCHLD:
            if found.si_code <= 0:  # from a process, not from the kernel
                os.kill(child, found.si_signo)
        elif (ended := os.waitpid(child, os.WNOHANG))[0]:
            return ended[1]


@contextlib.contextmanager
def exits_are_errors() -> Iterator[None]:
    """Turn `sys.exit` in the block, by code of the user, into a `UserError`."""
    try:
        yield
    except SystemExit as error:
        code = "" if error.code is None else error.code
        raise UserError(
            f"sys.exit({code}) was called before the run was finished: an environment or a callback of yours ends the program. "
            "Let it return, or raise an exception that says why."
        ) from error


class Stopped(UserError):
    """The run was asked to stop (SIGTERM or Ctrl-C); everything is saved. The program exits with 128 + the signal's number."""

    exit_status = 128


_SAID = b"\npsigrad: Stopping once what is under way has ended, and saving; Ctrl-C again stops at once.\n"


class StopSignal:
    """A block in which the first SIGTERM, SIGHUP or SIGINT only sets `requested` and `number`; the second raises
    KeyboardInterrupt. After Ctrl-C a line on the terminal says so.

    The process then exits with 128 + the signal's number: 143 (SIGTERM), 129 (SIGHUP), 130 (SIGINT). Outside the main thread,
    which alone can set handlers, the block does nothing.
    """

    def __init__(self) -> None:
        self.number, self._since = 0, 0.0
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
        if _supervised and number == self.number and time.monotonic() - self._since < _TWICE:
            return  # it was sent to the whole group of processes, and once more by the parent
        if self.requested:
            raise KeyboardInterrupt
        self.number, self._since = number, time.monotonic()
        if number == signal.SIGINT and os.environ.get("RANK", "0") == "0":
            with contextlib.suppress(OSError):
                os.write(2, _SAID)  # not print: the signal may come in the middle of one


def memory() -> dict[str, int]:
    """Bytes of memory that this process holds now, the most that it has held, and what of it is no file's; empty where the system
    does not say.
    """
    try:
        said = Path("/proc/self/status").read_text()
    except OSError:
        return {}
    found = {name: re.search(rf"^{key}:\s+(\d+) kB", said, re.M) for name, key in _HELD.items()}
    return {name: 1024 * int(match[1]) for name, match in found.items() if match}


class Trimmer:
    """Gives freed memory back to the system where more and more is held: tensors of ever new sizes leave holes that the next ones
    do not fit into.

    What a process holds between its first steps is what it needs. Above it by a fiftieth, the holes are given back; they cost
    page faults when they are used again, so that is not done in every step.
    """

    def __init__(self, steps: int = 3, above: float = 1.02) -> None:
        self._left, self._above, self._usual = steps, above, 0

    def __call__(self) -> dict[str, int]:
        """To be called at the end of each step, with whose row `memory` goes."""
        held = memory()
        now = held.pop("anonymous_bytes", 0)  # pages of files come and go with what the machine needs its memory for
        if self._left > 0:
            self._left -= 1
            self._usual = max(self._usual, now)
        elif now > self._above * self._usual:
            give_back()
            self._usual = max(self._usual, memory().get("anonymous_bytes", 0))  # what is held then is needed
        return held


def give_back() -> None:
    """Have glibc give all freed memory back to the system; other C libraries have no such call."""
    if sys.platform.startswith("linux"):
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL("libc.so.6").malloc_trim(0)


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
                redaction.say(f"{phase} has lasted {spent:.0f} s; the stacks are in {self._file}")
                self._report(phase, spent)
