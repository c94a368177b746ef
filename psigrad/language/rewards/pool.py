"""Scoring in processes that can be killed."""

from __future__ import annotations

import math
import selectors
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from psigrad.errors import UserError
from psigrad.language.rewards.outcomes import Failed, Failure, Result, RewardError, Samples, Scored, Scoring, Unscored, picked
from psigrad.language.rewards.resolve import RewardSpec
from psigrad.language.rewards.rubric import Rubric
from psigrad.language.rewards.worker import Answer, Malformed, Said, decoded
from psigrad.processes.workers import ShippingError, Worker, WorkerGone, homes, pack
from psigrad.processes.workers.process import START_LIMIT

# Seconds between two turns from which on a worker's time does not run: its parent was at work elsewhere.
_ABSENCE = 1.0


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


class RewardPool:
    """Scores with `workers` processes; a function has `timeout` seconds for a group, and for each sample on its second try.

    A function that raises, hangs, crashes or returns nonsense on a group is tried again sample by sample, so that one bad
    sample does not take its group along; the other functions have seen the group whole. Results do not depend on the number
    of workers. `weights` default to 1. Use as a context manager, or `close()`.
    """

    def __init__(
        self,
        specs: Sequence[RewardSpec],
        *,
        weights: Sequence[float] = (),
        timeout: float = 10.0,
        workers: int = 1,
        failure_value: float = 0.0,
        memory_gb: float = 0.0,
        variables: Sequence[str] = (),
    ) -> None:
        self.specs = unique(specs)
        self.weights = checked_weights(self.specs, weights)
        for name, value in (("reward_timeout", timeout), ("reward_workers", workers)):
            if not value > 0:
                raise UserError(f"{name} is {value}; it must be above 0.")
        for spec in self.specs:
            if isinstance(spec.function, Rubric):
                spec.function.check()
        self.timeout, self.failure_value = timeout, failure_value
        self._memory, self._variables = int(memory_gb * 1e9), tuple(variables)
        try:
            self._functions = [(spec.name, pack(spec.function, "reward")) for spec in self.specs]
        except ShippingError as error:
            raise RewardError(str(error)) from error
        self._homes = homes([spec.function for spec in self.specs], [packed for _, packed in self._functions])
        self._workers: list[Worker] = []
        self._jobs: dict[Worker, Job] = {}
        try:
            for _ in range(workers):
                self._workers.append(self._fresh())
        except OSError:
            self.close()
            raise

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the workers."""
        self._jobs.clear()
        while self._workers:
            self._workers.pop().kill()

    def _fresh(self) -> Worker:
        return Worker(
            "psigrad.language.rewards.worker:service",
            self._functions,
            self._homes,
            name="the rewards' worker",
            memory=self._memory,
            variables=self._variables,
        )

    def begin(self) -> PoolScoring:
        """A scoring that the workers are at work on from its first group on."""
        if not self._workers:
            raise RewardError("The reward pool is closed; make a new one.")
        for worker in list(self._jobs):
            del self._jobs[worker]
            self._replace(worker)  # a scoring that was given up left it at work
        return PoolScoring(self)

    def _hand_out(self, jobs: deque[Job], shown: Mapping[str, Sequence[Any]]) -> None:
        for worker in [w for w in self._workers if w.ready and w not in self._jobs]:
            if not worker.alive():
                self._replace(worker)  # killed while idle, which is no sample's fault
            elif jobs:
                job = self._jobs[worker] = jobs.popleft()
                worker.ask((job.functions, picked(shown, job.indices)), self.timeout)

    def _awaited(self, wait: bool) -> list[Worker]:
        """The workers that owe something, with `wait` after one of them stirred or ran out of time."""
        busy = [worker for worker in self._workers if worker in self._jobs or not worker.ready]
        if not wait:
            return busy
        with selectors.DefaultSelector() as selector:
            for worker in busy:
                worker.watch(selector)
            soonest = min(worker.deadline for worker in busy)
            selector.select(min(60.0, max(0.0, soonest - time.monotonic())))
        return busy

    def _collected(self, worker: Worker, said: list[dict[int, Said]]) -> list[Job]:
        """Enter what a worker has answered by now; the jobs that come of it."""
        jobs: list[Job] = []
        while (answer := self._heard(worker)) is not None and (job := self._jobs.pop(worker, None)) is not None:
            jobs += taken(job, answer, said)
            rest = job.rest()
            if rest is None:
                break
            if worker not in self._workers:  # it died or was late at one function; the rest is for another worker
                jobs.append(rest)
                break
            self._jobs[worker] = rest
        return jobs

    def _heard(self, worker: Worker) -> Answer | None:
        """What a worker answered, or the verdict on one that died or is late (and is replaced); None: nothing yet."""
        job = self._jobs.get(worker)
        asked = self.specs[job.functions[0]].name if job else ""
        try:
            message = worker.poll()
            answer = decoded(message[1], len(job.indices)) if job and message and message[0] == "answer" else None
        except (WorkerGone, ValueError):
            status = self._replace(worker)
            if not worker.ready:
                raise RewardError(
                    f"The process that runs the reward functions died while it loaded them ({status}); its output tells why."
                ) from None
            return f"{asked}: its process died ({status})"
        if message is None:
            if time.monotonic() < worker.deadline:
                return None
            if not worker.ready:
                raise RewardError(f"The reward functions did not load within {START_LIMIT:.0f} s; look at what they import.")
            self._replace(worker)
            return f"{asked}: time-out after {self.timeout:g} s"
        kind, content = message
        if kind == "broken":
            raise RewardError(
                f"The reward functions do not load in a fresh process ({content}); define them in a module that it can import."
            )
        worker.ready = True
        worker.deadline = time.monotonic() + self.timeout  # of the function that is next
        return answer

    def _replace(self, worker: Worker) -> str:
        """A fresh worker in the place of one that died or hangs; how that one ended."""
        status = worker.kill()
        self._workers[self._workers.index(worker)] = self._fresh()
        return status


class PoolScoring(Scoring):
    """A `Scoring` by a pool's workers."""

    def __init__(self, pool: RewardPool) -> None:
        self._pool = pool
        self._shown: dict[str, list[Any]] = {}
        self._said: list[dict[int, Said]] = [{} for _ in pool.specs]
        self._jobs: deque[Job] = deque()
        self._count, self._seen = 0, time.monotonic()

    def add(self, group: Samples) -> None:
        """See `Scoring`."""
        for name, values in group.shown.items():
            self._shown.setdefault(name, []).extend(values)
        self._jobs.append(Job(tuple(range(len(self._said))), tuple(range(self._count, self._count + len(group)))))
        self._count += len(group)
        self.turn()

    def turn(self) -> None:
        """See `Scoring`."""
        if self._pending():
            self._turn(wait=False)

    def results(self) -> list[Result]:
        """See `Scoring`."""
        while self._pending():
            self._turn(wait=True)
        pool, names = self._pool, [spec.name for spec in self._pool.specs]
        return [combine(names, pool.weights, [c[i] for c in self._said], pool.failure_value) for i in range(self._count)]

    def _pending(self) -> bool:
        return bool(self._jobs) or bool(self._pool._jobs)

    def _turn(self, wait: bool) -> None:
        pool, now = self._pool, time.monotonic()
        if now - self._seen > _ABSENCE:  # nobody listened meanwhile, so nobody was late
            for worker in pool._workers:
                worker.deadline += now - self._seen
        pool._hand_out(self._jobs, self._shown)
        for worker in pool._awaited(wait):
            self._jobs.extendleft(reversed(pool._collected(worker, self._said)))
        if not wait:
            pool._hand_out(self._jobs, self._shown)
        self._seen = time.monotonic()


def taken(job: Job, answer: Answer, said: list[dict[int, Said]]) -> list[Job]:
    """Enter the answer of a job's first function into `said` (by function, then by sample).

    Where it is only a reason: the jobs that ask that function sample by sample.
    """
    which = job.functions[0]
    if not isinstance(answer, str):
        said[which].update(zip(job.indices, answer, strict=True))
    elif len(job.indices) == 1:
        said[which][job.indices[0]] = Malformed(answer)
    else:
        return [Job((which,), (i,)) for i in job.indices]
    return []


def combine(names: Sequence[str], weights: Sequence[float], said: Sequence[Said], failure_value: float) -> Result:
    """The result of one sample: sum of weight × reward over the functions that apply to it (TRL's nansum).

    A sample that no function with a weight applies to is `Unscored`: TRL's 0 would be a reward that nobody gave.
    """
    for one in said:
        if isinstance(one, Malformed):
            return Unscored(str(one))
    parts = {name: one if isinstance(one, float) else None for name, one in zip(names, said, strict=True)}
    for name, one in zip(names, said, strict=True):
        if isinstance(one, Failure):
            return Failed(failure_value, f"{name}: {one}", parts)
    terms = [w * v for w, v in zip(weights, parts.values(), strict=True) if v is not None and w != 0]
    if not terms:
        return Unscored(f"no reward function applies to it ({', '.join(names)} gave None or have weight 0)")
    total = sum(terms)
    if not math.isfinite(total):
        return Unscored("the weighted sum of its rewards is beyond floating point")
    return Scored(total, parts)


def unique(specs: Sequence[RewardSpec]) -> list[RewardSpec]:
    """The specs under names of their own: the second `exact` is logged as `exact_2`."""
    if not specs:
        raise UserError("No reward function was given; name a built-in or module:function.")
    named: dict[str, RewardSpec] = {}
    for spec in specs:
        name, count = spec.name, 1
        while name in named:
            count += 1
            name = f"{spec.name}_{count}"
        named[name] = RewardSpec(name, spec.function)
    return list(named.values())


def checked_weights(specs: Sequence[RewardSpec], weights: Sequence[float]) -> tuple[float, ...]:
    """One weight per function; 1 each where none were given."""
    if weights and len(weights) != len(specs):
        raise UserError(f"There are {len(weights)} reward_weights for {len(specs)} reward functions; give one for each, or none.")
    if not all(math.isfinite(weight) for weight in weights):
        raise UserError(f"reward_weights are {list(weights)}; each must be a finite number.")
    return tuple(weights) or (1.0,) * len(specs)


def check_unscored(reasons: Sequence[str | None], limit: float) -> None:
    """Stop a run whose rewards do not work. `reasons` has one entry per completion: why it is unscored, or None."""
    unscored = sum(reason is not None for reason in reasons)
    if not unscored or unscored / len(reasons) <= limit:  # limit * len would put 29 of 100 above 0.29
        return
    raise RewardError(f"{why_unscored(reasons, f', above max_unscored {limit:g}')} Fix the reward function or raise the limit.")


def why_unscored(reasons: Sequence[str | None], above: str = "") -> str:
    """How many of the completions are unscored, and the reason that most of these have; `reasons` as in `check_unscored`."""
    counts: dict[str, list[int]] = {}
    for i, reason in enumerate(reasons):
        if reason is not None:
            counts.setdefault(reason, []).append(i)
    reason, samples = max(counts.items(), key=lambda item: len(item[1]))
    shown = ", ".join(map(str, samples[:5])) + (", …" if len(samples) > 5 else "")
    unscored = sum(map(len, counts.values()))
    most = f"most often ({len(samples)}, samples {shown}): {reason}."
    return f"{unscored} of {len(reasons)} completions stayed unscored{above}; {most}"
