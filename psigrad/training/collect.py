"""From prompts to scored trajectories to a `Batch`: the half of an online step that needs no gradient."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from psigrad import seeds
from psigrad.data.batches import order
from psigrad.data.templates import completion_for_reward, decode
from psigrad.models.language_model import LanguageModel
from psigrad.objective import Batch, terminal
from psigrad.rewards import Failed, Result, Samples, Scored, Scorer, Unscored, begin
from psigrad.rollout.episodes import Episodes, play, returns
from psigrad.rollout.types import Completion, Request, Sampler, SamplingParams, Stepping, Trajectory


@dataclass(frozen=True)
class Prompt:
    """One dataset row as training sees it: its index, its tokens, the row itself (text and columns for the rewards)."""

    index: int
    ids: tuple[int, ...]
    row: Any

    @property
    def text(self) -> str | list[dict[str, Any]]:
        return self.row.prompt


def prompts_from(prompts: Sequence[Prompt], seed: int, cursor: int, count: int) -> list[Prompt]:
    """Places `cursor` … `cursor + count` of the endless sequence of shuffled epochs: a pure function of its arguments."""
    n, places, picked = len(prompts), {}, []
    for place in range(cursor, cursor + count):
        epoch, offset = divmod(place, n)
        if epoch not in places:
            places[epoch] = order(n, seed, epoch)
        picked.append(prompts[places[epoch][offset]])
    return picked


def rollout(
    sampler: Sampler,
    scorer: Scorer | None,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    num_generations: int,
    seed_of: Callable[[int, int], int],
    model: LanguageModel,
    version: int,
    episodes: Episodes | None = None,
    missing_eos_penalty: float = 0.0,
    phase: Callable[[str], AbstractContextManager[Any]] = lambda name: nullcontext(),
) -> list[Trajectory]:
    """`num_generations` completions of each prompt, or episodes from it, with their rewards; `seed_of(i, k)` seeds the k-th of
    the i-th prompt.

    A group is scored as soon as its last completion has ended, while others are still being written, where sampler and scorer
    can. `phase` times "time/sample" and "time/score", the wait for what is not scored by then.
    """
    scoring = _Scoring(scorer, {p.index: p.row for p in prompts})

    def group(place: int, completions: Sequence[Completion]) -> list[Trajectory]:
        index, ids = prompts[place].index, prompts[place].ids
        return [Trajectory(index, k, ids, c, version, text=decode(model.tokenizer, c.ids)) for k, c in enumerate(completions)]

    with phase("time/sample"):
        if episodes is None:
            requests = [Request(p.ids, tuple(seed_of(i, k) for k in range(num_generations))) for i, p in enumerate(prompts)]
            trajectories = _completed(sampler, requests, params, group, scoring)
        else:
            trajectories = play(
                episodes,
                sampler,
                [(p.index, p.ids, p.row) for p in prompts],
                params,
                num_generations=num_generations,
                seed_of=seed_of,
                tokenizer=model.tokenizer,
                version=version,
                max_length=model.max_length,
            )
            scoring.add_all(trajectories)
    with phase("time/score"):
        return scoring.scored(trajectories, missing_eos_penalty)


def _completed(
    sampler: Sampler,
    requests: list[Request],
    params: SamplingParams,
    group: Callable[[int, Sequence[Completion]], list[Trajectory]],
    scoring: _Scoring,
) -> list[Trajectory]:
    """The completions of every request as the trajectories of a `group`, handed to `scoring` when it is complete."""
    found: dict[int, list[Trajectory]] = {}
    ended = sampler.steps(requests, params) if isinstance(sampler, Stepping) else [enumerate(sampler.sample(requests, params))]
    for step in ended:
        for place, completions in step:
            found[place] = group(place, completions)
            scoring.add(found[place])
        scoring.turn()
    return [t for place in range(len(requests)) for t in found[place]]


def score(scorer: Scorer | None, trajectories: list[Trajectory], rows: Mapping[int, Any]) -> list[Trajectory]:
    """The trajectories with their rewards; `rows[index]` is the dataset row, whose columns the rewards receive."""
    scoring = _Scoring(scorer, {t.row: rows[t.row] for t in trajectories})
    scoring.add_all(trajectories)
    return scoring.scored(trajectories)


class _Scoring:
    """Trajectories on their way to their rewards; the columns of all `rows`, by index, are shown for each of them.

    Rewards of the environment and of steps are added to the scorer's; without a scorer they are all there is.
    """

    def __init__(self, scorer: Scorer | None, rows: Mapping[int, Any]) -> None:
        self._scoring, self._rows = None if scorer is None else begin(scorer), rows
        self._names = sorted({name for row in rows.values() for name in row.columns})
        self._places: dict[int, int] = {}

    def add_all(self, trajectories: list[Trajectory]) -> None:
        """Group by group; a row may be drawn twice in a step: its two groups are not one."""
        starts = [i for i, t in enumerate(trajectories) if t.k == 0 or i == 0]
        for start, end in itertools.pairwise([*starts, len(trajectories)]):
            self.add(trajectories[start:end])

    def add(self, group: list[Trajectory]) -> None:
        """An episode is shown whole: as its messages, or as its text where the prompt is plain."""
        self._places |= {id(t): len(self._places) + i for i, t in enumerate(group)}
        if self._scoring is None:
            return
        sources = [self._rows[t.row] for t in group]
        samples = Samples(
            prompts=[row.prompt for row in sources],
            completions=[list(t.messages) or completion_for_reward(row, t.text) for row, t in zip(sources, group, strict=True)],
            completion_ids=[list(t.completion.ids) for t in group],
            columns={name: [row.columns.get(name) for row in sources] for name in self._names},
            prompt_ids=[t.prompt_ids for t in group],
        )
        self._scoring.add(samples)

    def turn(self) -> None:
        """Let the scorer go on."""
        if self._scoring is not None:
            self._scoring.turn()

    def scored(self, trajectories: list[Trajectory], missing_eos_penalty: float = 0.0) -> list[Trajectory]:
        """The same trajectories with their rewards. `missing_eos_penalty` is taken from the reward of completions that the
        length limit cut.
        """
        results: Sequence[Result] = [Scored(0.0)] * len(trajectories) if self._scoring is None else self._scoring.results()
        scored = [_outcome(t, results[self._places[id(t)]]) for t in trajectories]
        return [_without_end(t, missing_eos_penalty) for t in scored] if missing_eos_penalty else scored


def _without_end(trajectory: Trajectory, penalty: float) -> Trajectory:
    """A cut completion with `penalty` taken from its reward, and the others as they are."""
    if trajectory.reward is None or trajectory.completion.finish_reason != "length":
        return trajectory
    parts = {**trajectory.parts, "missing_eos": -penalty}
    return replace(trajectory, reward=trajectory.reward - penalty, parts=parts)


def _outcome(trajectory: Trajectory, result: Result) -> Trajectory:
    """The trajectory with its reward: the scorer's value and what was earned on the way."""
    if trajectory.reason:  # the environment broke
        return replace(trajectory, status="unscored")
    if isinstance(result, Unscored):
        return replace(trajectory, status="unscored", reason=result.reason)
    steps = (*trajectory.step_rewards, *getattr(result, "steps", ()))
    parts = dict(result.parts)
    if trajectory.step_rewards:
        parts["environment"] = returns(trajectory)
    total = float(result.value) + math.fsum(reward for _, reward in steps)
    failed = isinstance(result, Failed)
    return replace(
        trajectory,
        reward=total,
        status="failed" if failed else "scored",
        reason=result.reason if isinstance(result, Failed) else "",
        parts=parts,
        step_rewards=steps,
    )


def scored_groups(trajectories: list[Trajectory], group_size: int, smallest: int) -> Iterator[list[Trajectory]]:
    """Groups of consecutive completions without their unscored members; a group left with fewer than `smallest` is dropped."""
    for start in range(0, len(trajectories), group_size):
        group = [t for t in trajectories[start : start + group_size] if t.reward is not None and t.completion.ids]
        if len(group) >= smallest:
            yield group


def to_batch(groups: Sequence[Sequence[Trajectory]]) -> Batch:
    """The padded view [N, T] of scored groups, rows in order; an outcome's reward stands on the policy's last token."""
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
    for n, trajectory in enumerate(rows):
        for place, reward in trajectory.step_rewards:
            earned[n, place] += reward
    outcome = torch.tensor([(t.reward or 0.0) - math.fsum(r for _, r in t.step_rewards) for t in rows])
    return Batch(
        mask=mask,
        reward=terminal(outcome, mask) + earned,
        logp_old=padded(lambda t: t.completion.logprobs),
        group=torch.tensor([g for g, group in enumerate(groups) for _ in group]),
        logp_sampler=padded(lambda t: t.completion.sampling_logprobs),
        truncated=torch.tensor([t.completion.finish_reason == "length" for t in rows]),
        version=torch.tensor([t.version for t in rows]),
    )


def step_seeds(seed: int, purpose: str, step: int, prompts: Sequence[Prompt]) -> Callable[[int, int], int]:
    """Seed of completion k of the i-th prompt: a hash of (run seed, purpose, step, dataset row, k)."""
    return lambda i, k: seeds.derive(seed, purpose, step, prompts[i].index, k)
