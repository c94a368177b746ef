"""A run that hangs is noticed: which phase, since when, and where every thread stands."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
from timing import until
from tiny_jobs import online_config
from tiny_rewards import Sleepy

from psigrad.language.recipes import online
from psigrad.runs import journal as watchdog
from psigrad.runs.journal import STACKS, Watchdog


@pytest.fixture
def clock(monkeypatch):
    """The watchdog's own clock: it moves only when a test says so, however long the machine takes for anything."""
    made = SimpleNamespace(now=100.0)
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: made.now, strftime=time.strftime))
    return made


def watched(folder, seconds, work):
    """The phases that were reported while `work(dog, told)` went on."""
    told = []
    dog = Watchdog(seconds, folder, lambda phase, spent: told.append(phase))
    with dog.watching():
        work(dog, told)
    return told


def stuck_here(clock, told, seconds=1.0):
    """Hang for so long, until that is noticed and for some more looks of the watchdog."""
    clock.now += seconds
    until(lambda: told)
    looks()


def looks():
    """Time for several looks of a watchdog of 0.2 s."""
    time.sleep(0.3)


def test_a_phase_that_hangs_is_named_once_with_the_stacks(tmp_path, capsys, clock):
    def work(dog, told):
        with dog.phase("score"):
            stuck_here(clock, told)

    assert watched(tmp_path, 0.2, work) == ["score"]
    stacks = (tmp_path / STACKS).read_text()
    assert ": score for " in stacks and "in stuck_here" in stacks
    assert "psigrad: The phase 'score' has lasted" in capsys.readouterr().err


def test_what_hangs_between_phases_is_noticed_too(tmp_path, clock):
    def work(dog, told):
        with dog.phase("score"):
            pass
        stuck_here(clock, told)

    assert watched(tmp_path, 0.2, work) == ["between the phases of a step"]
    assert watched(tmp_path, 0.2, lambda dog, told: stuck_here(clock, told)) == ["loading"]


def test_negative_control_phases_that_end_are_no_hang(tmp_path, clock):
    def work(dog, told):
        for _ in range(5):
            with dog.phase("update"):
                clock.now += 0.1
                looks()

    assert watched(tmp_path, 0.2, work) == [] and not (tmp_path / STACKS).exists()


def test_a_phase_that_is_usually_long_may_be(tmp_path, clock):
    def work(dog, told):
        with dog.phase("update"):
            clock.now += 0.15
        with dog.phase("update"):
            clock.now += 0.8
            looks()

    assert watched(tmp_path, 0.2, work) == []


def test_zero_switches_it_off(tmp_path, clock):
    def work(dog, told):
        clock.now += 1000.0
        looks()

    assert watched(tmp_path, 0.0, work) == []


def test_a_run_names_the_phase_in_its_events(job, tmp_path):
    config = online_config(job, tmp_path / "run", max_steps=1, watchdog_minutes=0.01)
    sleepy = partial(Sleepy, tmp_path / "run" / "events.jsonl")
    config = replace(config, environment=sleepy, environment_timeout=120.0, reward=())
    config = replace(config, prompts_per_step=1, num_generations=2, num_minibatches=1)
    done = online.run(replace(config, evaluation=replace(config.evaluation, eval_prompts=0)))
    events = [json.loads(line) for line in (done.folder / "events.jsonl").read_text().splitlines()]
    phases = [e["phase"] for e in events if e["kind"] == "hanging"]
    assert "sample" in phases  # on a busy machine loading hangs for as long, too
