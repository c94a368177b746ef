"""Agreement against published worked examples, closed forms, and a slow oracle written the other way round."""

from __future__ import annotations

import itertools
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from scipy.stats import beta

from psigrad_studio.labels import agreement

N = np.nan
# Krippendorff 2011, "Computing Krippendorff's alpha-reliability", section D: four observers, twelve units, five categories.
KRIPPENDORFF = [
    [1, 2, 3, 3, 2, 1, 4, 1, 2, N, N, N],
    [1, 2, 3, 3, 2, 2, 4, 1, 2, 5, N, 3],
    [N, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, N],
    [1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, N],
]
# The table of the Wikipedia article on Fleiss' kappa: ten subjects, fourteen raters, five categories.
FLEISS = """0 0 0 0 14
0 2 6 4 2
0 0 3 5 6
0 3 9 2 0
2 2 8 1 1
7 7 0 0 0
3 2 6 3 0
2 5 3 2 2
6 5 2 1 0
0 2 2 3 7"""


@pytest.mark.parametrize("level, alpha", [("nominal", 0.743), ("ordinal", 0.815), ("interval", 0.849), ("ratio", 0.797)])
def test_krippendorffs_own_example(level, alpha):
    assert round(agreement.krippendorff_alpha(KRIPPENDORFF, level), 3) == alpha


def test_two_observers_two_categories_without_gaps():
    # section A of the same paper: 10 articles, 0.095
    a, b = [0, 1, 0, 0, 0, 0, 0, 0, 1, 0], [1, 1, 1, 0, 0, 1, 0, 0, 0, 0]
    assert round(agreement.krippendorff_alpha([a, b]), 3) == 0.095


def test_many_categories():
    # section B of the same paper: 12 articles, five categories, nominal 0.692
    a = list("aabbdcccedda")
    b = list("babbbccceddd")
    codes = [["abcde".index(x) for x in row] for row in (a, b)]
    assert round(agreement.krippendorff_alpha(codes), 3) == 0.692


def test_fleiss_example():
    counts = np.array([list(map(int, line.split())) for line in FLEISS.splitlines()])
    ratings = np.array([np.repeat(np.arange(5), row) for row in counts], float).T
    assert round(agreement.fleiss_kappa(ratings), 3) == 0.210


def test_cohen_example():
    # 20 both yes, 5 yes/no, 10 no/yes, 15 both no: (0.7 - 0.5) / 0.5 (the Wikipedia article's grant proposals)
    pairs = [(1, 1)] * 20 + [(1, 0)] * 5 + [(0, 1)] * 10 + [(0, 0)] * 15
    a, b = np.array(pairs).T
    assert agreement.cohen_kappa(a, b) == pytest.approx(0.4, abs=1e-12)


def slow_alpha(table, level):
    """Disagreement of all pairs within units over that of all pairs at all, pair by pair."""
    units = [[v for v in column if not np.isnan(v)] for column in np.array(table, float).T]
    units = [u for u in units if len(u) > 1]
    every = sorted(v for u in units for v in u)
    if not every:
        return N

    def squared(x, y):
        if level == "nominal":
            return float(x != y)
        if level == "interval":
            return (x - y) ** 2
        between = sum(min(x, y) <= v <= max(x, y) for v in every)
        return (between - (every.count(x) + every.count(y)) / 2) ** 2

    observed = sum(squared(x, y) / (len(u) - 1) for u in units for x, y in itertools.permutations(u, 2)) / len(every)
    expected = sum(squared(x, y) for x, y in itertools.permutations(every, 2)) / (len(every) * (len(every) - 1))
    return 1 - observed / expected if expected else N


tables = arrays.arrays(float, st.tuples(st.integers(1, 4), st.integers(1, 7)), elements=st.sampled_from([N, 1.0, 2.0, 3.0, 5.0]))


@given(tables, st.sampled_from(["nominal", "ordinal", "interval"]))
@settings(max_examples=150, deadline=None)
def test_alpha_is_that_of_all_pairs(table, level):
    assert agreement.krippendorff_alpha(table, level) == pytest.approx(slow_alpha(table, level), abs=1e-10, nan_ok=True)


@given(tables, st.randoms())
@settings(max_examples=60, deadline=None)
def test_the_order_of_raters_and_units_does_not_matter(table, random):
    rows, columns = list(range(table.shape[0])), list(range(table.shape[1]))
    random.shuffle(rows), random.shuffle(columns)
    mixed = table[rows][:, columns]
    for figure in (agreement.krippendorff_alpha, agreement.percent_agreement):
        assert figure(mixed) == pytest.approx(figure(table), abs=1e-12, nan_ok=True)


def test_perfect_agreement_is_one_and_guessing_is_about_zero():
    random = np.random.default_rng(1)
    truth = random.integers(0, 4, 4000)
    same, guessed = np.stack([truth, truth]), random.integers(0, 4, (3, 4000)).astype(float)
    assert agreement.krippendorff_alpha(same) == agreement.fleiss_kappa(same) == agreement.cohen_kappa(*same) == 1
    assert agreement.percent_agreement(same) == 1
    assert abs(agreement.krippendorff_alpha(guessed)) < 0.02 and abs(agreement.fleiss_kappa(guessed)) < 0.02
    assert abs(agreement.cohen_kappa(*guessed[:2])) < 0.04
    assert agreement.percent_agreement(guessed) == pytest.approx(0.25, abs=0.02)


def test_percent_agreement_by_hand():
    # unit 1: three answers, one pair of three agrees; unit 2: two answers that agree; unit 3: one answer
    assert agreement.percent_agreement([[1, 2, 1], [1, 2, N], [2, N, N]]) == 2 / 4


@pytest.mark.parametrize("table", [[[1, 2, N]], [[N, N], [N, N]], [[1, N], [N, 2]], np.empty((0, 0)), np.empty((3, 0))])
def test_nothing_to_compare_is_nan_and_no_error(table):
    assert np.isnan(agreement.krippendorff_alpha(table)) and np.isnan(agreement.percent_agreement(table))
    interval = agreement.alpha_interval(table)
    assert np.isnan([interval.value, interval.low, interval.high]).all() and interval.units == 0


def test_a_single_category_says_nothing():
    table = np.ones((3, 5))
    assert np.isnan([agreement.krippendorff_alpha(table), agreement.fleiss_kappa(table), agreement.cohen_kappa(*table[:2])]).all()
    assert agreement.percent_agreement(table) == 1


def test_fleiss_refuses_what_it_is_not_defined_for():
    with pytest.raises(ValueError, match="1 to 2 answers"):
        agreement.fleiss_kappa([[1, 2], [1, N]])
    with pytest.raises(ValueError, match=r"2 axes|expected 2"):
        agreement.fleiss_kappa([1, 2])
    with pytest.raises(ValueError, match="equal length"):
        agreement.cohen_kappa([1, 2], [1])


def test_the_interval_of_alpha_covers_its_value_95_times_in_100():
    random = np.random.default_rng(2)

    def sample(units):
        truth = random.integers(0, 2, units)
        return np.where(random.random((3, units)) < 0.8, truth, 1 - truth).astype(float)

    true = agreement.krippendorff_alpha(sample(400_000))
    found = [agreement.alpha_interval(sample(150), draws=400, seed=n) for n in range(300)]
    inside = sum(each.low <= true <= each.high for each in found)
    assert 0.90 <= inside / 300 <= 0.985


@pytest.mark.parametrize("level", ["nominal", "ordinal", "interval"])
def test_the_interval_of_alpha_is_that_of_resampled_units(level, monkeypatch):
    table = np.array([[1, 2, 3, 3, 5, 2], [1, 2, 5, 3, 1, N], [2, 2, 3, N, 5, N]], float)
    found = agreement.alpha_interval(table, level, draws=40, seed=3)
    times = np.random.default_rng(3).multinomial(5, np.full(5, 0.2), size=40)
    again = [slow_alpha(np.repeat(table[:, :5], each, axis=1), level) for each in times]
    assert (found.low, found.high) == pytest.approx(tuple(np.nanquantile(again, [0.025, 0.975])), abs=1e-10)
    monkeypatch.setattr(agreement, "AT_ONCE", 1)
    assert agreement.alpha_interval(table, level, draws=40, seed=3) == found, "one resample at a time"


@pytest.mark.parametrize("level", ["nominal", "ordinal", "interval"])
def test_the_interval_of_many_values_needs_no_table_of_all_pairs_of_them(level):
    """30 units of two answers with 60 values: 2000 tables of 60 × 60 would be 58 MB each time."""
    ratings = np.random.default_rng(0).permutation(60).reshape(2, 30) / 7
    tracemalloc.start()
    try:
        found = agreement.alpha_interval(ratings, level)
        assert found.units == 30 and tracemalloc.get_traced_memory()[1] < 25e6
    finally:
        tracemalloc.stop()


def test_a_share_of_one_side_by_hand_and_by_simulation():
    found = agreement.share(60, 100)
    assert (found.value, found.n) == (0.6, 100)
    # Wilson 1927; the two-sided exact test of 60 in 100 is 0.0569
    z, p, n = 1.959963984540054, 0.6, 100
    middle, reach = (p + z**2 / 200) / (1 + z**2 / n), z / (1 + z**2 / n) * np.sqrt(p * 0.4 / n + z**2 / (4 * n**2))
    assert (found.low, found.high) == pytest.approx((middle - reach, middle + reach), abs=1e-12)
    assert found.p_value == pytest.approx(0.0569, abs=5e-5)
    random = np.random.default_rng(3)
    false_alarms = sum(agreement.share(int((random.random(200) < 0.5).sum()), 200).p_value < 0.05 for _ in range(1000))
    assert 20 <= false_alarms <= 70  # the exact test is a little conservative
    assert agreement.share(int((random.random(400) < 0.65).sum()), 400).p_value < 1e-4


def test_no_choice_of_a_side_gives_no_figure():
    found = agreement.share(0, 0)
    assert found.n == 0 and np.isnan([found.value, found.low, found.high, found.p_value]).all()


def test_shares_at_the_ends_stay_inside():
    found = agreement.share(10, 10)
    assert found.value == 1 and 0.69 < found.low < 1 and found.high == 1
    assert found.low > beta.ppf(0.025, 10, 1)  # Wilson is shorter than the exact interval
