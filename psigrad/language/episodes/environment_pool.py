"""A pool of processes that run a user's environments and tools and can be killed, and the service that each process runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Unpack

from psigrad.errors import UserError
from psigrad.language.episodes.environments import Answer, EpisodeCall, Factory, Fault, InProcess, Opening, Playing, Step
from psigrad.processes.sandbox import enclosure_of_workers
from psigrad.processes.workers.child import reason_for
from psigrad.processes.workers.shipping import Packed, unpack
from psigrad.processes.workers.worker_pool import START_LIMIT, Lost, PoolLimits, WorkerPool


class EnvironmentPool(Playing):
    """Episodes spread over `workers` processes (default 1). Each call of an environment has `timeout` seconds (default 10).

    If an environment hangs, exits or crashes, its own episode ends with a `Fault`. The other episodes of its process are replayed
    in a new process from their rows and turns. They give the same result, since an environment depends on these alone.
    If `sandboxed` is a list of files, the processes run in a sandbox in which they can read these files.
    """

    def __init__(self, factory: Factory, *, sandboxed: Sequence[str] | None = None, **limits: Unpack[PoolLimits]) -> None:
        service = "psigrad.language.episodes.environment_pool:service"
        if sandboxed is not None:
            limits["enclosure"] = enclosure_of_workers(sandboxed)
        self.workers: WorkerPool[Any] = WorkerPool.of(service, factory, decode, kind="environment", **limits)
        self._waiting: list[list[EpisodeCall]] = [[] for _ in range(len(self.workers))]
        """For each worker, the calls that wait until it is idle."""

    def close(self) -> None:
        """Kill the workers."""
        self.workers.close()

    def submit(self, calls: Sequence[EpisodeCall]) -> None:
        """Send the calls to the workers. An episode always stays with the same worker. See `Playing`."""
        for call in calls:
            self._waiting[call.number % len(self._waiting)].append(call)
        self._hand_out()

    def answers(self, seconds: float) -> dict[int, Answer]:
        """Return the workers' answers since the previous call. See `Playing`."""
        self._hand_out()
        answers: dict[int, Answer] = {}
        for worker, call, answer in self.workers.answers(wait=seconds > 0, seconds=seconds):
            if isinstance(answer, Lost):
                self._waiting[worker] = [*answer.rest, *self._waiting[worker]]
                what = "step" if call.turns else "reset"
                late = f"{what}() did not return within {self.workers.timeout:g} s"
                answer = Fault(f"the environment's {f'process died ({answer.status})' if answer.status else late}")
            answers[call.number] = answer
        self._hand_out()
        return answers

    def give_up(self) -> None:
        """Drop the unanswered calls, and replace the workers that are busy with one. See `Playing`."""
        self._waiting = [[] for _ in range(len(self.workers))]
        self.workers.give_up()

    def _hand_out(self) -> None:
        for worker in self.workers.idle():
            if waiting := self._waiting[worker]:
                self._waiting[worker] = []
                self.workers.ask(worker, waiting, waiting)

    def rows(self, count: int, seed: int) -> list[Mapping[str, Any]] | None:
        """Ask a worker for the environment's own rows. See `Playing`."""
        while 0 not in self.workers.idle():
            list(self.workers.answers(wait=True))
        self.workers.ask(0, (count, seed), [None], timeout=START_LIMIT)
        answers: list[Any] = []
        while not answers:
            answers = [answer for _, _, answer in self.workers.answers(wait=True)]
        if isinstance(answers[0], Lost):
            late = f"did not return within {START_LIMIT:g} s"
            raise UserError(
                f"The environment's rows() {f'ended its process ({answers[0].status})' if answers[0].status else late}; fix it."
            )
        if isinstance(answers[0], Fault):
            raise UserError(answers[0].reason)
        rows: list[Mapping[str, Any]] | None = answers[0]
        return rows


def service(payload: Packed) -> Callable[[Any], Iterator[Any]]:
    """Return the function that answers requests in a worker, given the packed factory of an environment.

    A request is (count, seed) for rows, or a list of `EpisodeCall`. Each call is answered separately. Before its answer, a null
    is sent after each reset and turn that is played or replayed, as a sign of life.
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
                yield None  # the turn is complete, so the time limit starts again
            yield encode(last)

    return answer


def encode(answer: Answer) -> Any:
    """Return an answer in a form that JSON can represent."""
    if isinstance(answer, Fault):
        return {"fault": answer.reason}
    found = answer._asdict() if isinstance(answer, Step | Opening) else {"observation": answer}
    try:
        json.dumps(found, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        return {"fault": f"the environment's observation is not JSON: {error}"}
    return found


def decode(call: EpisodeCall | None, content: Any) -> Any:
    """Decode what `encode` returned: the answer to a call, or rows if `call` is None. Raises `ValueError` for anything else."""
    match content:
        case {"fault": str(reason)}:
            return Fault(reason)
        case {"rows": rows} if call is None:
            return rows
        case {
            "observation": said, "reward": float() | int() as reward, "done": bool(done), "seat": int(seat), "rewards": [*each],
        } if call and call.turns:  # fmt: skip
            return Step(said, float(reward), done, seat, tuple(map(float, each)))
        case {"observation": observation, "seat": int(seat)} if call and not call.turns:
            return Opening(seat, observation)
        case {"observation": observation} if call and not call.turns:
            return observation
    raise ValueError(f"{content!r} is no answer")
