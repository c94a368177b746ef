"""Functions are asked apart: the fault of one is known to be its own and changes nothing that another is shown."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest
from inline_scorer import InlineScorer
from timing import LIMITS, late

from psigrad.language.rewards import Failed, RewardPool, RewardSpec, Scored, Unscored, builtin, resolve


@pytest.mark.parametrize("bad", ["raise", "sys.exit", "fail"])
def test_who_needs_the_whole_group_sees_it_though_another_function_raises(scorer_of, zoo, score, bad):
    texts = ["ok", bad, "half", "none"]
    results = score(scorer_of(zoo("rank_in_group"), zoo("act")), texts)
    ranks = [float(sorted(texts).index(text)) for text in texts]
    assert [results[i].parts["rank_in_group"] for i in (0, 2, 3)] == [ranks[0], ranks[2], ranks[3]]
    assert isinstance(results[1], Failed if bad == "fail" else Unscored)
    alone = score(scorer_of(zoo("rank_in_group")), texts, size=1)
    assert [r.value for r in alone] == [0.0] * 4 != ranks, "the control: shown one by one, the ranks are others"


@pytest.mark.parametrize(("bad", "said"), [("sleep", "time-out after {:g} s"), ("os._exit", "its process died (exit status 0)")])
def test_the_reason_names_who_hung_or_died(pool_of, zoo, score, bad, said):
    for timeout in LIMITS:
        results = score(pool_of(zoo("length"), zoo("act"), zoo("rank_in_group"), timeout=timeout), ["ok", bad, "half"])
        if not late(results[0], results[2]) and (bad == "sleep" or not late(results[1])):
            break
    assert results[1] == Unscored(f"act: {said.format(timeout)}")
    ranks = {"half": 0.0, "ok": 1.0, "os._exit": 2.0} if bad == "os._exit" else {"half": 0.0, "ok": 1.0}
    assert results[0] == Scored(4.0, {"length": 2.0, "act": 1.0, "rank_in_group": ranks["ok"]})
    assert results[2] == Scored(4.5, {"length": 4.0, "act": 0.5, "rank_in_group": ranks["half"]})


def test_each_function_has_the_whole_time(pool_of, score):
    """Four functions that take 0.4 of a time-out each do not add up to one."""

    def slow(completions, seconds, **columns):
        import time

        time.sleep(seconds[0])
        return [1.0] * len(completions)

    for timeout in (1.0, 10.0):
        pool = pool_of(*[RewardSpec(f"slow{i}", slow) for i in range(4)], timeout=timeout)
        (result,) = score(pool, ["a"], seconds=[0.4 * timeout])
        if not late(result):
            break
    assert result == Scored(4.0, {f"slow{i}": 1.0 for i in range(4)})


def test_all_functions_at_fault_give_their_reasons_in_their_order_whatever_the_number_of_workers(pool_of, zoo, score):
    def boom(completions, **columns):
        raise OSError("second")

    line = boom.__code__.co_firstlineno + 1
    for workers in (1, 3):
        (result,) = score(pool_of(zoo("act"), RewardSpec("boom", boom), timeout=30.0, workers=workers), ["raise"])
        second = f"boom raised OSError: second (test_apart.py, line {line})"
        assert result == Unscored(f"act raised ValueError: boom (zoo.py, line 34); {second}")


def test_ours_outweighs_the_policys_fault(scorer_of, zoo, score):
    """A sample that one function faults and another cannot score has no known reward."""
    odd, fine = score(scorer_of(zoo("fault_of_odd"), zoo("nan_for_odd")), ["odd", "fine"])
    assert isinstance(odd, Unscored) and "nan_for_odd" in odd.reason
    assert fine == Scored(2.0, {"fault_of_odd": 1.0, "nan_for_odd": 1.0})


@pytest.fixture(scope="module", params=["inline", "pool"])
def gym(request):
    """Scores by reasoning_gym, for all of its tests, as its worker imports for a second."""
    if request.param == "inline":
        yield InlineScorer([resolve("reasoning_gym")])
        return
    with RewardPool([resolve("reasoning_gym")], timeout=60.0) as pool:
        yield pool


@pytest.mark.parametrize(
    "text", ["wrong", "\ud800", *(pytest.param(text, marks=pytest.mark.slow) for text in ("[1,2", "2 × two"))]
)
def test_text_that_a_reasoning_gym_scorer_chokes_on_is_the_policys_fault(gym, score, text):
    """prime_factorization's scorer raises ValueError for what is no product of numbers: no reason to stop a run."""
    row = {"task": "prime_factorization", "answer": "2 × 2 × 3", "metadata": {"number": 12, "factors": [2, 2, 3]}}
    columns = {name: [value] * 2 for name, value in row.items()}
    right, wrong = score(gym, ["2 × 2 × 3", text], **columns)
    assert right == Scored(1.0, {"reasoning_gym": 1.0})
    assert wrong == Failed(
        0.0, "reasoning_gym: the scorer of prime_factorization cannot read the answer (ValueError)", {"reasoning_gym": 0.0}
    )


def test_a_row_that_its_scorer_chokes_on_is_not_the_policys_fault(gym, score):
    columns = {"task": ["prime_factorization"], "answer": ["two"], "metadata": [{"number": 12, "factors": [2, 2, 3]}]}
    (result,) = score(gym, ["4"], **columns)
    assert isinstance(result, Unscored) and "ValueError" in result.reason


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("3/2", "1/2", 0),
        ("1/2", "1/2", 1),
        ("so 0.5", "1/2", 1),
        ("2/4", "0.5", 1),
        ("-3/4", "-0.75", 1),
        ("1/0", "5", 0),
        ("5", "1/0", None),
        ("on 12/30/2024", "2024", 1),
        ("6 / 2 = 3", "3", 1),
        ("1/3", "0.3333333333", 1),
        ("3 km/2h", "2", 1),
        ("1/1" + "0" * 400, "5", 0),
    ],
)
def test_numeric_reads_a_fraction_as_one_number(completion, answer, reward):
    assert builtin.Numeric()([completion], [answer]) == [reward]


def test_ctrl_c_does_not_reach_the_workers(pool_of, zoo, score):
    pool = pool_of(zoo("length"), timeout=30.0)
    score(pool, ["a"])
    workers = pool.workers.processes
    for pid in workers:
        os.kill(pid, signal.SIGINT)
    assert score(pool, ["bb"])[0].value == 2.0
    assert pool.workers.processes == workers and all(map(psutil.pid_exists, workers))


def test_workers_have_one_thread_and_no_torch(pool_of, score):
    def state(completions, **columns):
        import os
        import sys

        return [float("torch" in sys.modules) + 10 * float(os.environ["OMP_NUM_THREADS"])] * len(completions)

    (result,) = score(pool_of(resolve("exact"), RewardSpec("state", state), timeout=30.0), ["a"], answer=["a"])
    assert result.parts == {"exact": 1.0, "state": 10.0}


def test_a_pool_costs_little_per_completion(pool_of, score):
    """512 short completions take about 4 ms on the development box; the bound excludes a round trip per sample."""
    pool, texts = pool_of(resolve("exact"), timeout=30.0), ["x"] * 512
    score(pool, texts, size=8, answer=texts)
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        score(pool, texts, size=8, answer=texts)
        times.append(time.perf_counter() - begin)
    assert min(times) < 0.1


def test_what_a_reward_does_to_its_inputs_no_other_reward_sees(pool_of, score, tmp_path):
    (tmp_path / "changing.py").write_text(
        "def first(completions, answer, **columns):\n"
        "    completions.clear(); answer[0] = 'x'; answer.append('y')\n"
        "    return [1.0, 1.0]\n"
        "def second(completions, answer, **columns):\n    return [float(c == a) for c, a in zip(completions, answer)]\n"
    )
    specs = [resolve(f"{tmp_path}/changing.py:{name}") for name in ("first", "second")]
    for order in (specs, specs[::-1]):
        found = score(pool_of(*order, timeout=60.0), ["a", "b"], answer=["a", "b"])
        assert [result.parts["second"] for result in found] == [1.0, 1.0]


def test_a_child_that_a_reward_forks_never_answers_in_its_place(pool_of, score, tmp_path):
    (tmp_path / "forking.py").write_text(
        "import os, sys\n"
        "def reward(completions, **columns):\n"
        "    pid = os.fork()\n"
        "    if pid == 0: sys.exit(0)\n"
        "    os.waitpid(pid, 0)\n"
        "    return [float(c) for c in completions]\n"
    )
    pool = pool_of(resolve(f"{tmp_path}/forking.py:reward"), timeout=60.0)
    texts = [str(i) for i in range(12)]
    assert [result.value for result in score(pool, texts, size=2)] == list(range(12))
    assert [result.value for result in score(pool, texts[::-1], size=3)] == list(range(12))[::-1]
