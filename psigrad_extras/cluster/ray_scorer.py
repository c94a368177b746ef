"""Reward functions on a Ray cluster: on each machine processes that can be killed, as on the trainer's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from psigrad.language.rewards import Result, RewardPool, Samples, Scoring
from psigrad_extras.cluster.actor_pool import ActorPool


class RewardWorker:
    """A worker on a Ray cluster with a pool of processes that can be killed, as on the trainer's machine."""

    def __init__(self, make: Callable[[], RewardPool]) -> None:
        self.pool = make()

    def ready(self) -> bool:
        """Return once the pool has started."""
        return True

    def score(self, group: Samples) -> list[Result]:
        """The results of one group."""
        scoring = self.pool.begin()
        scoring.add(group)
        return scoring.results()


class RayScorer:
    """A `Scorer` on the actors of a pool, a group at a time. Results are the same as with a pool on this machine."""

    def __init__(self, pool: ActorPool) -> None:
        self.pool = pool

    def begin(self) -> Scoring:
        """See `Scorer`."""
        return RayScoring(self.pool)


class RayScoring(Scoring):
    """A `Scoring` whose groups are sent as soon as they are added."""

    def __init__(self, pool: ActorPool) -> None:
        self._batch = pool.begin()
        self._results: dict[int, list[Result]] = {}

    def add(self, group: Samples) -> None:
        """See `Scoring`."""
        self._batch.add(partial(_ask, group))
        self.poll()

    def poll(self) -> None:
        """See `Scoring`."""
        self._results.update(self._batch.answers(0.0))

    def results(self) -> list[Result]:
        """See `Scoring`."""
        while self._batch.pending:
            self._results.update(self._batch.answers(1.0))
        return [result for place in range(len(self._results)) for result in self._results[place]]


def _ask(group: Samples, actor: Any) -> Any:
    return actor.score.remote(group)
