"""A worker as its parent sees it: one process, pipes that never block, a deadline, and a kill that leaves nothing behind.

Everything that it has started is below its keeper, or in its enclosure, and ends with it. Where its code kills the keeper first,
what it started is found by a mark in the environment that children inherit.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import selectors
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from psigrad.processes.proc import began
from psigrad.processes.sandbox import Enclosure, cgroup
from psigrad.processes.workers import child
from psigrad.redaction import SECRET_NAME

# Seconds in which a worker must have imported the user's code.
START_LIMIT = 120.0
# Seconds in which a keeper must have ended what its worker started.
KEEPER_LIMIT = 10.0
# The environment variable by whose value all that a worker has started is known.
MARK = "PSIGRAD_WORKER"
# Bytes of one worker's output that are shown.
SHOWN = 1 << 18
# Variables that programs need to find their files, and no secrets.
_USUAL = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|TZ|LANG|LANGUAGE|PWD|TMPDIR|TMP|TEMP|(LD|DYLD)_LIBRARY_PATH|VIRTUAL_ENV|CC|CXX"
    # a worker is none of the ranks that torchrun started
    r"|(LC|PYTHON|CONDA|XDG|OMP|MKL|OPENBLAS|CUDA|NVIDIA|HF|TRANSFORMERS|TORCH(?!ELASTIC)|TOKENIZERS|PSIGRAD)_?\w*"
    r"|(SSL_CERT|REQUESTS)_?\w*"
    r"|(https?|no|all)_proxy",
    re.IGNORECASE,
)
_START = "from psigrad.processes.workers.child import main; main()"


def pack_request(number: int, message: Any) -> bytes:
    """A request as it goes through a pipe."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return child.HEADER.pack(child.MARK, number, len(data)) + data


class WorkerGone(Exception):
    """The worker died, or what came through its pipe is no answer."""


class Worker:
    """One process in a session of its own, which answers requests through `service`, "module:function" of ours.

    `service(payload)` is called in the worker and gives the function that answers. `homes` are files of modules that a fresh
    process does not find by name. `memory` limits its data in bytes (0: no limit), `variables` are environment variables that it
    gets besides the usual ones. It runs in the `enclosure`, where one is given. It must be ready within `start_limit` seconds.

    Pipes never block: a worker that was stopped in the middle of reading or writing is late like any other.
    """

    def __init__(
        self,
        service: str,
        payload: Any,
        homes: dict[str, str],
        *,
        name: str = "a worker",
        memory: int = 0,
        variables: Sequence[str] = (),
        enclosure: Enclosure | None = None,
        start_limit: float = START_LIMIT,
    ) -> None:
        request_read, self._requests = os.pipe()
        self._responses, response_write = os.pipe()
        printed, print_write = os.pipe()
        self._mark, self._name, self._number = uuid.uuid4().hex, name, 0
        prefix, given = enclosure.line() if enclosure else ([], [])
        self._kept = enclosure is None
        # an enclosure ends whole, with its first process
        parent = str(os.getpid() if self._kept else 0)
        try:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-P", "-c", _START, str(request_read), str(response_write), parent],
                pass_fds=(request_read, response_write, *given),
                stdin=subprocess.DEVNULL,
                stdout=print_write,
                stderr=print_write,
                env={**pick_variables(variables), MARK: self._mark},
                start_new_session=True,
            )
        except OSError:  # such as no memory for a fork: a pool tries again, and would run out of descriptors too
            _close(self._requests, self._responses, printed)
            raise
        finally:
            _close(request_read, response_write, print_write, *given)
        threading.Thread(target=_forward, args=(printed, name), name=f"output of {name}", daemon=True).start()
        os.set_blocking(self._requests, False)
        os.set_blocking(self._responses, False)
        self._outbox, self._inbox = bytearray(), bytearray()
        self.ready = False
        setup = {"path": sys.path, "homes": homes, "service": service, "payload": payload}
        self.ask({**setup, "memory": memory, "withheld": list_withheld(variables)}, start_limit)

    def ask(self, message: Any, limit: float) -> None:
        """Send a request that must be answered within `limit` seconds."""
        self.deadline = time.monotonic() + limit
        self._number += 1
        self._outbox += pack_request(self._number, message)
        self._push()

    def _push(self) -> None:
        try:
            while self._outbox:
                del self._outbox[: os.write(self._requests, self._outbox[: 1 << 16])]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self._outbox.clear()  # it died; `poll` says so

    def poll(self) -> tuple[str, Any] | None:
        """The next answer to the last request as (kind, content); None if there is none yet. Raises `WorkerGone`."""
        self._push()
        with contextlib.suppress(BlockingIOError):
            while not self._whole() and (data := os.read(self._responses, 1 << 16)):
                self._inbox += data
            if not self._whole():
                raise WorkerGone
        if not self._whole():
            return None
        _, number, length = child.HEADER.unpack_from(self._inbox)
        end = child.HEADER.size + length
        data = bytes(self._inbox[child.HEADER.size : end])
        del self._inbox[:end]
        try:
            kind, content = json.loads(data)
        except (ValueError, TypeError, RecursionError) as error:
            raise WorkerGone from error
        if number != self._number or kind not in ("ready", "broken", "answer"):
            raise WorkerGone
        return kind, content

    def _whole(self) -> bool:
        """Whether an answer is there. A header that can't be one of ours ends the worker: a stray writer is on its pipe."""
        if len(self._inbox) < child.HEADER.size:
            return False
        mark, number, length = child.HEADER.unpack_from(self._inbox)
        if mark != child.MARK or number > self._number or length > child.MOST_BYTES:
            raise WorkerGone
        return bool(len(self._inbox) >= child.HEADER.size + length)

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Have `selector` wake up when `poll` may have something to do."""
        selector.register(self._responses, selectors.EVENT_READ)
        if self._outbox:
            selector.register(self._requests, selectors.EVENT_WRITE)

    def alive(self) -> bool:
        """Whether the process still runs. It is not reaped here: until `kill` its number cannot become another's."""
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def kill(self) -> str:
        """End the process and everything that it started, for good, and say how it ended."""
        if self._kept:
            self.process.terminate()
            self.process.send_signal(signal.SIGCONT)  # the user's code may have stopped it
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(KEEPER_LIMIT)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        status = self.process.wait()
        _kill_marked(self._mark)
        cgroup.sweep()
        _close(self._requests, self._responses)
        return f"signal {-status}" if status < 0 else f"exit status {status}"


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def pick_variables(extra: Iterable[str] = ()) -> dict[str, str]:
    """The variables of this process that a worker gets: the usual ones, and those named in `extra`."""
    names = set(extra)
    kept = {k: v for k, v in os.environ.items() if k in names or (_USUAL.fullmatch(k) and not SECRET_NAME.search(k))}
    path = os.pathsep.join(p or os.getcwd() for p in sys.path)
    return {**kept, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": path}


def list_withheld(extra: Iterable[str] = ()) -> list[str]:
    """The names of the variables that a worker does not get."""
    return sorted(os.environ.keys() - pick_variables(extra).keys())


def _forward(descriptor: int, name: str) -> None:
    """Show what a worker prints on stderr, up to a limit; then read and drop it, so that nobody waits for a full pipe."""
    left = SHOWN
    with os.fdopen(descriptor, "rb", buffering=0) as stream:
        while data := stream.read(1 << 16):
            if left <= 0:
                continue
            with contextlib.suppress(OSError, ValueError):
                os.write(2, data[:left])
                left -= len(data)
                if left <= 0:
                    text = f"\npsigrad: {name} prints more than {SHOWN >> 10} KiB; the rest is dropped"
                    print(text, file=sys.stderr, flush=True)


def _kill_marked(mark: str) -> None:
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
            if wanted in (folder / "environ").read_bytes().split(b"\0") and began(int(folder.name)):
                found.append(int(folder.name))
    return found
