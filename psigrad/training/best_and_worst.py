"""Pairs out of fresh completions: the best and the worst of each group, ranked by the reward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from psigrad.data.pairs import Answer, Pair
from psigrad.rollout.types import Trajectory


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
