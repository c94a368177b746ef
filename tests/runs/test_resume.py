"""kill -9 at any point, start again: weights, optimiser, metrics and rollouts are those of the run that was never killed."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest
from resuming import MORE_RECIPES, RECIPES, digest, dying_at
from tiny_jobs import forked

SLOW, LONG = pytest.mark.slow, pytest.mark.long
SHORT = {"max_steps": 4}
"""Two checkpoints, and an evaluation between them."""


@pytest.fixture(scope="module", params=RECIPES)
def uninterrupted(request, job, tmp_path_factory):
    """A whole run, its digest, and how many events it had."""
    return whole(*RECIPES[request.param], job, tmp_path_factory.mktemp(request.param))


# an agent's sessions are episodes too, KTO is a loss in DPO's recipe, and GRPO draws a dropout as they all do
RARE = {"agent", "kto", "grpo one part", *(name for name in MORE_RECIPES if "dropout" in name and name != "grpo dropout")}


@pytest.fixture(scope="module", params=[pytest.param(r, marks=SLOW if r in RARE else ()) for r in MORE_RECIPES])
def another(request, job, tmp_path_factory):
    """The same of the other recipes."""
    return whole(*MORE_RECIPES[request.param], job, tmp_path_factory.mktemp(request.param.replace(" ", "-")))


def whole(run, config, job, folder):
    counter = folder / "events"

    def work():
        seen: list[str] = []
        dying_at(0, seen)
        run(config(job, folder / "run", **SHORT))
        counter.write_text("\n".join(seen))

    assert forked(work) == 0
    events = counter.read_text().splitlines()
    assert len(events) > 40
    return run, config, digest(folder / "run"), events


def killed_then_resumed(run, config, job, output: Path, points: list[int]) -> None:
    for point in points:

        def doomed(point=point):
            dying_at(point)
            run(config(job, output, **SHORT))

        status = forked(doomed)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, f"the kill at event {point} did not land"
    assert forked(lambda: run(config(job, output, **SHORT))) == 0


@pytest.mark.parametrize("index", [0, *(pytest.param(i, marks=SLOW if i < 5 else LONG) for i in range(1, 10))])
def test_a_killed_run_resumes_bitwise(index, uninterrupted, job, tmp_path):
    run, config, expected, events = uninterrupted
    point = random.Random(index).randrange(1, len(events))
    killed_then_resumed(run, config, job, tmp_path / "run", [point])
    assert digest(tmp_path / "run") == expected, f"killed at event {point}: {events[point - 1]}"


@pytest.mark.parametrize("index", [0, *(pytest.param(i, marks=SLOW) for i in range(1, 4))])
def test_every_recipe_resumes_bitwise(index, another, job, tmp_path):
    run, config, expected, events = another
    point = random.Random(index).randrange(len(events) // 2, len(events))  # behind the first checkpoint
    killed_then_resumed(run, config, job, tmp_path / "run", [point])
    assert digest(tmp_path / "run") == expected, f"killed at event {point}: {events[point - 1]}"


def test_what_a_critic_learned_is_part_of_the_digest(another, job):
    _, config, expected, _ = another
    name = next(name for name, recipe in MORE_RECIPES.items() if recipe[1] is config)
    wanted = {"ppo": {"critic", "critic's optimizer"}, "ppo shared": {"value head"},
              "following reference": {"reference"}, "past selves": {"past self", "other past self"}}  # fmt: skip
    assert wanted.get(name, set()) <= expected.keys()


def test_a_run_killed_again_and_again_resumes_bitwise(uninterrupted, job, tmp_path, record_property):
    """Each life dies a little later than it takes to reach the next checkpoint, so the chain makes progress."""
    run, config, expected, events = uninterrupted
    life = max(len(events) // 3, 1) + len(events) // 5
    record_property("count", 2)
    killed_then_resumed(run, config, job, tmp_path / "run", [life, len(events) // 4])
    assert digest(tmp_path / "run") == expected


def test_negative_control_another_seed_gives_another_digest(uninterrupted, job, tmp_path):
    run, config, expected, _ = uninterrupted
    assert forked(lambda: run(config(job, tmp_path / "run", seed=1, **SHORT))) == 0
    other = digest(tmp_path / "run")
    assert all(other[name] != expected[name] for name in ("metrics", "rollouts", "weights", "optimizer"))
