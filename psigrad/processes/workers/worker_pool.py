"""A pool of worker processes, which it starts, watches, kills and replaces. The caller defines requests and handles losses."""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import pickle
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Self, TypedDict, TypeVar, Unpack

from psigrad import redaction
from psigrad.errors import UserError
from psigrad.processes.sandbox import Enclosure, cgroup
from psigrad.processes.workers import child
from psigrad.processes.workers.shipping import homes, list_withheld, pack, pick_variables

# Seconds in which a worker must have imported the user's code.
START_LIMIT = 120.0
# Seconds in which a keeper must have ended the worker's processes.
KEEPER_LIMIT = 10.0
# The most bytes of one worker's output that are printed.
SHOWN = 1 << 18
_START = "from psigrad.processes.workers.child import main; main()"


def pack_request(number: int, message: Any) -> bytes:
    """Return `message` in the pipe's format, as request `number`."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return child.HEADER.pack(child.MARK, number, len(data)) + data


class WorkerGone(Exception):
    """An error for a worker that died or that wrote an invalid answer to its pipe."""


class Worker:
    """A worker process in its own session, which answers requests.

    `service` names a function of psigrad, as "module:function". The worker calls it with `payload`, and gets the function
    that answers requests. `homes` are files of modules that a new process does not find by name. `memory` limits the worker's
    data in bytes (0: no limit), and `variables` are environment variables besides the usual ones. The worker starts in `folder`
    and runs in the sandbox `enclosure`, if given. It must be ready within `start_limit` seconds.

    Pipes never block: a worker that stops in the middle of reading or writing is treated as late.
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
        folder: str | None = None,
    ) -> None:
        request_read, self._requests = os.pipe()
        self._responses, response_write = os.pipe()
        printed, print_write = os.pipe()
        self._name, self._number = name, 0
        prefix, given = enclosure.line() if enclosure else ([], [])
        self._kept = enclosure is None
        # an enclosure ends as a whole, with its first process
        parent = str(os.getpid() if self._kept else 0)
        try:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-P", "-c", _START, str(request_read), str(response_write), parent],
                pass_fds=(request_read, response_write, *given),
                stdin=subprocess.DEVNULL,
                stdout=print_write,
                stderr=print_write,
                env=pick_variables(variables),
                cwd=folder,
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
            self._outbox.clear()  # the worker died; `poll` raises the error

    def poll(self) -> tuple[str, Any] | None:
        """Return the next answer to the last request as (kind, content), or None if none has arrived yet. Raise `WorkerGone`."""
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
        """Return True if a complete answer has arrived. Raise `WorkerGone` for an invalid header: another process wrote it."""
        if len(self._inbox) < child.HEADER.size:
            return False
        mark, number, length = child.HEADER.unpack_from(self._inbox)
        if mark != child.MARK or number > self._number or length > child.MOST_BYTES:
            raise WorkerGone
        return bool(len(self._inbox) >= child.HEADER.size + length)

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Register the worker's pipes with `selector`, so that it wakes up when `poll` can make progress."""
        selector.register(self._responses, selectors.EVENT_READ)
        if self._outbox:
            selector.register(self._requests, selectors.EVENT_WRITE)

    def alive(self) -> bool:
        """Return True if the process is running.

        A dead process is not reaped here, so that its id is not reused before `kill`.
        """
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def kill(self) -> str:
        """Kill the process and all that it started, and return a description of its end, such as "exit status 1"."""
        if self._kept:
            self.process.terminate()
            self.process.send_signal(signal.SIGCONT)  # the user's code may have stopped it
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(KEEPER_LIMIT)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        status = self.process.wait()
        cgroup.sweep()
        _close(self._requests, self._responses)
        return f"signal {-status}" if status < 0 else f"exit status {status}"


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _forward(descriptor: int, name: str) -> None:
    """Print a worker's output on stderr, up to a limit. Then read it without printing, so that a full pipe blocks no process.

    Control characters are escaped, since a reward function may print a completion.
    """
    left, decoder = SHOWN, codecs.getincrementaldecoder("utf-8")("backslashreplace")
    with os.fdopen(descriptor, "rb", buffering=0) as stream:
        while data := stream.read(1 << 16):
            if left <= 0:
                continue
            with contextlib.suppress(OSError, ValueError):
                text = decoder.decode(data[:left], final=len(data) >= left)
                # A progress bar returns to the start of its line.
                os.write(2, "\r".join(map(redaction.escape, text.split("\r"))).encode())
                left -= len(data)
                if left <= 0:
                    text = f"\npsigrad: {name} prints more than {SHOWN >> 10} KiB; the rest is dropped"
                    print(text, file=sys.stderr, flush=True)


C = TypeVar("C")
T = TypeVar("T")
# If the parent did not check the workers for so many seconds, it was busy elsewhere. Deadlines are extended by that time.
ABSENCE = 1.0


class SharedWait:
    """A lock for threads that wait for the same events, as a context manager.

    One of them polls for all and releases the lock meanwhile. The others sleep until it returns.
    """

    def __init__(self) -> None:
        self._stirred = threading.Condition(threading.Lock())
        self._looking = False

    def __enter__(self) -> Self:
        self._stirred.acquire()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stirred.release()

    def look(self, look: Callable[[], T], seconds: float) -> T | None:
        """Release the lock, call `look`, acquire the lock again, and return the result of `look`.

        If another thread is polling, wait for it and return None instead. `look` waits for `seconds` at most. With 0 seconds it
        only polls, and any number of threads may call it at once.
        """
        if self._looking and seconds:
            self._stirred.wait(seconds)
            return None
        waits = bool(seconds)
        self._looking = self._looking or waits
        self._stirred.release()
        try:
            return look()
        finally:
            self._stirred.acquire()
            if waits:
                self._looking = False
                self._stirred.notify_all()


class PoolLimits(TypedDict, total=False):
    """The number of workers and the limits of each; see `WorkerPool`."""

    workers: int
    timeout: float
    memory_gb: float
    variables: Sequence[str]
    enclosure: Enclosure | None


@dataclass(frozen=True)
class Lost(Generic[C]):
    """The result of a call whose worker was lost and replaced. `rest` are the later calls of that worker without an answer."""

    status: str
    """A description of the process's end; empty if it was killed because it was late."""
    rest: list[C]


@dataclass
class _Place:
    """A worker and its unanswered calls, in order."""

    worker: Worker
    calls: deque[Any] = field(default_factory=deque)


class WorkerPool(Generic[C]):
    """A pool of `workers` worker processes that answer calls by `service` (see `Worker`), each within `timeout` seconds.

    One message asks a worker for several calls, and it answers them one by one. A null answer is a sign of life and restarts the
    call's time. A worker is killed with all its processes and replaced if it is late or dies, or if `decode(call, content)`
    raises `ValueError` for its answer. Error messages call the user's code `what`. Raise `error` if that code does not load.
    """

    def __init__(
        self,
        service: str,
        payload: Any,
        homes: dict[str, str],
        decode: Callable[[C, Any], Any],
        *,
        what: str,
        error: type[UserError] = UserError,
        workers: int = 1,
        timeout: float = 10.0,
        memory_gb: float = 0.0,
        variables: Sequence[str] = (),
        enclosure: Enclosure | None = None,
    ) -> None:
        self.timeout = timeout
        self._decode, self._what, self._error = decode, what, error
        each: Any = {"memory": int(memory_gb * 1e9), "variables": tuple(variables), "enclosure": enclosure, "folder": os.getcwd()}
        self._start = partial(Worker, service, payload, homes, name=f"the worker of the {what}", **each)
        self._places: list[_Place] = []
        self._looked = time.monotonic()
        try:
            for _ in range(workers):
                self._places.append(_Place(self._start()))
        except OSError:
            self.close()
            raise

    @classmethod
    def of(
        cls,
        service: str,
        function: Callable[..., Any],
        decode: Callable[[C, Any], Any],
        *,
        kind: str,
        **limits: Unpack[PoolLimits],
    ) -> Self:
        """Return a pool whose workers call the user's `function`. Error messages call it `kind`."""
        packed = pack(function, kind)
        return cls(service, packed, homes([function], [packed]), decode, what=f"{kind}s", **limits)

    @property
    def processes(self) -> list[int]:
        """The process ids of the workers."""
        return [place.worker.process.pid for place in self._places]

    def __len__(self) -> int:
        return len(self._places)

    def close(self) -> None:
        """Kill the workers."""
        while self._places:
            self._places.pop().worker.kill()

    def give_up(self, unwanted: Callable[[C], bool] = lambda call: True) -> None:
        """Kill and replace each worker if `unwanted` returns True for its current call, whose answer is no longer needed."""
        for place in self._places:
            if place.calls and unwanted(place.calls[0]):
                self._replace(place)

    def idle(self) -> list[int]:
        """Return the numbers of the idle workers that have loaded their code. A worker that died while idle is replaced."""
        free = [(number, place) for number, place in enumerate(self._places) if place.worker.ready and not place.calls]
        for _, place in free:
            if not place.worker.alive():
                self._replace(place)
        return [number for number, place in free if place.worker.ready]

    def ask(self, number: int, message: Any, calls: Sequence[C], timeout: float | None = None) -> None:
        """Send a message to the idle worker `number`, which answers each of `calls` in order, within `timeout` seconds each."""
        self._return()
        place = self._places[number]
        place.calls.extend(calls)
        place.worker.ask(message, self.timeout if timeout is None else timeout)

    def answers(self, wait: bool, seconds: float = 60.0) -> Iterator[tuple[int, C, Any]]:
        """Yield (worker's number, call, decoded answer or `Lost`) for all answers that have arrived.

        With `wait`, first wait until a worker has data or is late, for at most `seconds`.
        """
        self._return()
        if wait:
            self.stirring(seconds)()
        for number, place in self._busy():
            yield from ((number, *answered) for answered in self._answers_of(place))
        self._looked = time.monotonic()

    def stirring(self, seconds: float) -> Callable[[], None]:
        """Return a function that waits until a worker has data or is late, for at most `seconds`.

        Other threads may use the pool while it waits.
        """
        selector, busy = selectors.DefaultSelector(), self._busy()
        for _, place in busy:
            place.worker.watch(selector)
        soonest = min((place.worker.deadline for _, place in busy), default=0.0)

        def wait() -> None:
            with selector:
                if busy:
                    selector.select(min(seconds, max(0.0, soonest - time.monotonic())))

        return wait

    def _busy(self) -> list[tuple[int, _Place]]:
        return [(number, place) for number, place in enumerate(self._places) if place.calls or not place.worker.ready]

    def _answers_of(self, place: _Place) -> Iterator[tuple[C, Any]]:
        while place.calls or not place.worker.ready:
            worker, loading = place.worker, not place.worker.ready
            try:
                message = worker.poll()
                content = None if message is None or loading else message[1]
                answer = None if content is None else self._decode(place.calls[0], content)
            except (WorkerGone, ValueError):
                yield from self._lose(place, late=False)
                return
            if message is None:
                if time.monotonic() > worker.deadline:
                    yield from self._lose(place, late=True)
                return
            if message[0] == "broken":
                raise self._error(
                    f"The worker of the {self._what} does not load its code ({message[1]}); define it in a module that a fresh "
                    "process can import."
                )
            worker.ready, worker.deadline = True, time.monotonic() + self.timeout  # of the next call
            if content is not None:  # otherwise a sign of life
                yield place.calls.popleft(), answer

    def _lose(self, place: _Place, *, late: bool) -> Iterator[tuple[C, Any]]:
        """Replace a worker that died or hangs, and yield (its current call, `Lost`). Raise an error if its code was loading."""
        loading, calls = not place.worker.ready, list(place.calls)
        status = self._replace(place)
        if loading:
            how = f"did not load its code within {START_LIMIT:.0f} s" if late else f"died while it loaded its code ({status})"
            raise self._error(f"The worker of the {self._what} {how}; check the imports of that code, and the worker's output.")
        yield calls[0], Lost("" if late else status, calls[1:])

    def _replace(self, place: _Place) -> str:
        status = place.worker.kill()
        place.worker = self._start()
        place.calls.clear()
        return status

    def _return(self) -> None:
        """Extend all deadlines by the time in which this process did not check the workers, if that is long."""
        away = time.monotonic() - self._looked
        if away > ABSENCE:
            for place in self._places:
                place.worker.deadline += away
        self._looked = time.monotonic()
