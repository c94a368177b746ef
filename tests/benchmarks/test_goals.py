"""What `make bench` says of its goals follows from the figures beside it."""

from __future__ import annotations

import sys

import goals
import pytest


def line(workload, *, ratio=3.0, dtype="float32", memory_ratio=4.0, peak=1500.0, first=4.0):
    return {
        "workload": workload,
        "dtype": dtype,
        "ratio": {"median": ratio, "low": ratio - 1, "high": ratio + 1},
        "memory_ratio": memory_ratio,
        "ours": {"peak_mb": peak},
        "to_first_step": {"ours": first, "trl": 10.0},
        "trl": {},
    }


def test_every_goal_holds_at_its_bound():
    found = [v for name in ("W0", "W1", "W3", "W4") for v in goals.verdicts(line(name))]
    assert [v.what for v in found if not v.holds] == []
    assert [(v.workload, v.what) for v in found] == [
        ("W0", "times as fast, float32"),
        ("W0", "first step, s"),
        ("W1", "times as fast, float32"),
        ("W1", "peak memory, MiB"),
        ("W1", "first step, s"),
        ("W3", "times as fast, float32"),
        ("W3", "share of TRL's memory"),
        ("W4", "times as fast, float32"),
    ]


@pytest.mark.parametrize(
    ("workload", "figure", "what"),
    [
        ("W0", {"ratio": 2.99}, "times as fast, float32"),
        ("W0", {"first": 4.01}, "first step, s"),
        ("W0", {"dtype": "bfloat16", "ratio": 4.9}, "times as fast, bfloat16"),
        ("W1", {"dtype": "bfloat16", "ratio": 4.9}, "times as fast, bfloat16"),
        ("W1", {"peak": 1501.0}, "peak memory, MiB"),
        ("W3", {"memory_ratio": 3.99}, "share of TRL's memory"),
        ("W3F", {"ratio": 1.49}, "times as fast, float32"),
    ],
)
def test_a_goal_that_is_missed_is_called_missed(workload, figure, what):
    found = goals.verdicts(line(workload, **figure))
    assert [v.what for v in found if not v.holds] == [what]
    assert goals.table(found).count("missed") == 1


def test_a_goal_in_float32_says_nothing_of_bfloat16():
    assert goals.verdicts(line("W4", dtype="bfloat16", ratio=1.0)) == []


def test_alone_there_is_no_comparison():
    alone = {key: value for key, value in line("W1").items() if key != "trl"}
    assert goals.verdicts(alone) == []


def test_the_goals_are_of_workloads_that_exist():
    import workloads

    try:
        assert set(goals.GOALS) <= set(workloads.WORKLOADS)
    finally:
        del sys.modules["workloads"]
