"""Sampling by many processes on a Ray cluster, in parcels that any of them can take, and take again when one is lost.

A parcel is a fixed number of prompts in order, with the version of the weights that they are sampled from. What comes of it
depends on nothing else: not on the worker, nor on how many there are. So a lost worker's parcels go to others, the first answer
counts, and a run gives the same completions on any number of workers with one type of processor.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from psigrad.errors import UserError, reason_of
from psigrad.models.fused.activation_cache import ActivationCache
from psigrad.models.language_model import LanguageModel
from psigrad.rollout.types import Completion, Request, Sampler, SamplingParams

# Seconds after which an idle worker takes over another's parcel, at least, and as a multiple of what one takes in the median.
PATIENCE, TIMES = 60.0, 5.0
# Workers in a row that may fail to start.
STARTS = 6
Tell = Callable[..., None]


@dataclass(frozen=True)
class Version:
    """Published weights: their number, and where the cluster keeps them."""

    number: int
    place: Any


class RolloutWorker:
    """What runs on the cluster: a model with a sampler of its own. Each parcel says which weights it wants."""

    def __init__(self, make: Callable[[], tuple[LanguageModel, Sampler]], threads: int) -> None:
        torch.set_num_threads(threads)
        self.model, self.sampler = make()
        self.version = -1

    def ready(self) -> bool:
        """Answers when the model is there."""
        return True

    def sample(self, version: Version, requests: list[Request], params: SamplingParams) -> tuple[int, list[list[Completion]]]:
        """(the version sampled from, the completions of each request)."""
        if self.version != version.number:  # also in a worker that was started again, with the weights of the beginning
            import ray

            self._load(ray.get(version.place[0]))
            self.version = version.number
        return self.version, self.sampler.sample(requests, params)

    @torch.no_grad()
    def _load(self, weights: Mapping[str, Any]) -> None:
        own = self.model.trainable()
        if own.keys() != weights.keys():
            raise UserError("The trainer's weights have other names than the worker's; install the same psigrad on all machines.")
        for name, array in weights.items():
            own[name].copy_(torch.from_numpy(array.copy()).view(own[name].dtype).view(own[name].shape))


@dataclass
class _Worker:
    """A worker as the driver sees it."""

    actor: Any
    starting: Any
    work: Any = None
    """The answer that it owes."""
    parcel: int = -1
    turn: int = -1
    since: float = field(default_factory=time.monotonic)

    @property
    def idle(self) -> bool:
        return self.starting is None and self.work is None


class Fleet:
    """The workers on a cluster, as many as `count` says, and more or fewer as machines come and go."""

    def __init__(
        self,
        make: Callable[[], tuple[LanguageModel, Sampler]],
        *,
        address: str,
        count: int,
        cpus: int,
        gpus: float,
        minutes: float,
        tell: Tell,
    ) -> None:
        self.ray = _connected(address)
        self._make, self._count, self._cpus, self._gpus = make, count, cpus, gpus
        self._minutes, self._tell = minutes, tell
        self._remote = self.ray.remote(num_cpus=cpus, num_gpus=gpus, max_restarts=0)(RolloutWorker)
        self._workers: list[_Worker] = []
        self._lock, self._closed, self._turn, self._failed = threading.Lock(), False, 0, 0
        self._seconds: deque[float] = deque(maxlen=64)
        self.entries = {"issued": 0, "again": 0, "twice": 0, "lost": 0}
        """Parcels issued, of them again after a loss or a wait; answers that another had given before; workers lost."""

    def close(self) -> None:
        """Let go of the workers."""
        self._closed = True
        for worker in self._workers:
            with contextlib.suppress(Exception):
                self.ray.kill(worker.actor)
        self._workers.clear()

    def run(
        self, version: Version, parcels: Sequence[list[Request]], params: SamplingParams
    ) -> Iterator[tuple[int, list[list[Completion]]]]:
        """(place, completions) of each parcel as it is done."""
        with self._lock:
            self._turn += 1
            waiting, done, idle_since = deque(range(len(parcels))), set[int](), time.monotonic()
            while len(done) < len(parcels):
                if self._closed:
                    raise UserError("The samplers were closed while they were at work.")
                self._tend(done)
                for worker in [w for w in self._workers if w.idle]:
                    parcel = waiting.popleft() if waiting else self._late(done)
                    if parcel is None:
                        break
                    self._issue(worker, parcel, version, parcels[parcel], params)
                if any(w.starting is None for w in self._workers):
                    idle_since = time.monotonic()
                elif time.monotonic() - idle_since > 60 * self._minutes:
                    raise UserError(self._why_none())
                for parcel, found in self._answers(version, done, waiting):
                    done.add(parcel)
                    yield parcel, found

    def _issue(self, worker: _Worker, parcel: int, version: Version, requests: list[Request], params: SamplingParams) -> None:
        self.entries["issued"] += 1
        worker.work = worker.actor.sample.remote(version, requests, params)
        worker.parcel, worker.turn, worker.since = parcel, self._turn, time.monotonic()

    def _answers(self, version: Version, done: set[int], waiting: deque[int]) -> Iterator[tuple[int, list[list[Completion]]]]:
        """What has come in within a second."""
        owed = {ref: w for w in self._workers for ref in (w.starting, w.work) if ref is not None}
        if not owed:
            time.sleep(0.2)
            return
        ready, _ = self.ray.wait(list(owed), num_returns=1, timeout=1.0)
        for ref in ready:
            worker = owed[ref]
            try:
                answer = self.ray.get(ref)
            except self.ray.exceptions.RayTaskError as error:
                raise UserError(f"A sampler failed on the cluster ({reason_of(error.cause or error)}).") from error
            except self.ray.exceptions.RayError as error:
                self._lose(worker, error, done, waiting)
                continue
            if ref is worker.starting:
                worker.starting, self._failed = None, 0
                self._tell("worker_joined", f"A sampler has joined; there are {self._here()}.", workers=self._here())
                continue
            parcel, worker.work = worker.parcel, None
            self._seconds.append(time.monotonic() - worker.since)
            if worker.turn != self._turn or parcel in done:
                self.entries["twice"] += 1
                continue
            number, found = answer
            if number != version.number:
                raise RuntimeError(f"A sampler drew from version {number} in place of {version.number}; please report this.")
            yield parcel, found

    def _here(self) -> int:
        return sum(w.starting is None for w in self._workers)

    def _lose(self, worker: _Worker, error: Exception, done: set[int], waiting: deque[int]) -> None:
        self._workers.remove(worker)
        with contextlib.suppress(Exception):
            self.ray.kill(worker.actor)
        if worker.starting is not None:
            self._failed += 1
            if self._failed >= STARTS:
                reason = " ".join(str(error).split())[-600:]
                raise UserError(f"{self._failed} samplers in a row could not start on the cluster: {reason}") from error
        self.entries["lost"] += 1
        at_work = worker.work is not None and worker.turn == self._turn and worker.parcel not in done
        if at_work and not any(w.parcel == worker.parcel and w.work is not None for w in self._workers):
            self.entries["again"] += 1
            waiting.appendleft(worker.parcel)
        reason = type(error).__name__
        self._tell("worker_lost", f"A sampler was lost ({reason}); its work goes to another.", reason=reason)

    def _late(self, done: set[int]) -> int | None:
        """A parcel that is overdue and only one worker has."""
        limit = max(PATIENCE, TIMES * statistics.median(self._seconds) if self._seconds else PATIENCE)
        now = time.monotonic()
        working = [w for w in self._workers if w.work is not None and w.turn == self._turn and w.parcel not in done]
        shared = {p for p, n in _counts(w.parcel for w in working).items() if n > 1}
        late = [w for w in working if now - w.since > limit and w.parcel not in shared]
        if not late:
            return None
        oldest = min(late, key=lambda w: w.since)
        self.entries["again"] += 1
        waited = now - oldest.since
        self._tell("worker_late", f"A sampler has not answered for {waited:.0f} s; another does its work too.", seconds=waited)
        return oldest.parcel

    def _tend(self, done: set[int]) -> None:
        """Start workers that are wanted; end those that owe an old answer for too long."""
        limit = 3 * max(PATIENCE, TIMES * statistics.median(self._seconds) if self._seconds else PATIENCE)
        for worker in [w for w in self._workers if w.work is not None and time.monotonic() - w.since > limit]:
            if worker.turn != self._turn or worker.parcel in done:
                self._workers.remove(worker)
                self.entries["lost"] += 1
                self.ray.kill(worker.actor)
                self._tell("worker_lost", "A sampler that no longer answers was ended.", reason="no answer")
        for _ in range(len(self._workers), max(1, self._count or self._room())):
            actor = self._remote.remote(self._make, self._cpus)
            self._workers.append(_Worker(actor, actor.ready.remote()))

    def _room(self) -> int:
        """How many workers the cluster of now has room for."""
        resources = self.ray.cluster_resources()
        if self._gpus:
            return int(resources.get("GPU", 0) / self._gpus)
        return int(resources.get("CPU", 0) / self._cpus)

    def _why_none(self) -> str:
        has = {name: amount for name, amount in self.ray.cluster_resources().items() if name in ("CPU", "GPU")}
        return (
            f"No sampler could start for {self._minutes:g} minutes: each wants {self._cpus} CPU and {self._gpus:g} GPU, and the "
            f"cluster has {has}. Add machines, or ask for less with sampler_cpus and sampler_gpus."
        )


def _counts(parcels: Iterator[int]) -> dict[int, int]:
    return {parcel: len(list(group)) for parcel, group in itertools.groupby(sorted(parcels))}


def _connected(address: str) -> Any:
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


class RaySampler(Sampler):
    """Samples on a `Fleet`. Only rank 0 has one; the others take part in gathering weights that are in shards."""

    central = True

    def __init__(
        self,
        fleet: Fleet | None,
        weights: Callable[[], Iterator[tuple[str, Tensor]]],
        versions: Callable[[], object],
        *,
        exact: bool,
        parcel: int,
    ) -> None:
        self.fleet, self.exact, self.parcel = fleet, exact, parcel
        self._weights, self._versions = weights, versions
        self._published: tuple[object, Version] | None = None

    def snapshot(self) -> Sampler:
        """See `Sampler`: publishes the weights, unless they are those that it published last."""
        now = self._versions()
        if self._published is None or self._published[0] != now or now is None:
            number = 0 if self._published is None else self._published[1].number + 1
            held = {name: _array(weight) for name, weight in self._weights()}
            place = [self.fleet.ray.put(held)] if self.fleet is not None else []
            self._published = (now, Version(number, place))
        return _At(self, self._published[1])

    def steps(
        self, requests: list[Request], params: SamplingParams, cache: ActivationCache | None = None
    ) -> Iterator[list[tuple[int, list[Completion]]]]:
        """See `Sampler`; from the weights of now."""
        return self.snapshot().steps(requests, params)


class _At(Sampler):
    """A `RaySampler` at one version."""

    central = True

    def __init__(self, whole: RaySampler, version: Version) -> None:
        self.whole, self.version, self.exact = whole, version, whole.exact

    def snapshot(self) -> Sampler:
        return self

    def steps(
        self, requests: list[Request], params: SamplingParams, cache: ActivationCache | None = None
    ) -> Iterator[list[tuple[int, list[Completion]]]]:
        assert self.whole.fleet is not None, "only rank 0 samples"
        size = self.whole.parcel
        parcels = [requests[i : i + size] for i in range(0, len(requests), size)]
        for place, found in self.whole.fleet.run(self.version, parcels, params):
            yield [(place * size + i, completions) for i, completions in enumerate(found)]


def _array(weight: Tensor) -> Any:
    """A weight as numpy has it, which knows no bfloat16."""
    own = weight.detach().cpu()
    return (own.view(torch.int16) if own.dtype == torch.bfloat16 else own.clone()).numpy().copy()
