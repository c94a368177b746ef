"""Environments on workers that come and go: the answers are those of one process, and a worker that is new plays again."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from hostile_environments import BadReset, Counting

from psigrad.language.rollout.episodes.environment_pool import EnvironmentPool
from psigrad.language.rollout.episodes.environments import Fault, InProcess, Playing
from psigrad.language.rollout.episodes.ray_environments import Call, EnvironmentWorker, RayEnvironments

ROWS = [{"name": name} for name in "abcdefghijk"]


class Actor:
    """An `EnvironmentWorker` called as Ray calls one."""

    def __init__(self, make) -> None:
        self.worker = EnvironmentWorker(make)
        for name in ("play", "rows"):
            setattr(self, name, SimpleNamespace(remote=getattr(self.worker, name)))


class Workers:
    """A `Fleet` of two in this process. Before a job its worker may be lost, and a new one takes its place."""

    def __init__(self, make, seed: int, losses: float, *, at_home: bool = True) -> None:
        self.make, self.rng, self.losses, self.at_home = make, random.Random(seed), losses, at_home
        self.wanted, self.lost, self.actors = 2, 0, [Actor(make), Actor(make)]

    def run(self, jobs, homes):
        order = list(enumerate(zip(jobs, homes, strict=True)))
        self.rng.shuffle(order)
        for place, (job, home) in order:
            if self.rng.random() < self.losses:
                self.actors[self.rng.randrange(2)], self.lost = Actor(self.make), self.lost + 1
            known = self.at_home and home.worker in self.actors
            home.worker = home.worker if known else self.rng.choice(self.actors)
            yield place, job(home.worker)


class Stepping(InProcess):
    """Counts the calls of all environments."""

    calls = 0

    def step(self, turns):
        Stepping.calls += len(turns)
        return super().step(turns)


def played(playing: Playing, seed: int) -> list[object]:
    """Three batches of episodes, in which some end, some break and some are left alone for a turn."""
    rng, said = random.Random(seed), []
    for _ in range(3):
        rows = ROWS[: rng.randint(1, len(ROWS))]
        said.append(playing.begin(rows))
        live = {i for i, opening in enumerate(said[-1]) if not isinstance(opening, Fault)}
        while live:
            turns = {i: rng.choice(["x", "yy", "end", "raise"]) for i in sorted(live) if rng.random() < 0.8}
            answers = playing.step(turns) if turns else {}
            said.append(answers)
            live -= {i for i, answer in answers.items() if isinstance(answer, Fault) or answer.done}
    return said


@pytest.mark.parametrize("losses", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("seed", range(5))
def test_workers_that_are_lost_change_no_answer(seed, losses):
    fleet = Workers(lambda: InProcess(Counting), seed, losses)
    assert played(RayEnvironments(fleet), seed) == played(InProcess(Counting), seed)
    assert (fleet.lost > 0) == (losses > 0)


def test_a_worker_that_would_not_play_again_is_noticed(monkeypatch):
    """Negative control: whoever takes a lost worker's episodes for new ones gives other answers."""
    play = EnvironmentWorker.play
    short = lambda calls: [Call(call.number, call.row, call.turns[-1:]) for call in calls]  # noqa: E731
    monkeypatch.setattr(EnvironmentWorker, "play", lambda self, batch, calls: play(self, batch, short(calls)))
    for seed in range(5):
        fleet = Workers(lambda: InProcess(Counting), seed, 0.3)
        assert played(RayEnvironments(fleet), seed) != played(InProcess(Counting), seed)


def test_at_home_nothing_is_played_twice():
    counts = []
    for at_home in (True, False):
        Stepping.calls = 0
        environments = RayEnvironments(Workers(lambda: Stepping(Counting), 0, 0.0, at_home=at_home))
        environments.begin(ROWS)
        for _ in range(6):
            environments.step(dict.fromkeys(range(len(ROWS)), "x"))
        counts.append(Stepping.calls)
    assert counts[0] == 6 * len(ROWS) < counts[1]


def test_an_opening_that_breaks_is_its_own_episodes():
    rows = [{"name": name} for name in ("a", "raise", "b")]
    fleet = Workers(lambda: InProcess(BadReset), 0, 1.0)
    ours, theirs = RayEnvironments(fleet), InProcess(BadReset)
    assert ours.begin(rows) == theirs.begin(rows)
    assert isinstance(ours.begin(rows)[1], Fault)
    ours.begin(rows), theirs.begin(rows)
    assert ours.step({0: "x", 2: "y"}) == theirs.step({0: "x", 2: "y"})


def test_processes_that_can_be_killed_stand_behind_a_worker():
    pools = []

    def make():
        pools.append(EnvironmentPool(Counting, timeout=60.0))
        return pools[-1]

    try:
        worker = EnvironmentWorker(make)
        row = {"name": "a"}
        assert worker.play(1, [Call(0, row, ()), Call(1, row, ())]).keys() == {0, 1}
        found = worker.play(1, [Call(0, row, ("exit",)), Call(1, row, ("x",))])
        assert isinstance(found[0], Fault) and found[1].observation == "a 1"
    finally:
        for pool in pools:
            pool.close()
