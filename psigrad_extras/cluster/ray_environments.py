"""Environments on a Ray cluster. On each machine, they run in processes that can be killed, as on the trainer's machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from psigrad.language.episodes.environments import Answer, EpisodeCall, Playing
from psigrad.processes.parallel.world import World
from psigrad_extras.cluster.actor_pool import ActorPool, Affinity, JobBatch

# The number of parts into which each actor's episodes are divided, so that none waits long for the slowest.
PARTS = 4


class EnvironmentWorker:
    """A worker that plays episodes on the cluster."""

    def __init__(self, make: Callable[[], Playing]) -> None:
        self.playing = make()

    def ready(self) -> bool:
        """Return True once the processes have started."""
        return True

    def rows(self, count: int, seed: int) -> list[Mapping[str, Any]] | None:
        """Return the environment's own rows. See `Playing`."""
        return self.playing.rows(count, seed)

    def answer(self, calls: Sequence[EpisodeCall]) -> dict[int, Answer]:
        """Return the answers to these calls, by episode number. See `Playing`."""
        return self.playing.answer(calls)


class RayEnvironments(Playing):
    """Episodes on the workers of an `ActorPool`. Each stays on the worker where it started, unless that worker is lost.

    Rank 0 has the pool and plays for all ranks. The other ranks only receive the rows.
    """

    def __init__(self, pool: ActorPool | None, world: World) -> None:
        self._pool, self._world = pool, world
        self._affinities: dict[int, Affinity] = {}
        self._calls: list[EpisodeCall] = []
        self._jobs: JobBatch | None = None

    def submit(self, calls: Sequence[EpisodeCall]) -> None:
        """Store the calls. The next `answers` sends them in parts, because a worker runs one part at a time. See `Playing`."""
        if new := [call.number for call in calls if not call.turns]:
            parts = [Affinity() for _ in range(PARTS * self._actors.wanted)]
            self._affinities |= {number: parts[place * len(parts) // len(new)] for place, number in enumerate(new)}
        self._calls += calls

    def answers(self, seconds: float) -> dict[int, Answer]:
        """Send the stored calls, and return the answers that arrive within `seconds`. See `Playing`."""
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
        """Drop all calls without an answer. See `Playing`."""
        if self._jobs is not None:
            self._jobs.give_up()
        self._calls, self._jobs = [], None

    @property
    def _actors(self) -> ActorPool:
        assert self._pool is not None, "only rank 0 plays"
        return self._pool

    def rows(self, count: int, seed: int) -> list[Mapping[str, Any]] | None:
        """Return the environment's own rows on all ranks, read from one worker. See `Playing`."""
        rows: list[Mapping[str, Any]] | None = None
        if self._pool is not None:
            ((_, rows),) = self._pool.run([lambda actor: actor.rows.remote(count, seed)])
        return self._world.broadcast(rows)


def _ask(calls: Sequence[EpisodeCall], actor: Any) -> Any:
    return actor.answer.remote(calls)
