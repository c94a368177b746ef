"""Reward functions on a Ray cluster: on each machine a pool of processes that can be killed, as on the trainer's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from psigrad.language.rewards import Result, RewardPool, Samples, Scoring
from psigrad.processes.parallel.fleet import Fleet


class RewardWorker:
    """What runs on the cluster: a pool of its own."""

    def __init__(self, make: Callable[[], RewardPool]) -> None:
        self.pool = make()

    def ready(self) -> bool:
        """Answers when the pool is there."""
        return True

    def score(self, group: Samples) -> list[Result]:
        """The results of one group."""
        scoring = self.pool.begin()
        scoring.add(group)
        return scoring.results()


class RayScorer:
    """A `Scorer` by the workers of a `Fleet`, a group at a time. Results are those of a pool on this machine."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet

    def begin(self) -> Scoring:
        """See `Scorer`."""
        return RayScoring(self.fleet)


class RayScoring(Scoring):
    """A `Scoring` whose groups go out as soon as they are there."""

    def __init__(self, fleet: Fleet) -> None:
        self._turn = fleet.begin()
        self._found: dict[int, list[Result]] = {}

    def add(self, group: Samples) -> None:
        """See `Scoring`."""
        self._turn.add(partial(_ask, group))
        self.turn()

    def turn(self) -> None:
        """See `Scoring`."""
        self._found.update(self._turn.answers(0.0))

    def results(self) -> list[Result]:
        """See `Scoring`."""
        while self._turn.pending:
            self._found.update(self._turn.answers(1.0))
        return [result for place in range(len(self._found)) for result in self._found[place]]


def _ask(group: Samples, worker: Any) -> Any:
    return worker.score.remote(group)
