"""The division of devices between training and sampling: the memory of each device, and the time of a step.

The estimate is coarse on purpose. Its assumptions are in `ASSUMED`: all devices are equal and busy for their share of the step,
completions have the mean length of the settings, and messages have the speed of the network.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from psigrad.config import OnlineConfig, Placement
from psigrad.language.models.backbone import DTYPES
from psigrad_extras.preflight.plan.arithmetic import Config, Lengths, cost_of
from psigrad_extras.preflight.plan.hardware import Machine
from psigrad_extras.preflight.plan.memory import BASELINE, MemoryItem, ModelRole, PeakMemory, engine_item
from psigrad_extras.preflight.plan.predict import MARGIN, Plan, predict

ASSUMED = (
    "all devices are identical and never idle; matrix products run at the shares of the peak that `psigrad plan` "
    "assumes; gradients and shards travel at the network's speed, and computation hides half of that time; samplers get "
    "new weights in the measured time of one copy through the host's memory, or at the network's speed if that is slower; vLLM "
    "on its own devices uses 0.8 of their memory unless sampling.vllm_memory is set"
)
# The share of the messages of sharded training that computation hides, since FSDP2 gathers the next layer while one computes.
HIDDEN = 0.5
# The bytes per second at which weights reach samplers: from the device to the host's memory, into an object store or a file, and
# out of it. Measured with Ray on one machine (0.6 for small models and 1 GB/s, docs/scale.md).
PUBLISHED = 0.8e9


@dataclass(frozen=True)
class Split:
    """A division of devices: `trainers` devices train with `strategy`, and `samplers` others sample (0: the trainers do)."""

    trainers: int
    samplers: int
    strategy: Literal["ddp", "fsdp"]
    plan: Plan
    """The plan of one trainer."""
    sampler: PeakMemory | None
    sampling: float
    """The seconds of sampling a step's completions."""
    training: float
    """The seconds of training on a step's completions, including messages."""
    publishing: float
    """The seconds until the samplers have new weights."""
    starved: float = 0.0
    """The bytes that vLLM lacks on its device."""

    @property
    def lack(self) -> float:
        """The bytes that a device lacks for its trainer or sampler, with a margin for the prediction's error."""
        peaks = [self.plan.memory.peak, *([self.sampler.peak] if self.sampler is not None else [])]
        return max(self.starved, self.plan.starved, max(peaks) * (1 + MARGIN) - self.plan.machine.memory, 0.0)

    @property
    def fits(self) -> bool:
        """True if trainers and samplers fit in the memory of a device, with a margin for the prediction's error."""
        return not self.lack

    def seconds(self, lag: int) -> float:
        """Return the seconds of a step. With a `lag` above 0, sampling and training run at the same time."""
        if lag and self.samplers:
            return max(self.training, self.sampling + self.publishing)
        return self.training + self.sampling + self.publishing

    def tokens_per_second(self, lag: int) -> float:
        """Return the completion tokens per second and device."""
        return self.plan.work.completion_tokens / self.seconds(lag) / (self.trainers + self.samplers)


def splits(config: Config, lengths: Lengths, machine: Machine, devices: int, network: float, dataset: int = 0) -> list[Split]:
    """Return the ways to divide `devices` devices like `machine`, connected at `network` bytes/s, between training and sampling.

    The fastest that fits is first. Without `machine.peak`, all times are 0 and the order is by memory only.
    """
    found = []
    for trainers, samplers in _divisions(devices, isinstance(config, OnlineConfig)):
        for strategy in ("ddp", "fsdp") if trainers > 1 else ("ddp",):
            found.append(_split(config, lengths, machine, (trainers, samplers, strategy), network, dataset))
    lag = bool(getattr(config, "lag", 0))
    return sorted(found, key=lambda s: (not s.fits, s.seconds(lag) if machine.peak else s.plan.memory.peak, s.strategy))


def _divisions(devices: int, online: bool) -> Iterator[tuple[int, int]]:
    """Yield (trainers, samplers): first (all devices, 0), then trainers in steps of an eighth, with at least one of each."""
    yield devices, 0
    if online:
        for trainers in sorted({max(1, devices * eighth // 8) for eighth in range(1, 8)}):
            if trainers < devices:
                yield trainers, devices - trainers


def _split(
    config: Any, lengths: Lengths, machine: Machine, division: tuple[int, int, Any], network: float, dataset: int
) -> Split:
    trainers, samplers, strategy = division
    once = strategy == "fsdp" and config.placement.reduce_once
    placement = Placement(processes=trainers, strategy=strategy, cluster="auto" if samplers else "", reduce_once=once)
    placed = replace(config, placement=placement)
    plan = predict(placed, lengths, machine, dataset=dataset, quick=True)
    weights = DTYPES[config.model.dtype].itemsize * plan.policy.parameters
    phases = plan.cost.phases(machine) if machine.peak else dict.fromkeys(("sampling", "training", "optimizer"), 0.0)
    training = phases["training"] + phases["optimizer"] + _messages(plan, trainers, network)
    if not samplers:
        sampling = phases["sampling"]
        copies = weights / network if strategy == "fsdp" else 0.0  # gathering the full copy with which each device samples
        if plan.work.engine:
            copies += weights / PUBLISHED
        return Split(trainers, 0, strategy, plan, None, sampling, training, copies)
    alone = replace(config, placement=Placement(processes=samplers), lag=0)
    other = predict(alone, lengths, machine, dataset=dataset, quick=True)
    caching = sum(item.bytes for item in other.memory.items if item.name == "KV cache")
    cost = cost_of(other.share, plan.policy, frozen=True, recompute=False, weight_bytes=weights, cache_bytes=caching)
    sampling = cost.phases(machine)["sampling"] if machine.peak else 0.0
    peak, starved = _sampler_memory(other, weights)
    publishing = weights / min(network, PUBLISHED)
    return Split(trainers, samplers, strategy, plan, peak, sampling, training, publishing, starved)


def _sampler_memory(plan: Plan, weights: float) -> tuple[PeakMemory, float]:
    """Return (the memory of a process that only samples, the bytes that vLLM lacks in it)."""
    if plan.work.engine:
        width = round(weights / plan.policy.parameters)
        config: Any = plan.config
        taken = config.sampling.vllm_memory_alone() * plan.machine.memory
        engine, starved = engine_item(plan.work, plan.policy, width, taken)
        return PeakMemory((engine,), plan.machine.kind, plan.machine.kind, 0.0), starved
    policy = ModelRole("policy", plan.policy.parameters, 0, round(weights / plan.policy.parameters))
    items: list[MemoryItem] = [*policy.items(), *(item for item in plan.memory.items if item.phase in ("sample", "load"))]
    process = plan.memory.process if plan.memory.process in BASELINE else plan.machine.kind
    return PeakMemory(tuple(items), plan.machine.kind, process, 0.0), 0.0


def _messages(plan: Plan, ranks: int, network: float) -> float:
    """Return the seconds that trainers wait for messages.

    With replicas, each optimiser step sums the gradients: 2 (n − 1)/n of their bytes leave each process (ring all-reduce). With
    shards, each forward and backward pass gathers the weights, and each backward pass scatters the gradients, (n − 1)/n each.
    """
    if ranks == 1:
        return 0.0
    config, work, share = plan.config, plan.work, (ranks - 1) / ranks
    width = DTYPES[config.model.dtype].itemsize
    learns = plan.policy.parameters - plan.policy.beside
    if config.model.lora_rank:
        learns = plan.policy.lora_parameters(config.model.lora_rank, config.model.lora_target_modules)
    if config.placement.strategy == "ddp":
        return work.updates * 2 * share * 4 * learns / network
    passes = work.updates * plan.share.micro_batches
    reduced = work.updates if config.placement.reduce_once else passes
    return (1 - HIDDEN) * share * (passes * 2 * width * plan.policy.parameters + reduced * 4 * learns) / network


def smallest(config: Config, lengths: Lengths, machine: Machine, most: int = 1024) -> int:
    """Return the smallest number of devices, a power of two, on which the sharded run fits; 0 if even `most` are too few."""
    for devices in (1 << n for n in range(int(math.log2(most)) + 1)):
        placement = Placement(processes=devices, strategy="fsdp", cluster="auto" if isinstance(config, OnlineConfig) else "")
        if predict(replace(config, placement=placement), lengths, machine, quick=True).fits:
            return devices
    return 0
