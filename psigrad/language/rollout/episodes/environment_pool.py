"""A user's environments and tools in processes that can be killed."""

from __future__ import annotations

import selectors
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from psigrad.errors import UserError
from psigrad.language.rollout.episodes.environment_worker import decoded
from psigrad.language.rollout.episodes.environments import Factory, Fault, Observation, Playing, Step
from psigrad.processes.workers import Worker, WorkerGone, homes, pack
from psigrad.processes.workers.process import START_LIMIT


@dataclass(frozen=True)
class _Ask:
    """One call: "reset" with a row or "step" with a text. A `replay` brings a fresh worker to where the old one was."""

    number: int
    what: str
    given: Any
    replay: bool = False


@dataclass
class _Seat:
    """A worker, what it has yet to answer, and what it is asked once it is ready."""

    worker: Worker
    asked: deque[_Ask] = field(default_factory=deque)
    waiting: deque[_Ask] = field(default_factory=deque)


class EnvironmentPool(Playing):
    """Episodes spread over `workers` processes; one call of an environment has `timeout` seconds.

    An environment that hangs, exits or crashes faults its own episode. The others of its process are played again in a fresh one
    from their rows and turns, which gives the same: an environment depends on these alone.
    """

    def __init__(
        self,
        factory: Factory,
        *,
        timeout: float = 10.0,
        workers: int = 1,
        memory_gb: float = 0.0,
        variables: Sequence[str] = (),
        prefix: Sequence[str] = (),
    ) -> None:
        self.timeout = timeout
        self._payload = pack(factory, "environment")
        self._homes = homes([factory], [self._payload])
        self._settings: dict[str, Any] = {"memory": int(memory_gb * 1e9), "variables": tuple(variables), "prefix": tuple(prefix)}
        self._history: dict[int, tuple[Mapping[str, Any], list[str]]] = {}
        self._seats = [_Seat(self._fresh()) for _ in range(workers)]

    def _fresh(self) -> Worker:
        name, service = "the environments' worker", "psigrad.language.rollout.episodes.environment_worker:service"
        return Worker(service, self._payload, self._homes, name=name, **self._settings)

    def close(self) -> None:
        """Kill the workers."""
        while self._seats:
            self._seats.pop().worker.kill()

    def clear(self) -> None:
        """See `Playing`."""
        self._history = {}

    def open(self, rows: Mapping[int, Mapping[str, Any]]) -> dict[int, Observation | Fault | None]:
        """See `Playing`."""
        for number in rows:
            self._history.pop(number, None)
        return self._answers([_Ask(number, "reset", row) for number, row in rows.items()])  # type: ignore[return-value]

    def step(self, turns: Mapping[int, str]) -> dict[int, Step | Fault]:
        """See `Playing`."""
        return self._answers([_Ask(number, "step", text) for number, text in turns.items()])  # type: ignore[return-value]

    def rows(self, count: int, seed: int) -> list[Mapping[str, Any]] | None:
        """See `Playing`."""
        seat = self._seats[0]
        limit = START_LIMIT
        self._until_ready(seat)
        seat.worker.ask(("rows", count, seed), limit)
        while True:
            try:
                message = seat.worker.poll()
            except WorkerGone:
                raise UserError(f"The environment's rows() ended its process ({self._replace(seat)}).") from None
            if message is not None:
                if isinstance(message[1], str):
                    raise UserError(message[1])
                rows: list[Mapping[str, Any]] | None = message[1]
                return rows
            if time.monotonic() > seat.worker.deadline:
                self._replace(seat)
                raise UserError(f"The environment's rows() did not return within {limit:g} s.")
            self._wait([seat])

    def _until_ready(self, seat: _Seat) -> None:
        while not seat.worker.ready:
            self._load(seat)
            if not seat.worker.ready:
                self._wait([seat])

    def _answers(self, asks: Sequence[_Ask]) -> dict[int, Observation | Step | Fault | None]:
        found: dict[int, Observation | Step | Fault | None] = {}
        for ask in asks:
            self._seats[ask.number % len(self._seats)].waiting.append(ask)
        while busy := [seat for seat in self._seats if seat.waiting or seat.asked]:
            for seat in busy:
                self._turn(seat, found)
            if still := [seat for seat in busy if seat.waiting or seat.asked]:
                self._wait(still)
        return found

    def _turn(self, seat: _Seat, found: dict[int, Observation | Step | Fault | None]) -> None:
        """Send what waits, and enter what has been answered by now."""
        if not seat.worker.ready and not self._load(seat):
            return
        if seat.waiting and not seat.asked:
            seat.asked, seat.waiting = seat.waiting, deque()
            seat.worker.ask(("play", [(a.number, a.what, a.given) for a in seat.asked]), self.timeout)
        while seat.asked:
            first = seat.asked[0]
            try:
                message = seat.worker.poll()
                answer = None if message is None else decoded(message[1], first.what)
            except (WorkerGone, ValueError):
                self._lost(seat, f"its process died ({self._replace(seat)})", found)
                return
            if message is None:
                if time.monotonic() > seat.worker.deadline:
                    self._replace(seat)
                    self._lost(seat, f"{first.what}() did not return within {self.timeout:g} s", found)
                return
            seat.asked.popleft()
            seat.worker.deadline = time.monotonic() + self.timeout  # of the call that is next
            self._enter(first, answer, found)

    def _enter(
        self, ask: _Ask, answer: Observation | Step | Fault | None, found: dict[int, Observation | Step | Fault | None]
    ) -> None:
        """An answer in its place, and in the history that a fresh worker would be told."""
        number = ask.number
        if isinstance(found.get(number), Fault):
            return  # it went wrong while it was played again
        if isinstance(answer, Fault):
            found[number] = answer
            self._history.pop(number, None)
            return
        if ask.replay:
            return
        found[number] = answer
        if ask.what == "reset":
            self._history[number] = (ask.given, [])
        elif isinstance(answer, Step) and answer.done:
            self._history.pop(number, None)
        else:
            self._history[number][1].append(ask.given)

    def _lost(self, seat: _Seat, why: str, found: dict[int, Observation | Step | Fault | None]) -> None:
        """The first call that was asked has cost the worker: its episode is faulted, the others are played again."""
        first, *rest = seat.asked
        found[first.number] = Fault(f"the environment: {why}")
        self._history.pop(first.number, None)
        mine = [number for number in self._history if self._seats[number % len(self._seats)] is seat]
        replayed = [
            _Ask(n, what, given, replay=True)
            for n in mine
            for what, given in [("reset", self._history[n][0]), *(("step", text) for text in self._history[n][1])]
        ]
        seat.asked = deque()
        seat.waiting = deque([*replayed, *(ask for ask in rest if not ask.replay and ask.number != first.number)])

    def _load(self, seat: _Seat) -> bool:
        """Whether the worker has loaded the environment. Raises `UserError` if it can't."""
        try:
            message = seat.worker.poll()
        except WorkerGone:
            status = self._replace(seat)
            raise UserError(f"The process that runs the environment died while it loaded ({status}); see its output.") from None
        if message is None:
            if time.monotonic() > seat.worker.deadline:
                raise UserError(f"The environment did not load within {START_LIMIT:.0f} s; look at what its module imports.")
            return False
        if message[0] == "broken":
            raise UserError(
                f"The environment does not load in a fresh process ({message[1]}); define it in a module that it can import."
            )
        seat.worker.ready = True
        return True

    def _wait(self, seats: Sequence[_Seat]) -> None:
        """Until one of them stirs or runs out of time."""
        with selectors.DefaultSelector() as selector:
            for seat in seats:
                seat.worker.watch(selector)
            soonest = min(seat.worker.deadline for seat in seats)
            selector.select(min(60.0, max(0.0, soonest - time.monotonic())))

    def _replace(self, seat: _Seat) -> str:
        status = seat.worker.kill()
        seat.worker = self._fresh()
        return status
