"""A run that hangs is noticed: which phase, since when, and where every thread stands."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace

from tiny_jobs import online_config

from psigrad.recipes import online
from psigrad.training.watchdog import STACKS, Watchdog


def watched(folder, seconds, work):
    told = []
    dog = Watchdog(seconds, folder, lambda phase, spent: told.append(phase))
    with dog.watching():
        work(dog)
    return told


def stuck_here(seconds):
    threading.Event().wait(seconds)


def test_a_phase_that_hangs_is_named_once_with_the_stacks(tmp_path, capsys):
    def work(dog):
        with dog.phase("score"):
            stuck_here(1.0)

    assert watched(tmp_path, 0.2, work) == ["score"]
    stacks = (tmp_path / STACKS).read_text()
    assert ": score for " in stacks and "in stuck_here" in stacks
    assert "psigrad: score has lasted" in capsys.readouterr().err


def test_what_hangs_between_phases_is_noticed_too(tmp_path):
    def work(dog):
        with dog.phase("score"):
            pass
        stuck_here(0.8)

    assert watched(tmp_path, 0.2, work) == ["between the phases of a step"]
    assert watched(tmp_path, 0.2, lambda dog: stuck_here(0.8)) == ["loading"]


def test_negative_control_phases_that_end_are_no_hang(tmp_path):
    def work(dog):
        for _ in range(30):
            with dog.phase("update"):
                time.sleep(0.03)

    assert watched(tmp_path, 0.3, work) == [] and not (tmp_path / STACKS).exists()


def test_a_phase_that_is_usually_long_may_be(tmp_path):
    def work(dog):
        with dog.phase("update"):
            stuck_here(0.15)
        with dog.phase("update"):
            stuck_here(0.8)

    assert watched(tmp_path, 0.2, work) == []


def test_zero_switches_it_off(tmp_path):
    assert watched(tmp_path, 0.0, lambda dog: stuck_here(0.3)) == []


class Sleepy:
    """An environment whose first answer takes a while."""

    def reset(self, row):
        return None

    def step(self, text):
        time.sleep(1.5)
        return "", 1.0, True


def test_a_run_names_the_phase_in_its_events(job, tmp_path):
    config = online_config(job, tmp_path / "run", max_steps=1, watchdog_minutes=0.01)
    config = replace(config, environment=Sleepy, reward=(), prompts_per_step=1, num_generations=2, num_minibatches=1)
    done = online.run(replace(config, evaluation=replace(config.evaluation, eval_prompts=0)))
    events = [json.loads(line) for line in (done.folder / "events.jsonl").read_text().splitlines()]
    phases = [e["phase"] for e in events if e["kind"] == "hanging"]
    assert "sample" in phases  # on a busy machine loading hangs for as long, too
