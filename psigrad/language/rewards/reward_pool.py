"""Scoring of completions by reward functions that run in worker processes, which can be killed."""

from __future__ import annotations

import itertools
import math
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from psigrad.errors import UserError
from psigrad.language.rewards.resolve import RewardSpec
from psigrad.language.rewards.reward_worker import Part, is_async
from psigrad.language.rollout.scoring import (
    NOT_APPLICABLE,
    Failed,
    Failure,
    Preparable,
    Result,
    RewardError,
    Samples,
    Scored,
    Scoring,
    Unscored,
    select,
)
from psigrad.processes.workers.shipping import ShippingError, homes, pack
from psigrad.processes.workers.worker_pool import Lost, SharedWait, WorkerPool

# Seconds after which a thread that waits for answers checks for groups that other threads have added.
SLICE = 0.05
_LARGEST = 1e150
"""The largest reward whose square, which a standard deviation takes, is finite."""
# The number of groups that a worker scores at once if a function is `async`.
TOGETHER = 8


@dataclass(frozen=True)
class RewardCall:
    """One call of one reward function (an index) on several samples (indices).

    Functions never share a call. An error thus identifies its function, and does not change what other functions receive.
    """

    function: int
    samples: tuple[int, ...]


class RewardPool:
    """A pool of `workers` processes that call the reward functions. A call has at most `timeout` seconds.

    A function is first called on a whole group. If it raises, hangs, crashes or returns no list, it is called again sample by
    sample, so that one bad sample does not affect its group. The other functions still receive the whole group. Results do not
    depend on the number of workers. `weights` default to 1. Several threads can each have a scoring in progress. Use the pool as
    a context manager, or call `close()`.
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
        self.specs = name_apart(specs)
        self.weights = check_weights(self.specs, weights)
        for name, value in (("reward_timeout", timeout), ("reward_workers", workers)):
            if not value > 0:
                raise UserError(f"{name} is {value}; it must be above 0.")
        for spec in self.specs:
            if isinstance(spec.function, Preparable):
                spec.function.check()
        self.failure_value = failure_value
        try:
            functions = [(spec.name, pack(spec.function, "reward")) for spec in self.specs]
        except ShippingError as error:
            raise RewardError(str(error)) from error
        self.watch = SharedWait()
        self.jobs: deque[tuple[PoolScoring, list[RewardCall]]] = deque()
        self._at_once = TOGETHER if any(is_async(spec.function) for spec in self.specs) else 1
        self._of_thread: dict[int, PoolScoring] = {}
        self.workers: WorkerPool[tuple[PoolScoring, RewardCall]] = WorkerPool(
            "psigrad.language.rewards.reward_worker:service",
            functions,
            homes([spec.function for spec in self.specs], [packed for _, packed in functions]),
            lambda owed, content: decode(content, len(owed[1].samples)),
            what="reward functions",
            error=RewardError,
            workers=workers,
            timeout=timeout,
            memory_gb=memory_gb,
            variables=variables,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the workers."""
        self.workers.close()

    def begin(self) -> PoolScoring:
        """Return a new scoring. The workers start when its first group is added. Cancel this thread's previous scoring."""
        if not len(self.workers):
            raise RewardError("The reward pool is closed; make a new one.")
        with self.watch:
            last, new = self._of_thread.get(threading.get_ident()), PoolScoring(self)
            self.workers.give_up(lambda owed: owed[0] is last)
            self.jobs = deque(job for job in self.jobs if job[0] is not last)
            self._of_thread[threading.get_ident()] = new
        return new

    def advance(self, wait: bool) -> None:
        """Give waiting calls to idle workers, and record the answers that have arrived, for all scorings.

        The caller must hold the lock `self.watch`. With `wait`, wait up to `SLICE` seconds for an answer.
        """
        self._hand_out()
        if wait:
            self.watch.look(self.workers.stirring(SLICE), SLICE)
        for _, (scoring, call), answer in self.workers.answers(False):
            if isinstance(answer, Lost):
                why = f"its process died ({answer.status})" if answer.status else f"time-out after {self.workers.timeout:g} s"
                calls = [call, *(one for _, one in answer.rest)]
                others = calls[-1].samples != call.samples  # calls in progress on other samples, any of which may be at fault
                rest = itertools.groupby(calls if others else calls[1:], lambda one: one.samples)
                self.jobs.extendleft([(scoring, list(own)) for _, own in rest][::-1])
                if others:
                    self._at_once = 1
                    continue
                answer = Unscored(f"{self.specs[call.function].name}: {why}")
            scoring.enter(call, answer)
        self._hand_out()

    def _hand_out(self) -> None:
        idle = self.workers.idle() if self.jobs else []
        for left, worker in zip(range(len(idle), 0, -1), idle, strict=True):
            count = min(self._at_once, -(-len(self.jobs) // left))  # each worker gets its share
            jobs: list[tuple[PoolScoring, list[RewardCall]]] = []
            while self.jobs and len(jobs) < count and (not jobs or self.jobs[0][0] is jobs[0][0]):
                jobs.append(self.jobs.popleft())
            if jobs:
                message = [([call.function for call in calls], own.shown(calls[0].samples)) for own, calls in jobs]
                owed = [(own, call) for own, calls in jobs for call in calls]
                self.workers.ask(worker, message, owed, len(jobs) * self.workers.timeout)  # any of the jobs may end first


class PoolScoring(Scoring):
    """A `Scoring` by the workers of a pool."""

    def __init__(self, pool: RewardPool) -> None:
        self._pool = pool
        self._shown: dict[str, list[Any]] = {}
        self._parts: list[dict[int, Part]] = [{} for _ in pool.specs]
        self._count = 0

    def add(self, group: Samples) -> None:
        """Add a group, and queue a call of each function on it. See `Scoring`."""
        for name, values in group.arguments.items():
            self._shown.setdefault(name, []).extend(values)
        samples = tuple(range(self._count, self._count + len(group)))
        with self._pool.watch:
            self._pool.jobs.append((self, [RewardCall(function, samples) for function in range(len(self._parts))]))
        self._count += len(group)
        self.poll()

    def poll(self) -> None:
        """Record the answers that have arrived, and give waiting calls to idle workers, without waiting. See `Scoring`."""
        with self._pool.watch:
            if self._pending():
                self._pool.advance(wait=False)

    def results(self) -> list[Result]:
        """Wait for all answers, and return the result of each sample. See `Scoring`."""
        self._wait()
        pool, names = self._pool, [spec.name for spec in self._pool.specs]
        return [combine(names, pool.weights, [part[i] for part in self._parts], pool.failure_value) for i in range(self._count)]

    def faults(self) -> list[str]:
        """Return one text per sample: the name of a function that could not score it, and the reason.

        The text is empty if each function gave a number or None.
        """
        self._wait()
        named = list(zip(self._pool.specs, self._parts, strict=True))
        said = [[(spec.name, part[i]) for spec, part in named] for i in range(self._count)]
        return [
            next((p.reason if isinstance(p, Unscored) else f"{n}: {p}" for n, p in one if isinstance(p, Unscored | Failure)), "")
            for one in said
        ]

    def shown(self, samples: Sequence[int]) -> dict[str, list[Any]]:
        """Return the arguments of reward functions for these samples: field -> one value per sample."""
        return select(self._shown, samples)

    def enter(self, call: RewardCall, answer: list[Part] | Unscored) -> None:
        """Record a function's answer, or schedule calls of it sample by sample."""
        self._pool.jobs.extendleft((self, job) for job in reversed(enter(call, answer, self._parts)))

    def _wait(self) -> None:
        with self._pool.watch:
            while self._pending():
                self._pool.advance(wait=True)

    def _pending(self) -> bool:
        return sum(map(len, self._parts)) < self._count * len(self._parts)


def enter(call: RewardCall, answer: list[Part] | Unscored, parts: Sequence[dict[int, Part]]) -> list[list[RewardCall]]:
    """Record a function's answer in `parts` (by function, then by sample), and return the calls that it makes necessary.

    If the answer is one error for several samples, these calls repeat the function sample by sample. Otherwise there are none.
    """
    if isinstance(answer, Unscored) and len(call.samples) > 1:
        return [[RewardCall(call.function, (sample,))] for sample in call.samples]
    parts[call.function].update(zip(call.samples, [answer] if isinstance(answer, Unscored) else answer, strict=True))
    return []


def combine(names: Sequence[str], weights: Sequence[float], given: Sequence[Part], failure_value: float) -> Result:
    """Return the result of one sample: sum of weight × reward over the functions that apply to it (TRL's nansum).

    A `Failure` counts as `failure_value`; the other functions keep their values. A sample is `Unscored` if a function could not
    score it, if the sum is too large, or if no function with a weight applies: TRL's 0 would be a reward that no function gave.
    """
    parts: dict[str, float | None] = {}
    faults = []
    for name, weight, part in zip(names, weights, given, strict=True):
        if isinstance(part, Unscored):
            return Unscored("; ".join(dict.fromkeys(one.reason.rstrip(".") for one in given if isinstance(one, Unscored))))
        parts[name] = failure_value if isinstance(part, Failure) else part
        if isinstance(part, Failure) and weight != 0:
            faults.append(f"{name}: {part}")
    terms = [w * v for w, v in zip(weights, parts.values(), strict=True) if v is not None and w != 0]
    if not terms:
        return Unscored(f"{NOT_APPLICABLE} ({', '.join(names)}: None or a weight of 0)")
    total = sum(terms)
    if not abs(total) <= _LARGEST:
        given_by = ", ".join(f"{name} {value:g}" for name, value in parts.items() if value is not None)
        return Unscored(f"the weighted sum of its rewards is beyond {_LARGEST:g} ({given_by})")
    return Failed(total, faults[0], parts) if faults else Scored(total, parts)


def name_apart(specs: Sequence[RewardSpec]) -> list[RewardSpec]:
    """Return the specs with distinct names: the second `exact` becomes `exact_2`. Raise `UserError` if there are none."""
    if not specs:
        raise UserError("No reward function was given; name a built-in or module:function.")
    return [replace(spec, name=name) for spec, name in zip(specs, names_apart([spec.name for spec in specs]), strict=True)]


def names_apart(names: Sequence[str]) -> list[str]:
    """Return distinct names: the second `exact` is logged as `exact_2`."""
    found: list[str] = []
    for name in names:
        others = (f"{name}_{count}" for count in itertools.count(2))
        found.append(next(one for one in itertools.chain([name], others) if one not in found))
    return found


def check_weights(parts: Sequence[Any], weights: Sequence[float]) -> tuple[float, ...]:
    """Return one weight per reward function and model; 1 each if none were given."""
    if weights and len(weights) != len(parts):
        raise UserError(
            f"There are {len(weights)} reward_weights for {len(parts)} reward functions and models; give one for each, or none."
        )
    if not all(math.isfinite(weight) for weight in weights):
        raise UserError(f"reward_weights are {list(weights)}; each must be a finite number.")
    return tuple(weights) or (1.0,) * len(parts)


def decode(content: Any, count: int) -> list[Part] | Unscored:
    """Return a worker's answer for `count` samples: the inverse of its `encode`. Raise `ValueError` for an invalid answer."""
    if isinstance(content, str):
        return Unscored(content)
    if not isinstance(content, list) or len(content) != count:
        raise ValueError(f"{count} rewards were expected")
    return [_decode_part(value) for value in content]


def _decode_part(value: Any) -> Part:
    match value:
        case None:
            return None
        case ["Failure", reason]:
            return Failure(str(reason))
        case ["Unscored", reason]:
            return Unscored(str(reason))
        case int() | float() if math.isfinite(value):
            return float(value)
    raise ValueError(f"{value!r} is no reward")
