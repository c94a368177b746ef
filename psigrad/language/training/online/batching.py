"""Convert trajectories to a `Batch`, divide the batch into micro-batches, and arrange model outputs by row of the batch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from psigrad import seeds
from psigrad.errors import UserError
from psigrad.language.models.attention import on_device
from psigrad.language.models.packing import Groups, pack_groups
from psigrad.language.rollout.exchange import fetch_tokens
from psigrad.language.rollout.types import CompletionSpan, Trajectory
from psigrad.language.training.loss_sums import to_host
from psigrad.objective import Batch, PolicyOutputs, terminal
from psigrad.processes.parallel.world import ALONE, World, num_teams, shard

MicroBatch = list[list[int]]
"""The rows of a batch in one forward pass: a list of row indices for each group. Rows of a group share their prompt."""
LENGTH_PENALTY = "soft_overlong"
_ROUNDED = 1e-3
"""The greatest allowed rounding error of float32, as a share of the spread of a group's rewards. Above it, use float64."""
_WIDE = 1e15
"""The greatest spread of rewards in float32. Above it, use float64, since the squares may overflow."""


def to_batch(
    groups: Sequence[Sequence[Trajectory]], filter_metric: str = "", reward_weights: Mapping[str, float] | None = None
) -> Batch:
    """Return the trajectories of scored groups as a `Batch`, padded to [N, T]. Its `inputs` are the trajectories, in order.

    `Batch.metric` has the values of `metric_of` for `filter_metric`. `reward_weights` are the reward functions' weights by name.
    """
    rows = [t for group in groups for t in group]
    lengths = torch.tensor([len(t.completion.ids) for t in rows])
    width = int(lengths.max())
    mask = torch.arange(width)[None] < lengths[:, None]
    for n, trajectory in enumerate(rows):
        if trajectory.mask:
            mask.numpy()[n, : len(trajectory.mask)] = trajectory.mask

    def padded(values: Callable[[Trajectory], Sequence[float]]) -> torch.Tensor:
        out = torch.zeros(mask.shape)
        for row, trajectory in zip(out.numpy(), rows, strict=True):
            row[: len(trajectory.completion.ids)] = values(trajectory)
        return out

    # Rewards of steps are placed on the token where they were earned, and the remainder on the last token.
    names = sorted({name for t in rows for name in t.parts})
    weights = reward_weights or {}
    metric = [metric_of(t, filter_metric, weights) for t in rows]
    parts = [[_part(t, name) for name in names] for t in rows]
    precision = reward_dtype([*map(len, groups)], [[t.reward or 0.0 for t in rows], metric, *zip(*parts, strict=True)])
    earned = torch.zeros(mask.shape, dtype=precision)
    rewarded = torch.zeros(mask.shape, dtype=torch.bool)
    for n, trajectory in enumerate(rows):
        for place, reward in trajectory.step_rewards:
            earned[n, place] += reward
            rewarded[n, place] = True
    outcome = torch.tensor([(t.reward or 0.0) - math.fsum(r for _, r in t.step_rewards) for t in rows], dtype=precision)
    ends = (outcome != 0) | ~rewarded.any(1)  # if steps have rewards, an outcome of 0 is not another reward
    return Batch(
        mask=mask,
        reward=terminal(outcome, mask) + earned,
        logp_old=padded(lambda t: t.completion.logprobs),
        group=torch.tensor([g for g, group in enumerate(groups) for _ in group]),
        logp_sampler=padded(lambda t: t.completion.sampling_logprobs),
        metric=torch.tensor(metric, dtype=precision),
        truncated=torch.tensor([t.completion.finish_reason == "length" for t in rows]),
        rewarded=rewarded | (terminal(ends.float(), mask) != 0),
        parts=torch.tensor(parts, dtype=precision) if names else None,
        part_weights=tuple(weights.get(name, 1.0) for name in names),
        inputs=rows,
    )


def _part(trajectory: Trajectory, name: str) -> float:
    """Return the value of the reward function `name` for a trajectory; NaN if the function does not apply to it."""
    # A scorer may give a failed completion without `parts`.
    if trajectory.status == "failed" and name not in trajectory.parts:
        return trajectory.reward or 0.0
    part = trajectory.parts.get(name)
    return math.nan if part is None else float(part)


def micro_batches(batch: Batch, row_mask: Tensor, budget: int, ranks: int = 1) -> list[MicroBatch]:
    """Divide the rows where `row_mask` [N] is True into passes of at most `budget` tokens, which `ranks` processes share."""
    group = batch.group.tolist()
    rows = [i for i, asked in enumerate(row_mask.tolist()) if asked]
    groups = [list(members) for _, members in itertools.groupby(rows, lambda i: group[i])]
    prompts = [batch.inputs[members[0]].prompt_ids for members in groups]
    sizes = [[_size(batch.inputs[i], shared) for i in members] for members, shared in zip(groups, prompts, strict=True)]
    return [[[groups[g][k] for k in ks] for g, ks in parts] for parts in pack_groups([*map(len, prompts)], sizes, budget, ranks)]


def _size(trajectory: Trajectory, shared: Sequence[int]) -> int:
    """Return the number of tokens that a trajectory adds to a forward pass. `shared`, its group's prompt, is not counted."""
    own = sum(len(context.prompt_ids) for context in trajectory.contexts if context.prompt_ids != shared)
    return len(trajectory.completion.ids) + own


def assign_micro_batches(world: World, batch: Batch, row_mask: Tensor, budget: int) -> list[tuple[MicroBatch, float]]:
    """Return the micro-batches of at most `budget` tokens that this process computes, as pairs (micro-batch, weight).

    The weight is 0 for a pass whose loss does not count, otherwise 1. Missing tokens are fetched into `batch.inputs`.
    """
    micros = micro_batches(batch, row_mask, budget, num_teams(world))
    if world.size > 1:
        shares = [shard(world, micros, rank) for rank in range(world.size)]
        fetch_tokens(world, batch.inputs, [[i for micro, _ in share for members in micro for i in members] for share in shares])
    return shard(world, micros)


def rows_of(micro: MicroBatch) -> Tensor:
    """Return the row indices [n] of a micro-batch, in the order of its forward pass."""
    return torch.tensor([i for members in micro for i in members])


def inputs_of(batch: Batch, micro: MicroBatch) -> Groups:
    """Return the model's inputs for a micro-batch: each prompt with the tokens sampled after it."""
    read = _contexts_of(batch, micro)
    rows = [[batch.inputs[i].completion for i, _ in own] for _, own in read]
    experts = [(own[0].prompt_experts, [one.experts for one in own]) for own in rows]
    recorded = any(prompt for prompt, _ in experts)
    contexts = [[context.ids for _, context in own] for _, own in read]
    return Groups([prompt for prompt, _ in read], contexts, experts=experts if recorded else None)


def reference_inputs_of(batch: Batch, micro: MicroBatch) -> Groups | None:
    """Return the reference's inputs for a micro-batch if its prompts differ from the policy's; otherwise None."""
    own = [batch.inputs[members[0]].teacher_prompt_ids for members in micro]
    if not any(own):
        return None
    prompts = [ids or batch.inputs[members[0]].prompt_ids for ids, members in zip(own, micro, strict=True)]
    return Groups(prompts, [[batch.inputs[i].completion.ids for i in members] for members in micro])


def _contexts_of(batch: Batch, micro: MicroBatch) -> list[tuple[tuple[int, ...], list[tuple[int, CompletionSpan]]]]:
    """Return (prompt, [(row, the part of the row's completion sampled after this prompt)]) for each prompt of a forward pass."""
    read: list[tuple[tuple[int, ...], list[tuple[int, CompletionSpan]]]] = []
    for members in micro:
        behind: dict[tuple[int, ...], list[tuple[int, CompletionSpan]]] = {}
        for i in members:
            for context in batch.inputs[i].contexts:
                behind.setdefault(context.prompt_ids, []).append((i, context))
        read += behind.items()
    return read


def to_rows(x: Tensor, batch: Batch, micro: MicroBatch) -> Tensor:
    """Return `x`, a model's outputs for `inputs_of(batch, micro)`, as [n, T]: the n rows of `micro` in order, padded with 0."""
    width, rows = batch.mask.shape[1], rows_of(micro).tolist()
    pieces = [piece for _, own in _contexts_of(batch, micro) for piece in own]
    if [i for i, _ in pieces] == rows:  # one part for each row, in order
        return torch.nn.functional.pad(x, (0, width - x.shape[1]))
    place = {i: n for n, i in enumerate(rows)}
    source = torch.full((len(rows), width), x.numel())  # a token outside of all parts reads the zero at the end
    for n, (i, context) in enumerate(pieces):
        end = context.start + len(context.ids)
        source[place[i], context.start : end] = torch.arange(len(context.ids)) + n * x.shape[1]
    return torch.cat([x.flatten(), x.new_zeros(1)])[on_device(source, x.device)]


def minibatches(count: int, shares: int, seed: int, step: int, iteration: int) -> list[Tensor]:
    """Shuffle the indices 0 … count - 1 by seed, step and iteration. Return them as at most `shares` nearly equal minibatches."""
    order = torch.from_numpy(seeds.permutation(count, seed, "minibatch", step, iteration)) if count else torch.zeros(0)
    return [share for share in order.tensor_split(shares) if len(share)]


def outputs_by_row(evaluation: PolicyOutputs, batch: Batch, micro: MicroBatch) -> PolicyOutputs:
    """Return a forward pass's outputs as tensors [n, T]: the n rows of the micro-batch, in order; see `to_rows`."""
    return PolicyOutputs(**{name: to_rows(x, batch, micro) for name, x in vars(evaluation).items() if x is not None})


@torch.no_grad()
def compute_by_row(
    batch: Batch,
    budget: int,
    of: Callable[[Groups], Tensor],
    row_mask: Tensor | None = None,
    world: World = ALONE,
    inputs: Callable[[Batch, MicroBatch], Groups] = inputs_of,
) -> Tensor:
    """Apply `of` to micro-batches of at most `budget` tokens. Return its outputs [N, T], which are 0 where `row_mask` is False.

    `of` receives `inputs(batch, micro_batch)`. The processes share the work. All of them get the result, on the CPU.
    """
    out = torch.zeros_like(batch.logp_old)
    micros = assign_micro_batches(world, batch, batch.present if row_mask is None else row_mask, budget)
    parts = to_host([of(inputs(batch, micro)) for micro, _ in micros])
    for (micro, weight), part in zip(micros, parts, strict=True):
        if weight and world.rank % world.division.team == 0:  # a team that computes one share together counts once
            out[rows_of(micro)] = to_rows(part.to(out.dtype), batch, micro)
    return world.all_reduce(out)


def metric_of(trajectory: Trajectory, name: str = "", weights: Mapping[str, float] | None = None) -> float:
    """Return the value of the reward function `name`, which dynamic sampling compares within a group.

    If `name` is empty, return the reward without the length penalty soft_overlong.
    """
    reward = trajectory.reward or 0.0
    if trajectory.status == "unscored":
        return reward
    if name in trajectory.parts:
        return float(trajectory.parts[name] or 0.0)
    if name and trajectory.status != "failed":
        raise UserError(
            f"filter_metric is {name!r}, and no reward function has this name; expected one of {', '.join(trajectory.parts)}."
        )
    if name or LENGTH_PENALTY not in trajectory.parts:
        return reward
    given, parts = weights or {}, trajectory.parts.items()
    return math.fsum(given.get(other, 1.0) * float(part or 0.0) for other, part in parts if other != LENGTH_PENALTY)


def reward_dtype(sizes: Sequence[int], columns: Sequence[Sequence[float]]) -> torch.dtype:
    """Return float64 if rewards within a group are too close or too far apart for float32. Otherwise return float32.

    Each of `columns` has a number per row. Consecutive rows form groups of these `sizes`.
    """
    for column in columns:
        for exact in torch.tensor(column, dtype=torch.float64).split([*sizes]):
            given = exact[~exact.isnan()]
            spread = float(given.max() - given.min()) if len(given) else 0.0
            if spread and (spread > _WIDE or float((given - given.float()).abs().max()) > _ROUNDED * spread):
                return torch.float64
    return torch.float32
