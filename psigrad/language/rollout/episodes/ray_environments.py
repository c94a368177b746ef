"""Environments on a Ray cluster: on each machine processes that can be killed, as on the trainer's own.

An environment depends on its row and the policy's turns alone. So what a worker is asked names both: one that has not played the
episode so far, since another has been lost, plays it again and answers the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from psigrad.language.rollout.episodes.environments import Fault, Observation, Playing, Step
from psigrad.processes.parallel.fleet import Fleet, Home
from psigrad.processes.parallel.world import World

Said = Observation | Step | Fault | None
# Parts of each worker's share that the episodes are dealt in, so that none waits long for the slowest.
PARTS = 4


@dataclass(frozen=True)
class Call:
    """What an episode is asked: after its `turns` so far the answer to the last, or the opening where there is none."""

    number: int
    row: Mapping[str, Any]
    turns: tuple[str, ...]


class EnvironmentWorker:
    """What runs on the cluster: episodes of its own."""

    def __init__(self, make: Callable[[], Playing]) -> None:
        self.playing = make()
        self.batch = -1
        self.played: dict[int, tuple[str, ...]] = {}

    def ready(self) -> bool:
        """Answers when the processes are there."""
        return True

    def rows(self, count: int, seed: int) -> list[Mapping[str, Any]] | None:
        """See `Playing`."""
        return self.playing.rows(count, seed)

    def play(self, batch: int, calls: Sequence[Call]) -> dict[int, Said]:
        """The answer to each call. Episodes of another batch are over."""
        if batch != self.batch:
            self.playing.clear()
            self.batch, self.played = batch, {}
        new = [call for call in calls if not call.turns or self.played.get(call.number) != call.turns[:-1]]
        opened = self.playing.open({call.number: call.row for call in new}) if new else {}
        found: dict[int, Said] = {
            call.number: opened[call.number] for call in new if not call.turns or isinstance(opened[call.number], Fault)
        }
        told = {call.number: 0 if call.number in opened else len(call.turns) - 1 for call in calls}
        while turn := {call.number: call.turns[told[call.number]] for call in calls if call.number not in found}:
            said = self.playing.step(turn)
            for call in calls:
                number = call.number
                if number in turn:
                    told[number] += 1
                    if told[number] == len(call.turns) or isinstance(said[number], Fault):
                        found[number] = said[number]
        self.played |= {call.number: call.turns for call in calls}
        return found


@dataclass
class _Episode:
    """An episode as the trainer sees it."""

    row: Mapping[str, Any]
    home: Home
    turns: list[str] = field(default_factory=list)


class RayEnvironments(Playing):
    """Episodes on the workers of a `Fleet`, each where it began for as long as that worker is there."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self._batch = 0
        self._episodes: dict[int, _Episode] = {}

    def clear(self) -> None:
        """See `Playing`."""
        self._batch += 1
        self._episodes = {}

    def open(self, rows: Mapping[int, Mapping[str, Any]]) -> dict[int, Observation | Fault | None]:
        """See `Playing`."""
        homes = [Home() for _ in range(PARTS * self.fleet.wanted)]
        for place, (number, row) in enumerate(rows.items()):
            self._episodes[number] = _Episode(row, homes[place * len(homes) // len(rows)])
        return self._answers(rows)  # type: ignore[return-value]

    def step(self, turns: Mapping[int, str]) -> dict[int, Step | Fault]:
        """See `Playing`."""
        for number, text in turns.items():
            self._episodes[number].turns.append(text)
        return self._answers(turns)  # type: ignore[return-value]

    def rows(self, count: int, seed: int) -> list[Mapping[str, Any]] | None:
        """See `Playing`. Every worker would bring the same."""
        (answer,) = self.fleet.run([lambda worker: worker.rows.remote(count, seed)])
        rows: list[Mapping[str, Any]] | None = answer[1]
        return rows

    def _answers(self, numbers: Mapping[int, Any]) -> dict[int, Said]:
        """What the environments say, part by part."""
        parts: dict[int, list[Call]] = {}
        homes: dict[int, Home] = {}
        for number in numbers:
            episode = self._episodes[number]
            homes[id(episode.home)] = episode.home
            parts.setdefault(id(episode.home), []).append(Call(number, episode.row, tuple(episode.turns)))
        jobs = [partial(_ask, self._batch, calls) for calls in parts.values()]
        found: dict[int, Said] = {}
        for _, answers in self.fleet.run(jobs, [homes[key] for key in parts]):
            found |= answers
        return {number: found[number] for number in numbers}


class OfRankZero(Playing):
    """Episodes that rank 0 plays for all, `there`; the others learn the rows."""

    def __init__(self, there: Playing | None, world: World) -> None:
        self.there, self._world = there, world

    def _own(self) -> Playing:
        assert self.there is not None, "only rank 0 plays"
        return self.there

    def clear(self) -> None:
        """See `Playing`."""
        self._own().clear()

    def open(self, rows: Mapping[int, Mapping[str, Any]]) -> dict[int, Observation | Fault | None]:
        """See `Playing`."""
        return self._own().open(rows)

    def step(self, turns: Mapping[int, str]) -> dict[int, Step | Fault]:
        """See `Playing`."""
        return self._own().step(turns)

    def rows(self, count: int, seed: int) -> list[Mapping[str, Any]] | None:
        """See `Playing`."""
        return self._world.broadcast(None if self.there is None else self.there.rows(count, seed))


def _ask(batch: int, calls: Sequence[Call], worker: Any) -> Any:
    return worker.play.remote(batch, calls)
