"""Online preference optimisation: the best and the worst completion of each fresh group, ranked by the reward, as a pair."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from psigrad import seeds
from psigrad.data.pairs import Answer, Pair
from psigrad.errors import UserError
from psigrad.objective.preference import Preference
from psigrad.rollout.types import Trajectory
from psigrad.training.learn import Tally, Update
from psigrad.training.online import Online
from psigrad.training.state import State
from psigrad.training.tasks import Share
from psigrad.training.tasks.preference import PreferenceTask, reference_logps


@dataclass(frozen=True)
class Pick:
    """The pairs of a collection: places of the chosen and the rejected among all rows."""

    pairs: list[Pair]
    chosen: list[int]
    rejected: list[int]
    rows: int


def update(run: Online, loss: Preference, groups: Sequence[Sequence[Trajectory]], state: State, lr: float) -> Update:
    """All optimiser steps on one collection. A group whose rewards are all equal says nothing and is left out.

    Source: Guo et al. 2024, Direct language model alignment from online AI feedback, arXiv:2402.04792.
    """
    config, picked = run.config, pick(groups)
    reference = None
    if loss.needs_reference and picked.pairs:
        if run.reference is None:
            raise UserError(f"{loss.name} reads a reference model and none was loaded.")
        answers = [[p.chosen, p.rejected] for p in picked.pairs]
        reference = reference_logps(run.reference, [p.prompt for p in picked.pairs], answers, config.micro_batch_tokens)
    task = PreferenceTask(run.model, loss, picked.pairs, reference)
    tally = Tally()
    for iteration in range(config.num_iterations):
        for rows in _minibatches(run, len(picked.pairs), state.step, iteration):
            tally.steps += 1
            shares = task.shares(rows, config.micro_batch_tokens)
            norm = run.optimizer.step([lambda share=share, tally=tally: _counted(share, tally) for share in shares], lr)
            tally.stepped(None if norm is None else [norm])
    signs = torch.zeros(picked.rows)
    signs[picked.chosen], signs[picked.rejected] = 1.0, -1.0
    metrics = {**(tally.result() if tally.steps else {"updates": 0}), "pairs": len(picked.pairs)}
    return Update(metrics, dict(state.algorithm), signs.tolist())


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


def _minibatches(run: Online, count: int, step: int, iteration: int) -> list[list[int]]:
    """The pairs of each optimiser step of one pass."""
    order = (
        torch.from_numpy(seeds.permutation(count, run.config.run.seed, "minibatch", step, iteration)) if count else torch.zeros(0)
    )
    return [share.tolist() for share in order.tensor_split(run.config.num_minibatches) if len(share)]


def _counted(share: Share, tally: Tally) -> torch.Tensor:
    loss = share()
    tally.add(loss.value, loss.terms)
    return loss.value
