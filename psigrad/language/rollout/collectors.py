"""Collectors, which sample trajectories for prompts, and `ScoredRollout`, which scores each group while it samples more."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

from psigrad.language import images
from psigrad.language.rollout.exchange import gather_trajectories
from psigrad.language.rollout.scoring import Failed, Result, Samples, Scored, Scorer, Unscored
from psigrad.language.rollout.types import Completion, Prompt, Request, Sampler, SamplingParams, Trajectory
from psigrad.processes.parallel.world import ALONE, World
from psigrad.step import Clock

if TYPE_CHECKING:
    from psigrad.language.models.fused.caches import ActivationCache

DIGITS = 4
"""The decimal places of values per token in rollouts.jsonl."""
SeedOf = Callable[[int, int], int]
"""A function that returns a completion's seed, given the index of its prompt and its number in the group."""
ToSamples = Callable[[Sequence[Trajectory]], Samples]
"""A function that turns a group of trajectories into the samples that reward functions receive: texts and dataset columns."""


@dataclass(frozen=True)
class GroupRequest:
    """A request for `num_generations` trajectories of each prompt. Trajectory k of prompt i has the seed `seed_of(i, k)`.

    `version` is the number of training steps so far.
    """

    num_generations: int
    seed_of: SeedOf
    version: int


class TrajectoryCollector(Protocol):
    """A source of unscored trajectories for prompts: single completions, episodes, or sessions of agents."""

    @property
    def sampler(self) -> Sampler:
        """The sampler that completes prompts, or that answers an agent's requests."""

    @property
    def plays(self) -> bool:
        """True if a trajectory may have several turns."""

    def collect(
        self, prompts: Sequence[Prompt], params: SamplingParams, asked: GroupRequest, cache: ActivationCache | None = None
    ) -> Iterator[list[tuple[int, list[Trajectory]]]]:
        """Sample the trajectories that `asked` describes. Yield lists of (index of a prompt, its group) as groups are completed.

        A sampler may store activations in `cache` for the trainer.
        """

    def snapshot(self) -> Self:
        """Return a collector that samples with the policy's current weights; see `Sampler.snapshot`."""


@dataclass(frozen=True)
class Completions:
    """A collector that samples a single completion per trajectory."""

    sampler: Sampler
    decode: Callable[[Sequence[int]], str]
    """The function that decodes token ids to the text that users and reward functions see."""
    plays: bool = False

    def collect(
        self, prompts: Sequence[Prompt], params: SamplingParams, asked: GroupRequest, cache: ActivationCache | None = None
    ) -> Iterator[list[tuple[int, list[Trajectory]]]]:
        """Sample the completions that `asked` describes; see `TrajectoryCollector`."""
        numbers = range(asked.num_generations)
        requests = [Request(p.ids, tuple(asked.seed_of(i, k) for k in numbers)) for i, p in enumerate(prompts)]
        for completed in self.sampler.steps(requests, params, cache):
            groups = []
            for place, completions in completed:
                prompt, texts = prompts[place], [self.decode(c.ids) for c in completions]
                made = [
                    Trajectory(prompt.index, k, prompt.ids, c, asked.version, text=text, teacher_prompt_ids=prompt.teacher_ids)
                    for k, (c, text) in enumerate(zip(completions, texts, strict=True))
                ]
                groups.append((place, made))
            yield groups

    def snapshot(self) -> Completions:
        """Return a collector that samples with the policy's current weights; see `TrajectoryCollector`."""
        return replace(self, sampler=self.sampler.snapshot())


@dataclass(frozen=True)
class ScoredRollout:
    """A function that samples and scores trajectories for prompts. All processes of `world` share the work."""

    collector: TrajectoryCollector
    scorer: Scorer | None
    to_samples: Callable[[Mapping[int, Any]], ToSamples]
    """A function that takes dataset rows by index, and returns the `ToSamples` function for trajectories of these rows."""
    world: World = ALONE
    complete: bool = False
    """True if every process receives the tokens of all trajectories, so that a checkpoint can store pending collections."""

    def __call__(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        num_generations: int,
        seed_of: SeedOf,
        version: int,
        clock: Clock | None = None,
        cache: ActivationCache | None = None,
    ) -> list[Trajectory]:
        """Return `num_generations` scored trajectories per prompt (in a game: per prompt and player), in order of `prompts`.

        For the other arguments see `GroupRequest` and `TrajectoryCollector.collect`.
        """
        clock, world, central = clock or Clock(), self.world, self.collector.sampler.central
        share = range(world.rank, len(prompts), 1 if central else world.size)
        if central and world.rank:
            share = range(0)
        asked = GroupRequest(num_generations, lambda i, k: seed_of(share[i], k), version)
        found = self._collect([prompts[i] for i in share], params, asked, clock, cache) if share else []
        if world is ALONE:
            return found
        with clock("time/gather"):
            each = gather_trajectories(world, found, with_tokens=self.complete)
        if central:
            return each[0]
        count = sum(map(len, each)) // len(prompts)
        parts = [(each[i % world.size], i // world.size * count) for i in range(len(prompts))]
        return [t for made, at in parts for t in made[at : at + count]]

    def _collect(
        self, mine: Sequence[Prompt], params: SamplingParams, asked: GroupRequest, clock: Clock, cache: ActivationCache | None
    ) -> list[Trajectory]:
        """Sample and score the trajectories that `asked` describes for `mine`, the prompts of this process."""
        scoring = PendingRewards(self.scorer, self.to_samples({p.index: p.row for p in mine}))
        groups: dict[int, list[Trajectory]] = {}
        with clock("time/sample"):
            for completed in self.collector.collect(mine, params, asked, cache):
                for place, group in completed:
                    groups[place] = group
                    scoring.add(group)
                scoring.poll()
        with clock("time/score"):
            return scoring.assign_to([t for place in range(len(mine)) for t in groups[place]])

    def snapshot(self) -> ScoredRollout:
        """Return a rollout that samples with the policy's current weights; see `Sampler.snapshot`."""
        return replace(self, collector=self.collector.snapshot())


class PendingRewards:
    """Trajectories that wait for their rewards.

    A reward is the sum of the scorer's and the environment's rewards. Without a scorer, only the environment gives rewards.
    """

    def __init__(self, scorer: Scorer | None, to_samples: ToSamples) -> None:
        self._scoring, self._to_samples = None if scorer is None else scorer.begin(), to_samples
        self._places: dict[int, int] = {}

    def add_all(self, trajectories: Sequence[Trajectory]) -> None:
        """Add all trajectories, divided into groups."""
        starts = [i for i, t in enumerate(trajectories) if t.k == 0 or i == 0]  # adjacent groups may have the same `row`
        for start, end in itertools.pairwise([*starts, len(trajectories)]):
            self.add(trajectories[start:end])

    def add(self, group: Sequence[Trajectory]) -> None:
        """Send one group to the scorer."""
        self._places |= {id(t): len(self._places) + i for i, t in enumerate(group)}
        if self._scoring is not None:
            self._scoring.add(self._to_samples(group))

    def poll(self) -> None:
        """Let the scorer make progress, but do not wait for it."""
        if self._scoring is not None:
            self._scoring.poll()

    def assign_to(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Wait for the scores, and return the trajectories with their rewards. All of them must have been passed to `add`."""
        results: Sequence[Result] = [Scored(0.0)] * len(trajectories) if self._scoring is None else self._scoring.results()
        return [add_reward(t, results[self._places[id(t)]]) for t in trajectories]


def add_reward(trajectory: Trajectory, result: Result) -> Trajectory:
    """Add the reward: the scorer's value plus step rewards. If the environment, agent or scorer failed, set status "unscored"."""
    if trajectory.reason:  # the environment or the agent failed
        return replace(trajectory, status="unscored")
    if isinstance(result, Unscored):
        return replace(trajectory, status="unscored", reason=result.reason)
    steps = (*trajectory.step_rewards, *getattr(result, "steps", ()))
    parts = dict(result.parts)
    if trajectory.step_rewards:
        seat = "environment" if trajectory.seat is None else f"seat_{trajectory.seat}"
        parts[seat if trajectory.answer is None else "agent"] = trajectory.step_return
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


def rollout_row(
    trajectory: Trajectory,
    step: int,
    kind: Literal["train", "eval"],
    prompt: str | Sequence[dict[str, Any]],
    advantage: float | None = None,
) -> dict[str, Any]:
    """Return one line of rollouts.jsonl; `records.rows.RolloutRow` documents its keys."""
    completion = trajectory.completion
    row: dict[str, Any] = {
        "step": step,
        "kind": kind,
        "row": trajectory.row,
        "k": trajectory.k,
        "prompt": images.record_prompt(prompt),
        "completion": trajectory.text,
        "completion_ids": list(completion.ids),
        "reward": trajectory.reward,
        "parts": trajectory.parts,
        "status": trajectory.status,
        "reason": trajectory.reason,
        "advantage": advantage,
        "finish_reason": completion.finish_reason,
        "seed": completion.seed,
        "version": trajectory.version,
    }
    if trajectory.mask:
        row |= {"turns": trajectory.turns, "mask": [int(m) for m in trajectory.mask]}
    if trajectory.seat is not None:
        row["seat"] = trajectory.seat
    if trajectory.answer is not None or trajectory.branches or trajectory.seat is not None:
        row["contexts"] = [(context.start, list(context.prompt_ids)) for context in trajectory.contexts]
    if trajectory.cuts:
        row["cuts"] = [cut._asdict() for cut in trajectory.cuts]
    if trajectory.step_rewards:
        row["step_rewards"] = [list(pair) for pair in trajectory.step_rewards]
    return row


def log_probs_of(completion: Completion) -> dict[str, list[float]]:
    """Return a completion's `logprobs` for rollouts.jsonl, and its `sampling_logprobs` if these differ, as with top-k."""
    same = completion.logprobs == completion.sampling_logprobs
    sampling = {} if same else {"sampling_logprobs": round_all(completion.sampling_logprobs)}
    return {"logprobs": round_all(completion.logprobs), **sampling}


def round_all(values: Sequence[float]) -> list[float]:
    """Return the values rounded to `DIGITS` decimal places."""
    return [round(float(value), DIGITS) for value in values]
