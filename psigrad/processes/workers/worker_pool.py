"""Workers that are started, watched, killed and replaced; what they are asked, and what a loss means, their user says."""

from __future__ import annotations

import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Self, TypedDict, TypeVar, Unpack

from psigrad.errors import UserError
from psigrad.processes.sandbox import Enclosure
from psigrad.processes.workers.process import START_LIMIT, Worker, WorkerGone
from psigrad.processes.workers.shipping import homes, pack

C = TypeVar("C")
T = TypeVar("T")
# Seconds without a look at the workers from which on their time does not run: the parent was at work elsewhere.
ABSENCE = 1.0


class SharedWait:
    """A lock, as a context manager. Of the threads that wait, one looks for all of them, without the lock; the others sleep until
    it has seen something.
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
        """What `look` finds; None where another thread looks meanwhile, after it has or so many seconds have passed. The caller
        has the lock, and has it again afterwards; `look` waits for `seconds` at most. With 0 seconds everybody may look.
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
    """How many workers there are, and what each may take; see `WorkerPool`."""

    workers: int
    timeout: float
    memory_gb: float
    variables: Sequence[str]
    enclosure: Enclosure | None


@dataclass(frozen=True)
class Lost(Generic[C]):
    """A worker that was at a call and has been replaced; `rest` are the calls behind it that it has not answered."""

    status: str
    """How it ended; empty: it was late."""
    rest: list[C]


@dataclass
class _Place:
    """A worker and the calls that it has yet to answer, in order."""

    worker: Worker
    calls: deque[Any] = field(default_factory=deque)


class WorkerPool(Generic[C]):
    """`workers` processes that answer through `service`, see `Worker`; each call has `timeout` seconds.

    A worker is asked with one message for several calls, and answers them one by one. It may answer null before: it is still at
    work, and its time begins anew. One that is late, dies, or sends what `decode(call, content)` raises `ValueError` for is
    killed with everything that it started, and a fresh one takes its place. `what` is what people call the user's code in it.

    Raises `error` where that code does not load.
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
        limits: Any = {"memory": int(memory_gb * 1e9), "variables": tuple(variables), "enclosure": enclosure}
        self._start = partial(Worker, service, payload, homes, name=f"the worker of the {what}", **limits)
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
        """Workers of one function of the user's, which is packed for the service; `kind` is what people call it."""
        packed = pack(function, kind)
        return cls(service, packed, homes([function], [packed]), decode, what=f"{kind}s", **limits)

    @property
    def processes(self) -> list[int]:
        """The process id of each worker."""
        return [place.worker.process.pid for place in self._places]

    @property
    def at_work(self) -> bool:
        """Whether a call is to be answered."""
        return any(place.calls for place in self._places)

    def __len__(self) -> int:
        return len(self._places)

    def close(self) -> None:
        """Kill the workers."""
        while self._places:
            self._places.pop().worker.kill()

    def give_up(self, unwanted: Callable[[C], bool] = lambda call: True) -> None:
        """Replace the workers that are at such calls, whose answers nobody waits for any more."""
        for place in self._places:
            if place.calls and unwanted(place.calls[0]):
                self._replace(place)

    def idle(self) -> list[int]:
        """The workers that have loaded and have nothing to do. One that died meanwhile is replaced: that is no call's fault."""
        free = [(number, place) for number, place in enumerate(self._places) if place.worker.ready and not place.calls]
        for _, place in free:
            if not place.worker.alive():
                self._replace(place)
        return [number for number, place in free if place.worker.ready]

    def ask(self, number: int, message: Any, calls: Sequence[C], timeout: float | None = None) -> None:
        """Send a message to an idle worker, which answers each of these calls in order."""
        self._return()
        place = self._places[number]
        place.calls.extend(calls)
        place.worker.ask(message, self.timeout if timeout is None else timeout)

    def answers(self, wait: bool, seconds: float = 60.0) -> Iterator[tuple[int, C, Any]]:
        """(worker, call, what it answers, decoded, or `Lost`) as they come in; with `wait` after a worker stirred or was late, or
        after so many seconds.
        """
        self._return()
        if wait:
            self.stirring(seconds)()
        for number, place in self._busy():
            yield from ((number, *answered) for answered in self._answers_of(place))
        self._looked = time.monotonic()

    def stirring(self, seconds: float) -> Callable[[], None]:
        """What waits until a worker stirs or is late, or for so many seconds; it may do so while the pool is used elsewhere."""
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
            worker.ready, worker.deadline = True, time.monotonic() + self.timeout  # of the call that is next
            if content is not None:  # else a sign of life
                yield place.calls.popleft(), answer

    def _lose(self, place: _Place, *, late: bool) -> Iterator[tuple[C, Any]]:
        """A fresh worker in the place of one that died or hangs, and what that means for the call that it was at."""
        loading, calls = not place.worker.ready, list(place.calls)
        status = self._replace(place)
        if loading:
            how = f"did not load its code within {START_LIMIT:.0f} s" if late else f"died while it loaded its code ({status})"
            raise self._error(f"The worker of the {self._what} {how}; look at what that imports, and at its output.")
        yield calls[0], Lost("" if late else status, calls[1:])

    def _replace(self, place: _Place) -> str:
        status = place.worker.kill()
        place.worker = self._start()
        place.calls.clear()
        return status

    def _return(self) -> None:
        """Nobody listened for a while, so nobody was late meanwhile."""
        away = time.monotonic() - self._looked
        if away > ABSENCE:
            for place in self._places:
                place.worker.deadline += away
        self._looked = time.monotonic()
