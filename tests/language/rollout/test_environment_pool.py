"""A user's environments and tools run in processes of their own: what they do costs their own episode alone."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from functools import partial

import psutil
import pytest
from hostile_environments import BadReset, Counting, Exiting, Half, NoWay, Odd, slow_tool
from timing import LIMITS
from tiny_jobs import online_config

from psigrad.errors import UserError
from psigrad.language.episodes.environment_pool import EnvironmentPool
from psigrad.language.episodes.environments import Fault, InProcess, Step
from psigrad.language.episodes.tools import ToolBox
from psigrad.language.recipes import online

ROWS = [{"name": name} for name in "abcdef"]


@pytest.fixture
def pool():
    made = []

    def make(factory=Counting, **settings):
        made.append(EnvironmentPool(factory, **{"timeout": 60.0, **settings}))
        return made[-1]

    yield make
    for each in made:
        each.close()


def say(playing, *texts):
    return playing.step(dict(enumerate(texts)))


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_a_pool_gives_what_the_environment_gives_here(pool, workers):
    there, here = pool(workers=workers), InProcess(Counting)
    for _ in range(2):
        assert there.begin(ROWS) == here.begin(ROWS)
        for texts in ({0: "x", 3: "y", 5: "end"}, {0: "x", 1: "z"}, {0: "end", 4: "raise", 2: "x"}):
            ours, theirs = there.step(texts), here.step(texts)
            assert ours.keys() == theirs.keys()
            for number in ours:
                assert ours[number] == theirs[number]


def late(*answers):
    """Whether one that does not hang was given up, as on a machine with much else to do: then it gets more time."""
    return any(isinstance(answer, Fault) and "did not return within" in answer.reason for answer in answers)


DEATHS = {
    "hang": "the environment's step() did not return within {:g} s",
    "exit": "the environment's process died (exit status 0)",
    "segfault": "the environment's process died (signal 11)",
    "sys.exit": "the environment raised SystemExit: 0 (hostile_environments.py, line",
    "raise": "the environment raised ValueError: the board fell over (hostile_environments.py, line",
    "memory": "the environment raised MemoryError",
}


@pytest.mark.parametrize("workers", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "bad", [pytest.param(bad, marks=pytest.mark.slow if bad in ("segfault", "sys.exit") else ()) for bad in DEATHS]
)
def test_what_an_episode_does_costs_that_episode_alone(pool, bad, workers):
    for limit in LIMITS if bad == "hang" else (60.0,):
        playing = pool(workers=workers, memory_gb=2.0, timeout=limit)
        playing.begin(ROWS)
        before = say(playing, *["one"] * 6)
        found = say(playing, "two", "two", bad, "two", "two", "end")
        after = playing.step({0: "three", 3: "three", 4: "three"})
        fallen = found.pop(2)
        if not late(*before.values(), *found.values(), *after.values()):
            break
    assert isinstance(fallen, Fault) and fallen.reason.startswith(DEATHS[bad].format(limit))
    assert [step.observation for step in found.values()] == ["a 2", "b 2", "d 2", "e 2", "f 2"]
    assert {i: step.observation for i, step in after.items()} == {0: "a 3", 3: "d 3", 4: "e 3"}, "they go on where they were"


@pytest.mark.slow
def test_several_may_fall_in_one_turn(pool):
    playing = pool(timeout=5.0)
    playing.begin(ROWS)
    say(playing, *["one"] * 6)
    found = say(playing, "hang", "two", "exit", "two", "hang", "two")
    assert [isinstance(found[i], Fault) for i in range(6)] == [True, False, True, False, True, False]
    assert [found[i].observation for i in (1, 3, 5)] == ["b 2", "d 2", "f 2"]


def test_a_reset_that_hangs_or_exits_costs_its_own_episode(pool):
    for limit in LIMITS:
        playing = pool(BadReset, timeout=limit)
        opened = playing.begin([{"name": name} for name in ("a", "hang", "b", "exit", "raise")])
        if not late(opened[0], opened[2]) and not late(*(steps := playing.step({0: "x", 2: "x"})).values()):
            break
    assert [isinstance(o, Fault) for o in opened] == [False, True, False, True, True]
    assert {i: s.observation for i, s in steps.items()} == {0: "a 1", 2: "b 1"}


def test_a_child_that_was_forked_answers_for_nobody_and_none_outlives_the_worker(pool):
    mark = f"{9000 + os.getpid() % 1000}.4321"
    for limit in LIMITS:
        playing = pool(timeout=limit)
        playing.begin(ROWS)
        forked = say(playing, *["fork"] * 6).values()
        found = playing.step({0: f"child {mark}", 1: "x"})
        if not late(*forked, found[1]):
            break
    assert [step.observation for step in forked] == [f"{c} 1" for c in "abcdef"]
    assert isinstance(found[0], Fault) and found[1].observation == "b 2"
    end = time.monotonic() + 60
    while time.monotonic() < end and any(mark in (p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])):
        time.sleep(0.05)
    assert not any(mark in (p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"]))


def test_a_hundred_megabytes_of_output_hold_nobody_up(pool, capfd):
    playing = pool()
    playing.begin(ROWS[:1])
    assert say(playing, "print")[0].observation == "a 1"


@pytest.mark.parametrize(
    ("text", "said"),
    [("none", "TypeError"), ("reward", "'much' as its reward"), ("nan", "reward is nan"), ("object", "as the observation")],
)
def test_what_is_no_step_is_named(pool, text, said):
    playing = pool(Odd)
    playing.begin(ROWS[:1])
    (found,) = say(playing, text).values()
    assert isinstance(found, Fault) and said in found.reason
    here = InProcess(Odd)
    here.begin(ROWS[:1])
    assert isinstance(say(here, text)[0], Fault)


def test_an_environment_that_does_not_load_is_one_sentence(pool):
    def broken():
        raise OSError("no board")

    playing = pool(broken)
    (opened,) = playing.begin(ROWS[:1])
    assert isinstance(opened, Fault) and "OSError: no board" in opened.reason


def test_a_tool_that_hangs_ends_its_episode_and_no_other(pool):
    call = '<tool_call>{{"name": "slow_tool", "arguments": {{"seconds": {}}}}}</tool_call>'
    for limit in LIMITS:
        playing = pool(partial(ToolBox, [slow_tool]), timeout=limit)
        playing.begin(ROWS[:2])
        found = say(playing, call.format(60), call.format(0))
        if not late(found[1]):
            break
    assert isinstance(found[0], Fault) and f"did not return within {limit:g} s" in found[0].reason
    assert found[1] == Step([{"role": "tool", "name": "slow_tool", "content": "done"}], 0.0, False)


@pytest.mark.needs("bubblewrap")
def test_in_a_sandbox_there_is_no_network_and_nothing_to_write_to(pool, tmp_path):
    playing = pool(NoWay, sandboxed=[str(tmp_path)])
    playing.begin(ROWS[:3])
    found = say(playing, "network", f"write {tmp_path / 'file'}", "temporary")
    assert "Operation not permitted" in found[0].reason
    # as root it is another user, to whom the folder is closed before it is read-only
    assert "Read-only file system" in found[1].reason or "Permission denied" in found[1].reason
    assert not (tmp_path / "file").exists()
    assert isinstance(found[2], Step)
    outside = pool(NoWay)
    outside.begin(ROWS[:3])
    assert isinstance(say(outside, "x", f"write {tmp_path / 'file'}")[1], Step), "negative control"


def run_of(job, tmp_path, environment, rows=None, **settings):
    config = online_config(job, tmp_path / "run", max_steps=2)
    made = replace(config, environment=environment, reward=(), num_minibatches=1, **settings)
    if rows is not None:
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        made = replace(made, data=replace(made.data, dataset=str(tmp_path / "rows.jsonl")))
    return online.run(replace(made, evaluation=replace(made.evaluation, eval_prompts=0)))


def test_an_environment_that_exits_is_an_error_and_never_a_success(job, tmp_path):
    with pytest.raises(UserError, match=r"stayed unscored.*process died \(exit status 0\)"):
        run_of(job, tmp_path, Exiting, prompts_per_step=2, num_generations=2)
    assert not (tmp_path / "run" / "model").exists()


def test_a_run_goes_on_past_episodes_that_hang(job, tmp_path):
    rows = [{"prompt": f"say {c}:", "name": "hangs" if i % 4 == 0 else "fine"} for i, c in enumerate("abcdefgh" * 4)]
    done = run_of(job, tmp_path, Half, rows, environment_timeout=0.3, max_unscored=0.9, num_generations=2)
    found = [json.loads(line) for line in (done.folder / "rollouts.jsonl").read_text().splitlines()]
    assert {row["status"] for row in found} == {"scored", "unscored"}
    assert all("did not return within 0.3 s" in row["reason"] for row in found if row["status"] == "unscored")
