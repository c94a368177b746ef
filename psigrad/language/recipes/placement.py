"""Where a run samples and plays, as its section `placement` says: here, in a whole copy of a model in shards, or on Ray."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import Any

from torch import Tensor

from psigrad.config import OnlineConfig, Placement, PreferenceConfig, SFTConfig
from psigrad.errors import UserError
from psigrad.language.loading.load_model import load_model
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.rollout.samplers import samplers
from psigrad.language.rollout.samplers.ray_sampler import RaySampler, RolloutWorker
from psigrad.language.rollout.types import ReplicaSampler, Sampler
from psigrad.processes.parallel import sharded
from psigrad.processes.parallel.actor_pool import ActorPool, keep_output
from psigrad.processes.parallel.world import ALONE, World
from psigrad.runs.journal import Journal


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
) -> Iterator[ActorPool]:
    """`count` workers of a kind, for the length of the block; 0: as many as there is room for beside those that were counted.
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
        minutes=placement.timeout_minutes,
        tell=journal.tell,
    )
    try:
        with keep_output(kind.__name__, journal.folder.path / "workers.log"):
            yield pool
    finally:
        pool.close()


@contextlib.contextmanager
def sampler_of(
    config: SFTConfig | OnlineConfig | PreferenceConfig, model: LanguageModel, journal: Journal | None = None
) -> Iterator[Sampler]:
    """The sampler that the settings ask for: on a cluster, or here; of a model in shards it samples from a whole copy."""
    placement, world = config.placement, ALONE if journal is None else journal.world
    if placement.cluster and journal is not None:
        with _samplers(config, journal) if world.rank == 0 else contextlib.nullcontext() as workers:
            yield RaySampler(
                workers,
                lambda: weights_of(model),
                lambda: None if model.root is not None else [p._version for p in model.trainable().values()],
                exact=config.sampling.sampler == "embedded" and not model.why_padded,
                prompts_per_task=placement.parcel_prompts,
            )
        return
    twin = model if model.root is None else load_model(config.model, config.run, None)
    with contextlib.closing(samplers.make(config.sampling, twin, None if journal is None else journal.tell)) as sampler:
        yield sampler if twin is model else ReplicaSampler(sampler, sharded.Replica(model, twin).refresh)


@contextlib.contextmanager
def collector_of(config: OnlineConfig, sampler: Sampler, world: World) -> Iterator[Executor | None]:
    """Threads that collect while steps train, where others sample and a lag gives them the time: one for each collection that is
    under way, but only one where environments play.
    """
    if not (sampler.central and config.lag and world.rank == 0):
        yield None
        return
    threads = ThreadPoolExecutor(1 if config.plays else config.lag + 1, "collector")
    try:
        yield threads
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


def count_tasks(sampler: Sampler) -> dict[str, dict[str, int]]:
    """How many tasks went to a cluster, for the record; nothing where none did."""
    return {"fleet": sampler.pool.entries} if isinstance(sampler, RaySampler) and sampler.pool is not None else {}


def weights_of(model: LanguageModel) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) of all that learns."""
    learns = model.trainable()
    return iter(learns.items()) if model.root is None else sharded.gather(model, set(learns))


def _samplers(
    config: SFTConfig | OnlineConfig | PreferenceConfig, journal: Journal
) -> contextlib.AbstractContextManager[ActorPool]:
    placement = config.placement
    arguments = (partial(sampling_model, config), placement.sampler_cpus)
    wants: Any = {"count": placement.samplers, "cpus": placement.sampler_cpus, "gpus": placement.sampler_gpus}
    return open_actors(placement, journal, RolloutWorker, arguments, name="sampler", **wants)


def sampling_model(config: SFTConfig | OnlineConfig | PreferenceConfig) -> tuple[LanguageModel, Sampler]:
    """A model to sample with, on a worker: its first weights are those of the beginning."""
    model = load_model(config.model, config.run, None)
    return model, samplers.make(config.sampling, model)
