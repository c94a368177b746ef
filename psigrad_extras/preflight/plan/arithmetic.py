"""The arithmetic of a run: the work of a step, its division among processes, its FLOPs, and its time."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from psigrad.config import OnlineConfig, PreferenceConfig, RewardConfig, SFTConfig
from psigrad.config.algorithms import resolve_loss
from psigrad.language.recipes import online_settings
from psigrad.objective.preferences.preference_loss import KahnemanTversky, OnlinePreference
from psigrad_extras.preflight.plan.hardware import Machine
from psigrad_extras.preflight.plan.shape import Shape

Config = OnlineConfig | SFTConfig | PreferenceConfig | RewardConfig
# The shares of the peak of matrix products that training and decoding reach, and of the bandwidth that decoding reaches. Those of
# a CPU were measured on the workloads W0 (0.44 to 0.6 in decoding) to SmolLM2-135M (0.8). Those of a GPU are typical for
# products. tests/extras/preflight/test_published.py compares them with published runs.
REACHED = {"cpu": (0.7, 0.55, 1.0), "cuda": (0.5, 0.3, 0.6)}
# The factor on the share of training for a mixture of experts, whose products are small and uneven. Fitted on one published run.
EXPERTS = 0.25
# The work of a GPU besides matrix products, in transformers' modules: the number of kernels that a layer launches per
# micro-batch, forward and backward, and the bytes that they move, as multiples of the bytes of `Terms.estimate`. They were
# counted on Qwen3's layer by a TorchDispatchMode, as in tests/language/models/test_gpu_parts.py. An adapter adds 40 % more
# kernels.
KERNELS, MOVED, ADAPTED = (28, 55), (2.6, 4.6), 1.4
# The seconds of a kernel launch by Python and in a CUDA graph, and the share of the bandwidth that elementwise kernels reach.
LAUNCH, RECORDED, MOVING = 8e-6, 4e-6, 0.7
# The bytes that AdamW reads and writes for a parameter, and those that log-probs move for a logit, forward and backward.
STEPPED, LOGIT = 28, 38
# The seconds of a decoding step of vLLM that do not depend on the model: scheduler, sampler and kernel launches.
STEP = 0.004
# The time to decode one quantised number on a CPU, in FLOPs at the peak for bfloat16: of 4 bits, of a GGUF file, and of 8 bits.
UNPACKED = {"nf4": 35, "gguf": 35, "int8": 18}
# The guessed tokens of a prompt or an answer if neither the settings nor a dataset give them.
GUESSED = 256


@dataclass(frozen=True)
class Lengths:
    """The numbers of tokens of prompts and completions: the means, and the longest ones, which must fit in memory."""

    prompt: int
    completion: int
    longest_prompt: int
    longest_completion: int


@dataclass(frozen=True)
class Work:
    """The work of a step: `rows` prompts (or offline rows) with `members` completions each, of which `trained` get a gradient.

    A step makes `passes` over its batch, each of `minibatches` optimiser steps. The run has `steps` (0: unknown). `budget` is the
    setting micro_batch_tokens, and `slots` the number of sequences that are decoded at once.
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
    """True if the loss needs only log-probs, so that the head's gradient has a closed form (`models/logprobs.py`)."""
    keeps: float = 0.0
    """The maximum bytes of activations that training reuses from sampling; 0: none are kept."""
    engine: float = 0.0
    """The share of a device's memory that vLLM takes for weights and a paged cache; 0: psigrad's sampler."""
    tensor: int = 1
    """The number of devices over which an engine splits the model."""

    @property
    def fresh(self) -> float:
        """The number of forward passes over the batch. If activations are kept, the first optimiser step needs none."""
        return self.passes - (1 / self.minibatches if self.keeps else 0)

    @property
    def group(self) -> int:
        """The number of tokens computed for a prompt and its trained completions."""
        return self.lengths.prompt + self.trained * self.lengths.completion

    @property
    def tokens(self) -> int:
        """The number of tokens in one pass over the batch."""
        return self.rows * self.group

    @property
    def completion_tokens(self) -> int:
        """The number of completion tokens that a step samples, or learns from offline."""
        return self.rows * self.members * self.lengths.completion

    @property
    def rounds(self) -> int:
        """The number of decoding steps of psigrad's sampler, each of at most `slots` sequences."""
        return math.ceil(self.rows * self.members / self.slots) * self.lengths.longest_completion

    @property
    def updates(self) -> int:
        """The number of optimiser steps per training step."""
        return self.passes * self.minibatches

    @property
    def micro_batches(self) -> int:
        """The number of forward passes of an optimiser step."""
        return math.ceil(math.ceil(self.rows / self.minibatches) * self.group / self.micro_tokens)

    @property
    def micro_tokens(self) -> int:
        """The tokens of the largest forward pass: the budget, or the longest sample if longer; at most those of a minibatch."""
        longest = self.lengths.longest_prompt + self.lengths.longest_completion
        return min(max(self.budget, longest), max(math.ceil(self.rows / self.minibatches) * self.group, longest))

    @property
    def micro_completions(self) -> int:
        """The number of completions in the largest forward pass."""
        return max(1, round(self.micro_tokens / self.group * self.trained))

    @property
    def epochs(self) -> float:
        """The number of passes of the run over the dataset; 0: unknown."""
        return self.steps * self.rows / self.dataset if self.dataset else 0.0


def share_of(config: Config, work: Work) -> Work:
    """Return the part of a step's work that one of the run's processes does."""
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
    """Return the work of a step under the settings. `dataset` is the number of training rows (0: unknown)."""
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
        old_pass=kto,  # a pass over answers of other rows, with which KTO estimates the KL
        entropy=isinstance(config, SFTConfig),
        closed_head=not (isinstance(config, SFTConfig) and config.label_smoothing_factor),
    )


def samples_itself(config: Config) -> bool:
    """Return True if psigrad's sampler decodes completions on the trained model."""
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
        else (config.keep_activations_gb or 0.0) * 1e9,
    )


@dataclass(frozen=True)
class StepCost:
    """The cost of a step: FLOPs of `sampling`, `passes` without gradient and `training`, and the bytes that decoding reads."""

    sampling: float
    passes: float
    training: float
    read: float
    waiting: float = 0.0
    """The seconds of decoding that do not depend on the device."""
    experts: bool = False
    unpacking: float = 0.0
    """The time to dequantise matrices, expressed in FLOPs."""
    launching: tuple[float, float] = (0.0, 0.0)
    """The seconds that a GPU spends on kernel launches: in sampling, and in passes and training."""
    moved: float = 0.0
    """The bytes that a GPU moves in training outside matrix products."""
    stepped: float = 0.0
    """The bytes that a GPU moves in optimiser steps."""

    @property
    def flops(self) -> float:
        """The total FLOPs."""
        return self.sampling + self.passes + self.training

    def with_head_again(self, work: Work, policy: Shape) -> StepCost:
        """Return the cost if the head's gradient is computed twice from recomputed logits: for its norm, and for the update."""
        more = work.passes * 4 * 2 * policy.head * work.rows * work.trained * work.lengths.completion
        return replace(self, training=self.training + more)

    def with_codes(self, work: Work, flops: float, packed: float) -> StepCost:
        """Return the cost with quantised matrices. Dequantising all matrices once takes as long as `flops` FLOPs.

        They are dequantised in the forward and backward pass of each micro-batch, and in each decoding step, except the share
        `packed`, which is dequantised once before decoding.
        """
        decoding = packed + (1 - packed) * work.rounds if self.sampling else 0
        return replace(self, unpacking=flops * (decoding + 2 * work.micro_batches * work.updates))

    def phases(self, machine: Machine) -> dict[str, float]:
        """Return phase -> seconds, with the measured shares of the machine's peak.

        Decoding takes at least the time to read the weights. Small kernels take the time of their launches.
        """
        training, decoding, reading = REACHED[machine.kind]
        training *= EXPERTS if self.experts else 1
        sampling = max(self.sampling / (decoding * machine.peak), self.read / (reading * machine.bandwidth)) + self.launching[0]
        computing = (self.passes + self.training) / training + self.unpacking
        moving = MOVING * machine.bandwidth
        passes = computing / machine.peak + self.moved / moving + self.launching[1]
        return {"sampling": sampling + self.waiting, "training": passes, "optimizer": self.stepped / moving}

    def seconds(self, machine: Machine) -> float:
        """Return the seconds of a step."""
        return sum(self.phases(machine).values())

    def on_gpu(self, work: Work, policy: Shape, *, frozen: bool, recompute: bool, learns: int) -> StepCost:
        """Return the cost with kernel launches and bytes moved outside products, for transformers' modules on a GPU."""
        forward = work.fresh + work.passes * recompute + work.reference + work.old_pass + work.critic * (1 + work.passes)
        backward = work.passes * (1 + work.critic)
        kernels = policy.layers * (KERNELS[0] * forward + KERNELS[1] * backward) * (ADAPTED if frozen else 1)
        decodes = work.samples and not work.engine
        decoding = work.rounds * policy.layers * KERNELS[0] * RECORDED if decodes else 0.0
        kept = 2 * (6 * policy.hidden + 4 * policy.query + 3 * policy.key + 4 * policy.inner)
        moved = policy.layers * kept * work.tokens * (MOVED[0] * forward + MOVED[1] * backward)
        moved += LOGIT * policy.vocabulary * work.passes * work.rows * work.trained * work.lengths.completion
        launching = (decoding, kernels * work.minibatches * work.micro_batches * LAUNCH)
        return replace(self, launching=launching, moved=moved, stepped=float(STEPPED * learns * work.updates))


def cost_of(work: Work, policy: Shape, *, frozen: bool, recompute: bool, weight_bytes: int, cache_bytes: float) -> StepCost:
    """Return the cost of a step: 2 FLOPs per weight and token forward, 4 backward (2 if the weights are frozen under LoRA)."""
    length, trained = work.lengths, work.rows * work.trained * work.lengths.completion
    seen = length.prompt**2 / 2 * work.rows + trained * (length.prompt + length.completion / 2)
    scores = 4 * policy.layers * policy.query * seen
    body, head, experts = 2 * policy.active * work.tokens + scores, 2 * policy.head * trained, policy.active < policy.matrices
    backward = (1 if frozen else 2) + (1 if recompute else 0)
    # Logits are recomputed for the backward pass. They are also computed beforehand if the sampler stored no log-probs.
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
    # vLLM fills a free slot immediately, and a step reads only the pages in use, not a cache as long as the longest sequence.
    rounds = max(length.longest_completion, math.ceil(sampled / work.slots))
    read = rounds * weight_bytes / work.tensor + sampled * context * token_bytes(policy, weight_bytes / policy.parameters)
    return StepCost(decoded, passes, training, read, rounds * STEP, experts)


def token_bytes(policy: Shape, width: float) -> float:
    """Return the bytes of one token's keys and values, at `width` bytes per number."""
    return policy.cached * width
