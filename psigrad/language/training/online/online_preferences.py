"""Online preference learning: the loss compares the best and the worst completion of each group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from psigrad.errors import UserError
from psigrad.language.examples import Example, Pair, pair_of
from psigrad.language.models.experts import add_balance_loss
from psigrad.language.rollout.exchange import fetch_tokens
from psigrad.language.rollout.types import State, Trajectory
from psigrad.language.training.loss_sums import LossSums
from psigrad.language.training.offline.preference_task import PreferenceTask, reference_logps
from psigrad.language.training.online.batching import minibatches
from psigrad.language.training.online.figures import UpdateResult
from psigrad.language.training.online.online_run import OnlineRun
from psigrad.objective.preferences.preference_loss import Preference
from psigrad.optim import step_together
from psigrad.processes.parallel.world import ALONE, World, num_teams, shard

if TYPE_CHECKING:
    from psigrad.language.models.fused.caches import ActivationCache


def learn_preferences(
    run: OnlineRun,
    loss: Preference,
    groups: Sequence[Sequence[Trajectory]],
    state: State,
    lr: float,
    cache: ActivationCache | None,
) -> UpdateResult:
    """Take all optimiser steps of one training step, on the pairs of completions that `pick_pairs` chooses from `groups`.

    Source: Guo et al. 2024, Direct language model alignment from online AI feedback, arXiv:2402.04792.
    """
    config, world = run.config, run.world
    picked, sums = pick_pairs(groups, world), LossSums(world)
    logps_ref = None
    if loss.needs_reference and picked.pairs:
        if run.reference is None:
            raise UserError(f"{loss.name} needs a reference model; add Reference to the run's annotators.")
        answers = [[p.chosen, p.rejected] for p in picked.pairs]
        logps_ref = reference_logps(run.reference, [p.prompt for p in picked.pairs], answers, config.micro_batch_tokens, world)
    task = PreferenceTask(run.model, loss, picked.pairs, logps_ref, cache)
    for iteration in range(config.num_iterations):
        shares_of_pairs = minibatches(len(picked.pairs), config.num_minibatches, config.run.seed, state.step, iteration)
        for number, rows in enumerate(shares_of_pairs):
            run.model.dropout_masks.draw(config.run.seed, state.step, iteration, number)
            passes = task.shares(rows.tolist(), config.micro_batch_tokens, num_teams(world))
            shares = shard(world, [partial(add_balance_loss, run.model, share, len(passes)) for share in passes])
            losses = [partial(sums.of, share, weight) for share, weight in shares]
            sums.end_step(step_together([(run.optimizer, lr)], losses, sums.read))
    signs = torch.zeros(picked.rows)
    signs[picked.chosen], signs[picked.rejected] = 1.0, -1.0
    metrics = {**(sums.figures() if sums.steps else {"updates": 0}), "pairs": len(picked.pairs)}
    return UpdateResult(metrics, dict(state.algorithm), signs.tolist())


@dataclass(frozen=True)
class Pick:
    """The pairs picked from a step's completions. Pair i has the completions with the indices `chosen[i]` and `rejected[i]`."""

    pairs: list[Pair]
    chosen: list[int]
    rejected: list[int]
    rows: int
    """The number of completions from which the pairs were picked."""


def pick_pairs(groups: Sequence[Sequence[Trajectory]], world: World = ALONE) -> Pick:
    """Return a pair for each group with unequal rewards: the completions with the highest and the lowest reward.

    All processes of `world` must call this.
    """
    rows = [t for group in groups for t in group]
    chosen, rejected, first = [], [], 0
    for group in groups:
        rewards = [t.reward or 0.0 for t in group]
        best, worst = rewards.index(max(rewards)), rewards.index(min(rewards))
        if rewards[best] > rewards[worst]:
            chosen.append(first + best)
            rejected.append(first + worst)
        first += len(group)
    fetch_tokens(world, rows, [[*chosen, *rejected]] * world.size)
    pairs = [pair_of(_texts(rows[best]), _texts(rows[worst])) for best, worst in zip(chosen, rejected, strict=True)]
    return Pick(pairs, chosen, rejected, first)


def _texts(trajectory: Trajectory) -> list[Example]:
    """Return a training example for each part of a completion: the prompt that the policy read for it, then the part."""
    mask = trajectory.mask or (True,) * len(trajectory.completion.ids)
    return [
        Example([*prompt, *ids], [False] * len(prompt) + list(mask[start : start + len(ids)]), False)
        for start, prompt, ids in trajectory.contexts
    ]
