"""From prompts to completions with their rewards: the half of an online step that needs no gradient, and all of an evaluation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from psigrad.language.data.templates import completion_for_reward, decode
from psigrad.language.models.fused.activation_cache import ActivationCache
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.rewards import Failed, Result, Samples, Scored, Scorer, Unscored
from psigrad.language.rollout.episodes.episodes import Episodes, play, returns
from psigrad.language.rollout.types import Request, Sampler, SamplingParams, Trajectory
from psigrad.language.training.online.ledger import Prompt
from psigrad.processes.parallel.world import ALONE, World


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
    cache: ActivationCache | None = None,
    phase: Callable[[str], AbstractContextManager[Any]] = lambda name: nullcontext(),
    world: World = ALONE,
) -> list[Trajectory]:
    """`num_generations` completions of each prompt, or episodes from it, with their rewards; `seed_of(i, k)` seeds the k-th of
    the i-th prompt.

    A group goes to the scorer as soon as its last completion has ended, while others are still being written. `cache` is for what
    sampling computes. `phase` times "time/sample" and "time/score", the wait for what is not scored by then. Each process of the
    world does its share of the prompts, and all of them get the whole.
    """
    if world is not ALONE:
        alone: Any = partial(
            rollout,
            sampler,
            scorer,
            params=params,
            num_generations=num_generations,
            model=model,
            version=version,
            episodes=episodes,
            missing_eos_penalty=missing_eos_penalty,
            cache=cache,
            phase=phase,
        )
        return _shared(alone, sampler.central, prompts, num_generations, seed_of, phase, world)
    if not prompts:
        return []
    rewards = _Rewards(scorer, {p.index: p.row for p in prompts})
    with phase("time/sample"):
        if episodes is None:
            trajectories = _written(sampler, prompts, params, num_generations, seed_of, model, version, cache, rewards)
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
            rewards.add_all(trajectories)
    with phase("time/score"):
        return rewards.given_to(trajectories, missing_eos_penalty)


def _written(
    sampler: Sampler,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    num_generations: int,
    seed_of: Callable[[int, int], int],
    model: LanguageModel,
    version: int,
    cache: ActivationCache | None,
    rewards: _Rewards,
) -> list[Trajectory]:
    """Completions of one turn each; `rewards` gets each group when its last one has ended."""
    requests = [Request(p.ids, tuple(seed_of(i, k) for k in range(num_generations))) for i, p in enumerate(prompts)]
    groups: dict[int, list[Trajectory]] = {}
    for completed in sampler.steps(requests, params, cache):
        for place, completions in completed:
            prompt, texts = prompts[place], [decode(model.tokenizer, c.ids) for c in completions]
            groups[place] = [
                Trajectory(prompt.index, k, prompt.ids, c, version, text=text, teacher_prompt_ids=prompt.teacher_ids)
                for k, (c, text) in enumerate(zip(completions, texts, strict=True))
            ]
            rewards.add(groups[place])
        rewards.poll()
    return [t for place in range(len(requests)) for t in groups[place]]


def _shared(
    alone: Callable[..., list[Trajectory]],
    central: bool,
    prompts: Sequence[Prompt],
    size: int,
    seed_of: Callable[[int, int], int],
    phase: Callable[[str], AbstractContextManager[Any]],
    world: World,
) -> list[Trajectory]:
    """`rollout`, of which each process does its share, or rank 0 all."""
    own = list(range(len(prompts))) if central else list(range(world.rank, len(prompts), world.size))
    if central and world.rank:
        own = []
    found = alone([prompts[i] for i in own], seed_of=lambda i, k: seed_of(own[i], k))
    with phase("time/gather"):
        if central:
            return world.broadcast(found)
        each = world.all_gather([found[i : i + size] for i in range(0, len(found), size)])
    return [t for i in range(len(prompts)) for t in each[i % world.size][i // world.size]]


def score(scorer: Scorer | None, trajectories: list[Trajectory], rows: Mapping[int, Any]) -> list[Trajectory]:
    """The trajectories with their rewards; `rows[index]` is the dataset row, whose columns the rewards receive."""
    rewards = _Rewards(scorer, {t.row: rows[t.row] for t in trajectories})
    rewards.add_all(trajectories)
    return rewards.given_to(trajectories)


class _Rewards:
    """Trajectories on their way to their rewards; the columns of all `rows`, by index, are shown for each of them.

    Rewards of the environment and of steps are added to the scorer's; without a scorer they are all there is.
    """

    def __init__(self, scorer: Scorer | None, rows: Mapping[int, Any]) -> None:
        self._scoring, self._rows = None if scorer is None else scorer.begin(), rows
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

    def poll(self) -> None:
        """Let the scorer go on."""
        if self._scoring is not None:
            self._scoring.poll()

    def given_to(self, trajectories: list[Trajectory], missing_eos_penalty: float = 0.0) -> list[Trajectory]:
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
