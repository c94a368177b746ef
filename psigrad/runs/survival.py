"""Safe handling of stops and exits: `supervise` around a command, `convert_exits` and `StopSignal` around a run."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from psigrad import redaction
from psigrad.errors import UserError
from psigrad.processes.proc import die_with_parent, end_by

_FORWARDED = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
# A supervised process can receive one signal twice. A second one within this many seconds is ignored.
_TWICE = 0.3
_supervised = False


def supervise(work: Callable[[], int]) -> int:
    """Run `work` in a forked child if possible, and return its exit status, which is 0 only if `work` returned 0.

    This process forwards signals to the child. If a signal ends the child, it also ends this process.
    """
    if not sys.platform.startswith("linux") or sys.gettrace() is not None or threading.active_count() > 1:
        return work()
    # only a parent can tell a normal end of the child from an `os._exit(0)`, `posix.execv` or exit handler in user code
    read, write = os.pipe()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # otherwise both processes would write the buffered output
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
        redaction.say("The command did not finish: code that it runs or imports ended the process, perhaps by os._exit.")
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
    """Forward signals until the child has ended, and return its wait status.

    Signals from the terminal, such as Ctrl-C's, are not forwarded, since the child receives them too.
    """
    while True:
        found = signal.sigwaitinfo({*_FORWARDED, signal.SIGCHLD})
        if found.si_signo != signal.SIGCHLD:
            if found.si_code <= 0:  # from a process, not from the kernel
                os.kill(child, found.si_signo)
        elif (ended := os.waitpid(child, os.WNOHANG))[0]:
            return ended[1]


@contextlib.contextmanager
def convert_exits() -> Iterator[None]:
    """Raise a `UserError` if user code in the block calls `sys.exit`."""
    try:
        yield
    except SystemExit as error:
        code = "" if error.code is None else error.code
        raise UserError(
            f"sys.exit({code}) was called before the run was finished, probably by an environment or a callback. "
            "Return instead, or raise an exception with the reason."
        ) from error


class Stopped(UserError):
    """Raised once a run that was stopped by a signal has saved its state. The exit status is 128 + the signal's number."""

    exit_status = 128


class Interrupted(BaseException):
    """Raised at a signal in a block of `StopSignal.interrupting`. As a `BaseException`, it passes through `except Exception`."""


_SAID = b"\npsigrad: Stopping after the current step, then saving. Ctrl-C again stops at once.\n"


class StopSignal:
    """A context in which the first SIGTERM, SIGHUP or SIGINT sets `requested` to True instead of ending the process.

    `number` is then the number of that signal. A second signal raises KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self.requested, self.number, self._since, self._interrupts = False, 0, 0.0, False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():  # Python allows signal handlers only there
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: set by something that is not Python
        self._before.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if _supervised and number == self.number and time.monotonic() - self._since < _TWICE:
            return  # the signal was sent to the whole process group, and the parent forwarded it as well
        if self.requested:
            raise KeyboardInterrupt
        self.requested, self.number, self._since = True, number, time.monotonic()
        if number == signal.SIGINT and os.environ.get("RANK", "0") == "0":
            with contextlib.suppress(OSError):
                os.write(2, _SAID)  # not print: the signal may interrupt one
        if self._interrupts:
            raise Interrupted

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[None]:
        """Raise `Interrupted` as soon as a signal arrives in the block, or at once if a signal arrived earlier."""
        self._interrupts = True
        try:
            if self.requested:
                raise Interrupted
            yield
        finally:
            self._interrupts = False
