"""Reward functions called where the test stands, without processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from psigrad.language.rewards import Result, RewardSpec, Samples, Scoring
from psigrad.language.rewards.outcomes import picked
from psigrad.language.rewards.pool import Job, checked_weights, combine, taken, unique
from psigrad.language.rewards.worker import Said, answer_of


class InlineScorer:
    """What `RewardPool` does, in this process; nothing here can stop a function that hangs."""

    def __init__(self, specs: Sequence[RewardSpec], *, weights: Sequence[float] = (), failure_value: float = 0.0) -> None:
        self.specs = unique(specs)
        self.weights, self.failure_value = checked_weights(self.specs, weights), failure_value

    def begin(self) -> Scoring:
        return Scoring(lambda groups: [result for group in groups for result in self._scored(group)])

    def _scored(self, samples: Samples) -> list[Result]:
        said: list[dict[int, Said]] = [{} for _ in self.specs]
        jobs = deque(Job((which,), tuple(range(len(samples)))) for which in range(len(self.specs)))
        while jobs:
            job = jobs.popleft()
            spec = self.specs[job.functions[0]]
            jobs.extendleft(reversed(taken(job, answer_of(spec.name, spec.function, picked(samples.shown, job.indices)), said)))
        names = [spec.name for spec in self.specs]
        return [combine(names, self.weights, [c[i] for c in said], self.failure_value) for i in range(len(samples))]


def results(scorer, *groups: Samples) -> list[Result]:
    """The results of these groups."""
    scoring = scorer.begin()
    for group in groups:
        scoring.add(group)
    return scoring.results()
