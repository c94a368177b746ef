"""Workers on a Ray cluster that run jobs, and run them again when a worker is lost.

The result of a job depends only on the job, not on the worker or the number of workers. So the jobs of a lost or late worker go
to others, and the first answer counts. Several batches of jobs may run at once, each with its own waiting thread. The jobs of the
oldest batch come first. A job goes to the worker with the fewest jobs, or to the one that has a cache for it (`Affinity`).
"""

from __future__ import annotations

import contextlib
import itertools
import re
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from psigrad.errors import UserError, name_reason
from psigrad.processes.workers.worker_pool import SharedWait
from psigrad_extras.cluster import ray_connection

# The seconds after which an idle worker takes over another's job: the minimum, and a multiple of the median seconds of a job.
PATIENCE, TIMES = 60.0, 5.0
# The seconds after which the thread that waits for answers checks for jobs that other threads have added.
SLICE = 0.05
# The number of workers that may be lost in a row at their start, or at one job; the seconds without workers before a message.
LOSSES, NOTICE = 6, 20.0
# The factor on the seconds between starts if there is no worker. A cluster that has just started may refuse the first.
SOONER = 0.25
# The number of characters kept of the start and of the end of Ray's message about a loss.
SAID = 600
_OURS = re.compile(r"/(psigrad\w*|site-packages|dist-packages|lib/python3\.\d+)/|^<")
Log = Callable[..., None]
Job = Callable[[Any], Any]
"""A function that calls a worker, an actor of Ray, and returns the reference to its answer."""


@dataclass(eq=False)
class Affinity:
    """A group of jobs that should run on the same worker, because it caches data for them.

    `worker` answered the group's last job. It also gets the next one, unless it is lost or late; then any other worker gets it.
    """

    worker: Any = None


@dataclass(frozen=True, eq=False)
class _Owed:
    """A job that a worker is running, and the time at which it started."""

    batch: JobBatch
    job: int
    since: float = field(default_factory=time.monotonic)

    @property
    def wanted(self) -> bool:
        """True if the job's answer is still needed."""
        return not self.batch.closed and self.job not in self.batch.done


@dataclass(eq=False)
class _Worker:
    """The driver's record of a worker."""

    actor: Any
    starting: Any
    work: dict[Any, _Owed] = field(default_factory=dict)
    """Ray's reference to the answer -> the running job."""


class ActorPool:
    """A pool of workers on a Ray cluster, which replaces lost workers.

    `kind` is the class of the workers, created with `arguments` on the worker's machine. Its method `ready()`, or the call
    `greet`, returns when the worker has started. `name` is the workers' name in messages. A worker runs up to `depth` jobs at
    once, from batches with equal `needs`. `count` is the number of workers. 0 means as many as fit while `spare_cpus` CPUs of
    the cluster stay free.
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
        depth: int = 1,
        minutes: float,
        log: Log,
        greet: Callable[[Any], Any] | None = None,
    ) -> None:
        self.ray = ray_connection.connect(address)
        self._arguments, self._name, self._count, self._cpus, self._gpus = tuple(arguments), name, count, cpus, gpus
        self._spare_cpus, self._depth, self._minutes, self._log = spare_cpus, depth, minutes, log
        self._greet = greet or (lambda actor: actor.ready.remote())
        self._a = f"{'An' if name[0] in 'aeiou' else 'A'} {name}"
        self._remote = self.ray.remote(num_cpus=cpus, num_gpus=gpus, max_restarts=0, max_concurrency=depth)(kind)
        self._workers, self._batches = list[_Worker](), list[JobBatch]()
        self._watch = SharedWait()
        self._closed, self._failed, self._noticed = False, 0, False
        self._alone_since, self._next_start = time.monotonic(), 0.0
        self._broken: UserError | None = None
        self._head = ray_connection.HeadWatch(self.ray, self._lose_head)
        self._seconds: deque[float] = deque(maxlen=64)
        self.entries = {"issued": 0, "again": 0, "twice": 0, "lost": 0}
        """Counts: issued jobs, jobs issued again because a worker was lost or late, duplicate answers, and lost workers."""

    def close(self) -> None:
        """End the workers."""
        self._closed = True
        self._head.over.set()
        for worker in self._workers:
            self._kill(worker)
        self._workers.clear()

    def begin(self, needs: object = None) -> JobBatch:
        """Return a new, empty batch of jobs. A worker does not run its jobs at the same time as jobs of other `needs`."""
        return JobBatch(self, needs)

    @property
    def wanted(self) -> int:
        """The number of workers that the pool should have now."""
        return max(1, self._count or self._room())

    def run(self, jobs: Sequence[Job], affinities: Sequence[Affinity | None] = ()) -> Iterator[tuple[int, Any]]:
        """Run these jobs as a batch, and yield (index, answer) of each when it is done. `affinities` has one for each job."""
        batch = self.begin()
        try:
            for job, affinity in itertools.zip_longest(jobs, affinities):
                batch.add(job, affinity)
            while batch.pending:
                yield from batch.answers(1.0)
        finally:
            batch.give_up()

    def _advance(self, batch: JobBatch, seconds: float) -> list[tuple[int, Any]]:
        """Issue jobs, and return the answers for this batch that arrive within `seconds`."""
        end = time.monotonic() + seconds
        with self._watch:
            while True:
                if self._closed:
                    raise UserError(f"The {self._name}s were closed during their jobs; resume the run.")
                self._tend()
                self._hand_out()
                self._note_absence()
                left = min(SLICE, max(0.0, end - time.monotonic()))
                owed = {ref: w for w in self._workers for ref in ([w.starting] if w.starting is not None else w.work)}
                for ref in self._watch.look(partial(self._wait, owed, left), left) or ():
                    self._take(owed[ref], ref)
                if error := batch.error or self._broken:
                    raise error
                if batch.found or time.monotonic() >= end:
                    found, batch.found = batch.found, []
                    return found

    def _wait(self, owed: dict[Any, _Worker], seconds: float) -> list[Any]:
        if not owed:
            time.sleep(seconds)
            return []
        return list(self.ray.wait(list(owed), num_returns=1 if seconds else len(owed), timeout=seconds)[0])

    def _hand_out(self) -> None:
        """Issue jobs of the oldest batch first, each to the worker with the fewest jobs."""
        here = [w for w in self._workers if w.starting is None]
        in_time = set(filter(self._in_time, self._workers))
        choose = partial(self._choose, in_time)
        while chosen := next(filter(None, map(choose, sorted(here, key=lambda w: len(w.work)))), None):
            worker, batch, job = chosen
            batch.waiting.remove(job)
            self._issue(worker, job, batch)
        for worker in () if any(b.waiting for b in self._batches) else [w for w in here if not w.work]:
            if late := self._find_late():
                self._issue(worker, late.job, late.batch)

    def _enter(self, batch: JobBatch, job: Job, affinity: Affinity | None) -> None:
        with self._watch:  # other threads read the waiting jobs
            if not self._batches:
                self._alone_since = time.monotonic()
            if batch not in self._batches:
                self._batches.append(batch)
            batch.jobs.append(job)
            batch.affinities.append(affinity)
            batch.waiting.append(len(batch.jobs) - 1)

    def _leave(self, batch: JobBatch) -> None:
        with self._watch:
            if batch in self._batches:
                self._batches.remove(batch)

    def _lose_head(self) -> None:
        said = f"The head of the Ray cluster at {self._head.address} has not answered for {ray_connection.HEAD:.0f} s"
        self._log("head_lost", f"{said}.", address=self._head.address)
        self._broken = UserError(f"{said}; start a cluster again, and repeat the command to resume from the newest checkpoint.")

    def _note_absence(self) -> None:
        if self._head.silent:
            return
        if any(w.starting is None for w in self._workers):
            self._alone_since, self._noticed = time.monotonic(), False
        elif (waited := time.monotonic() - self._alone_since) > 60 * self._minutes:
            raise UserError(f"No {self._name} could start for {self._minutes:g} minutes: {self._describe_wants()}")
        elif waited > NOTICE and not self._noticed:
            self._noticed = True
            self._log("worker_awaited", f"No {self._name} has started so far: {self._describe_wants()}", seconds=waited)

    def _choose(self, in_time: set[_Worker], worker: _Worker) -> tuple[_Worker, JobBatch, int] | None:
        """Return (worker, batch, job) of the next job for this worker, or None.

        It is from the oldest batch with a waiting job, if that batch has the same `needs` as the worker's current jobs.
        """
        for batch in self._batches if len(worker.work) < self._depth else ():
            if (job := self._next(worker, batch, in_time)) is not None:
                return (worker, batch, job) if all(owed.batch.needs == batch.needs for owed in worker.work.values()) else None
        return None

    def _next(self, worker: _Worker, batch: JobBatch, in_time: set[_Worker]) -> int | None:
        """Return a waiting job that has no affinity or whose affinity is this worker.

        Otherwise return one whose worker is lost or late; None if there is none.
        """
        free = None
        for job in batch.waiting:
            affinity = batch.affinities[job]
            if affinity is None or affinity.worker is worker:
                return job
            if free is None and affinity.worker not in in_time:
                free = job
        return free

    def _issue(self, worker: _Worker, job: int, batch: JobBatch) -> None:
        self.entries["issued"] += 1
        worker.work[batch.jobs[job](worker.actor)] = _Owed(batch, job)

    def _take(self, worker: _Worker, ref: Any) -> None:
        """Fetch the answer `ref` of a worker, and deliver it to the job's batch."""
        if worker not in self._workers or (ref is not worker.starting and ref not in worker.work):
            return  # another thread has fetched it
        try:
            answer = self.ray.get(ref)
        except self.ray.exceptions.RayTaskError as error:
            owed = worker.work.pop(ref, None)
            if owed is None:
                self._broken = self._explain(error)
            else:
                owed.batch.error = self._explain(error)
            return
        except self.ray.exceptions.RayError as error:
            self._lose(worker, *_cause_of(error))
            return
        if ref is worker.starting:
            worker.starting, self._failed = None, 0
            self._log("worker_joined", f"{self._a} has joined; there are now {self._here()}.", workers=self._here())
            return
        owed = worker.work.pop(ref)
        self._seconds.append(time.monotonic() - owed.since)
        if not owed.wanted:
            self.entries["twice"] += 1
            return
        owed.batch.done.add(owed.job)
        if (affinity := owed.batch.affinities[owed.job]) is not None:
            affinity.worker = worker
        owed.batch.found.append((owed.job, answer))

    def _explain(self, error: Any) -> UserError:
        """Return the driver's error for a worker's exception. The traceback is written to the run folder."""
        if isinstance(error.cause, UserError):
            return UserError(str(error.cause))
        trace = str(error)  # the traceback of the worker
        text = f"{self._a} failed on the cluster ({name_reason(error.cause)}{_place(trace)})."
        self._log("worker_failed", f"The traceback of the {self._name} is in events.jsonl.", traceback=trace[-8000:])
        return UserError(text)

    def _here(self) -> int:
        return sum(w.starting is None for w in self._workers)

    def _lose(self, worker: _Worker, reason: str, said: str = "") -> None:
        self._workers.remove(worker)
        self._kill(worker)
        if worker.starting is not None:  # on an unreachable machine starts fail at once, so wait before the next one
            self._failed += 1
            self._next_start = time.monotonic() + 2.0 ** min(self._failed, 6) * (1.0 if self._here() else SOONER)
        if worker.starting is not None and self._failed >= LOSSES and not self._here():
            began = f"{self._failed} {self._name}s in a row could not start on the cluster"
            self._broken = UserError(f"{began}: {reason}. {said}".rstrip())
            return
        self.entries["lost"] += 1
        shared = {(id(o.batch), o.job) for w in self._workers for o in w.work.values()}
        for owed in filter(lambda owed: owed.wanted, reversed(worker.work.values())):
            owed.batch.losses[owed.job] += 1
            if owed.batch.losses[owed.job] == LOSSES:
                began = f"{LOSSES} {self._name}s were lost one after another during the same job"
                owed.batch.error = UserError(f"{began}; the last one: {reason}. {said}".rstrip())
            elif (id(owed.batch), owed.job) not in shared:
                self.entries["again"] += 1
                owed.batch.waiting.appendleft(owed.job)
        self._log("worker_lost", f"{self._a} was lost ({reason}); another one repeats its jobs.", reason=reason, said=said)

    def _kill(self, worker: _Worker) -> None:
        if not self._head.silent:  # a silent head would block the call
            with contextlib.suppress(Exception):
                self.ray.kill(worker.actor)

    def _find_late(self) -> _Owed | None:
        """Return the oldest overdue job that only one worker is running, or None."""
        working = [o for w in self._workers for o in w.work.values() if o.wanted]
        count = Counter((id(o.batch), o.job) for o in working)
        late = [o for o in working if self._is_late(o) and count[id(o.batch), o.job] == 1]
        if not late:
            return None
        oldest = min(late, key=lambda o: o.since)
        self.entries["again"] += 1
        waited = time.monotonic() - oldest.since
        self._log("worker_late", f"{self._a} has not answered for {waited:.0f} s; another one repeats its jobs.", seconds=waited)
        return oldest

    def _is_late(self, owed: _Owed, times: float = 1.0) -> bool:
        """Return True if a job has run longer than `times` the limit, a multiple of the median time of a job."""
        limit = times * max(PATIENCE, TIMES * statistics.median(self._seconds) if self._seconds else PATIENCE)
        return time.monotonic() - owed.since > limit

    def _in_time(self, worker: _Worker, times: float = 1.0) -> bool:
        return not any(self._is_late(owed, times) for owed in worker.work.values())

    def _tend(self) -> None:
        """Start missing workers, and end those that are very late.

        These are workers whose jobs are not needed any more, or that have not answered within the time limit of the pool.
        """
        if self._head.silent:
            return
        for worker in [w for w in self._workers if not self._in_time(w, 3.0)]:
            waited = time.monotonic() - min(owed.since for owed in worker.work.values())
            if waited > 60 * self._minutes or not any(owed.wanted for owed in worker.work.values()):
                self._lose(worker, f"no answer for {waited:.0f} s")
        for _ in range(len(self._workers), self.wanted if time.monotonic() >= self._next_start else 0):
            actor = self._remote.remote(*self._arguments)
            self._workers.append(_Worker(actor, self._greet(actor)))

    def _room(self) -> int:
        """Return the number of workers that fit in the current cluster, if `spare_cpus` CPUs stay free."""
        resources = self.ray.cluster_resources()
        room = int((resources.get("CPU", 0) - self._spare_cpus) / self._cpus)
        return min(room, int(resources.get("GPU", 0) / self._gpus)) if self._gpus else room

    def _describe_wants(self) -> str:
        asked = (self.ray.cluster_resources(), self.ray.available_resources())
        has, free = ({name: amount for name, amount in found.items() if name in ("CPU", "GPU")} for found in asked)
        return (
            f"each needs {self._cpus} CPU and {self._gpus:g} GPU. The cluster has {has}, of which {free or 'nothing'} is free; "
            "add machines, or request less in placement."
        )


class JobBatch:
    """A batch of jobs of one caller, which adds them one by one and collects their answers."""

    def __init__(self, pool: ActorPool, needs: object) -> None:
        self._pool, self.needs = pool, needs
        self.jobs: list[Job] = []
        self.affinities: list[Affinity | None] = []
        self.waiting, self.done, self.closed = deque[int](), set[int](), False
        self.found: list[tuple[int, Any]] = []
        """The pairs (index, answer) that have arrived but were not collected yet."""
        self.losses = Counter[int]()
        """The number of workers that were lost at each job."""
        self.error: UserError | None = None
        """The error that a worker raised in one of the jobs."""

    def add(self, job: Job, affinity: Affinity | None = None) -> None:
        """Add a job. Its index is the previous number of jobs."""
        self._pool._enter(self, job, affinity)

    @property
    def pending(self) -> bool:
        """True if an answer has not arrived, or was not collected yet."""
        return bool(self.found) or len(self.done) < len(self.jobs)

    def answers(self, seconds: float) -> list[tuple[int, Any]]:
        """Return the pairs (index, answer) that have arrived. If there are none, wait for at most `seconds`."""
        found = self._pool._advance(self, seconds) if self.pending else []
        if not self.pending:
            self._pool._leave(self)
        return found

    def give_up(self) -> None:
        """Close the batch. Its answers are no longer needed."""
        self.closed = True
        self._pool._leave(self)


def _cause_of(error: Exception) -> tuple[str, str]:
    """Return (the reason why a worker was lost, Ray's message, of which only start and end are kept if it is long)."""
    name, said = type(error).__name__, " ".join(str(error).split())
    if "low on memory" in said:
        used = re.search(r"was ([\d.]+) ?GB\D*/ ?([\d.]+) ?GB", said)
        of = f" ({used[1]} of {used[2]} GB in use)" if used else ""
        name += (
            f": Ray ended the process because its machine ran low on memory{of}; in placement, give each process more CPUs, or "
            "request fewer processes"
        )
    elif "references to the actor were removed" in said and "never ran" in said:  # the driver still has them
        name += (
            ": the cluster cannot connect to this process; if only this process uses Ray's token, set RAY_AUTH_MODE=disabled "
            "for this process too, otherwise open the firewall between them"
        )
    return name, said if len(said) <= 2 * SAID else f"{said[:SAID]} … {said[-SAID:]}"


def _place(trace: str) -> str:
    """Return the place of the traceback's last line in the user's own code, not in psigrad or a package; "" if there is none."""
    lines = [(file, line) for file, line in re.findall(r'File "(.+?)", line (\d+)', trace) if not _OURS.search(file)]
    return f", {lines[-1][0]}, line {lines[-1][1]}" if lines else ""
