"""The critic's values. The critic is a separate model with its own optimiser, or a value head on the policy."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from psigrad.language.models.language_model import LanguageModel
from psigrad.language.models.packing import Groups
from psigrad.language.models.scalar_model import ScalarModel
from psigrad.language.training.online.batching import compute_by_row
from psigrad.language.training.online.online_run import Annotator, OnlineRun
from psigrad.objective import Batch
from psigrad.processes.parallel.world import ALONE, World

if TYPE_CHECKING:
    from psigrad.language.models.fused.caches import ActivationCache


class Values(Annotator):
    """The annotator that adds the critic's values: V(s) of the state before each token, computed before the critic's update."""

    def columns(self, run: OnlineRun, batch: Batch, step: int, cache: ActivationCache | None) -> Batch:
        """Add the column `value` [N, T]: the critic's values, as `compute_values` returns them."""
        critic = run.model if run.critic is None else run.critic.model
        return replace(batch, value=compute_values(critic, batch, run.config.micro_batch_tokens, cache, run.world))


def compute_values(
    critic: LanguageModel | ScalarModel, batch: Batch, budget: int, cache: ActivationCache | None = None, world: World = ALONE
) -> Tensor:
    """Return the critic's values [N, T] of the state before each token, in forward passes of at most `budget` tokens."""

    def of(inputs: Groups) -> Tensor:
        if isinstance(critic, ScalarModel):
            return critic.values(inputs)
        value = critic.evaluate(inputs, value=True, cache=cache).value
        assert value is not None
        return value

    return compute_by_row(batch, budget, of, world=world)
