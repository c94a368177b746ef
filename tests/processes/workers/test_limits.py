"""What a user's code does in a worker ends with the worker: it answers for nobody else and leaves nothing behind."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import time

import psutil
import pytest
from cases import slow

from psigrad.language.rewards import RewardPool, RewardSpec, Samples, Unscored
from psigrad.language.rewards.resolve import resolve
from psigrad.processes.workers import worker_pool as process
from psigrad.processes.workers.shipping import list_withheld, pick_variables
from psigrad.processes.workers.worker_pool import SHOWN


def scored(function, texts=("a", "b"), **settings):
    with RewardPool([RewardSpec("mine", function)], **{"timeout": 60.0, **settings}) as pool:
        scoring = pool.begin()
        scoring.add(Samples(list(texts), list(texts), [[1]] * len(texts)))
        return scoring.results()


def alive_with(mark):
    """Processes whose command line has this word."""
    found = []
    for one in psutil.process_iter(["cmdline"]):
        if one.info["cmdline"] and mark in one.info["cmdline"]:
            found.append(one.pid)
    return found


def dead_below(pool):
    """Processes below the workers of a pool that have ended and were not reaped."""
    dead = []
    for one in (one for worker in pool.workers.processes for one in psutil.Process(worker).children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):  # reaped meanwhile
            dead += [one.pid] if one.status() == psutil.STATUS_ZOMBIE else []
    return dead


def gone(mark, seconds=60.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not alive_with(mark):
            return True
        time.sleep(0.05)
    return False


WAYS = ["child", "session", "double fork", "nobody's"]


ENDS = ["hang", "exit", "crash"]
EACH = [*zip(WAYS, itertools.cycle(ENDS), strict=False)]


@pytest.mark.parametrize(("way", "end"), [*EACH, *slow(*sorted({*itertools.product(WAYS, ENDS)} - {*EACH}))])
def test_nothing_that_a_reward_started_outlives_it(way, end):
    mark = f"{7000 + os.getpid() % 1000}.{WAYS.index(way)}{ENDS.index(end)}1234"

    def hangs(completions, **columns):
        import subprocess
        import time

        if way in ("double fork", "nobody's"):
            env = {"PATH": os.environ["PATH"]} if way == "nobody's" else None
            subprocess.run(["sh", "-c", f"setsid sleep {mark} & exit 0"], check=True, env=env)
        else:
            subprocess.Popen(["sleep", mark], start_new_session=way == "session")
        if end != "hang":
            os.kill(os.getpid(), 11) if end == "crash" else os._exit(0)
        time.sleep(60)

    (result,) = scored(hangs, ["a"], timeout=1.0 if end == "hang" else 60.0)
    assert isinstance(result, Unscored)
    assert {"hang": "time-out", "exit": "exit status 0", "crash": "signal 11"}[end] in result.reason
    assert gone(mark, 5.0)


@pytest.mark.parametrize("way", ["orphans", pytest.param("programs", marks=[pytest.mark.needs("bubblewrap"), pytest.mark.slow])])
def test_no_dead_process_stays_while_the_workers_live(way):
    """Each orphan and each judged program leaves a process whose parent ended first: 20 of them are no pid in the end."""

    def orphans(completions, **columns):
        for _ in completions:
            subprocess.run(["sh", "-c", "sleep 0.01 & exit 0"], check=True)
        return [1.0] * len(completions)

    count = 20
    texts = ["```python\nprint(input())\n```"] * count
    tests = [[{"input": "3", "output": "3"}]] * count
    spec = RewardSpec("mine", orphans) if way == "orphans" else resolve("code")
    with RewardPool([spec], timeout=120.0) as pool:
        for _ in range(2):
            scoring = pool.begin()
            scoring.add(Samples(texts, texts, [[1]] * count, columns={"tests": tests}))
            assert [result.value for result in scoring.results()] == [1.0] * count
            end = time.monotonic() + 5.0
            while (dead := dead_below(pool)) and time.monotonic() < end:  # one look decides: the next may see a fresh end
                time.sleep(0.05)
            assert dead == []
        assert all(psutil.Process(worker).is_running() for worker in pool.workers.processes)


def test_what_a_reward_started_ends_with_a_trainer_that_was_killed():
    """Also a child in a session of its own with an emptied environment."""
    mark = f"{8000 + os.getpid() % 1000}.1234"
    code = f"""if True:
        import subprocess, time
        from psigrad.language.rewards import RewardPool, RewardSpec, Samples
        def starts(completions, **columns):
            subprocess.run(["sh", "-c", "setsid sleep {mark} & exit 0"], check=True, env={{"PATH": "/usr/bin:/bin"}})
            time.sleep(60)
        scoring = RewardPool([RewardSpec("mine", starts)], timeout=60.0).begin()
        scoring.add(Samples(["a"], ["a"], [[1]]))
        scoring.results()
    """
    trainer = subprocess.Popen([sys.executable, "-c", code])
    end = time.monotonic() + 60.0
    while not alive_with(mark) and time.monotonic() < end:
        time.sleep(0.05)
    assert alive_with(mark)
    trainer.kill()
    trainer.wait()
    assert gone(mark, 5.0)


def test_memory_has_a_limit():
    def greedy(completions, **columns):
        return [float(len(bytearray(1 << 30)))] * len(completions)

    results = scored(greedy, memory_gb=0.5)
    assert all(isinstance(r, Unscored) and "MemoryError" in r.reason for r in results)
    (fine,) = scored(greedy, ["a"], memory_gb=0.0, timeout=60.0)  # negative control: without a limit there is none
    assert fine.value == float(1 << 30)


def test_memory_that_is_shared_counts_too(capfd):
    def shares(completions, **columns):
        import mmap
        import time

        held, piece = mmap.mmap(-1, 1 << 29), b"x" * (16 << 20)
        for _ in range(25):
            held.write(piece)
        time.sleep(1.0)
        return [float(held.tell())] * len(completions)

    (result,) = scored(shares, ["a"], memory_gb=0.3)
    assert isinstance(result, Unscored) and "signal 9" in result.reason
    assert "more than worker_memory_gb" in capfd.readouterr().err
    (fine,) = scored(shares, ["a"], memory_gb=0.0)  # negative control: without a limit there is none
    assert fine.value == float(25 * (16 << 20))


def test_what_is_printed_has_a_limit_and_nobody_waits(capfd):
    def talks(completions, **columns):
        import sys

        for _ in range(300):
            sys.stderr.write("x" * (1 << 20))
        print("done")
        return [1.0] * len(completions)

    assert [r.value for r in scored(talks, timeout=60.0)] == [1.0, 1.0]
    printed, end = "", time.monotonic() + 60
    while "the rest is dropped" not in printed and time.monotonic() < end:
        time.sleep(0.2)
        printed += capfd.readouterr().err
    assert SHOWN <= len(printed) < SHOWN + 1000 and "the rest is dropped" in printed


def test_secrets_of_the_trainer_are_not_in_the_worker(monkeypatch):
    for name in ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY", "DATABASE_URL"):
        monkeypatch.setenv(name, "secret")

    def looks(completions, **columns):
        import os

        return [float(sum(value == "secret" for value in os.environ.values()))] * len(completions)

    assert scored(looks)[0].value == 0.0
    assert scored(looks, variables=("OPENAI_API_KEY",))[0].value == 1.0
    assert {"HF_TOKEN", "DATABASE_URL"} <= set(list_withheld()) and {"PATH", "HOME"} <= pick_variables().keys()


def test_a_pickle_that_a_reward_writes_is_never_loaded(tmp_path):
    canary = tmp_path / "ran"

    def forges(completions, **columns):
        import os
        import pickle
        import struct

        class Bomb:
            def __reduce__(self):
                return (open, (str(canary), "w"))

        data = pickle.dumps(Bomb())
        for number in range(8):
            frame = struct.pack("<8sQQ", b"psigrad\x01", number, len(data)) + data
            for descriptor in range(3, 1024):
                try:
                    os.write(descriptor, frame)
                except OSError:
                    continue
        return [1.0] * len(completions)

    results = scored(forges)
    assert not canary.exists() and all(isinstance(r, Unscored) for r in results)


def test_a_header_that_promises_gigabytes_does_not_grow_the_trainer():
    def lies(completions, **columns):
        import os
        import struct

        for descriptor in range(3, 1024):
            try:
                os.write(descriptor, struct.pack("<8sQQ", b"psigrad\x01", 1, 1 << 40))
            except OSError:
                continue
        return [1.0] * len(completions)

    before = psutil.Process().memory_info().rss
    assert all(isinstance(r, Unscored) for r in scored(lies))
    assert psutil.Process().memory_info().rss - before < 64 << 20


def test_a_forked_child_never_answers():
    def forks(completions, **columns):
        import os
        import sys

        pid = os.fork()
        if pid == 0:
            sys.exit(0)
        os.waitpid(pid, 0)
        return [float(len(c)) for c in completions]

    with RewardPool([RewardSpec("mine", forks)], timeout=60.0) as pool:
        for count in range(1, 8):
            scoring = pool.begin()
            texts = ["x" * (i + 1) for i in range(count)]
            scoring.add(Samples(texts, texts, [[1]] * count))
            assert [r.value for r in scoring.results()] == [float(i + 1) for i in range(count)]


def test_where_a_reward_raised_is_named_by_file_and_line():
    def raises(completions, **columns):
        return [1.0 / (len(c) - 1) for c in completions]

    line = raises.__code__.co_firstlineno + 1
    (result,) = scored(raises, ["a"])
    assert result == Unscored(f"mine raised ZeroDivisionError: float division by zero (test_limits.py, line {line})")


def test_a_worker_that_cannot_be_started_leaves_no_descriptor_open(monkeypatch):
    def no_memory(*given, **named):
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr(process.subprocess, "Popen", no_memory)
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        with pytest.raises(OSError, match="Cannot allocate"):
            process.Worker("module:function", None, {})
    assert set(os.listdir("/proc/self/fd")) <= set(before)  # what an earlier test left may go meanwhile
