"""Trajectories to batches, and batches to the forward passes of one optimiser step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from psigrad import seeds
from psigrad.errors import UserError
from psigrad.language.data.batches import pack_groups
from psigrad.language.models.packing import Groups
from psigrad.language.rollout.types import Trajectory
from psigrad.objective import Batch, terminal

LENGTH_PENALTY = "soft_overlong"


def scored_groups(trajectories: list[Trajectory], group_size: int, smallest: int) -> Iterator[list[Trajectory]]:
    """Groups of consecutive completions without their unscored members; a group left with fewer than `smallest` is dropped."""
    for start in range(0, len(trajectories), group_size):
        group = [t for t in trajectories[start : start + group_size] if t.reward is not None and t.completion.ids]
        if len(group) >= smallest:
            yield group


def metric_of(trajectory: Trajectory, name: str = "") -> float:
    """What dynamic sampling compares within a group: what the reward function `name` gave, or without a name the rewards of all
    functions but the penalty on length. Raises `UserError` where no function has that name.
    """
    reward = trajectory.reward or 0.0
    if trajectory.status != "scored":
        return reward
    if name:
        if name not in trajectory.parts:
            raise UserError(
                f"filter_metric is {name!r}, and no reward function has this name; expected one of {', '.join(trajectory.parts)}."
            )
        return float(trajectory.parts[name] or 0.0)
    if LENGTH_PENALTY not in trajectory.parts:
        return reward
    return math.fsum(float(part or 0.0) for other, part in trajectory.parts.items() if other != LENGTH_PENALTY)


def to_batch(
    groups: Sequence[Sequence[Trajectory]], filter_metric: str = "", reward_weights: Mapping[str, float] | None = None
) -> Batch:
    """The padded view [N, T] of scored groups, whose trajectories, in order, are its `inputs`.

    An outcome's reward stands on the policy's last token. `reward_weights` are those of the rewards' parts, by name.
    """
    rows = [t for group in groups for t in group]
    lengths = torch.tensor([len(t.completion.ids) for t in rows])
    width = int(lengths.max())
    mask = torch.arange(width)[None] < lengths[:, None]
    for n, trajectory in enumerate(rows):
        if trajectory.mask:
            mask[n, : len(trajectory.mask)] = torch.tensor(trajectory.mask)

    def padded(values: Callable[[Trajectory], Sequence[float]]) -> torch.Tensor:
        return torch.tensor([[*values(t), *[0.0] * (width - len(t.completion.ids))] for t in rows])

    # what was earned on the way stands where it was earned, the rest on the last token
    earned = torch.zeros(mask.shape)
    rewarded = torch.zeros(mask.shape, dtype=torch.bool)
    for n, trajectory in enumerate(rows):
        for place, reward in trajectory.step_rewards:
            earned[n, place] += reward
            rewarded[n, place] = True
    outcome = torch.tensor([(t.reward or 0.0) - math.fsum(r for _, r in t.step_rewards) for t in rows])
    whole = (outcome != 0) | ~rewarded.any(1)  # where there are rewards of steps, an outcome of 0 is none
    names = sorted({name for t in rows for name in t.parts})
    return Batch(
        mask=mask,
        reward=terminal(outcome, mask) + earned,
        logp_old=padded(lambda t: t.completion.logprobs),
        group=torch.tensor([g for g, group in enumerate(groups) for _ in group]),
        logp_sampler=padded(lambda t: t.completion.sampling_logprobs),
        metric=torch.tensor([metric_of(t, filter_metric) for t in rows]),
        truncated=torch.tensor([t.completion.finish_reason == "length" for t in rows]),
        rewarded=rewarded | (terminal(whole.float(), mask) != 0),
        parts=torch.tensor([[_part(t, name) for name in names] for t in rows]) if names else None,
        part_weights=tuple((reward_weights or {}).get(name, 1.0) for name in names),
        inputs=rows,
    )


def _part(trajectory: Trajectory, name: str) -> float:
    """What one reward function gave; NaN where it does not apply. A failed completion is worth the same to each of them."""
    if trajectory.status == "failed":
        return trajectory.reward or 0.0
    part = trajectory.parts.get(name)
    return math.nan if part is None else float(part)


@dataclass(frozen=True)
class MicroBatch:
    """Rows of the batch that share one forward pass, in the order in which `inputs` lists them."""

    rows: Tensor
    inputs: Groups
    teacher_inputs: Groups | None = None
    """The same completions behind the prompts of the reference, where it has its own."""


def micro_batches(batch: Batch, wanted: Tensor, budget: int, ranks: int = 1) -> list[MicroBatch]:
    """Forward passes of at most `budget` tokens over the rows where `wanted` [N] is True; a group's prompt is computed once.

    For several `ranks`, which take turns in taking one, there are about as many tokens in each.
    """
    group = batch.group.tolist()
    rows = [i for i, asked in enumerate(wanted.tolist()) if asked]
    numbered = [[(i, batch.inputs[i]) for i in members] for _, members in itertools.groupby(rows, lambda i: group[i])]
    sizes = [[len(t.completion.ids) for _, t in members] for members in numbered]
    found = []
    for parts in pack_groups([len(members[0][1].prompt_ids) for members in numbered], sizes, budget, ranks):
        picked = [[numbered[g][k] for k in ks] for g, ks in parts]
        completions = [[t.completion.ids for _, t in p] for p in picked]
        inputs = Groups([p[0][1].prompt_ids for p in picked], completions)
        theirs = [p[0][1].teacher_prompt_ids for p in picked]
        others = Groups([own or p[0][1].prompt_ids for own, p in zip(theirs, picked, strict=True)], completions)
        rows_of = torch.tensor([i for p in picked for i, _ in p])
        found.append(MicroBatch(rows_of, inputs, others if any(theirs) else None))
    return found


def minibatches(count: int, shares: int, seed: int, step: int, iteration: int) -> list[Tensor]:
    """The places 0 … count - 1, shuffled, in `shares` nearly equal parts: one for each optimiser step of a pass."""
    order = torch.from_numpy(seeds.permutation(count, seed, "minibatch", step, iteration)) if count else torch.zeros(0)
    return [share for share in order.tensor_split(shares) if len(share)]
