"""What one online run consists of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from psigrad.config import OnlineConfig
from psigrad.models.language_model import LanguageModel
from psigrad.models.scalar_model import ScalarModel
from psigrad.objective import PolicyGradient
from psigrad.objective.online_preference import OnlinePreference
from psigrad.rewards import Scorer
from psigrad.rollout.episodes import Episodes
from psigrad.rollout.types import Sampler, SamplingParams
from psigrad.training.collect import Prompt
from psigrad.training.evaluate import Evaluator
from psigrad.training.journal import Journal
from psigrad.training.update import Optimizer


@dataclass(frozen=True)
class Critic:
    """A critic of its own: a model, its optimiser, and its peak learning rate."""

    model: ScalarModel
    optimizer: Optimizer
    learning_rate: float


@dataclass(frozen=True)
class Online:
    """The parts of one online run.

    `reference` is the frozen model of the KL term (the model itself under LoRA). `exact_sampling` says that the sampler's
    log-probs are the trainer's to float32 rounding, so that they need not be computed again before several passes over a
    batch. Where the algorithm needs a critic and `critic` is None, the policy's own value head is the critic. With
    `episodes` a completion is an episode of several turns, and `scorer` may be None: the environment rewards.
    """

    config: OnlineConfig
    algorithm: PolicyGradient | OnlinePreference
    model: LanguageModel
    reference: LanguageModel | None
    sampler: Sampler
    scorer: Scorer | None
    optimizer: Optimizer
    prompts: Sequence[Prompt]
    params: SamplingParams
    total_steps: int
    journal: Journal
    exact_sampling: bool
    evaluator: Evaluator | None = None
    critic: Critic | None = None
    episodes: Episodes | None = None
