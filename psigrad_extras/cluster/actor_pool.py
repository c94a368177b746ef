"""Workers on a Ray cluster that take jobs, and take them again when one is lost.

What comes of a job depends on the job alone: not on the worker, nor on how many there are. So a lost worker's jobs go to others,
and the first answer counts.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import socket
import statistics
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from psigrad.errors import UserError, name_reason, reason_of

# Seconds after which an idle worker takes over another's job, at least, and as a multiple of what one takes in the median.
PATIENCE, TIMES = 60.0, 5.0
# Bytes that the file of what actors print may have.
LOG_BYTES = 64 << 20
# Workers in a row that may fail to start; seconds after which people are told that none has.
STARTS, NOTICE = 6, 20.0
_OURS = re.compile(r"/(psigrad\w*|site-packages|dist-packages|lib/python3\.\d+)/|^<")
Tell = Callable[..., None]
Job = Callable[[Any], Any]
"""Asks a worker, an actor of Ray; the reference to its answer."""


@dataclass(eq=False)
class Affinity:
    """Where what a job needs is kept: the worker that last answered a job of this affinity. It gets the next one too, while it
    is there and in time; else any other does.
    """

    worker: Any = None


@dataclass(eq=False)
class _Worker:
    """A worker as the driver sees it."""

    actor: Any
    starting: Any
    work: Any = None
    """The answer that it owes."""
    job: int = -1
    batch: int = -1
    since: float = field(default_factory=time.monotonic)

    @property
    def idle(self) -> bool:
        return self.starting is None and self.work is None


class ActorPool:
    """The workers on a cluster, as many as `count` says, and more or fewer as machines come and go.

    `kind` is their class, made with `arguments` on the machine where each runs; its `ready()` answers once it is there. `name` is
    what people call them. With `count` 0 there are as many as the cluster has room for beside `spare_cpus`, which others take.
    """

    def __init__(
        self,
        kind: type,
        arguments: Sequence[Any],
        *,
        name: str,
        address: str,
        count: int,
        cpus: int,
        gpus: float = 0.0,
        spare_cpus: int = 0,
        minutes: float,
        tell: Tell,
    ) -> None:
        self.ray = _connect(address)
        self._arguments, self._name, self._count, self._cpus, self._gpus = tuple(arguments), name, count, cpus, gpus
        self._spare_cpus, self._minutes, self._tell = spare_cpus, minutes, tell
        self._a = f"{'An' if name[0] in 'aeiou' else 'A'} {name}"
        self._remote = self.ray.remote(num_cpus=cpus, num_gpus=gpus, max_restarts=0)(kind)
        self._workers: list[_Worker] = []
        self._closed, self._batch, self._failed, self._noticed = False, 0, 0, False
        self._seconds: deque[float] = deque(maxlen=64)
        self.entries = {"issued": 0, "again": 0, "twice": 0, "lost": 0}
        """Jobs issued, of them again after a loss or a wait; answers that another had given before; workers lost."""

    def close(self) -> None:
        """Let go of the workers."""
        self._closed = True
        for worker in self._workers:
            with contextlib.suppress(Exception):
                self.ray.kill(worker.actor)
        self._workers.clear()

    def begin(self) -> JobBatch:
        """Jobs of a new batch; those of one before it are given up."""
        self._batch += 1
        return JobBatch(self)

    @property
    def wanted(self) -> int:
        """How many workers there are to be now."""
        return max(1, self._count or self._room())

    def run(self, jobs: Sequence[Job], affinities: Sequence[Affinity | None] = ()) -> Iterator[tuple[int, Any]]:
        """(place, answer) of each job as it is done; `affinities` say which of them belong to a worker."""
        batch = self.begin()
        for job, affinity in itertools.zip_longest(jobs, affinities):
            batch.add(job, affinity)
        while batch.pending:
            yield from batch.answers(1.0)

    def _advance(self, batch: JobBatch, seconds: float) -> list[tuple[int, Any]]:
        """Give out jobs, and what has come in within so many seconds."""
        if self._closed:
            raise UserError(f"The {self._name}s were closed while they were at work.")
        self._tend(batch.done)
        for worker in [w for w in self._workers if w.idle]:
            job = self._next(worker, batch)
            if job is None and not batch.waiting:
                job = self._find_late(batch.done)
            if job is not None:
                self._issue(worker, job, batch)
        if any(w.starting is None for w in self._workers):
            batch.idle_since, self._noticed = time.monotonic(), False
        elif (waited := time.monotonic() - batch.idle_since) > 60 * self._minutes:
            raise UserError(f"No {self._name} could start for {self._minutes:g} minutes: {self._describe_wants()}")
        elif waited > NOTICE and not self._noticed:
            self._noticed = True
            self._tell("worker_awaited", f"No {self._name} has started so far: {self._describe_wants()}", seconds=waited)
        return list(self._answers(batch, seconds))

    def _next(self, worker: _Worker, batch: JobBatch) -> int | None:
        """What waits for this worker, or else for none that is there and in time."""
        free = None
        for job in batch.waiting:
            affinity = batch.affinities[job]
            if affinity is None or affinity.worker is worker:
                free = job
                break
            if free is None and (affinity.worker not in self._workers or self._is_late(affinity.worker)):
                free = job
        if free is not None:
            batch.waiting.remove(free)
        return free

    def _issue(self, worker: _Worker, job: int, batch: JobBatch) -> None:
        self.entries["issued"] += 1
        worker.work = batch.jobs[job](worker.actor)
        worker.job, worker.batch, worker.since = job, self._batch, time.monotonic()

    def _answers(self, batch: JobBatch, seconds: float) -> Iterator[tuple[int, Any]]:
        owed = {ref: w for w in self._workers for ref in (w.starting, w.work) if ref is not None}
        if not owed:
            time.sleep(min(seconds, 0.2))
            return
        ready, _ = self.ray.wait(list(owed), num_returns=1 if seconds else len(owed), timeout=seconds)
        for ref in ready:
            worker = owed[ref]
            try:
                answer = self.ray.get(ref)
            except self.ray.exceptions.RayTaskError as error:
                worker.work = None
                raise self._explain(error) from error
            except self.ray.exceptions.RayError as error:
                self._lose(worker, error, batch)
                continue
            if ref is worker.starting:
                worker.starting, self._failed = None, 0
                self._tell("worker_joined", f"{self._a} has joined; there are {self._here()}.", workers=self._here())
                continue
            job, worker.work = worker.job, None
            self._seconds.append(time.monotonic() - worker.since)
            if worker.batch != self._batch or job in batch.done:
                self.entries["twice"] += 1
                continue
            batch.done.add(job)
            if (affinity := batch.affinities[job]) is not None:
                affinity.worker = worker
            yield job, answer

    def _explain(self, error: Any) -> UserError:
        """What a worker raised, as the driver says it; the traceback goes to the run folder."""
        if isinstance(error.cause, UserError):
            return UserError(str(error.cause))
        trace = str(error)  # the traceback of the worker
        text = f"{self._a} failed on the cluster ({name_reason(error.cause)}{_place(trace)})."
        self._tell("worker_failed", f"The traceback of the {self._name} is in events.jsonl.", traceback=trace[-8000:])
        return UserError(text)

    def _here(self) -> int:
        return sum(w.starting is None for w in self._workers)

    def _lose(self, worker: _Worker, error: Exception, batch: JobBatch) -> None:
        self._workers.remove(worker)
        with contextlib.suppress(Exception):
            self.ray.kill(worker.actor)
        if worker.starting is not None:
            self._failed += 1
            if self._failed >= STARTS:
                reason = " ".join(str(error).split())[-600:]
                raise UserError(f"{self._failed} {self._name}s in a row could not start on the cluster: {reason}") from error
        self.entries["lost"] += 1
        at_work = worker.work is not None and worker.batch == self._batch and worker.job not in batch.done
        if at_work and not any(w.job == worker.job and w.work is not None for w in self._workers):
            self.entries["again"] += 1
            batch.waiting.appendleft(worker.job)
        reason = type(error).__name__
        self._tell("worker_lost", f"{self._a} was lost ({reason}); its work goes to another.", reason=reason)

    def _find_late(self, done: set[int]) -> int | None:
        """A job that is overdue and only one worker has."""
        working = [w for w in self._workers if w.work is not None and w.batch == self._batch and w.job not in done]
        shared = {p for p, n in _count(w.job for w in working).items() if n > 1}
        late = [w for w in working if self._is_late(w) and w.job not in shared]
        if not late:
            return None
        oldest = min(late, key=lambda w: w.since)
        self.entries["again"] += 1
        waited = time.monotonic() - oldest.since
        self._tell("worker_late", f"{self._a} has not answered for {waited:.0f} s; another does its work too.", seconds=waited)
        return oldest.job

    def _is_late(self, worker: _Worker, times: float = 1.0) -> bool:
        """Whether it owes an answer for longer than answers take, or than so many times that."""
        limit = times * max(PATIENCE, TIMES * statistics.median(self._seconds) if self._seconds else PATIENCE)
        return worker.work is not None and time.monotonic() - worker.since > limit

    def _tend(self, done: set[int]) -> None:
        """Start workers that are wanted; end those that owe an old answer for too long."""
        for worker in [w for w in self._workers if self._is_late(w, 3.0)]:
            if worker.batch != self._batch or worker.job in done:
                self._workers.remove(worker)
                self.entries["lost"] += 1
                self.ray.kill(worker.actor)
                self._tell("worker_lost", f"{self._a} that no longer answers was ended.", reason="no answer")
        for _ in range(len(self._workers), self.wanted):
            actor = self._remote.remote(*self._arguments)
            self._workers.append(_Worker(actor, actor.ready.remote()))

    def _room(self) -> int:
        """How many workers the cluster of now has room for, beside what it keeps free."""
        resources = self.ray.cluster_resources()
        room = int((resources.get("CPU", 0) - self._spare_cpus) / self._cpus)
        return min(room, int(resources.get("GPU", 0) / self._gpus)) if self._gpus else room

    def _describe_wants(self) -> str:
        asked = (self.ray.cluster_resources(), self.ray.available_resources())
        has, free = ({name: amount for name, amount in found.items() if name in ("CPU", "GPU")} for found in asked)
        return (
            f"each wants {self._cpus} CPU and {self._gpus:g} GPU, and the cluster has {has}, of which {free or 'nothing'} is "
            "free. Add machines, or ask for less of them in placement."
        )


class JobBatch:
    """Jobs that belong together, added one by one."""

    def __init__(self, pool: ActorPool) -> None:
        self._pool = pool
        self.jobs: list[Job] = []
        self.affinities: list[Affinity | None] = []
        self.waiting, self.done, self.idle_since = deque[int](), set[int](), time.monotonic()

    def add(self, job: Job, affinity: Affinity | None = None) -> None:
        """One more; its place is how many there were."""
        if not self.pending:
            self.idle_since = time.monotonic()
        self.waiting.append(len(self.jobs))
        self.jobs.append(job)
        self.affinities.append(affinity)

    @property
    def pending(self) -> bool:
        """Whether an answer is still to come."""
        return len(self.done) < len(self.jobs)

    def answers(self, seconds: float) -> list[tuple[int, Any]]:
        """(place, answer) of what has come in, waiting for so many seconds at most."""
        return self._pool._advance(self, seconds) if self.pending else []


def _count(jobs: Iterator[int]) -> dict[int, int]:
    return {job: len(list(group)) for job, group in itertools.groupby(sorted(jobs))}


def _place(trace: str) -> str:
    """The last line of a traceback that is neither ours nor Ray's, where it has one."""
    lines = [(file, line) for file, line in re.findall(r'File "(.+?)", line (\d+)', trace) if not _OURS.search(file)]
    return f", {lines[-1][0]}, line {lines[-1][1]}" if lines else ""


def _connect(address: str) -> Any:
    """Ray, connected to the cluster at `address`, or with "auto" to the one that is there, or to one of this machine alone."""
    try:
        import ray
    except ImportError as error:
        raise UserError("placement.cluster needs Ray, which is not installed: pip install 'psigrad[cluster]'.") from error
    if ray.is_initialized():
        return ray
    _knock(address)
    passed = ("PYTHONPATH", "HF_HOME", "HF_HUB_OFFLINE", "XDG_CACHE_HOME", "PSIGRAD_NATIVE")
    variables = {name: os.environ[name] for name in passed if name in os.environ}
    settings: dict[str, Any] = {
        "runtime_env": {"env_vars": {**variables, "TQDM_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false"}},
        "logging_level": "ERROR",
        "log_to_driver": True,
    }
    try:
        ray.init(address=address, **settings)
    except ConnectionError as error:
        if "InvalidAuthToken" in "".join(traceback.format_exception(error)):
            raise UserError(
                f"The Ray cluster at {address!r} wants its token: set RAY_AUTH_MODE=token, with the token in ~/.ray/auth_token "
                "or RAY_AUTH_TOKEN, as on the machine that started it."
            ) from error
        if address != "auto":
            raise UserError(
                f"There is no Ray cluster at {address!r} ({reason_of(error)}); start one with `ray start`."
            ) from error
        ray.init(include_dashboard=False, **settings)
    return ray


def _knock(address: str) -> None:
    """Ray itself asks for minutes whether anybody is at an address."""
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if address == "auto" or not colon or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=10.0).close()
    except OSError as error:
        raise UserError(f"There is no Ray cluster at {address!r} ({reason_of(error)}); start one with `ray start`.") from error


@contextlib.contextmanager
def keep_output(kind: str, file: Path) -> Iterator[None]:
    """Append to `file` what actors of the class named `kind` print for the length of the block: time, kind, process, machine.

    On the driver's terminal Ray shows it too, and leaves out lines that come often.
    """
    try:
        # no public interface of Ray's has the lines on the driver
        from ray._private.ray_logging import global_worker_stdstream_dispatcher as streams
    except ImportError:
        yield
        return
    name = f"psigrad {kind}"
    with file.open("a", buffering=1, encoding="utf-8") as stream:

        def write(data: dict[str, Any]) -> None:
            if data.get("actor_name") != kind or stream.closed or stream.tell() > LOG_BYTES:
                return
            begin = f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {kind} {data.get('pid')}@{data.get('ip')}"
            with contextlib.suppress(OSError, ValueError):  # a full disk must not end Ray's thread
                stream.writelines(f"{begin}: {line}\n" for line in data.get("lines", ()))
                if stream.tell() > LOG_BYTES:
                    stream.write(f"psigrad: workers print more than {LOG_BYTES >> 20} MiB; the rest is dropped\n")

        streams.add_handler(name, write)
        try:
            yield
        finally:
            streams.remove_handler(name)
