"""Start and end the processes (ranks) of one machine that train together."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType

from psigrad.errors import UserError
from psigrad.processes.parallel.world import RankLost
from psigrad.processes.proc import die_with_parent

# Seconds in which the other processes may end by themselves after a failure, and bytes of a process's last output to store.
GRACE, WORDS = 10.0, 8000


def is_rank() -> bool:
    """Return True if this process was started as a rank."""
    return "WORLD_SIZE" in os.environ


def is_first_rank() -> bool:
    """Return True if this process is rank 0, the one that prints."""
    return os.environ.get("RANK", "0") == "0"


def check(processes: int) -> None:
    """Raise `UserError` if the setting `processes` is above 1 and differs from the number of ranks that were started."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if processes > 1 and size != processes:
        raise UserError(
            f"processes is {processes}, but the number of started processes is {size}; start your Python script with `torchrun "
            f"--nproc-per-node={processes}`, or use the command line, which starts the processes itself."
        )


def run(processes: int, arguments: Sequence[str]) -> int:
    """Run `psigrad` with `arguments` as ranks 0 … processes - 1 of this machine. Return the exit status of the run.

    Only rank 0 uses the terminal. If a process fails, the others are killed after `GRACE` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="psigrad-") as folder:
        ranks = [_Rank(rank, processes, folder, arguments) for rank in range(processes)]
        before = {number: signal.signal(number, _forward_signals(ranks)) for number in (signal.SIGTERM, signal.SIGHUP)}
        before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            return _watch(ranks)
        finally:
            for rank in ranks:
                rank.process.kill()
                rank.process.wait()
            for number, handler in before.items():
                signal.signal(number, handler)


class _Rank:
    """One of the started processes. If it is not rank 0, the end of its stderr is stored for error messages."""

    def __init__(self, rank: int, size: int, folder: str, arguments: Sequence[str]) -> None:
        self.rank, self.words = rank, b""
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "PSIGRAD_RANKS": folder}
        environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
        quiet = {} if rank == 0 else {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
        command = [sys.executable, "-m", "psigrad", *arguments]
        self.process = subprocess.Popen(command, env=environment, preexec_fn=partial(_prepare, os.getpid()), **quiet)  # type: ignore[call-overload]
        if rank:
            threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in self.process.stderr:
            self.words = (self.words + line)[-WORDS:]

    @property
    def failed(self) -> bool:
        """True if the process has ended with an error."""
        return self.process.poll() not in (None, 0)

    @property
    def status(self) -> int:
        """The exit status as in a shell: if a signal ended the process, 128 + the signal's number."""
        code = int(self.process.returncode)
        return code if code >= 0 else 128 - code


def _prepare(parent: int) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    die_with_parent(parent)


def _forward_signals(ranks: Sequence[_Rank]) -> Callable[[int, FrameType | None], None]:
    def handler(number: int, frame: FrameType | None) -> None:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                rank.process.send_signal(number)

    return handler


def _watch(ranks: Sequence[_Rank]) -> int:
    """Wait until all ranks have ended, or until `GRACE` seconds after the first failure. Return the exit status of the run."""
    first: _Rank | None = None
    since = 0.0
    while any(rank.process.poll() is None for rank in ranks):
        failed = [rank for rank in ranks if rank.failed]
        if first is None and failed:
            # a process that ended because it lost another one is not the cause
            first, since = min(failed, key=lambda rank: rank.status == RankLost.exit_status), time.monotonic()
        if first is not None and time.monotonic() - since > GRACE:
            break
        time.sleep(0.05)
    unaware = [str(rank.rank) for rank in ranks if rank.process.poll() is None]
    stopped = [rank for rank in ranks if rank.failed and rank.status != RankLost.exit_status]
    cause = first if first in stopped or not stopped else stopped[0]
    if cause is None:
        cause = next((rank for rank in ranks if rank.failed), None)
    if cause is None:
        return 0
    own = ranks[0].status if ranks[0].failed else 0
    # rank 0 has printed its own error on the terminal, unless a signal ended it
    if cause.process.returncode < 0 or (cause.rank and own in (0, RankLost.exit_status)):
        _report(cause, len(ranks), unaware)
        return cause.status
    return own or cause.status


def _report(rank: _Rank, size: int, unaware: Sequence[str]) -> None:
    code = rank.process.returncode
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    print(f"psigrad: process {rank.rank} of {size} (counted from 0) {how}, so the others were stopped too.", file=sys.stderr)
    if unaware:  # a time-out of NCCL ends the waiting processes by SIGABRT
        running = f"processes {', '.join(unaware)} were" if unaware[1:] else f"process {unaware[0]} was"
        print(f"psigrad: {running} still running and may have hung, which makes the others fail.", file=sys.stderr)
    time.sleep(0.1)  # its last output may not have arrived yet
    if words := rank.words.decode(errors="replace").strip():
        print(words, file=sys.stderr)
