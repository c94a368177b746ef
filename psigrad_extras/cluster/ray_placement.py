"""What a run places on a Ray cluster, as its section `placement` says: who samples, who scores, who plays."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from psigrad.config import OnlineConfig, Placement, PreferenceConfig, SFTConfig
from psigrad.errors import UserError
from psigrad.language.loading.load_model import load_model
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.rewards import RewardPool, Scorer
from psigrad.language.rollout.episodes.environments import Playing
from psigrad.language.rollout.samplers import samplers
from psigrad.language.rollout.types import Sampler
from psigrad.processes.parallel import sharded
from psigrad.runs.journal import Journal
from psigrad_extras.cluster.actor_pool import ActorPool
from psigrad_extras.cluster.ray_environments import EnvironmentWorker, RayEnvironments
from psigrad_extras.cluster.ray_sampler import RaySampler, RolloutWorker
from psigrad_extras.cluster.ray_scorer import RayScorer, RewardWorker
from psigrad_extras.cluster.worker_output import keep_output


@contextlib.contextmanager
def open_actors(
    placement: Placement,
    journal: Journal,
    kind: type,
    arguments: Sequence[Any],
    *,
    name: str,
    count: int,
    cpus: int,
    gpus: float = 0.0,
    depth: int = 1,
) -> Iterator[ActorPool]:
    """`count` workers of a kind, for the length of the block, each at up to `depth` jobs at once; 0: as many as there is room for
    beside those that were counted.
    What they print goes to the terminal and to workers.log of the run folder.

    Raises `UserError` where no cluster is named.
    """
    if not placement.cluster:
        raise UserError(f"placement asks for {name}s on a Ray cluster and none was named; give --cluster, or leave them out.")
    counted = placement.scorers * placement.scorer_cpus + placement.environment_actors * placement.environment_cpus
    pool = ActorPool(
        kind,
        arguments,
        name=name,
        address=placement.cluster,
        count=count,
        cpus=cpus,
        gpus=gpus,
        spare_cpus=counted,
        depth=depth,
        minutes=placement.timeout_minutes,
        tell=journal.tell,
    )
    try:
        with keep_output(kind.__name__, journal.folder.path / "workers.log"):
            yield pool
    finally:
        pool.close()


@contextlib.contextmanager
def open_sampler(
    config: SFTConfig | OnlineConfig | PreferenceConfig, model: LanguageModel, journal: Journal, longest: int = 0
) -> Iterator[Sampler]:
    """A sampler on the cluster, which gets the weights of `model`. Rank 0 has the workers. `longest` as in `samplers.make`."""
    placement = config.placement
    arguments = (partial(_load_sampler, config, longest), placement.sampler_cpus)
    wants: Any = {"count": placement.samplers, "cpus": placement.sampler_cpus, "gpus": placement.sampler_gpus}
    wants["depth"] = _tasks_at_once(config)
    with contextlib.ExitStack() as stack:
        workers = None
        if journal.world.rank == 0:
            actors = open_actors(placement, journal, RolloutWorker, arguments, name="sampler", **wants)
            workers = stack.enter_context(actors)
        yield RaySampler(
            workers,
            lambda: _weights_of(model),
            lambda: None if model.root is not None else [p._version for p in model.trainable().values()],
            exact=config.sampling.sampler == "embedded" and not model.why_padded,
            prompts_per_task=placement.parcel_prompts,
            joins=config.sampling.sampler == "vllm",
        )


@contextlib.contextmanager
def open_environments(placement: Placement, make: Callable[[], Playing], journal: Journal) -> Iterator[Playing]:
    """Environments on the cluster, made there. Rank 0 plays for all."""
    with contextlib.ExitStack() as stack:
        pool = None
        if journal.world.rank == 0:
            wants: Any = {"count": placement.environment_actors, "cpus": placement.environment_cpus}
            actors = open_actors(placement, journal, EnvironmentWorker, (make,), name="environment actor", **wants)
            pool = stack.enter_context(actors)
        yield RayEnvironments(pool, journal.world)


@contextlib.contextmanager
def open_scorer(placement: Placement, make: Callable[[], RewardPool], journal: Journal) -> Iterator[Scorer]:
    """Reward functions on the cluster."""
    wants: Any = {"count": placement.scorers, "cpus": placement.scorer_cpus}
    with open_actors(placement, journal, RewardWorker, (make,), name="scorer", **wants) as actors:
        yield RayScorer(actors)


def _tasks_at_once(config: SFTConfig | OnlineConfig | PreferenceConfig) -> int:
    """How many tasks fill the batch of a sampler that lets them join; the others decode one alone, for the same bits anywhere."""
    if config.sampling.sampler != "vllm" or not isinstance(config, OnlineConfig):
        return 1
    return math.ceil(config.sampling.max_decode_batch / (config.placement.parcel_prompts * config.num_generations))


def _weights_of(model: LanguageModel) -> Any:
    """(name, whole tensor) of all that learns."""
    learns = model.trainable()
    return iter(learns.items()) if model.root is None else sharded.gather(model, set(learns))


def _load_sampler(config: SFTConfig | OnlineConfig | PreferenceConfig, longest: int) -> tuple[LanguageModel, Sampler]:
    """A model to sample with, on a worker: its first weights are those of the beginning. vLLM has its GPU to itself."""
    run, sampling = config.run, config.sampling
    if sampling.sampler == "vllm":
        run = replace(run, device="cpu")
        sampling = replace(sampling, vllm_memory=sampling.vllm_memory_alone(config.placement.sampler_gpus or 1.0))
    model = load_model(config.model, run, None)
    return model, samplers.make(sampling, model, longest=longest)
