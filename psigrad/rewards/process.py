"""A worker as its parent sees it: one process, two pipes that never block, and a deadline."""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

from psigrad.rewards.shipping import Packed
from psigrad.rewards.worker import HEADER, frame

# Seconds in which a worker must have imported the reward functions.
START_LIMIT = 120.0
_START = "from psigrad.rewards.worker import main; main()"


@dataclass(frozen=True)
class Job:
    """The functions that have yet to answer, in order, and the samples to show them together.

    Each answers for itself, so that the fault of one is known to be its own and changes nothing that another is shown.
    """

    functions: tuple[int, ...]
    indices: tuple[int, ...]

    def rest(self) -> Job | None:
        """What is left once the first function has answered."""
        return Job(self.functions[1:], self.indices) if len(self.functions) > 1 else None


class Worker:
    """One process in a session of its own, so that what a reward function starts can be killed with it.

    Pipes never block: a worker that was stopped in the middle of reading or writing is late like any other.
    """

    def __init__(self, functions: list[tuple[str, Packed]], homes: dict[str, str]) -> None:
        request_read, self._requests = os.pipe()
        self._responses, response_write = os.pipe()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment["PYTHONPATH"] = os.pathsep.join(p or os.getcwd() for p in sys.path)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", _START, str(request_read), str(response_write), str(os.getpid())],
            pass_fds=(request_read, response_write),
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        os.close(request_read)
        os.close(response_write)
        os.set_blocking(self._requests, False)
        os.set_blocking(self._responses, False)
        self._outbox, self._inbox = bytearray(), bytearray()
        self.job: Job | None = None
        self.ready = False
        self.ask({"path": sys.path, "functions": functions, "homes": homes}, START_LIMIT)

    def ask(self, message: Any, limit: float) -> None:
        """Send a message that must be answered within `limit` seconds."""
        self.deadline = time.monotonic() + limit
        self._outbox += frame(message)
        self._push()

    def _push(self) -> None:
        try:
            while self._outbox:
                del self._outbox[: os.write(self._requests, self._outbox[: 1 << 16])]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self._outbox.clear()  # it died; `poll` says so

    def poll(self) -> Any:
        """Move what the pipes take; the next message of the worker, or None. Raises EOFError where it is gone or speaks
        nonsense.
        """
        self._push()
        with contextlib.suppress(BlockingIOError):
            while len(data := os.read(self._responses, 1 << 16)):
                self._inbox += data
            if not self._whole():
                raise EOFError
        if not self._whole():
            return None
        end = HEADER.size + HEADER.unpack_from(self._inbox)[0]
        data = bytes(self._inbox[HEADER.size : end])
        del self._inbox[:end]
        try:
            return pickle.loads(data)
        except Exception as error:
            raise EOFError from error

    def _whole(self) -> bool:
        held = len(self._inbox)
        return held >= HEADER.size and held >= HEADER.size + HEADER.unpack_from(self._inbox)[0]

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Have `selector` wake up when `poll` may have something to do."""
        selector.register(self._responses, selectors.EVENT_READ)
        if self._outbox:
            selector.register(self._requests, selectors.EVENT_WRITE)

    def alive(self) -> bool:
        """Whether the process still runs. It is not reaped here: until `kill` its number cannot become another's."""
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def kill(self) -> str:
        """End the process and those it started, for good, and say how it ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        status = self.process.wait()
        os.close(self._requests)
        os.close(self._responses)
        return f"signal {-status}" if status < 0 else f"exit status {status}"
