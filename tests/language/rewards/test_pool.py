"""What only processes can promise: hangs end, crashes pass, nothing leaks, and the number of workers changes nothing."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time

import psutil
import pytest
from cases import slow
from timing import LIMITS, late, until

from psigrad.errors import UserError
from psigrad.language.rewards import RewardError, RewardPool, RewardSpec, Scored, Unscored, resolve

HANGS = ["loop", "blocked", "stopped", *slow("power", "sleep", "deaf")]
DEATHS = {"os._exit": "exit status 0", "segfault": "signal 11", "kill": "signal 9"}


def children() -> set[int]:
    return {p.pid for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE}


def workers(pool: RewardPool) -> set[int]:
    """The pool's own processes: others of this one's children are another test's."""
    return set(pool.workers.processes)


def below(pids: set[int]) -> set[int]:
    """The workers themselves, each below its keeper."""
    return {child.pid for pid in pids for child in psutil.Process(pid).children()}


def zombies() -> set[int]:
    return {p.pid for p in psutil.Process().children() if p.status() == psutil.STATUS_ZOMBIE}


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def listeners() -> int:
    """Threads that hear a worker's output to its end, a moment after the worker's; each has a descriptor open."""
    return sum(thread.name.startswith("output of ") for thread in threading.enumerate())


def gone(pid: int, within: float = 60.0) -> bool:
    """Whether the process ends in time; a zombie that nobody reaps has ended."""
    end = time.monotonic() + within
    while time.monotonic() < end:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("hang", HANGS)
def test_a_hang_is_unscored_and_its_group_scored(pool_of, zoo, score, hang):
    for timeout in LIMITS:
        pool = pool_of(zoo("act"), timeout=timeout)
        score(pool, ["ok"])
        begin = time.monotonic()
        results = score(pool, ["ok", hang, "half", "ok"])
        spent = time.monotonic() - begin
        again = score(pool, ["half"])
        if spent < 2 * (timeout + 1.0) and not late(results[0], *results[2:], *again):
            break
    assert [getattr(r, "value", r) for r in results] == [1.0, Unscored(f"act: time-out after {timeout:g} s"), 0.5, 1.0]
    assert spent < 2 * (timeout + 1.0)
    assert again == [Scored(0.5, {"act": 0.5})], "the pool is at work again"


@pytest.mark.parametrize("death", DEATHS)
def test_a_crash_is_unscored_and_its_group_scored(pool_of, zoo, score, death):
    pool = pool_of(zoo("act"), timeout=30.0)
    results = score(pool, ["ok", death, "half", "ok"])
    assert [getattr(r, "value", r) for r in results] == [1.0, Unscored(f"act: its process died ({DEATHS[death]})"), 0.5, 1.0]


def test_groups_of_an_async_function_are_under_way_together_and_one_that_hangs_spoils_no_other(pool_of, zoo, score):
    """All are there before the worker is, so it is given eight at once."""
    results = score(pool_of(zoo("crowd"), timeout=60.0), ["a", "b"] * 10, size=2)
    assert len(results) == 20 and max(r.value for r in results) > 4
    for timeout in LIMITS:
        pool = pool_of(zoo("crowd"), timeout=timeout / 4)
        results = score(pool, ["a", "b", "c", "stuck", "d", "e", "f", "g"], size=2)
        if not late(*results[:3], *results[4:]):
            break
    assert [isinstance(r, Scored) for r in results] == [True] * 3 + [False] + [True] * 4
    assert "time-out" in results[3].reason


def test_what_dies_beside_others_is_the_only_one_that_is_unscored(pool_of, zoo, score):
    """Eight groups of one are under way when the process ends: each is asked again by itself."""
    results = score(pool_of(zoo("act_async"), timeout=30.0), ["ok", "half", "ok", "kill", "ok", "half", "ok", "ok"], size=1)
    found = [getattr(r, "value", r) for r in results]
    assert found == [1.0, 0.5, 1.0, Unscored("act_async: its process died (signal 9)"), 1.0, 0.5, 1.0, 1.0]


def test_what_a_function_prints_is_no_frame(pool_of, zoo, score, capfd):
    results = score(pool_of(zoo("act"), timeout=30.0), ["print", "ok", "print", "half"])
    assert [r.value for r in results] == [1.0, 1.0, 1.0, 0.5]
    seen = []
    until(lambda: seen.append(capfd.readouterr()) or "".join(err for _, err in seen).count("from a shell") == 2)
    assert not any(out for out, _ in seen)


def test_a_garbled_answer_is_a_death_and_not_an_error_here(pool_of, score):
    def garble(completions, **columns):
        import os

        if "bad" in completions:
            for descriptor in range(3, 200):
                try:
                    os.write(descriptor, (3).to_bytes(8, "little") + b"abc")
                except OSError:
                    continue
        return [1.0] * len(completions)

    results = score(pool_of(RewardSpec("garble", garble), timeout=30.0), ["ok", "bad"])
    assert results[0] == Scored(1.0, {"garble": 1.0})
    assert isinstance(results[1], Unscored) and "died" in results[1].reason


def test_programs_that_a_hanging_function_started_die_with_it(pool_of, zoo, score, tmp_path, monkeypatch):
    monkeypatch.setenv("ZOO_CHILD", str(tmp_path / "pid"))
    (result,) = score(pool_of(zoo("act"), timeout=60.0), ["child"])
    assert "KeyError: 'ZOO_CHILD'" in result.reason and "name this one in worker_env" in result.reason
    for timeout in LIMITS:
        (result,) = score(pool_of(zoo("act"), timeout=timeout, variables=("ZOO_CHILD",)), ["child"])
        if (tmp_path / "pid").exists():  # it had the time to start one
            break
    assert result == Unscored(f"act: time-out after {timeout:g} s")
    assert gone(int((tmp_path / "pid").read_text()))


def test_a_worker_killed_while_idle_costs_no_sample(pool_of, zoo, score):
    pool = pool_of(zoo("act"), timeout=30.0)
    score(pool, ["ok"])
    own = workers(pool)
    for pid in own:
        os.kill(pid, signal.SIGKILL)
    assert all(gone(pid) for pid in own)
    assert score(pool, ["ok"], size=1) == [Scored(1.0, {"act": 1.0})]


def test_a_worker_stopped_before_it_reads_a_large_request_is_late(pool_of, zoo, score):
    """A write that blocks would hang this process: a pipe holds 64 KiB."""
    for timeout in LIMITS:
        pool = pool_of(zoo("length"), timeout=timeout)
        score(pool, ["ok"])
        for pid in workers(pool) | below(workers(pool)):
            os.kill(pid, signal.SIGSTOP)
        results = score(pool, ["x" * 1_000_000, "y"])
        if not late(*results):
            break
    assert [r.value for r in results] == [1_000_000, 1]


@pytest.mark.slow
def test_two_hundred_hangs_leave_the_pool_as_it_was(pool_of, zoo, score, record_property):
    record_property("count", 200)
    pool = pool_of(zoo("hang_on_marked"), timeout=0.05, workers=2)
    score(pool, ["warm"] * 4)
    until(lambda: listeners() == 2)
    others = {p.pid for p in psutil.Process().children()} - workers(pool)
    size, open_files = len(workers(pool)), descriptors()
    costs = []
    for part in range(4):
        start = start_of_one(zoo, score)
        begin = time.monotonic()
        results = score(pool, [f"hang {i}" for i in range(50)], size=1)
        costs.append((time.monotonic() - begin) / (50 * (0.05 + max(1.0, 5 * start)) / size))
        assert results == [Unscored("hang_on_marked: time-out after 0.05 s")] * 50
        until(lambda: listeners() == 2)
        left = {p.pid for p in psutil.Process().children()} - others
        assert (len(left), zombies(), descriptors()) == (size, set(), open_files), f"after {50 * (part + 1)} hangs"
    assert min(costs) < 1, "a hang costs its time-out and the start of one process"
    assert size == 2


def start_of_one(zoo, score) -> float:
    """Seconds that a pool of one process takes now, from its start to its first answer and its end."""
    begin = time.monotonic()
    with RewardPool([zoo("hang_on_marked")], timeout=60.0) as pool:
        score(pool, ["warm"])
    return time.monotonic() - begin


def test_closing_leaves_nothing_behind(zoo, score):
    until(lambda: listeners() == 0)
    gc.collect()  # what other tests dropped closes now, and not in the middle of this one
    before, open_files, old_zombies = children(), descriptors(), zombies()
    with RewardPool([zoo("act")], workers=3) as pool:
        score(pool, ["ok"] * 12)
        until(lambda: len(children() - before) == 6)  # a worker each, and its keeper; not all of them need have had work
    until(lambda: listeners() == 0)
    until(lambda: not zombies() - old_zombies)  # the last keeper is reaped a moment after it ended
    assert not children() - before
    assert descriptors() <= open_files
    with pytest.raises(RewardError, match="closed"):
        score(pool, ["ok"])


def test_results_do_not_depend_on_the_number_of_workers(pool_of, zoo, score):
    texts = [("ok", "half", "raise", "none", "fail", "os._exit", "print")[i % 7] for i in range(21)]
    one, two, three = (score(pool_of(zoo("act"), zoo("rank_in_group"), timeout=30.0, workers=n), texts) for n in (1, 2, 3))
    assert one == two == three
    assert {type(r).__name__ for r in one} == {"Scored", "Failed", "Unscored"}


def test_a_function_that_knows_its_process_would_be_noticed(pool_of, score, tmp_path):
    """The negative control of the test above."""

    def who(completions, place, wanted, **columns):
        import os
        import time
        from pathlib import Path

        Path(place[0], str(os.getpid())).touch()
        end = time.monotonic() + 60
        while len(os.listdir(place[0])) < wanted[0] and time.monotonic() < end:
            time.sleep(0.01)  # another process may have its start before it yet
        return [float(os.getpid())] * len(completions)

    spec = RewardSpec("who", who)
    found = []
    for n, wanted in ((1, 1), (3, 2)):
        place = tmp_path / str(n)
        place.mkdir()
        columns = {"place": [str(place)] * 60, "wanted": [wanted] * 60}
        found.append({r.value for r in score(pool_of(spec, timeout=120.0, workers=n), ["a"] * 60, **columns)})
    assert len(found[0]) == 1 < len(found[1])


def test_an_interrupted_call_leaves_no_answer_for_the_next(pool_of, zoo, score):
    pool = pool_of(zoo("act"), timeout=30.0)
    score(pool, ["ok"])

    def interrupt(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            score(pool, ["sleep"])
    finally:
        signal.signal(signal.SIGALRM, before)
    assert score(pool, ["half"]) == [Scored(0.5, {"act": 0.5})]


def test_workers_outlive_the_thread_that_made_them(zoo, score):
    """The kernel tells a process of its parent's end when the thread that started it ends."""
    made = []

    def make():
        made.append(RewardPool([zoo("act")]))
        score(made[0], ["half"])  # it is there, and has asked to be told

    maker = threading.Thread(target=make)
    maker.start()
    maker.join()
    with made[0] as pool:
        before = workers(pool)
        time.sleep(0.1)
        assert score(pool, ["half"]) == [Scored(0.5, {"act": 0.5})]
        assert workers(pool) == before and not any(gone(worker, 0.1) for worker in before)


def test_workers_die_with_a_parent_that_was_killed(zoo, score, tmp_path):
    """One of them idle, one in a C call that never lets go of the interpreter."""
    told = tmp_path / "pids"
    pid = os.fork()
    if pid == 0:
        try:
            pool = RewardPool([zoo("act")], workers=2, timeout=60.0)
            score(pool, ["ok"] * 2, size=1)
            until(lambda: len(children()) == 4)  # a worker each, and its keeper
            told.with_suffix(".part").write_text(" ".join(map(str, children())))
            told.with_suffix(".part").rename(told)
            score(pool, ["power"])
        finally:
            os._exit(1)
    end = time.monotonic() + 120.0
    while not told.exists() and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.2)
    workers = [int(word) for word in told.read_text().split()]
    assert len(workers) == 4 and all(psutil.pid_exists(worker) for worker in workers)
    os.kill(pid, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert all(gone(worker) for worker in workers)


def unloadable() -> RewardSpec:
    """A function by value whose module is not there in a fresh process."""
    import sys
    import types

    module = types.ModuleType("only_here")
    exec("def helper(): return 1.0\ndef reward(completions, **columns): return [helper()]", module.__dict__)
    sys.modules["only_here"] = module
    return RewardSpec("reward", module.reward)


def test_a_function_that_does_not_load_elsewhere_is_one_sentence(pool_of, score):
    with pytest.raises(RewardError, match=r"does not load its code \(ModuleNotFoundError: No module named 'only_here'\)"):
        score(pool_of(unloadable()), ["a"])


def test_a_function_that_cannot_be_sent_is_one_sentence(pool_of):
    lock = (i for i in range(3))

    with pytest.raises(RewardError, match=r"cannot be sent to a worker process \(TypeError: .*generator.*module:function"):
        pool_of(RewardSpec("holder", lambda completions, **columns: [next(lock)]))


def test_a_module_that_kills_its_process_is_one_sentence(pool_of, score, tmp_path, monkeypatch):
    (tmp_path / "deadly.py").write_text("def reward(completions, **columns):\n    return [1.0]\n")
    monkeypatch.syspath_prepend(tmp_path)
    from importlib import import_module

    function = import_module("deadly").reward
    (tmp_path / "deadly.py").write_text("import os\nos._exit(5)\n")
    with pytest.raises(RewardError, match=r"died while it loaded its code \(exit status 5\)"):
        score(pool_of(RewardSpec("reward", function)), ["a"])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"timeout": 0.0}, "reward_timeout is 0.0"),
        ({"timeout": float("nan")}, "reward_timeout is nan"),
        ({"workers": 0}, "reward_workers is 0"),
    ],
)
def test_impossible_settings_are_refused(zoo, settings, said):
    with pytest.raises(UserError, match=said):
        RewardPool([zoo("act")], **settings)


def test_no_time_limit_at_all_is_possible(pool_of, zoo, score):
    assert score(pool_of(zoo("act"), timeout=float("inf")), ["ok"])[0].value == 1.0


def test_math_that_would_blow_up_is_not_computed(pool_of, score):
    pool = pool_of(resolve("math"), timeout=60.0)
    score(pool, ["4"], answer=["4"])  # the worker has imported sympy after this
    for timeout in (1.0, 10.0):
        pool.workers.timeout = timeout
        results = score(pool, ["$4$", "$" + "9^{" * 4 + "9" + "}" * 4 + "$"], size=1, answer=["4", "3"])
        if not late(*results):
            break
    assert results == [Scored(1.0, {"math": 1.0}), Scored(0.0, {"math": 0.0})]
