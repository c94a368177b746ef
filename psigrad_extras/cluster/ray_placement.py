"""The parts of a run on a Ray cluster according to its section `placement`: samplers, scorers and environments."""

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
    placement: Placement, journal: Journal, kind: type, arguments: Sequence[Any], name: str, **wants: Any
) -> Iterator[ActorPool]:
    """Yield an `ActorPool` of workers of a kind. `wants` are its arguments `count`, `cpus`, `gpus`, `depth` and `greet`.

    Their output goes to the terminal and to workers.log in the run folder. Raises `UserError` if no cluster is named.
    """
    if not placement.cluster:
        raise UserError(f"placement requests {name}s on a Ray cluster, but there is no --cluster; add it, or remove placement.")
    counted = placement.scorers * placement.scorer_cpus + placement.environment_actors * placement.environment_cpus
    usual: dict[str, Any] = {
        "address": placement.cluster,
        "minutes": placement.timeout_minutes,
        "spare_cpus": counted,
        "log": journal.log,
    }
    pool = ActorPool(kind, arguments, name=name, **usual, **wants)
    try:
        with keep_output(kind.__name__, journal.folder.path / "workers.log"):
            yield pool
    finally:
        pool.close()


@contextlib.contextmanager
def open_sampler(
    config: SFTConfig | OnlineConfig | PreferenceConfig, model: LanguageModel, journal: Journal, longest: int = 0
) -> Iterator[Sampler]:
    """Yield a sampler on the cluster with the weights of `model`. Rank 0 has the workers.

    `longest` is the maximum length of a sequence in tokens, as in `samplers.make`.
    """
    placement = config.placement
    arguments = (partial(_load_sampler, config, longest), placement.sampler_cpus)
    wants: dict[str, Any] = {"count": placement.samplers, "cpus": placement.sampler_cpus, "gpus": placement.sampler_gpus}
    wants["depth"] = _tasks_at_once(config)
    kind = agreed_transfer(config, model, journal.world)
    with contextlib.ExitStack() as stack:
        workers = broadcasts = None
        if journal.world.rank == 0:
            if kind is not None:
                broadcasts = _broadcasts(kind, config, model, journal)
                wants["greet"] = broadcasts.meet
            workers = stack.enter_context(open_actors(placement, journal, RolloutWorker, arguments, "sampler", **wants))
            if broadcasts is not None:  # closed before the samplers, whose end would otherwise count as a failure
                stack.callback(broadcasts.close)
        yield RaySampler(
            workers,
            lambda: _weights_of(model) if kind is None else vllm_weights.outgoing(model),
            lambda: None if model.shard_root is not None else [p._version for p in model.trainable().values()],
            exact=config.sampling.sampler == "embedded" and not model.why_padded,
            prompts_per_task=placement.parcel_prompts,
            joins=config.sampling.sampler == "vllm",
            broadcasts=broadcasts,
        )


def agreed_transfer(config: SFTConfig | OnlineConfig | PreferenceConfig, model: LanguageModel, world: World) -> Kind | None:
    """Return the kind of broadcast that sends weights to the samplers, or None for Ray's object store. Rank 0 decides.

    Raises `UserError` if a broadcast is required but impossible.
    """
    wish = config.placement.weight_transfer
    if wish == "object_store":
        return None
    kind: Kind = "gloo" if wish == "gloo" else "nccl"
    why = world.broadcast(_why_not(kind, config, model))
    if why and wish != "auto":
        raise UserError(f"placement.weight_transfer={wish} is not possible, because {why}; remove placement.weight_transfer.")
    return None if why else kind


def _why_not(kind: Kind, config: SFTConfig | OnlineConfig | PreferenceConfig, model: LanguageModel) -> str:
    """Return the reason why engines cannot get the model's weights by this kind of broadcast, or ""."""
    sampling, placement = config.sampling, config.placement
    if sampling.sampler != "vllm":
        return f"it works only with sampler=vllm, and the sampler is {sampling.sampler}"
    if not vllm_weights.why_merged(model):
        return "vLLM needs only the adapter, which is small enough for the object store"
    if sampling.filtered:
        return "samplers with top_p, top_k or min_p need a second copy of the weights, for the policy's log-probs"
    if placement.cluster.startswith("ray://"):
        return "the trainer's machine is not part of the cluster"
    if kind == "nccl" and not (model.device.type == "cuda" and placement.sampler_gpus):
        return "nccl needs a GPU for the trainer and GPUs for the samplers (placement.sampler_gpus)"
    if kind == "nccl" and importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed on the trainer's machine"
    return ""


def _broadcasts(
    kind: Kind, config: SFTConfig | OnlineConfig | PreferenceConfig, model: LanguageModel, journal: Journal
) -> Broadcasts:
    """Return the trainer's side of the broadcasts.

    On CPUs, the weights are first sent once more before an update, to choose the values that are compared after it, since vLLM's
    packed weights cannot be read completely.
    """
    import ray

    first = ("choose",) if kind == "gloo" else ()
    passes = (*first, "load", "compare") if config.sampling.vllm_readback else ("load",)
    device = torch.empty(0, device=model.device if kind == "nccl" else "cpu").device  # with the index of the GPU
    turned, size = vllm_weights.transposed(model.network), 1 + config.sampling.tensor_parallel_size
    return Broadcasts(kind, ray.util.get_node_ip_address, size, device, passes, turned, journal.log)


@contextlib.contextmanager
def open_environments(placement: Placement, make: Callable[[], Playing], journal: Journal) -> Iterator[Playing]:
    """Yield environments that run on the cluster. Rank 0 plays for all ranks."""
    with contextlib.ExitStack() as stack:
        pool = None
        if journal.world.rank == 0:
            wants = {"count": placement.environment_actors, "cpus": placement.environment_cpus}
            actors = open_actors(placement, journal, EnvironmentWorker, (make,), "environment actor", **wants)
            pool = stack.enter_context(actors)
        yield RayEnvironments(pool, journal.world)


@contextlib.contextmanager
def open_scorer(placement: Placement, make: Callable[[], RewardPool], journal: Journal) -> Iterator[Scorer]:
    """Yield a scorer that runs the reward functions on the cluster."""
    wants = {"count": placement.scorers, "cpus": placement.scorer_cpus}
    with open_actors(placement, journal, RewardWorker, (make,), "scorer", **wants) as actors:
        yield RayScorer(actors)


def _tasks_at_once(config: SFTConfig | OnlineConfig | PreferenceConfig) -> int:
    """Return the number of tasks that a sampler runs at once.

    For vLLM, that many tasks fill its batch. Other samplers decode one task at a time, so that the result is bitwise the same on
    any worker.
    """
    if config.sampling.sampler != "vllm" or not isinstance(config, OnlineConfig):
        return 1
    return math.ceil(config.sampling.max_decode_batch / (config.placement.parcel_prompts * config.num_generations))


def _weights_of(model: LanguageModel) -> Any:
    """Return (name, full tensor) of all trainable weights."""
    learns = model.trainable()
    return iter(learns.items()) if model.shard_root is None else sharded.gather(model, set(learns))


def _load_sampler(config: SFTConfig | OnlineConfig | PreferenceConfig, longest: int) -> tuple[LanguageModel, Sampler]:
    """Return the model, with the initial weights, and its sampler on a worker. vLLM has the worker's GPU for itself."""
    run, sampling = config.run, config.sampling
    if sampling.sampler == "vllm":
        run = replace(run, device="cpu")
        sampling = replace(sampling, vllm_memory=sampling.vllm_memory_alone(config.placement.sampler_gpus or 1.0))
    model = load_model(config.model, run, None)
    return model, samplers.make(sampling, model, longest=longest)
