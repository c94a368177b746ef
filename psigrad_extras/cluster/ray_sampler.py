"""Sampling by many processes on a Ray cluster, in tasks that any of them can run.

A task is a fixed number of prompts in order, and the version of the weights. The result depends on nothing else, so a run gives
the same completions on any number of workers with the same type of processor. vLLM's engine runs several tasks of one version at
once.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from psigrad import redaction
from psigrad.errors import UserError
from psigrad.language.models.fused.caches import ActivationCache
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.rollout.types import Completion, Dialogue, Request, RestartedDialogue, Sampler, SamplingParams
from psigrad.processes.parallel.world import RankLost
from psigrad_extras.cluster.actor_pool import ActorPool, Affinity
from psigrad_extras.cluster.ray_broadcast import Broadcasts, Version
from psigrad_extras.vllm import vllm_backend
from psigrad_extras.vllm.vllm_backend import VLLMSampler
from psigrad_extras.vllm.vllm_sources import Delivery

# The seconds between two checks for requests that may join the running ones.
LOOK = 0.1
Part = tuple[Affinity | None, Sequence[int]]
"""The affinity of a task, and the indices of its requests."""


class RolloutWorker:
    """A worker on the cluster with a model and a sampler.

    Each task names the version of its weights. Tasks of the same version may be sampled at once.
    """

    def __init__(self, make: Callable[[], tuple[LanguageModel, Sampler]], threads: int) -> None:
        torch.set_num_threads(threads)
        self.model, self.sampler = make()
        self.version, self._at = -1, self.sampler
        self._at_work, self._turn = 0, threading.Condition()

    def ready(self, meeting: tuple[Any, ...] = ()) -> str:
        """Wait until the model is loaded and vLLM's engine has joined the trainer's group. Return "" or the error's text."""
        return vllm_backend.join(self.sampler, meeting) if isinstance(self.sampler, VLLMSampler) and meeting else ""

    def sample(self, version: Version, requests: list[Request], params: SamplingParams) -> tuple[int, list[list[Completion]]]:
        """Return (the version sampled from, the completions of each request)."""
        with self._turn:
            self._turn.wait_for(lambda: self.version == version.number or not self._at_work)
            if self.version != version.number:  # also true in a restarted worker, which has the initial weights
                import ray

                self._at = self._take(ray.get(version.place[0]))
                self.version = version.number
            self._at_work += 1
        try:
            return version.number, self._at.sample(requests, params)
        except RankLost as lost:
            _end(lost)
        finally:
            with self._turn:
                self._at_work -= 1
                self._turn.notify_all()

    def _take(self, weights: Any) -> Sampler:
        """Return a sampler with the trainer's weights, which are loaded into the local model, or only into its vLLM engine."""
        if not isinstance(weights, Delivery):
            self._load(weights)
            return self.sampler.snapshot()
        assert isinstance(self.sampler, VLLMSampler)
        try:
            return self.sampler.take(weights)
        except RankLost as lost:
            _end(lost)

    @torch.no_grad()
    def _load(self, weights: Mapping[str, Any]) -> None:
        own = self.model.trainable()
        if own.keys() != weights.keys():
            raise UserError("The trainer's weights have other names than the worker's; install the same psigrad on all machines.")
        for name, array in weights.items():
            own[name].copy_(torch.from_numpy(array.copy()).view(own[name].dtype).view(own[name].shape))


def _end(lost: RankLost) -> NoReturn:
    """End this worker after the loss of its engine. The pool starts another one, to which the trainer sends the weights."""
    redaction.say(str(lost))
    os._exit(RankLost.exit_status)


class RaySampler(Sampler):
    """A sampler on the workers of an `ActorPool`. Only rank 0 has the pool. Other ranks help to gather sharded weights.

    If requests can join a running batch of the engines (`joins`), an episode continues as soon as its environment has answered.
    With `broadcasts`, weights have the names of a checkpoint and are sent to engines by broadcast.
    """

    central = True

    def __init__(
        self,
        pool: ActorPool | None,
        weights: Callable[[], Iterator[tuple[str, Tensor]]],
        versions: Callable[[], object],
        *,
        exact: bool,
        prompts_per_task: int,
        joins: bool = False,
        broadcasts: Broadcasts | None = None,
    ) -> None:
        self.broadcasts = broadcasts
        self.pool, self.exact, self.prompts_per_task, self.joins = pool, exact, prompts_per_task, joins
        self._weights, self._versions = weights, versions
        self._published: tuple[object, Version] | None = None

    def count(self) -> dict[str, Any]:
        """Return counts for the metrics: tasks on the cluster, and transfers of weights by broadcast. See `Sampler`."""
        sent = {} if self.broadcasts is None else {"broadcasts": self.broadcasts.sent}
        return {} if self.pool is None else {"fleet": {**self.pool.entries, **sent}}

    def snapshot(self) -> Sampler:
        """Return a sampler at the current weights, which are published unless the last version has them. See `Sampler`."""
        now = self._versions()
        if self._published is None or self._published[0] != now or now is None:
            number = 0 if self._published is None else self._published[1].number + 1
            self._published = (now, self._publish(number))
        return _At(self, self._published[1])

    def _publish(self, number: int) -> Version:
        """Return a new version with the current weights. All ranks take part in gathering them; only rank 0 stores them."""
        if self.pool is not None and self.broadcasts is not None:
            return self.broadcasts.publish(self.pool.ray, number, self._weights())
        held = {name: _array(weight) for name, weight in self._weights() if self.pool is not None}
        return Version(number, [self.pool.ray.put(held)] if self.pool is not None else [])

    def ask(self, version: Version, requests: list[Request], params: SamplingParams, worker: Any) -> Any:
        """Start a task on a worker, and return Ray's reference to the answer."""
        if self.broadcasts is not None and self.pool is not None:
            version = self.broadcasts.bring(self.pool.ray, version, worker)
        return worker.sample.remote(version, requests, params)

    def steps(
        self, requests: list[Request], params: SamplingParams, cache: ActivationCache | None = None
    ) -> Iterator[list[tuple[int, list[Completion]]]]:
        """Sample from the current weights. See `Sampler`."""
        return self.snapshot().steps(requests, params)


class _At(Sampler):
    """A sampler that samples from one version of the weights of a `RaySampler`."""

    central = True

    def __init__(self, whole: RaySampler, version: Version) -> None:
        self.whole, self.version, self.exact = whole, version, whole.exact

    def snapshot(self) -> Sampler:
        return self

    def steps(
        self, requests: list[Request], params: SamplingParams, cache: ActivationCache | None = None
    ) -> Iterator[list[tuple[int, list[Completion]]]]:
        assert self.whole.pool is not None, "only rank 0 samples"
        size = self.whole.prompts_per_task
        return self.tasks(
            requests, params, [(None, range(i, min(i + size, len(requests)))) for i in range(0, len(requests), size)]
        )

    def dialogue(self, prompts: Sequence[tuple[int, ...]], params: SamplingParams) -> Dialogue:
        """Return episodes that stay with their workers. See `Sampler`."""
        return StickyDialogue(self, prompts, params)

    def tasks(
        self,
        requests: Sequence[Request],
        params: SamplingParams,
        parts: Sequence[Part],
        more: Callable[[], Sequence[Part]] = list,
    ) -> Iterator[list[tuple[int, list[Completion]]]]:
        """Sample requests as tasks, and yield (index of the request, completions) as tasks are completed.

        Each of `parts` is a task: an affinity and the indices of its requests. `more` is called repeatedly, and returns the parts
        of requests that have joined meanwhile.
        """
        assert self.whole.pool is not None, "only rank 0 samples"
        batch, tasks, new = self.whole.pool.begin(self.version.number), list[Sequence[int]](), parts
        try:
            while new or batch.pending:
                for affinity, places in new:
                    tasks.append(places)
                    batch.add(partial(self.whole.ask, self.version, [requests[place] for place in places], params), affinity)
                for task, (number, found) in batch.answers(LOOK):
                    if number != self.version.number:
                        wrong = f"A sampler used version {number} of the weights instead of version {self.version.number}"
                        raise RuntimeError(f"{wrong}; please report this.")
                    yield list(zip(tasks[task], found, strict=True))
                new = more()
        finally:
            batch.give_up()


class StickyDialogue(RestartedDialogue):
    """Episodes whose turns go to the worker of their previous turn, whose prefix cache may contain that turn.

    The episodes that started in one task stay on the same worker.
    """

    def __init__(self, sampler: _At, prompts: Sequence[tuple[int, ...]], params: SamplingParams) -> None:
        super().__init__(sampler, prompts, params)
        groups = itertools.accumulate((a != b for a, b in itertools.pairwise(prompts)), initial=0)
        self._at, self._parcels = sampler, [group // sampler.whole.prompts_per_task for group in groups]
        self._affinities = {parcel: Affinity() for parcel in self._parcels}
        self.joins = sampler.whole.joins

    def _steps(self, requests: list[Request], owners: list[list[int]]) -> Iterator[list[tuple[int, list[Completion]]]]:
        def parts(first: int) -> list[Part]:
            together: dict[int, list[int]] = {}
            for place, (episode, *_) in enumerate(owners[first:], first):
                together.setdefault(self._parcels[episode], []).append(place)
            return [(self._affinities[parcel], places) for parcel, places in together.items()]

        def more() -> list[Part]:
            first, (joining, own) = len(requests), self._begin(self.more())
            requests.extend(joining)
            owners.extend(own)
            return parts(first)

        return self._at.tasks(requests, self.params, parts(0), more if self.joins else list)


def _array(weight: Tensor) -> Any:
    """Return a weight as a numpy array. bfloat16, which numpy lacks, is viewed as int16."""
    own = weight.detach().cpu()
    return (own.view(torch.int16) if own.dtype == torch.bfloat16 else own.clone()).numpy().copy()
