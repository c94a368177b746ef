"""The objects of an online run, and annotators, which add columns to batches, or terms to the policy's outputs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from psigrad.errors import UserError
from psigrad.language.models.language_model import Divergence, LanguageModel
from psigrad.language.models.scalar_model import ScalarModel
from psigrad.language.rollout.collectors import ScoredRollout
from psigrad.language.rollout.types import Prompt, Sampler, SamplingParams
from psigrad.language.training.loss_sums import LossSums
from psigrad.language.training.online.batching import MicroBatch
from psigrad.language.training.online.figures import TokenFigures
from psigrad.objective import Batch, PolicyGradient, PolicyOutputs, Prepared
from psigrad.objective.preferences.preference_loss import OnlinePreference
from psigrad.optim import Optimizer
from psigrad.processes.parallel.world import ALONE, World
from psigrad.step import Observe

if TYPE_CHECKING:
    from torch import Tensor

    from psigrad.config import OnlineConfig
    from psigrad.language.models.fused.caches import ActivationCache


@dataclass(frozen=True)
class ValueModel:
    """A critic that is a separate model, with its optimiser and its peak learning rate."""

    model: ScalarModel
    optimizer: Optimizer
    learning_rate: float


class Annotator:
    """A component that adds columns to a run's batches, or terms to the policy's outputs. This base class adds nothing."""

    gives_reference = False
    """True if the annotator provides the reference of a KL term."""
    reference: LanguageModel | None = None
    """The reference model."""

    def columns(self, run: OnlineRun, batch: Batch, step: int, cache: ActivationCache | None) -> Batch:
        """Return the batch with columns [N, T] added. `step` counts completed steps. `cache` has activations from sampling."""
        return batch

    def divergence(self, run: OnlineRun, batch: Batch, micro: MicroBatch) -> Divergence | None:
        """Return the `Divergence` that the policy's forward pass over `micro` must compute; None if it needs none."""
        return None

    def add_terms(
        self, run: OnlineRun, part: Prepared, outputs: PolicyOutputs, rows: Tensor, sums: LossSums
    ) -> tuple[Prepared, PolicyOutputs]:
        """Return (`part`, `outputs`) with the annotator's changes, such as a KL term.

        `part` is a micro-batch: the rows `rows` of a prepared batch. `outputs` are the policy's outputs for `part`. `sums.steps`
        is the number of optimiser steps taken on this collection so far.
        """
        return part, outputs

    def figures(self, run: OnlineRun, step: int) -> dict[str, float]:
        """Return metrics after training on a collection. `step` is as in `columns`. Raising `UserError` here ends the run."""
        return {}

    def after_step(self, run: OnlineRun, number: int) -> None:
        """After step `number`, update data that depends on the policy's weights, such as a moving-average reference."""


@dataclass(frozen=True)
class OnlineRun:
    """The objects of one online run, built from the run's settings.

    If the algorithm needs a critic and `critic` is None, the policy's own value head is the critic.
    """

    config: OnlineConfig
    algorithm: PolicyGradient | OnlinePreference
    model: LanguageModel
    optimizer: Optimizer
    prompts: Sequence[Prompt]
    params: SamplingParams
    rollout: ScoredRollout
    """The function that samples and scores completions of prompts."""
    annotators: Sequence[Annotator]
    """The annotators, which add the columns that the algorithm reads, in this order."""
    total_steps: int
    critic: ValueModel | None = None
    executor: Executor | None = None
    """Threads that collect during training steps. None: collections are made between the steps."""
    world: World = ALONE
    """The processes of the run."""
    watch: Observe = contextlib.nullcontext
    """A function that observes the phases of a step."""
    token_figures: Callable[[int, Prepared], TokenFigures] = TokenFigures
    """A function of (number of rows, prepared batch) that creates the recorder of a step's log-probs per token."""
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    """The weights of reward functions by name. Functions that are not named have weight 1."""

    @property
    def sampler(self) -> Sampler:
        """The sampler of the rollout."""
        return self.rollout.collector.sampler

    @property
    def reference(self) -> LanguageModel | None:
        """The reference model; None if there is none, or if a teacher provides the reference's log-probs."""
        return next((one.reference for one in self.annotators if one.reference is not None), None)

    @property
    def has_reference(self) -> bool:
        """True if a model or a teacher provides the reference of a KL term."""
        return any(one.gives_reference for one in self.annotators)

    def check_reference(self) -> None:
        """Raise `UserError` if the algorithm's KL term needs a reference and there is none."""
        if self.algorithm.needs_reference and not self.has_reference:
            raise UserError("The algorithm's KL term needs a reference model; add Reference to the run's annotators.")

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimisers of the policy and of a separate critic."""
        return [self.optimizer, *([self.critic.optimizer] if self.critic is not None else [])]

    def updates(self) -> int:
        """Return the number of weight updates that all optimisers of this process have made so far."""
        return sum(optimizer.updates for optimizer in self.optimizers)

    @property
    def refills(self) -> bool:
        """True if new prompts replace groups whose rewards are all equal (dynamic sampling)."""
        return isinstance(self.algorithm, PolicyGradient) and self.algorithm.dynamic_sampling

    @property
    def single_pass(self) -> bool:
        """True if training takes a single optimiser step on each collection."""
        return self.config.num_iterations * self.config.num_minibatches == 1

    @property
    def max_gap(self) -> float:
        """The largest allowed mean absolute difference between the sampler's and the trainer's log-probs, in nats."""
        rounds = self.model.network.dtype in (torch.bfloat16, torch.float16) or not has_exact_matmul(self.model.device)
        return self.config.max_logp_difference or (0.1 if rounds else 1e-3)

    @property
    def exact_sampling(self) -> bool:
        """True if the sampler's log-probs equal the trainer's, so that `logp_old` need not be recomputed."""
        return is_exact_sampler(self.sampler, self.model)


def is_exact_sampler(sampler: Sampler, model: LanguageModel) -> bool:
    """Return True if the trainer uses float32, and the sampler's log-probs equal the trainer's, except for rounding."""
    return sampler.exact and not model.why_padded and model.network.dtype == torch.float32 and has_exact_matmul(model.device)


def has_exact_matmul(where: torch.device) -> bool:
    """Return True if this device computes float32 matrix products in float32, not in TF32."""
    return where.type != "cuda" or not torch.backends.cuda.matmul.allow_tf32
