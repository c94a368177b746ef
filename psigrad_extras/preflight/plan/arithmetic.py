"""The arithmetic of a run: what a step computes, how it is split, how many FLOPs that is, how long it takes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from psigrad.config import OnlineConfig, PreferenceConfig, RewardConfig, SFTConfig
from psigrad.config.algorithms import resolve_loss
from psigrad.language.recipes import online_settings
from psigrad.objective.preferences.preference_catalog import OnlinePreference
from psigrad.objective.preferences.preference_loss import KahnemanTversky
from psigrad_extras.preflight.plan.hardware import Machine
from psigrad_extras.preflight.plan.shape import Shape

Config = OnlineConfig | SFTConfig | PreferenceConfig | RewardConfig
# Shares of the matrix-product peak that training and decoding reach, and of the bandwidth that decoding does: on a CPU as
# measured from W0 (0.44 to 0.6 of decoding's) to SmolLM2-135M (0.8), on a GPU as is common. Held against published runs in
# tests/extras/preflight/test_published.py.
REACHED = {"cpu": (0.7, 0.55, 1.0), "cuda": (0.4, 0.3, 0.6)}
# Share of training's that a mixture of experts reaches: its products are small and uneven. Fitted on one published run.
EXPERTS = 0.25
# Seconds of a decoding step of vLLM's that no figure of the model accounts for: the scheduler, the sampler, the launches.
STEP = 0.004
# FLOPs, at the peak for bfloat16, in whose time a CPU makes a number of a code: of 4 bits, or a GGUF file's, and of 8.
UNPACKED = {"nf4": 35, "gguf": 35, "int8": 18}
# Tokens of a prompt or an answer where neither the settings nor a dataset give them.
GUESSED = 256


@dataclass(frozen=True)
class Lengths:
    """Tokens of prompts and completions: means, and the longest that memory must hold."""

    prompt: int
    completion: int
    longest_prompt: int
    longest_completion: int


@dataclass(frozen=True)
class Work:
    """One step. `rows` prompts (or offline rows) with `members` completions each; `trained` of them get a gradient.

    `passes` over the batch of `minibatches` optimiser steps each; `steps` of the run, 0 where unknown. `roles` are the
    models that take part besides the policy.
    """

    rows: int
    members: int
    trained: int
    lengths: Lengths
    passes: int
    minibatches: int
    budget: int
    samples: bool
    slots: int
    steps: int
    dataset: int
    reference: bool = False
    old_pass: bool = False
    critic: bool = False
    shared_critic: bool = False
    entropy: bool = False
    closed_head: bool = True
    """Whether nothing but log-probs, and figures beside them, is asked of the head (`models/logprobs.py`)."""
    keeps: float = 0.0
    """Most bytes for what sampling computed and training need not compute again; 0 where nothing is kept."""
    engine: float = 0.0
    """Share of a device's memory that vLLM takes for weights and a paged cache; 0: psigrad's own sampler."""
    tensor: int = 1
    """Devices that an engine divides the model among."""

    @property
    def fresh(self) -> float:
        """Passes over the batch that run forward: the first optimiser step starts from what sampling kept."""
        return self.passes - (1 / self.minibatches if self.keeps else 0)

    @property
    def group(self) -> int:
        """Tokens computed for one prompt and the completions that are trained on."""
        return self.lengths.prompt + self.trained * self.lengths.completion

    @property
    def tokens(self) -> int:
        """Tokens that one pass computes."""
        return self.rows * self.group

    @property
    def completion_tokens(self) -> int:
        """Tokens sampled in a step, or offline learnt from."""
        return self.rows * self.members * self.lengths.completion

    @property
    def rounds(self) -> int:
        """Decoding steps of psigrad's own sampler, each of at most `slots` sequences."""
        return math.ceil(self.rows * self.members / self.slots) * self.lengths.longest_completion

    @property
    def updates(self) -> int:
        """Optimiser steps per step."""
        return self.passes * self.minibatches

    @property
    def micro_batches(self) -> int:
        """Forward passes of one optimiser step."""
        return math.ceil(math.ceil(self.rows / self.minibatches) * self.group / self.micro_tokens)

    @property
    def micro_tokens(self) -> int:
        """Tokens of the largest forward pass: the budget, the longest sample if that is longer, or all there is."""
        longest = self.lengths.longest_prompt + self.lengths.longest_completion
        return min(max(self.budget, longest), max(math.ceil(self.rows / self.minibatches) * self.group, longest))

    @property
    def micro_completions(self) -> int:
        """Completions in the largest forward pass."""
        return max(1, round(self.micro_tokens / self.group * self.trained))

    @property
    def epochs(self) -> float:
        """Passes of the run over the dataset; 0 where unknown."""
        return self.steps * self.rows / self.dataset if self.dataset else 0.0


def share_of(config: Config, work: Work) -> Work:
    """What one of the run's processes does of the work of a step."""
    placement = config.placement
    ranks = placement.processes
    elsewhere = isinstance(config, OnlineConfig) and bool(placement.cluster)
    if ranks == 1 and not elsewhere:
        return work
    rows = math.ceil(work.rows / ranks)
    slots = 0 if elsewhere else min(work.slots, rows * work.members)
    minibatches = min(work.minibatches, rows)
    return replace(work, rows=rows, minibatches=minibatches, slots=slots, samples=work.samples and not elsewhere, keeps=0.0)


def work_of(config: Config, lengths: Lengths, dataset: int = 0) -> Work:
    """What the settings ask for in one step; `dataset` is the number of training rows, 0 where unknown."""
    if isinstance(config, OnlineConfig):
        return _online(config, lengths, dataset)
    kto = isinstance(config, PreferenceConfig) and isinstance(resolve_loss(config.loss), KahnemanTversky)
    members = 1 if kto or isinstance(config, SFTConfig) or (isinstance(config, RewardConfig) and config.process) else 2
    return Work(
        rows=config.batch_size,
        members=members,
        trained=members,
        lengths=lengths,
        passes=1,
        minibatches=1,
        budget=config.micro_batch_tokens,
        samples=False,
        slots=0,
        steps=config.run.steps(dataset, config.batch_size),
        dataset=dataset,
        old_pass=kto,  # the answers that rows are mismatched with
        entropy=isinstance(config, SFTConfig),
        closed_head=not (isinstance(config, SFTConfig) and config.label_smoothing_factor),
    )


def samples_itself(config: Config) -> bool:
    """Whether completions are decoded by psigrad's own sampler, on the model that is trained."""
    return isinstance(config, OnlineConfig) and config.sampling.sampler == "embedded"


def _online(config: OnlineConfig, lengths: Lengths, dataset: int) -> Work:
    algorithm: Any = online_settings.method(config)
    preferring = isinstance(algorithm, OnlinePreference)
    single = config.num_iterations * config.num_minibatches == 1
    several_turns = config.plays
    tensor = config.sampling.tensor_parallel_size if config.sampling.sampler == "vllm" else 1
    return Work(
        rows=config.prompts_per_step,
        members=config.num_generations,
        trained=2 if preferring else config.num_generations,
        lengths=lengths,
        passes=config.num_iterations,
        minibatches=config.num_minibatches,
        budget=config.micro_batch_tokens,
        samples=True,
        slots=min(max(1, config.sampling.max_decode_batch // tensor), config.prompts_per_step * config.num_generations),
        steps=config.run.steps(dataset, config.prompts_per_step),
        dataset=dataset,
        reference=algorithm.needs_reference,
        old_pass=not single and config.model.dtype != "float32",
        critic=algorithm.needs_critic and not config.critic_shared,
        shared_critic=algorithm.needs_critic and config.critic_shared,
        entropy=not preferring and algorithm.needs_entropy,
        closed_head=preferring or not (algorithm.needs_entropy or algorithm.needs_exact_kl),
        engine=config.sampling.vllm_memory if config.sampling.sampler == "vllm" else 0.0,
        tensor=tensor,
        keeps=0.0
        if several_turns or not samples_itself(config) or config.model.gradient_checkpointing or config.lag
        else config.keep_activations_gb * 1e9,
    )


@dataclass(frozen=True)
class StepCost:
    """FLOPs of one step, and the bytes that decoding reads."""

    sampling: float
    passes: float
    training: float
    read: float
    waiting: float = 0.0
    """Seconds of decoding that pass whatever the device is."""
    experts: bool = False
    unpacking: float = 0.0
    """FLOPs in whose time the numbers of matrices in codes are made."""

    @property
    def flops(self) -> float:
        """All of them."""
        return self.sampling + self.passes + self.training

    def with_head_again(self, work: Work, policy: Shape) -> StepCost:
        """With the head's gradient made twice, from logits computed again: for its norm and for the step."""
        more = work.passes * 4 * 2 * policy.head * work.rows * work.trained * work.lengths.completion
        return replace(self, training=self.training + more)

    def with_codes(self, work: Work, flops: float) -> StepCost:
        """With matrices in codes, all of which are unpacked in the time of as many FLOPs: in each round of decoding, and as a
        micro-batch runs forward and backward.
        """
        decoding = work.rounds if self.sampling else 0
        return replace(self, unpacking=flops * (decoding + 2 * work.micro_batches * work.updates))

    def seconds(self, machine: Machine) -> float:
        """Seconds of a step at the shares of the peak that were measured; decoding no faster than the weights can be read."""
        training, decoding, reading = REACHED[machine.kind]
        training *= EXPERTS if self.experts else 1
        sampling = max(self.sampling / (decoding * machine.peak), self.read / (reading * machine.bandwidth))
        computing = (self.passes + self.training) / training + self.unpacking
        return sampling + self.waiting + computing / machine.peak


def cost_of(work: Work, policy: Shape, *, frozen: bool, recompute: bool, weight_bytes: int, cache_bytes: float) -> StepCost:
    """The cost of one step: 2 FLOPs per weight and token forward, 4 backward (2 where the weights are frozen under LoRA)."""
    length, trained = work.lengths, work.rows * work.trained * work.lengths.completion
    seen = length.prompt**2 / 2 * work.rows + trained * (length.prompt + length.completion / 2)
    scores = 4 * policy.layers * policy.query * seen
    body, head, experts = 2 * policy.active * work.tokens + scores, 2 * policy.head * trained, policy.active < policy.matrices
    backward = (1 if frozen else 2) + (1 if recompute else 0)
    # logits are computed again for the backward pass; before it, where the sampler did not keep their log-probs
    training = work.passes * (body * backward + head * (1 + (1 if frozen else 2)))
    training += work.fresh * body + (work.fresh if work.closed_head else work.passes) * head
    training += work.passes * work.critic * 3 * body
    passes = (work.reference + work.old_pass) * (body + head) + (work.critic or work.shared_critic) * body
    if not work.samples:
        return StepCost(0.0, passes, training, 0.0, experts=experts)
    sampled = work.completion_tokens
    context = length.prompt + length.completion / 2
    decoded: float = 2 * (policy.active + policy.head) * sampled
    decoded += 4 * policy.layers * policy.query * sampled * context
    decoded += 2 * policy.active * work.rows * length.prompt
    if not work.engine:
        return StepCost(decoded, passes, training, work.rounds * (weight_bytes + cache_bytes / 2), experts=experts)
    # a slot that is free is filled at once, and a step reads a token's own pages, not a room as long as the longest
    rounds = max(length.longest_completion, math.ceil(sampled / work.slots))
    read = rounds * weight_bytes / work.tensor + sampled * context * token_bytes(policy, weight_bytes / policy.parameters)
    return StepCost(decoded, passes, training, read, rounds * STEP, experts)


def token_bytes(policy: Shape, width: float) -> float:
    """Bytes of the keys and values of one token, in numbers of `width` bytes."""
    return policy.cached * width
