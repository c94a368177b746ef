"""Intervals and pass@k against closed forms and enumeration."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from scipy import stats

from psigrad.intervals import mean_interval, pass_at_k, wilson


@pytest.mark.parametrize(("successes", "n"), [(0, 10), (10, 10), (3, 10), (190, 200), (1, 1)])
def test_wilson_is_scipys(successes, n):
    for outside in (0.05, 0.025):
        expected = stats.binomtest(successes, n).proportion_ci(1 - outside, method="wilson")
        assert wilson(successes, n, outside) == pytest.approx((expected.low, expected.high), abs=1e-12)
    assert wilson(successes, n) == wilson(successes, n, 0.05)


def test_wilson_covers_the_truth_about_95_times_in_100():
    rng, covered = random.Random(0), 0
    for _ in range(2000):
        low, high = wilson(sum(rng.random() < 0.9 for _ in range(100)), 100)
        covered += low <= 0.9 <= high
    assert 0.93 < covered / 2000 < 0.97


def test_the_interval_of_a_mean_by_hand():
    low, high = mean_interval([1.0, 2.0, 3.0, 4.0])
    half = 1.959964 * math.sqrt(5 / 3) / 2
    assert (low, high) == pytest.approx((2.5 - half, 2.5 + half), abs=1e-6)
    assert mean_interval([0.5]) == (0.5, 0.5)
    assert mean_interval([1.0, 0.0]) == wilson(1, 2)


@pytest.mark.parametrize(("n", "correct"), [(5, 0), (5, 2), (5, 5), (8, 1)])
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_one(n, correct):
    flags = [True] * correct + [False] * (n - correct)
    for k in range(1, n + 1):
        subsets = list(itertools.combinations(flags, k))
        assert pass_at_k(n, correct, k) == pytest.approx(sum(any(s) for s in subsets) / len(subsets))
