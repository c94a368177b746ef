"""Who samples for a run: the process itself, a whole copy of a model in shards, or processes on a cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor

from psigrad.config import OnlineConfig, PreferenceConfig, SFTConfig
from psigrad.language.loading.load_model import load_model
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.recipes.fleets import fleet
from psigrad.language.rollout.samplers import samplers
from psigrad.language.rollout.samplers.ray_sampler import RaySampler, RolloutWorker
from psigrad.language.rollout.types import ReplicaSampler, Sampler
from psigrad.processes.parallel import sharded
from psigrad.processes.parallel.fleet import Fleet
from psigrad.processes.parallel.world import ALONE
from psigrad.runs.journal import Journal


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
                parcel=placement.parcel_prompts,
            )
        return
    twin = model if model.root is None else load_model(config.model, config.run, None)
    with contextlib.closing(samplers.make(config.sampling, twin, None if journal is None else journal.tell)) as sampler:
        yield sampler if twin is model else ReplicaSampler(sampler, sharded.Replica(model, twin).refresh)


def parcels(sampler: Sampler) -> dict[str, dict[str, int]]:
    """How many parcels went to a cluster, for the record; nothing where none did."""
    return {"fleet": sampler.fleet.entries} if isinstance(sampler, RaySampler) and sampler.fleet is not None else {}


def weights_of(model: LanguageModel) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) of all that learns."""
    learns = model.trainable()
    return iter(learns.items()) if model.root is None else sharded.gather(model, set(learns))


def _samplers(config: SFTConfig | OnlineConfig | PreferenceConfig, journal: Journal) -> contextlib.AbstractContextManager[Fleet]:
    placement = config.placement
    arguments = (partial(sampling_model, config), placement.sampler_cpus)
    wants: Any = {"count": placement.samplers, "cpus": placement.sampler_cpus, "gpus": placement.sampler_gpus}
    return fleet(placement, journal, RolloutWorker, arguments, name="sampler", **wants)


def sampling_model(config: SFTConfig | OnlineConfig | PreferenceConfig) -> tuple[LanguageModel, Sampler]:
    """A model to sample with, on a worker: its first weights are those of the beginning."""
    model = load_model(config.model, config.run, None)
    return model, samplers.make(config.sampling, model)
