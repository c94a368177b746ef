"""Environments on a Ray cluster. Each machine has processes that can be killed, like the trainer's machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from psigrad.language.episodes.environments import Answer, EpisodeCall, Playing
from psigrad.processes.parallel.world import World
from psigrad_extras.cluster.actor_pool import ActorPool, Affinity, JobBatch

# The number of parts of each actor's share of episodes, so that none waits long for the slowest.
PARTS = 4


class EnvironmentWorker:
    """A worker that plays episodes on the cluster."""

    def __init__(self, make: Callable[[], Playing]) -> None:
        self.playing = make()

    def ready(self) -> bool:
        """Return True once the processes have started."""
        return True

    def rows(self, count: int, seed: int) -> list[Mapping[str, Any]] | None:
        """See `Playing`."""
        return self.playing.rows(count, seed)

    def answer(self, calls: Sequence[EpisodeCall]) -> dict[int, Answer]:
        """See `Playing`."""
        return self.playing.answer(calls)


class RayEnvironments(Playing):
    """Episodes on the actors of a pool. Each stays on the actor where it started, as long as that actor exists.

    Rank 0 has the pool and plays for all ranks. The others only get the rows.
    """

    def __init__(self, pool: ActorPool | None, world: World) -> None:
        self._pool, self._world = pool, world
        self._affinities: dict[int, Affinity] = {}
        self._calls: list[EpisodeCall] = []
        self._jobs: JobBatch | None = None

    def submit(self, calls: Sequence[EpisodeCall]) -> None:
        """See `Playing`. The calls are issued at the next `answers`, part by part, since an actor takes one part at a time."""
        if new := [call.number for call in calls if not call.turns]:
            parts = [Affinity() for _ in range(PARTS * self._actors.wanted)]
            self._affinities |= {number: parts[place * len(parts) // len(new)] for place, number in enumerate(new)}
        self._calls += calls

    def answers(self, seconds: float) -> dict[int, Answer]:
        """See `Playing`."""
        together: dict[Affinity, list[EpisodeCall]] = {}
        for call in self._calls:
            together.setdefault(self._affinities[call.number], []).append(call)
        self._calls = []
        jobs = self._jobs = self._jobs or self._actors.begin()
        for affinity, part in together.items():
            jobs.add(partial(_ask, part), affinity)
        answers: dict[int, Answer] = {}
        for _, answered in jobs.answers(min(seconds, 1.0)):
            answers |= answered
        return answers

    def give_up(self) -> None:
        """See `Playing`."""
        if self._jobs is not None:
            self._jobs.give_up()
        self._calls, self._jobs = [], None

    @property
    def _actors(self) -> ActorPool:
        assert self._pool is not None, "only rank 0 plays"
        return self._pool

    def rows(self, count: int, seed: int) -> list[Mapping[str, Any]] | None:
        """See `Playing`. Every actor would return the same rows."""
        rows: list[Mapping[str, Any]] | None = None
        if self._pool is not None:
            ((_, rows),) = self._pool.run([lambda actor: actor.rows.remote(count, seed)])
        return self._world.broadcast(rows)


def _ask(calls: Sequence[EpisodeCall], actor: Any) -> Any:
    return actor.answer.remote(calls)
