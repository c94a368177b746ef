"""Hostile programs: none gets out, none passes, none stays, and the machine is as it was."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from hostile_programs import programs

from psigrad.language.rewards.code import Code
from psigrad.language.rewards.outcomes import Failure
from psigrad.processes.sandbox import Limits, Program, cgroup, tier_of_this_machine
from psigrad.processes.sandbox.bubblewrap import Bubblewrap, user_of

SECRET, EXPECTED = "the-host-keeps-this-5b1c", "nobody-can-guess-this-77fa"
NAMES = list(programs(Path("/s"), Path("/m"), 1))


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    folder = tmp_path_factory.mktemp("host")
    folder.chmod(0o755)
    (folder / "secret").write_text(SECRET)
    (folder / "secret").chmod(0o644)
    return folder


@pytest.fixture(scope="module")
def sandbox():
    return Bubblewrap(tier_of_this_machine())


def left_over(process: int | None = None) -> list[str]:
    """Processes of the sandboxes of a process of ours, by their command; as root they have users of their own."""
    first, left = user_of(process or os.getpid(), 0), []
    for found in psutil.process_iter(["uids", "cmdline"]):
        command = " ".join(found.info["cmdline"] or ())
        if first <= found.info["uids"].effective < first + 64 or (os.geteuid() and "/driver.py" in command):
            left.append(f"{found.pid} {command}")
    return left


def groups_left() -> list[Path]:
    return [p for home in set(cgroup.homes().values()) for p in home.glob(f"{os.getpid()}-*")]


def test_the_corpus_is_as_large_as_it_is_said_to_be():
    assert len(NAMES) >= 80


@pytest.mark.needs("bubblewrap")
@pytest.mark.parametrize("name", NAMES)
def test_it_gets_nowhere(name, host, sandbox, monkeypatch):
    monkeypatch.setenv("PSIGRAD_SECRET", SECRET)
    marker = host / "marker"
    source = programs(host / "secret", marker, os.getpid())[name]
    limits = Limits(seconds=1.0, memory_mb=256, files_mb=8)
    for _ in range(3):
        (outcome,) = sandbox.run([Program(source, stdin="some input")], limits)
        if outcome.seconds < 4:  # else it is the machine, which may have much else to do, or it is so every time
            break
    assert SECRET not in outcome.stdout + outcome.stderr
    assert len(outcome.stdout) <= limits.output_kb << 10 and len(outcome.stderr) <= limits.output_kb << 10
    assert outcome.seconds < 4
    assert not marker.exists() and (host / "secret").read_text() == SECRET
    tests = [{"input": "some input", "output": EXPECTED}], [f"assert answer() == {EXPECTED!r}"]
    rewards = Code(seconds=1.0, memory_mb=256)([source, source], tests=list(tests))
    assert all(isinstance(reward, Failure) for reward in rewards), rewards
    assert not any(EXPECTED in str(reward) for reward in rewards)
    assert not left_over() and not groups_left()


@pytest.mark.needs("bubblewrap")
def test_under_load_nothing_gets_out_either(host, sandbox):
    burner = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(2)]
    try:
        chosen = [
            "fork bomb",
            "memory",
            "output",
            "a daemon",
            "read the host's file",
            "kill everybody",
            "spin",
            "write to the answers",
        ]
        sources = [programs(host / "secret", host / "marker", os.getpid())[name] for name in chosen]
        outcomes = sandbox.run([Program(source) for source in sources], Limits(seconds=2.0, memory_mb=256))
        assert not any(SECRET in outcome.stdout + outcome.stderr for outcome in outcomes)
        with ThreadPoolExecutor(1) as beside:
            honest = beside.submit(Code(seconds=60.0), ["print(input())"] * 3, tests=[[{"input": "a", "output": "a"}]] * 3)
            rewards = Code(seconds=2.0)(sources, tests=[[{"input": "a", "output": EXPECTED}]] * len(sources))
        assert honest.result() == [1.0] * 3 and all(isinstance(reward, Failure) for reward in rewards)
    finally:
        for process in burner:
            process.kill()
            process.wait()
    assert not left_over() and not groups_left()


def test_negative_control_without_a_sandbox_the_secret_comes_out(host):
    from psigrad.processes.sandbox.unsafe import Unsafe

    (outcome,) = Unsafe().run([Program(f"print(open({str(host / 'secret')!r}).read())")], Limits())
    assert SECRET in outcome.stdout


@pytest.mark.needs("bubblewrap")
def test_a_killed_judge_leaves_no_program_behind(tmp_path):
    """The reward's process is killed while a program runs: the program dies with it."""
    code = (
        "from psigrad.processes.sandbox import executor_for, Limits, Program\n"
        "executor_for().run([Program('import os, time; os.fork(); time.sleep(1000)')], Limits(seconds=500))"
    )
    judge = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 60
    while len(left_over(judge.pid)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left_over(judge.pid), "the program runs"
    judge.kill()
    judge.wait()
    deadline = time.monotonic() + 60
    while left_over(judge.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left_over(judge.pid)
