"""Environments on workers that come and go: the answers are those of one process, and a worker that is new plays again."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hostile_environments import BadReset, Counting

from psigrad.language.episodes.environment_pool import EnvironmentPool
from psigrad.language.episodes.environments import EpisodeCall, Fault, InProcess, Playing
from psigrad.processes.parallel.world import ALONE
from psigrad_extras.cluster.ray_environments import EnvironmentWorker, RayEnvironments

ROWS = [{"name": name} for name in "abcdefghijk"]


class Actor:
    """An `EnvironmentWorker` called as Ray calls one."""

    def __init__(self, make) -> None:
        self.worker = EnvironmentWorker(make)
        for name in ("answer", "rows"):
            setattr(self, name, SimpleNamespace(remote=getattr(self.worker, name)))


class Workers:
    """An `ActorPool` of two in this process. Before a job its worker may be lost, and a new one takes its place."""

    def __init__(self, make, seed: int, losses: float, *, stays: bool = True) -> None:
        self.make, self.rng, self.losses, self.stays = make, random.Random(seed), losses, stays
        self.wanted, self.lost, self.actors = 2, 0, [Actor(make), Actor(make)]

    def begin(self):
        return Jobs(self)


class Jobs:
    """The jobs of a batch; each look at its answers has some of them done, in any order."""

    def __init__(self, workers: Workers) -> None:
        self.workers, self.jobs = workers, []

    def give_up(self):
        self.jobs = []

    def add(self, job, affinity):
        self.jobs.append((job, affinity))

    def answers(self, seconds):
        own, found = self.workers, []
        own.rng.shuffle(self.jobs)
        for _ in range(own.rng.randint(0, len(self.jobs))):
            job, affinity = self.jobs.pop()
            if own.rng.random() < own.losses:
                own.actors[own.rng.randrange(2)], own.lost = Actor(own.make), own.lost + 1
            known = own.stays and affinity.worker in own.actors
            affinity.worker = affinity.worker if known else own.rng.choice(own.actors)
            found.append((0, job(affinity.worker)))
        return found


class Stepping(Counting):
    """Counts the turns of all environments."""

    turns = 0

    def step(self, text):
        Stepping.turns += 1
        return super().step(text)


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
    workers = Workers(lambda: InProcess(Counting), seed, losses)
    assert played(RayEnvironments(workers, ALONE), seed) == played(InProcess(Counting), seed)
    assert (workers.lost > 0) == (losses > 0)


def test_a_worker_that_would_not_play_again_is_noticed(monkeypatch):
    """Negative control: whoever takes a lost worker's episodes for new ones gives other answers."""
    answer = EnvironmentWorker.answer
    short = lambda calls: [replace(call, turns=call.turns[-1:]) for call in calls]  # noqa: E731
    monkeypatch.setattr(EnvironmentWorker, "answer", lambda self, calls: answer(self, short(calls)))
    for seed in range(5):
        workers = Workers(lambda: InProcess(Counting), seed, 0.3)
        assert played(RayEnvironments(workers, ALONE), seed) != played(InProcess(Counting), seed)


def test_where_episodes_stay_nothing_is_played_twice():
    counts = []
    for stays in (True, False):
        Stepping.turns = 0
        environments = RayEnvironments(Workers(lambda: InProcess(Stepping), 0, 0.0, stays=stays), ALONE)
        environments.begin(ROWS)
        for _ in range(6):
            environments.step(dict.fromkeys(range(len(ROWS)), "x"))
        counts.append(Stepping.turns)
    assert counts[0] == 6 * len(ROWS) < counts[1]


def test_an_opening_that_breaks_is_its_own_episodes():
    rows = [{"name": name} for name in ("a", "raise", "b")]
    workers = Workers(lambda: InProcess(BadReset), 0, 1.0)
    ours, theirs = RayEnvironments(workers, ALONE), InProcess(BadReset)
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
        assert worker.answer([EpisodeCall(1, 0, row), EpisodeCall(1, 1, row)]).keys() == {0, 1}
        found = worker.answer([EpisodeCall(1, 0, row, ("exit",)), EpisodeCall(1, 1, row, ("x",))])
        assert isinstance(found[0], Fault) and found[1].observation == "a 1"
    finally:
        for pool in pools:
            pool.close()
