"""Hostile programs: none gets out, none passes, none stays, and the machine is as it was."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from hostile_programs import groups, programs

from psigrad.language.rewards import code
from psigrad.language.rewards.code import Code
from psigrad.processes.sandbox import Limits, Program, ProgramOutcome, cgroup, tier_of_this_machine
from psigrad.processes.sandbox.bubblewrap import Bubblewrap
from psigrad.processes.sandbox.enclosure import USERS, Enclosure, user_of, users_here

SECRET, EXPECTED = "the-host-keeps-this-5b1c", "nobody-can-guess-this-77fa"
NAMES = list(programs(Path("/s"), Path("/m"), 1))


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    folder = tmp_path_factory.mktemp("host")
    folder.chmod(0o755)
    (folder / "secret").write_text(SECRET)
    (folder / "secret").chmod(0o644)
    os.mkfifo(folder / "fifo")
    (folder / "fifo").chmod(0o666)
    kept = os.open(folder / "fifo", os.O_RDWR | os.O_NONBLOCK)
    with socket.socket(socket.AF_UNIX) as stream, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagram:
        for name, one in (("stream", stream), ("datagram", datagram)):
            one.bind(str(folder / name))
            (folder / name).chmod(0o777)
            one.setblocking(False)
        stream.listen()
        os.write(kept, SECRET.encode())
        yield folder
        assert os.read(kept, 1000) == SECRET.encode(), "nobody has read the FIFO or written to it"
        for heard in (stream.accept, lambda: datagram.recv(10)):
            with pytest.raises(BlockingIOError):
                heard()
    os.close(kept)


@pytest.fixture(scope="module")
def sandbox():
    return Bubblewrap(tier_of_this_machine())


class Watched:
    """The sandbox, with room for 8 MB of files, and what came of the programs that it ran."""

    def __init__(self, sandbox: Bubblewrap) -> None:
        self.sandbox, self.outcomes = sandbox, list[ProgramOutcome]()

    def run(self, programs: Sequence[Program], limits: Limits) -> list[ProgramOutcome]:
        found = self.sandbox.run(programs, replace(limits, files_mb=8))
        self.outcomes += found
        return found


def left_over(process: int | None = None) -> list[str]:
    """Processes of the sandboxes of a process of ours, by their command; as root they have users of their own."""
    first, left, by_user = user_of(process or os.getpid(), 0), [], os.geteuid() == 0 and users_here()[1] > 0
    for found in psutil.process_iter(["uids", "cmdline"]):
        command = " ".join(found.info["cmdline"] or ())
        user = found.info["uids"].effective
        if first <= user < first + USERS if by_user else user == os.geteuid() and "/driver.py" in command:
            left.append(f"{found.pid} {command}")
    return left


def groups_left() -> list[Path]:
    return [p for home in set(cgroup.homes().values()) for p in home.glob(f"{os.getpid()}-*")]


def test_the_corpus_is_as_large_as_it_is_said_to_be():
    assert len(NAMES) >= 80


# Of each group those that differ in kind run always, and the others with `make test-slow`.
ALWAYS = {
    *("read it through /proc/1/root", "read every descriptor", "the parent's environment", "every command line", "kernel memory"),
    *("write the marker", "overwrite the checker", "core pattern", "setuid copy"),
    *("become root", "mount", "new user namespace", "a call that no list knows", "ptrace the parent", "32-bit calls"),
    *("a socket", "a Unix socket of the host", "write to a FIFO of the host", "netlink"),
    *("fork bomb", "memory in many", "disk", "output", "descriptors", "spin", "sleep"),
    *("a daemon", "kill everybody", "stop the parent"),
    *("leave at once", "equal to all", "write to the answers", "patch json", "look up the stack", "answer deep"),
}


@pytest.mark.needs("bubblewrap")
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in ALWAYS else pytest.mark.slow) for n in NAMES])
def test_it_gets_nowhere(name, host, sandbox, monkeypatch):
    monkeypatch.setenv("PSIGRAD_SECRET", SECRET)
    marker = host / "marker"
    source = programs(host / "secret", marker, os.getpid())[name]
    tests = [{"input": "some input", "output": EXPECTED}], [f"assert answer() == {EXPECTED!r}"]
    judge = Code(seconds=0.3, memory_mb=256, output_kb=64)
    for _ in range(3):
        watched = Watched(sandbox)
        monkeypatch.setattr(code, "_executor", lambda *given, watched=watched: watched)
        rewards = judge([source, source], tests=list(tests))
        if watched.outcomes[0].seconds < 4:  # else it is the machine, which may have much else to do, or it is so every time
            break
    assert len(watched.outcomes) == 2 and watched.outcomes[0].seconds < 4
    for outcome in watched.outcomes:
        assert SECRET not in outcome.stdout + outcome.stderr
        assert max(len(outcome.stdout), len(outcome.stderr)) <= judge.output_kb << 10
    assert not marker.exists() and (host / "secret").read_text() == SECRET
    assert all(reward == 0.0 for reward in rewards), rewards
    assert not any(EXPECTED in reward.reason for reward in rewards)
    assert not left_over() and not groups_left()


# Each source in a process of its own: it says whether the source ended without an error.
ALL = """if True:
    import json, os, signal, sys
    for name, source in json.load(sys.stdin).items():
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            signal.alarm(2)
            try:
                exec(source, {"__name__": "__main__"})
                print("DONE", name, flush=True)
            except BaseException as error:
                print(name, error, flush=True)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
    print("UID", os.getuid(), open("/proc/self/uid_map").read().split()[1])
"""
# What harms nobody where it works.
HARMLESS = {
    *("read every descriptor", "read every descriptor of init", "the environment", "every environment", "every command line"),
    *("home", "every setting of the kernel"),
    # a file of its own under that name, in a temporary folder of its own
    *("overwrite the secret", "delete the secret"),
}


@pytest.mark.needs("bubblewrap")
def test_a_worker_of_environments_gets_nowhere_either(host):
    """The folder with the host's FIFO and sockets is shown to it, as the working folder of a run may be."""
    secret = host.with_name("secret")
    secret.write_text(SECRET)
    found = groups(secret, host / "marker", os.getpid())
    kinds = ("read", "write", "kernel", "network")
    tried = {name: source for kind in kinds for name, source in found[kind].items() if name != "walk everything"}
    before = Path("/proc/sys/kernel/core_pattern").read_text()
    enclosure = Enclosure.of_worker(tier_of_this_machine().name, [str(host)])
    line, given = enclosure.line()
    done = subprocess.run(
        [*line, sys.executable, "-c", ALL], input=json.dumps(tried), capture_output=True, text=True, pass_fds=given, timeout=60
    )
    for descriptor in given:
        os.close(descriptor)
    lines = done.stdout.splitlines()
    assert lines[-1].startswith("UID"), done.stderr[-2000:]
    user, outside = map(int, lines[-1].split()[1:])
    assert user != 0 and (tier_of_this_machine().name == "user" or outside == 0)
    assert SECRET not in done.stdout.replace(str(secret), "") and "written" not in done.stdout
    assert {line.removeprefix("DONE ") for line in lines if line.startswith("DONE")} <= HARMLESS
    assert not (host / "marker").exists() and secret.read_text() == SECRET
    assert Path("/proc/sys/kernel/core_pattern").read_text() == before


@pytest.mark.slow
@pytest.mark.needs("bubblewrap")
@pytest.mark.parametrize(
    "chosen",
    [("fork bomb", "a daemon", "write to the answers"), ("memory", "output", "read the host's file", "kill everybody", "spin")],
    ids=("three", "more"),
)
def test_under_load_nothing_gets_out_either(chosen, host, sandbox):
    """Without the load: test_it_gets_nowhere."""
    burner = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(2)]
    try:
        sources = [programs(host / "secret", host / "marker", os.getpid())[name] for name in chosen]
        outcomes = sandbox.run([Program(source) for source in sources], Limits(seconds=1.0, memory_mb=256))
        assert not any(SECRET in outcome.stdout + outcome.stderr for outcome in outcomes)
        with ThreadPoolExecutor(1) as beside:
            honest = beside.submit(Code(seconds=60.0), ["print(input())"] * 3, tests=[[{"input": "a", "output": "a"}]] * 3)
            rewards = Code(seconds=1.0)(sources, tests=[[{"input": "a", "output": EXPECTED}]] * len(sources))
        assert honest.result() == [1.0] * 3 and all(reward == 0.0 for reward in rewards)
    finally:
        for process in burner:
            process.kill()
            process.wait()
    assert not left_over() and not groups_left()


def test_negative_control_without_a_sandbox_the_secret_comes_out(host):
    from psigrad.processes.sandbox.choice import Unsafe

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
