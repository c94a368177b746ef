"""The parts of one online run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

import torch

from psigrad.config import OnlineConfig
from psigrad.language.loading.teacher import Teacher
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.models.scalar_model import ScalarModel
from psigrad.language.rewards import Scorer
from psigrad.language.rollout.episodes.episodes import Player
from psigrad.language.rollout.types import Prompt, Sampler, SamplingParams, Trajectory
from psigrad.language.training.online.figures import TokenFigures
from psigrad.language.training.update import Optimizer
from psigrad.objective import PolicyGradient, Prepared
from psigrad.objective.preferences.online_preference import OnlinePreference
from psigrad.processes.parallel.world import World
from psigrad.runs.journal import Journal
from psigrad.runs.machine import exact_products


@dataclass(frozen=True)
class ValueModel:
    """A critic of its own: a model, its optimiser, and its peak learning rate."""

    model: ScalarModel
    optimizer: Optimizer
    learning_rate: float


@dataclass(frozen=True)
class Online:
    """The parts of one online run.

    `reference` is the frozen model of the KL term (the model itself under LoRA). Where the algorithm needs a critic and `critic`
    is None, the policy's own value head is the critic. With `episodes` a completion is an episode of several turns, and `scorer`
    may be None: the environment rewards.
    """

    config: OnlineConfig
    algorithm: PolicyGradient | OnlinePreference
    model: LanguageModel
    reference: LanguageModel | Teacher | None
    sampler: Sampler
    scorer: Scorer | None
    optimizer: Optimizer
    prompts: Sequence[Prompt]
    params: SamplingParams
    total_steps: int
    journal: Journal
    evaluate: Callable[[int], None] | None = None
    """Evaluates after so many steps, where there are rows for it."""
    critic: ValueModel | None = None
    episodes: Player | None = None
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    """The weight of each part of the rewards, by name; 1 for others."""
    collector: Executor | None = None
    """Threads that collect while steps train; None: collections are made between them."""
    recorded: Callable[[list[Trajectory]], list[Trajectory]] | None = None
    """In a replay: the completions with what was recorded of them, in place of what a scorer gives."""
    token_figures: Callable[[int, Prepared], TokenFigures] = TokenFigures
    """Who looks at the log-probs of a step as they are computed."""

    @property
    def world(self) -> World:
        """The processes that take part."""
        return self.journal.world

    def updates(self) -> int:
        """How often this process has updated weights."""
        return self.optimizer.updates + (self.critic.optimizer.updates if self.critic is not None else 0)

    @property
    def single_pass(self) -> bool:
        """Whether each collection is trained on in a single optimiser step."""
        return self.config.num_iterations * self.config.num_minibatches == 1

    @property
    def max_gap(self) -> float:
        """How far sampler and trainer may disagree in mean log-probability, in nats."""
        rounds = self.model.network.dtype in (torch.bfloat16, torch.float16) or not exact_products(self.model.device)
        return self.config.max_logp_difference or (0.1 if rounds else 1e-3)

    @property
    def exact_sampling(self) -> bool:
        """Whether the sampler's log-probs need not be computed again before several passes over a batch."""
        return is_exact(self.sampler, self.model)


def is_exact(sampler: Sampler, model: LanguageModel) -> bool:
    """Whether a sampler's log-probs are the trainer's, but for the order of sums in float32."""
    return sampler.exact and not model.why_padded and model.network.dtype == torch.float32 and exact_products(model.device)
