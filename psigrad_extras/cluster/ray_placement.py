"""What a run places on a Ray cluster, as its section `placement` says: who samples, who scores, who plays."""

from __future__ import annotations

import contextlib
import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from psigrad.config import OnlineConfig, Placement, PreferenceConfig, SFTConfig
from psigrad.errors import UserError
from psigrad.language.episodes.environments import Playing
from psigrad.language.loading import samplers
from psigrad.language.loading.load_model import load_model
from psigrad.language.models import sharded
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.rewards import RewardPool, Scorer
from psigrad.language.rollout.types import Sampler
from psigrad.processes.parallel.world import World
from psigrad.runs.journal import Journal
from psigrad_extras.cluster.actor_pool import ActorPool
from psigrad_extras.cluster.ray_broadcast import Broadcasts
from psigrad_extras.cluster.ray_environments import EnvironmentWorker, RayEnvironments
from psigrad_extras.cluster.ray_sampler import RaySampler, RolloutWorker
from psigrad_extras.cluster.ray_scorer import RayScorer, RewardWorker
from psigrad_extras.cluster.worker_output import keep_output
from psigrad_extras.vllm import vllm_weights
from psigrad_extras.vllm.broadcast import Kind


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
    greet: Callable[[Any], Any] | None = None,
) -> Iterator[ActorPool]:
    """`count` workers of a kind, for the length of the block, each at up to `depth` jobs at once; 0: as many as there is room for
    beside those that were counted. See `ActorPool`.
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
        greet=greet,
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
    kind = agreed_transfer(config, model, journal.world)
    with contextlib.ExitStack() as stack:
        workers = broadcasts = None
        if journal.world.rank == 0:
            if kind is not None:
                broadcasts = _broadcasts(kind, config, model, journal)
                wants["greet"] = broadcasts.meet
            actors = open_actors(placement, journal, RolloutWorker, arguments, name="sampler", **wants)
            workers = stack.enter_context(actors)
            if broadcasts is not None:  # closed before the samplers are, whose end is no failure then
                stack.callback(broadcasts.close)
        yield RaySampler(
            workers,
            lambda: _weights_of(model) if kind is None else vllm_weights.outgoing(model),
            lambda: None if model.root is not None else [p._version for p in model.trainable().values()],
            exact=config.sampling.sampler == "embedded" and not model.why_padded,
            prompts_per_task=placement.parcel_prompts,
            joins=config.sampling.sampler == "vllm",
            broadcasts=broadcasts,
        )


def agreed_transfer(config: SFTConfig | OnlineConfig | PreferenceConfig, model: LanguageModel, world: World) -> Kind | None:
    """How weights go to the samplers: by a broadcast of that kind, or None: Ray's object store. What rank 0 finds holds for all.

    Raises `UserError` where a broadcast is asked for and can't be.
    """
    wish = config.placement.weight_transfer
    if wish == "object_store":
        return None
    kind: Kind = "gloo" if wish == "gloo" else "nccl"
    why = world.broadcast(_why_not(kind, config, model))
    if why and wish != "auto":
        raise UserError(f"placement.weight_transfer={wish} can't be: {why}; leave it out.")
    return None if why else kind


def _why_not(kind: Kind, config: SFTConfig | OnlineConfig | PreferenceConfig, model: LanguageModel) -> str:
    """Why engines can't get the model's weights by a broadcast of this kind; empty where they can."""
    sampling, placement = config.sampling, config.placement
    if sampling.sampler != "vllm":
        return f"it is for sampler=vllm, and the sampler is {sampling.sampler}"
    if not vllm_weights.why_merged(model):
        return "vLLM gets the adapter alone, which is small"
    if sampling.filtered:
        return "with top_p, top_k or min_p samplers need the weights too, for the policy's log-probs"
    if placement.cluster.startswith("ray://"):
        return "the trainer's machine is not one of the cluster's"
    if kind == "nccl" and not (model.device.type == "cuda" and placement.sampler_gpus):
        return "the trainer and the samplers (sampler_gpus) need GPUs"
    if kind == "nccl" and importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed where the trainer is"
    return ""


def _broadcasts(
    kind: Kind, config: SFTConfig | OnlineConfig | PreferenceConfig, model: LanguageModel, journal: Journal
) -> Broadcasts:
    """The trainer's ends. On CPUs vLLM's weights are looked at before an update too, since some can't be read whole after it."""
    import ray

    first = ("choose",) if kind == "gloo" else ()
    passes = (*first, "load", "compare") if config.sampling.vllm_readback else ("load",)
    device = torch.empty(0, device=model.device if kind == "nccl" else "cpu").device  # with its number
    turned, size = vllm_weights.transposed(model.network), 1 + config.sampling.tensor_parallel_size
    return Broadcasts(kind, ray.util.get_node_ip_address, size, device, passes, turned, journal.tell)


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
