"""Intervals and pass@k against closed forms and enumeration."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from scipy import stats

from psigrad.intervals import (
    Interval,
    _student,
    detectable_gain,
    difference,
    mean_interval,
    paired_difference,
    pass_at_k,
    wilson,
)


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
    half = 3.18245 * math.sqrt(5 / 3) / 2
    assert (low, high) == pytest.approx((2.5 - half, 2.5 + half), abs=3e-3)
    assert mean_interval([1.0, 0.0]) == wilson(1, 2)
    assert mean_interval([0.5] * 4) == wilson(2, 4), "no spread: as wide as that of zeros and ones"
    assert all(map(math.isnan, mean_interval([3.0, 3.0]))), "no spread and no range: no interval"
    # 19 ones and one 0.5: m = 0.975, s² = 0.0125, n·m(1 − m)/s² = 39; Wilson's of 39 with t of 19 degrees of freedom
    t, n = 2.09302, 39.0
    centre, reach = 0.975 + t**2 / (2 * n), t * math.sqrt(0.975 * 0.025 / n + t**2 / (4 * n**2))
    low, high = mean_interval([1.0] * 19 + [0.5])
    assert (low, high) == pytest.approx(((centre - reach) / (1 + t**2 / n), (centre + reach) / (1 + t**2 / n)), abs=1e-4)
    assert high < 1


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 9, 30, 200])
def test_students_quantile_is_scipys(freedom):
    assert _student(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1.3e-3)


@pytest.mark.parametrize("n", [10, 11, 37, 1000])
def test_the_ends_of_all_and_of_none_are_exact(n):
    """Rounding left 3e-18 where 0 is meant."""
    assert wilson(0, n)[0] == 0.0 and wilson(n, n)[1] == 1.0 and 0 < wilson(0, n)[1] < wilson(n, n)[0] < 1


@pytest.mark.parametrize(
    "call", [lambda: wilson(0, 0), lambda: wilson(3, 2), lambda: mean_interval([]), lambda: pass_at_k(3, 1, 5)]
)
def test_what_has_no_interval_is_refused_with_what_was_expected(call):
    with pytest.raises(ValueError, match=r"expected 0 <= |at least one value"):
        call()


def share(n, rate, changed):
    """P(the interval leaves out 0): n rows of 0 and 1, right at `rate` before and with `changed` more after, by exact sums.

    Rows are independent, so that the numbers of those that turned either way are multinomial.
    """
    up, down = (1 - rate) * (rate + changed), rate * (1 - rate - changed)
    total = 0.0
    for better in range(n + 1):
        for worse in range(n + 1 - better):
            rest = n - better - worse
            found = paired_difference([0.0] * better + [1.0] * worse + [0.0] * rest, [1.0] * better + [0.0] * (worse + rest))
            if found.low > 0 or found.high < 0:
                total += stats.multinomial.pmf([better, worse, rest], n, [up, down, 1 - up - down])
    return total


# At n = 12 the rows of both evaluations as independent samples, with half widths in place of ends, gave 15.2 % false alarms.
@pytest.mark.parametrize(
    ("n", "rate", "changed", "least", "most"),
    [(12, 0.5, 0.0, 0.01, 0.065), (20, 0.02, 0.0, 0.0, 0.065), (24, 0.3, 0.0, 0.01, 0.065), (24, 0.2, 0.4, 0.75, 1.0)],
)
def test_a_change_is_rarely_seen_without_one_and_often_with_one(n, rate, changed, least, most):
    """tests/long/test_verdicts.py has the whole table."""
    assert least <= share(n, rate, changed) <= most


def test_a_difference_of_rows_by_hand():
    assert paired_difference([0.0] * 60, [0.0] * 60) == (0.0, -3 / 60, 3 / 60), "the rule of three"
    assert paired_difference([0.0] * 40, [1.0] * 40) == (1.0, 1 - 4 / 40, 1.0)
    few, enough = (paired_difference([0.0] * 40, [1.0] * turned + [0.0] * (40 - turned)).low for turned in (4, 5))
    assert few == 0 < enough, "of fewer than 50 rows five that turned one way are the first to prove anything"
    assert all(map(math.isnan, paired_difference([7.0] * 4, [7.0] * 4)[1:]))
    # d = 1, 2, 3, 6 of unbounded values: 3 ± 3.18·√(14/3)/2
    mean, low, high = paired_difference([0.0] * 4, [1.0, 2.0, 3.0, 6.0])
    assert (mean, high - 3) == pytest.approx((3, 3.182 * math.sqrt(14 / 3) / 2), rel=2e-3) and high - 3 == pytest.approx(3 - low)


def test_newcombes_difference_of_two_proportions():
    """56 of 70 against 48 of 80, the first example of Newcombe 1998: 0.2, from 0.0524 to 0.3339."""
    ends = [Interval(k / n, *wilson(k, n)) for k, n in ((48, 80), (56, 70))]
    assert difference(*ends) == pytest.approx((0.2, 0.0524, 0.3339), abs=5e-5)


@pytest.mark.parametrize(("right", "of"), [(0, 20), (5, 20), (10, 20)])
def test_the_detectable_gain_is_seen_in_about_four_of_five_runs(right, of):
    gain = detectable_gain([1.0] * right + [0.0] * (of - right))
    assert 0.7 < share(of, right / of, gain) < 0.9


@pytest.mark.parametrize(("n", "correct"), [(5, 0), (5, 2), (5, 5), (8, 1)])
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_one(n, correct):
    flags = [True] * correct + [False] * (n - correct)
    for k in range(1, n + 1):
        subsets = list(itertools.combinations(flags, k))
        assert pass_at_k(n, correct, k) == pytest.approx(sum(any(s) for s in subsets) / len(subsets))
