"""Runs with a lag on simulated engines, for tests of the scheduler.

psigrad's own code chooses the collections, sends tasks to a cluster and distributes them. Stand-ins are the engines, which sleep
for each token of a task's longest completion; Ray, in threads of this process; and the trainer, which sleeps as long as all
samplers would need for the tokens of a step if none had to wait. Lengths are log-normal.
"""

from __future__ import annotations

import hashlib
import math
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from psigrad.config import OnlineConfig
from psigrad.language.data.dataset_rows import Row
from psigrad.language.data.reward_view import reward_view
from psigrad.language.data.templates import decode
from psigrad.language.models import tiny
from psigrad.language.rewards import Scored, Scoring
from psigrad.language.rollout.collectors import Completions, ScoredRollout
from psigrad.language.rollout.types import Collected, Completion, Prompt, Request, SamplingParams, State
from psigrad.language.training.online.collect import next_collection
from psigrad.language.training.online.online_run import OnlineRun
from psigrad.objective import catalog
from psigrad.step import Clock
from psigrad_extras.cluster import ray_connection
from psigrad_extras.cluster.actor_pool import ActorPool
from psigrad_extras.cluster.ray_sampler import RaySampler, Version


@dataclass(frozen=True)
class Shape:
    """The shape of a run: the completions of each step, the spread of their lengths, and the seconds of a token."""

    prompts: int = 16
    generations: int = 2
    steps: int = 24
    samplers: int = 8
    mean_tokens: float = 20.0
    spread: float = 1.0
    token: float = 0.001
    seed: int = 0
    parcel: int = 1
    depth: int = 1
    trains: float = 1.0
    """The trainer's time for a step, as a share of the time that all samplers need for its tokens if none has to wait."""


def length(shape: Shape, seed: int) -> int:
    """Return the number of tokens of the completion with this seed."""
    drawn = random.Random(seed * 1_000_003 + shape.seed).lognormvariate(0.0, shape.spread)
    return 1 + int(shape.mean_tokens * drawn / math.exp(shape.spread**2 / 2))


class Engine:
    """A sampler of the cluster: it decodes a task together, so a task takes as long as its longest completion."""

    def __init__(self, shape: Shape) -> None:
        self.shape, self.version = shape, -1

    def ready(self) -> bool:
        """See `RolloutWorker`."""
        return True

    def sample(self, version: Version, requests: list[Request], params: SamplingParams) -> tuple[int, Any]:
        """See `RolloutWorker`."""
        self.version = version.number
        time.sleep(self.shape.token * max(length(self.shape, seed) for request in requests for seed in request.seeds))
        return version.number, written(self.shape, version, requests)


def written(shape: Shape, version: Version, requests: list[Request]) -> list[list[Completion]]:
    """Return an engine's completions. Each token is the number of the weights' version."""
    lengths = [[(length(shape, seed), seed) for seed in request.seeds] for request in requests]
    return [[Completion((version.number,) * n, (0.0,) * n, (0.0,) * n, "stop", seed) for n, seed in own] for own in lengths]


class Threads:
    """The part of Ray that `ActorPool` uses. An actor is an object with its own threads, a reference is a `Future`."""

    class Lost(Exception):
        """Stands for what Ray raises."""

    class Raised(Exception):
        """Likewise."""

    exceptions = SimpleNamespace(RayError=Lost, RayTaskError=Raised)

    def remote(self, **wants: Any) -> Any:
        """See `ray.remote`."""
        return lambda kind: SimpleNamespace(remote=lambda *given: self._actor(kind(*given), wants["max_concurrency"]))

    def _actor(self, made: Any, depth: int) -> Any:
        thread = ThreadPoolExecutor(depth)
        method = lambda name: SimpleNamespace(remote=lambda *given: thread.submit(getattr(made, name), *given))  # noqa: E731
        return SimpleNamespace(ready=method("ready"), sample=method("sample"), thread=thread)

    def wait(self, refs: Sequence[Future[Any]], num_returns: int, timeout: float) -> tuple[list[Future[Any]], list[Any]]:
        """See `ray.wait`."""
        return list(wait(refs, timeout, FIRST_COMPLETED).done), []

    def get(self, ref: Future[Any]) -> Any:
        """See `ray.get`."""
        return ref.result()

    def put(self, held: Any) -> Any:
        """See `ray.put`."""
        return held

    def kill(self, actor: Any) -> None:
        """See `ray.kill`."""
        actor.thread.shutdown(wait=False)


class LengthScorer:
    """Rewards each completion by its length, at once."""

    def begin(self) -> Scoring:
        """See `Scorer`."""
        return Scoring(lambda groups: [Scored(float(len(ids))) for group in groups for ids in group.completion_ids])


@contextmanager
def sampler_of(shape: Shape, versions: Any, prompts_per_task: int = 1, joins: bool = False) -> Iterator[RaySampler]:
    """Yield a sampler that runs on stand-ins."""
    connect, ray_connection.connect = ray_connection.connect, lambda address: Threads()
    try:
        wants: Any = {"name": "sampler", "address": "", "cpus": 1, "minutes": 1.0, "log": lambda *a, **k: None}
        pool = ActorPool(Engine, (shape,), count=shape.samplers, depth=shape.depth, **wants)
    finally:
        ray_connection.connect = connect
    try:
        weights = lambda: iter([("weight", torch.zeros(1))])  # noqa: E731
        yield RaySampler(pool, weights, versions, exact=True, prompts_per_task=prompts_per_task, joins=joins)
    finally:
        pool.close()


def run(shape: Shape, lag: int) -> tuple[float, list[Collected]]:
    """Return (the seconds of a run with this lag, the collection of each step)."""
    moved, trained = [0], []
    prompts = [Prompt(i, (1,), Row("overlap", prompt=str(i))) for i in range(shape.prompts * 8)]
    config = replace(OnlineConfig(), lag=lag, prompts_per_step=shape.prompts, num_generations=shape.generations)
    tokenizer = tiny.tokenizer(["hello world 123"] * 5, 280)
    with ThreadPoolExecutor(lag + 1) as threads, sampler_of(shape, lambda: moved[0], shape.parcel) as sampler:
        job = OnlineRun(
            config=config,
            algorithm=catalog.GRPO,
            model=None,  # type: ignore[arg-type]
            optimizer=None,  # type: ignore[arg-type]
            prompts=prompts,
            params=SamplingParams(max_tokens=10_000),
            rollout=ScoredRollout(Completions(sampler, partial(decode, tokenizer)), LengthScorer(), reward_view(tokenizer)),
            annotators=(),
            total_steps=shape.steps,
            executor=threads if lag else None,
        )
        begin = time.monotonic()
        for found in steps(job, State(), moved):
            trained.append(found)
            tokens = sum(len(t.completion.ids) for t in found.trajectories)
            time.sleep(shape.trains * shape.token * tokens / shape.generations / shape.samplers)
        return time.monotonic() - begin, trained


def steps(job: Any, state: State, moved: list[int]) -> Iterator[Collected]:
    """Yield the collection that each step of a run trains on."""
    for step in range(job.total_steps):
        collected, pending = next_collection(job, state, Clock(), None)
        yield collected
        moved[0] += 1
        state = replace(state, step=step + 1, cursor=collected.cursor, pending=pending)


def digest(trained: Sequence[Collected]) -> str:
    """Return a hash of all collections."""
    return hashlib.sha256("".join(found.to_json() for found in trained).encode()).hexdigest()[:16]
