"""Scoring in processes that can be killed."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from psigrad.errors import UserError
from psigrad.rewards.call import Malformed, call, combine
from psigrad.rewards.resolve import RewardSpec
from psigrad.rewards.types import Result, Unscored
from psigrad.rewards.worker import read_frame, write_frame

# Seconds in which a worker must have imported the reward functions.
START_LIMIT = 120.0
_START = "from psigrad.rewards.worker import main; main()"


class RewardError(UserError):
    """The rewards cannot be used: the functions do not load, or too many completions stay unscored."""


def pack_function(function: Callable[..., Any]) -> tuple[str, Any]:
    """A function as a worker can load it: by module and name where that finds it again, else by value (lambdas, closures, scripts)."""
    module, qualname = getattr(function, "__module__", None), getattr(function, "__qualname__", "<")
    if module and module != "__main__" and "<" not in qualname and module in sys.modules:
        return "name", (module, qualname, getattr(sys.modules[module], "__file__", None))
    import dill

    try:
        return "value", dill.dumps(function, recurse=True)
    except Exception as error:
        raise RewardError(
            f"The reward {qualname} cannot be sent to a worker process ({type(error).__name__}: {error}); define it at the top level "
            "of a module and name it as module:function."
        ) from error


@dataclass(frozen=True)
class _Job:
    """Samples to score together; `alone` says that the sample is on its second and last try."""

    indices: tuple[int, ...]
    alone: bool = False


class _Worker:
    """One process and its two pipes."""

    def __init__(self, functions: list[tuple[str, tuple[str, Any]]]) -> None:
        request_read, request_write = os.pipe()
        response_read, response_write = os.pipe()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
        self.process = subprocess.Popen(
            [sys.executable, "-c", _START, str(request_read), str(response_write)],
            pass_fds=(request_read, response_write),
            stdin=subprocess.DEVNULL,
            env=environment,
        )
        os.close(request_read)
        os.close(response_write)
        self.requests, self.responses = os.fdopen(request_write, "wb"), os.fdopen(response_read, "rb", buffering=0)
        self.job: _Job | None = None
        self.ready = False
        self.deadline = time.monotonic() + START_LIMIT
        write_frame(self.requests, {"path": sys.path, "functions": functions})

    def send(self, job: _Job, samples: dict[str, Any], limit: float) -> None:
        self.job, self.deadline = job, time.monotonic() + limit
        try:
            write_frame(self.requests, samples)
        except BrokenPipeError:
            pass  # it died idle; its closed pipe says so where answers are read

    def kill(self) -> int:
        """End the process for good and say how it had ended."""
        self.process.kill()
        status = self.process.wait()
        for stream in (self.requests, self.responses):
            try:
                stream.close()
            except BrokenPipeError:
                pass
        return status


class RewardPool:
    """Scores with `workers` processes; a group of completions has `timeout` seconds, and so has each alone on its second try.

    A function that raises, hangs, crashes or returns nonsense on a group is tried again sample by sample, so that one bad sample does not
    take its group along. Results do not depend on the number of workers. `weights` default to 1. Use as a context manager, or `close()`.
    """

    def __init__(
        self,
        specs: Sequence[RewardSpec],
        *,
        weights: Sequence[float] = (),
        timeout: float = 10.0,
        workers: int = 1,
        failure_value: float = 0.0,
    ) -> None:
        self.specs = unique(specs)
        self.weights = checked_weights(self.specs, weights)
        for name, value in (("reward_timeout", timeout), ("reward_workers", workers)):
            if value <= 0:
                raise UserError(f"{name} is {value}; it must be above 0.")
        self.timeout, self.failure_value = timeout, failure_value
        self._functions = [(spec.name, pack_function(spec.function)) for spec in self.specs]
        self._workers = [_Worker(self._functions) for _ in range(workers)]

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the workers."""
        while self._workers:
            self._workers.pop().kill()

    def score(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[list[int]],
        columns: dict[str, list[Any]],
        groups: Sequence[int] | None = None,
    ) -> list[Result]:
        """One result per completion, in order; see `Scorer`. Raises `RewardError` where the functions do not load."""
        if not self._workers:
            raise RewardError("The reward pool is closed; make a new one.")
        every = {**columns, "prompts": prompts, "completions": completions, "completion_ids": completion_ids}
        results: list[Result | None] = [None] * len(completions)
        jobs = deque(_Job(tuple(part)) for part in chunks(len(completions), groups))
        while jobs or any(worker.job for worker in self._workers):
            for worker in self._workers:
                if jobs and worker.ready and worker.job is None:
                    job = jobs.popleft()
                    worker.send(job, {name: [values[i] for i in job.indices] for name, values in every.items()}, self.timeout)
            for worker, message in self._wait():
                if message == ("ready", None):
                    worker.ready = True
                elif worker.job is not None:
                    job, worker.job = worker.job, None
                    self._take(job, message, results, jobs)
        return [result for result in results if result is not None]

    def _take(self, job: _Job, message: tuple[str, Any], results: list[Result | None], jobs: deque[_Job]) -> None:
        kind, said = message
        if kind == "said":
            names = [spec.name for spec in self.specs]
            for place, i in enumerate(job.indices):
                results[i] = combine(names, self.weights, [column[place] for column in said], self.failure_value)
        elif job.alone or len(job.indices) == 1:
            for i in job.indices:
                results[i] = Unscored(said)
        else:
            jobs.extendleft(_Job((i,), alone=True) for i in reversed(job.indices))

    def _wait(self) -> list[tuple[_Worker, tuple[str, Any]]]:
        """Answers that have come, and verdicts on workers that died or ran out of time (which are replaced)."""
        busy = [worker for worker in self._workers if worker.job is not None or not worker.ready]
        with selectors.DefaultSelector() as selector:
            for worker in busy:
                selector.register(worker.responses, selectors.EVENT_READ, worker)
            soonest = min(worker.deadline for worker in busy)
            readable = [key.data for key, _ in selector.select(max(0.0, soonest - time.monotonic()))]
        answers = []
        for worker in busy:
            if worker in readable:
                answers.append(self._answer(worker))
            elif time.monotonic() >= worker.deadline:
                if not worker.ready:
                    raise RewardError(f"The reward functions did not load within {START_LIMIT:.0f} s; look at what they import.")
                answers.append((self._replace(worker), ("late", f"time-out after {self.timeout:g} s")))
        return answers

    def _answer(self, worker: _Worker) -> tuple[_Worker, tuple[str, Any]]:
        try:
            kind, content = read_frame(worker.responses)
        except (EOFError, OSError):
            ready = worker.ready
            worker = self._replace(worker)
            if not ready:
                raise RewardError(
                    "The process that runs the reward functions died while it loaded them; its output tells why."
                ) from None
            return worker, ("died", f"its process died ({self._last_status})")
        if kind == "broken":
            raise RewardError(f"The reward functions do not load in a fresh process: {content}.")
        return worker, (kind, content)

    def _replace(self, worker: _Worker) -> _Worker:
        """A fresh worker in the place of a dead or hanging one, holding its job until the verdict is taken."""
        status = worker.kill()
        self._last_status = f"signal {-status}" if status < 0 else f"exit status {status}"
        fresh = _Worker(self._functions)
        fresh.job = worker.job
        self._workers[self._workers.index(worker)] = fresh
        return fresh


class InlineScorer:
    """The same without processes: for functions that are trusted, and for tests. Nothing here can stop a function that hangs."""

    def __init__(self, specs: Sequence[RewardSpec], *, weights: Sequence[float] = (), failure_value: float = 0.0) -> None:
        self.specs = unique(specs)
        self.weights, self.failure_value = checked_weights(self.specs, weights), failure_value

    def score(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[list[int]],
        columns: dict[str, list[Any]],
        groups: Sequence[int] | None = None,
    ) -> list[Result]:
        """One result per completion, in order; see `Scorer`."""
        every = {**columns, "prompts": prompts, "completions": completions, "completion_ids": completion_ids}
        results: dict[int, Result] = {}
        for part in chunks(len(completions), groups):
            try:
                self._score(part, every, results)
            except Exception:
                for i in part:
                    try:
                        self._score([i], every, results)
                    except Exception as error:
                        reason = (
                            str(error)
                            if isinstance(error, Malformed)
                            else f"{self._current} raised {type(error).__name__}: {error}"
                        )
                        results[i] = Unscored(reason)
        return [results[i] for i in range(len(completions))]

    def _score(self, part: Sequence[int], every: dict[str, Sequence[Any]], results: dict[int, Result]) -> None:
        samples = {name: [values[i] for i in part] for name, values in every.items()}
        said = []
        for spec in self.specs:
            self._current = spec.name
            said.append(call(spec.name, spec.function, samples))
        names = [spec.name for spec in self.specs]
        for place, i in enumerate(part):
            results[i] = combine(names, self.weights, [column[place] for column in said], self.failure_value)


def unique(specs: Sequence[RewardSpec]) -> list[RewardSpec]:
    """The specs under names of their own: the second `exact` is logged as `exact_2`."""
    if not specs:
        raise UserError("No reward function was given; name a built-in or module:function.")
    seen: dict[str, int] = {}
    named = []
    for spec in specs:
        seen[spec.name] = seen.get(spec.name, 0) + 1
        named.append(spec if seen[spec.name] == 1 else RewardSpec(f"{spec.name}_{seen[spec.name]}", spec.function))
    return named


def checked_weights(specs: Sequence[RewardSpec], weights: Sequence[float]) -> tuple[float, ...]:
    """One weight per function; 1 each where none were given."""
    if weights and len(weights) != len(specs):
        raise UserError(f"There are {len(weights)} reward_weights for {len(specs)} reward functions; give one for each, or none.")
    return tuple(weights) or (1.0,) * len(specs)


def chunks(count: int, groups: Sequence[int] | None) -> list[list[int]]:
    """Indices that are scored together: neighbours with the same group number, or 16 at a time."""
    if groups is None:
        return [list(range(start, min(start + 16, count))) for start in range(0, count, 16)]
    parts: list[list[int]] = []
    for i in range(count):
        if i and groups[i] == groups[i - 1]:
            parts[-1].append(i)
        else:
            parts.append([i])
    return parts


def check_unscored(reasons: Sequence[str | None], limit: float) -> None:
    """Stop a run whose rewards do not work. `reasons` has one entry per completion: why it is unscored, or None."""
    unscored = [(i, reason) for i, reason in enumerate(reasons) if reason is not None]
    if not unscored or len(unscored) <= limit * len(reasons):
        return
    counts: dict[str, list[int]] = {}
    for i, reason in unscored:
        counts.setdefault(reason, []).append(i)
    reason, samples = max(counts.items(), key=lambda item: len(item[1]))
    shown = ", ".join(map(str, samples[:5])) + (", …" if len(samples) > 5 else "")
    raise RewardError(
        f"{len(unscored)} of {len(reasons)} completions stayed unscored, above max_unscored {limit:g}; most often ({len(samples)}, samples "
        f"{shown}): {reason}. Mend the reward function or raise the limit."
    )
