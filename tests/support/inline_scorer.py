"""Reward functions called where the test stands, without processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Self

from psigrad.language.rewards import Result, RewardSpec, Samples, Scoring
from psigrad.language.rewards.reward_pool import RewardCall, check_weights, combine, enter, name_apart
from psigrad.language.rewards.reward_worker import Part, ask
from psigrad.language.rollout.scoring import select


class InlineScorer:
    """What `RewardPool` does, in this process; nothing here can stop a function that hangs."""

    def __init__(self, specs: Sequence[RewardSpec], *, weights: Sequence[float] = (), failure_value: float = 0.0) -> None:
        self.specs = name_apart(specs)
        self.weights, self.failure_value = check_weights(self.specs, weights), failure_value

    def begin(self) -> Scoring:
        return Scoring(lambda groups: [result for group in groups for result in self._scored(group)])

    def _scored(self, samples: Samples) -> list[Result]:
        parts: list[dict[int, Part]] = [{} for _ in self.specs]
        calls = deque(RewardCall(which, tuple(range(len(samples)))) for which in range(len(self.specs)))
        while calls:
            call = calls.popleft()
            spec = self.specs[call.function]
            answer = ask(spec.name, spec.function, select(samples.arguments, call.samples))
            calls.extendleft(reversed([again for job in enter(call, answer, parts) for again in job]))
        names = [spec.name for spec in self.specs]
        return [combine(names, self.weights, [p[i] for p in parts], self.failure_value) for i in range(len(samples))]


class PoolHere(InlineScorer):
    """Stands for the `RewardPool` of a run in tests of something else: to start a worker takes longer than most of their runs."""

    def __init__(self, specs: Sequence[RewardSpec], *, weights: Sequence[float] = (), **processes: object) -> None:
        super().__init__(specs, weights=weights)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


def results(scorer, *groups: Samples) -> list[Result]:
    """The results of these groups."""
    scoring = scorer.begin()
    for group in groups:
        scoring.add(group)
    return scoring.results()
