"""Snapshots of the policy's earlier weights. In games of several players, the policy plays against them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from psigrad import seeds
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.rollout.samplers.embedded import EmbeddedSampler
from psigrad.language.rollout.types import Sampler
from psigrad.language.training.online.annotators.reference import move_towards
from psigrad.language.training.online.online_run import Annotator, OnlineRun


class PastPolicies(Annotator):
    """The annotator that stores snapshots of the policy's weights in `models`, and picks the opponents in games from them.

    With probability `share`, the opponent is a random snapshot. Otherwise the policy plays itself.

    Source: Bansal et al. 2018, Emergent Complexity via Multi-Agent Competition, arXiv:1710.03748 (opponents from the past).
    """

    def __init__(self, models: Sequence[LanguageModel], every: int, share: float, max_batch: int = 256) -> None:
        self.models, self.every, self.share = models, every, share
        self._samplers = [EmbeddedSampler(model, max_batch) for model in models]

    def pick(self, seed: int, version: int) -> Sampler | None:
        """Return the opponent's sampler for games with this seed; None if the policy plays itself.

        `version` is the number of training steps so far.
        """
        drawn = np.array([seeds.derive(seed, "opponent")], dtype=np.uint64)
        if seeds.uniform(drawn, 0)[0] >= self.share:
            return None
        # `models[0]` starts as a copy of the policy.
        filled = min(len(self.models), 1 + version // self.every)
        return self._samplers[int(seeds.uniform(drawn, 1)[0] * filled)]

    def after_step(self, run: OnlineRun, number: int) -> None:
        """If the `number` of steps so far is a multiple of `every`, store the current weights in place of the oldest snapshot."""
        if number % self.every == 0:
            move_towards(self.models[number // self.every % len(self.models)], run.model, 1.0)
