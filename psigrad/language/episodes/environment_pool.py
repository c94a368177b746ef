"""A user's environments and tools in processes that can be killed: the pool, and what a process of it does."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Unpack

from psigrad.errors import UserError
from psigrad.language.episodes.environments import Answer, EpisodeCall, Factory, Fault, InProcess, Playing, Step
from psigrad.processes.workers import Lost, PoolLimits, WorkerPool, unpack
from psigrad.processes.workers.child import reason_for
from psigrad.processes.workers.shipping import Packed
from psigrad.processes.workers.worker_pool import START_LIMIT


class EnvironmentPool(Playing):
    """Episodes spread over `workers` processes (1); one call of an environment has `timeout` seconds (10).

    An environment that hangs, exits or crashes faults its own episode. The others of its process are played again in a fresh one
    from their rows and turns, which gives the same: an environment depends on these alone.
    """

    def __init__(self, factory: Factory, **limits: Unpack[PoolLimits]) -> None:
        service = "psigrad.language.episodes.environment_pool:service"
        self.workers: WorkerPool[Any] = WorkerPool.of(service, factory, decode, kind="environment", **limits)
        self._waiting: list[list[EpisodeCall]] = [[] for _ in range(len(self.workers))]
        """By worker, the calls that it is not at yet."""

    def close(self) -> None:
        """Kill the workers."""
        self.workers.close()

    def submit(self, calls: Sequence[EpisodeCall]) -> None:
        """See `Playing`: an episode stays with its worker."""
        for call in calls:
            self._waiting[call.number % len(self._waiting)].append(call)
        self._hand_out()

    def answers(self, seconds: float) -> dict[int, Answer]:
        """See `Playing`."""
        self._hand_out()
        answers: dict[int, Answer] = {}
        for worker, call, answer in self.workers.answers(wait=seconds > 0, seconds=seconds):
            if isinstance(answer, Lost):
                self._waiting[worker] = [*answer.rest, *self._waiting[worker]]
                what = "step" if call.turns else "reset"
                late = f"{what}() did not return within {self.workers.timeout:g} s"
                answer = Fault(f"the environment: {f'its process died ({answer.status})' if answer.status else late}")
            answers[call.number] = answer
        self._hand_out()
        return answers

    def give_up(self) -> None:
        """See `Playing`."""
        self._waiting = [[] for _ in range(len(self.workers))]
        self.workers.give_up()

    def _hand_out(self) -> None:
        for worker in self.workers.idle():
            if waiting := self._waiting[worker]:
                self._waiting[worker] = []
                self.workers.ask(worker, waiting, waiting)

    def rows(self, count: int, seed: int) -> list[Mapping[str, Any]] | None:
        """See `Playing`."""
        while 0 not in self.workers.idle():
            list(self.workers.answers(wait=True))
        self.workers.ask(0, (count, seed), [None], timeout=START_LIMIT)
        answers: list[Any] = []
        while not answers:
            answers = [answer for _, _, answer in self.workers.answers(wait=True)]
        if isinstance(answers[0], Lost):
            late = f"did not return within {START_LIMIT:g} s"
            raise UserError(
                f"The environment's rows() {f'ended its process ({answers[0].status})' if answers[0].status else late}."
            )
        if isinstance(answers[0], Fault):
            raise UserError(answers[0].reason)
        rows: list[Mapping[str, Any]] | None = answers[0]
        return rows


def service(payload: Packed) -> Callable[[Any], Iterator[Any]]:
    """The worker's service for an environment's packed factory.

    A request is (count, seed) of rows, or a list of `EpisodeCall`; each of these is answered by itself, after null for each turn.
    """
    factory = unpack(payload)
    if callable(prepare := getattr(factory, "prepare", None)):
        prepare()
    playing = InProcess(factory)

    def answer(message: tuple[int, int] | list[EpisodeCall]) -> Iterator[Any]:
        if isinstance(message, tuple):
            try:
                yield {"rows": playing.rows(*message)}
            except (Exception, SystemExit) as error:
                yield encode(Fault(reason_for("the environment's rows()", error)))
            return
        for call in message:
            last: Answer = None
            for said in playing.play(call):
                last = said
                yield None  # a turn is over, and the time of the next begins
            yield encode(last)

    return answer


def encode(answer: Answer) -> Any:
    """An answer as JSON."""
    if isinstance(answer, Fault):
        return {"fault": answer.reason}
    found = answer._asdict() if isinstance(answer, Step) else {"observation": answer}
    try:
        json.dumps(found, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        return {"fault": f"the environment's observation is not JSON: {error}"}
    return found


def decode(call: EpisodeCall | None, content: Any) -> Any:
    """The inverse of `encode`: the answer to a call, or rows where there is none. Raises `ValueError` for what is no answer."""
    match content:
        case {"fault": str(reason)}:
            return Fault(reason)
        case {"rows": rows} if call is None:
            return rows
        case {"observation": observation, "reward": float() | int() as reward, "done": bool(done)} if call and call.turns:
            return Step(observation, float(reward), done)
        case {"observation": observation} if call and not call.turns:
            return observation
    raise ValueError(f"{content!r} is no answer")
