"""Preference losses on fresh completions: on the best and the worst of each group, ranked by the reward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from psigrad.config import OnlineConfig
from psigrad.errors import UserError
from psigrad.language.data.pairs import Answer, Pair
from psigrad.language.models.fused.activation_cache import ActivationCache
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.rollout.types import Trajectory
from psigrad.language.training.learners import State
from psigrad.language.training.offline.preference_task import PreferenceTask, reference_logps
from psigrad.language.training.online.collate import minibatches
from psigrad.language.training.online.tally import Outcome, Tally
from psigrad.language.training.update import Optimizer
from psigrad.objective.preferences.preference_loss import Preference
from psigrad.processes.parallel.world import ALONE, World, shard


@dataclass(frozen=True)
class Pick:
    """The pairs of a collection: places of the chosen and the rejected among all rows."""

    pairs: list[Pair]
    chosen: list[int]
    rejected: list[int]
    rows: int


def pick(groups: Sequence[Sequence[Trajectory]]) -> Pick:
    """The earliest best and the earliest worst of every group that has both."""
    pairs, chosen, rejected, first = [], [], [], 0
    for group in groups:
        rewards = [t.reward or 0.0 for t in group]
        best, worst = rewards.index(max(rewards)), rewards.index(min(rewards))
        if rewards[best] > rewards[worst]:
            pairs.append(Pair(list(group[best].prompt_ids), _answer(group[best]), _answer(group[worst])))
            chosen.append(first + best)
            rejected.append(first + worst)
        first += len(group)
    return Pick(pairs, chosen, rejected, first)


def _answer(trajectory: Trajectory) -> Answer:
    ids = list(trajectory.completion.ids)
    return Answer(ids, list(trajectory.mask) or [True] * len(ids))


def learn_preferences(
    config: OnlineConfig,
    loss: Preference,
    model: LanguageModel,
    reference: LanguageModel | None,
    optimizer: Optimizer,
    groups: Sequence[Sequence[Trajectory]],
    state: State,
    lr: float,
    cache: ActivationCache | None,
    world: World = ALONE,
) -> Outcome:
    """All optimiser steps on one collection by a preference loss on the best and the worst of each group. A group of equal
    rewards is left out.

    Source: Guo et al. 2024, Direct language model alignment from online AI feedback, arXiv:2402.04792.
    """
    picked, tally = pick(groups), Tally(world=world)
    held = None
    if loss.needs_reference and picked.pairs:
        if reference is None:
            raise UserError(f"{loss.name} needs a reference model, and none was loaded.")
        answers = [[p.chosen, p.rejected] for p in picked.pairs]
        held = reference_logps(reference, [p.prompt for p in picked.pairs], answers, config.micro_batch_tokens, world)
    task = PreferenceTask(model, loss, picked.pairs, held, cache)
    for iteration in range(config.num_iterations):
        for rows in minibatches(len(picked.pairs), config.num_minibatches, config.run.seed, state.step, iteration):
            tally.steps += 1
            shares = shard(world, task.shares(rows.tolist(), config.micro_batch_tokens, world.size))
            norm = optimizer.step([partial(tally.of, share, weight) for share, weight in shares], lr)
            tally.stepped(None if norm is None else [norm])
    signs = torch.zeros(picked.rows)
    signs[picked.chosen], signs[picked.rejected] = 1.0, -1.0
    metrics = {**(tally.result() if tally.steps else {"updates": 0}), "pairs": len(picked.pairs)}
    return Outcome(metrics, dict(state.algorithm), signs.tolist())
