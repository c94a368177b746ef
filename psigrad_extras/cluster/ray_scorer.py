"""Reward functions on a Ray cluster. On each machine, they run in processes that can be killed, as on the trainer's machine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from psigrad.language.rewards import Result, RewardPool, Samples, Scoring
from psigrad_extras.cluster.actor_pool import ActorPool


class RewardWorker:
    """A worker on a Ray cluster that scores groups with a `RewardPool`."""

    def __init__(self, make: Callable[[], RewardPool]) -> None:
        self.pool = make()

    def ready(self) -> bool:
        """Return once the pool has started."""
        return True

    def score(self, group: Samples) -> list[Result]:
        """Return the results of one group, one for each sample."""
        scoring = self.pool.begin()
        scoring.add(group)
        return scoring.results()


class RayScorer:
    """A `Scorer` on the workers of an `ActorPool`. A job is one group. Results are the same as with a pool on this machine."""

    def __init__(self, pool: ActorPool) -> None:
        self.pool = pool

    def begin(self) -> Scoring:
        """Return a new scoring, whose groups are sent to the workers. See `Scorer`."""
        return RayScoring(self.pool)


class RayScoring(Scoring):
    """A `Scoring` whose groups are sent as soon as they are added."""

    def __init__(self, pool: ActorPool) -> None:
        self._batch = pool.begin()
        self._results: dict[int, list[Result]] = {}

    def add(self, group: Samples) -> None:
        """Send a group to a worker. See `Scoring`."""
        self._batch.add(partial(_ask, group))
        self.poll()

    def poll(self) -> None:
        """Collect the results that have arrived, without waiting. See `Scoring`."""
        self._results.update(self._batch.answers(0.0))

    def results(self) -> list[Result]:
        """Wait for all results, and return them in the order of the samples. See `Scoring`."""
        while self._batch.pending:
            self._results.update(self._batch.answers(1.0))
        return [result for place in range(len(self._results)) for result in self._results[place]]


def _ask(group: Samples, actor: Any) -> Any:
    return actor.score.remote(group)
