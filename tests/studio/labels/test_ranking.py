"""Bradley-Terry with ties: closed forms, an independent optimiser, coverage by simulation, and what has no answer."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import logsumexp

from psigrad_studio.labels.ranking import Undetermined, bradley_terry


def drawn(random, strengths, eta, n):
    """Outcomes of `n` random comparisons under the model itself."""
    m = len(strengths)
    i = random.integers(0, m, n)
    j = (i + random.integers(1, m, n)) % m
    d = (strengths[i] - strengths[j]) / 2
    chance = np.exp(np.stack([d, -d, np.full(n, eta)], 1))
    chance /= chance.sum(1, keepdims=True)
    kind = (random.random((n, 1)) > chance.cumsum(1)).sum(1)
    return i, j, np.array([1.0, 0.0, 0.5])[kind]


def optimised(i, j, y, m, ties):
    """The same maximum by a general optimiser from the chances as Davidson writes them."""
    won, lost, tied = (y == v for v in (1.0, 0.0, 0.5))

    def loss(x):
        p = np.append(0.0, x[: m - 1])  # the first strength is 0
        eta = x[-1] if ties else -np.inf
        rows = np.stack([p[i], p[j], eta + (p[i] + p[j]) / 2])
        return -(rows[0][won].sum() + rows[1][lost].sum() + (rows[2][tied].sum() if ties else 0) - logsumexp(rows, 0).sum())

    found = minimize(loss, np.zeros(m - 1 + ties), method="BFGS", options={"gtol": 1e-9})
    p = np.append(0.0, found.x[: m - 1])
    return p - p.mean(), found.x[-1] if ties else -np.inf, -found.fun


def difference(found, i, j):
    """θ_i − θ_j with its 95 % interval, of which the covariance decides the width."""
    d, v = found.strength[i] - found.strength[j], found.covariance
    reach = 1.959963984540054 * np.sqrt(v[i, i] + v[j, j] - 2 * v[i, j])
    return d, d - reach, d + reach


@pytest.mark.parametrize("wins, losses, ties", [(5, 2, 0), (5, 2, 3), (1, 1, 1), (30, 7, 50), (3, 3, 0)])
def test_two_competitors_have_a_closed_form(wins, losses, ties):
    n = wins + losses + ties
    found = bradley_terry([0] * n, [1] * n, [1.0] * wins + [0.0] * losses + [0.5] * ties, 2)
    d, low, high = difference(found, 0, 1)
    assert d == pytest.approx(np.log(wins / losses), abs=1e-8)
    # the variance of a log ratio of two counts of one sample
    assert (high - low) / 2 / 1.959963984540054 == pytest.approx(np.sqrt(1 / wins + 1 / losses), rel=1e-6)
    assert found.tie == (pytest.approx(np.log(ties / np.sqrt(wins * losses)), abs=1e-8) if ties else -np.inf)
    assert found.strength.sum() == pytest.approx(0, abs=1e-12)


def test_a_balanced_circle_is_even():
    found = bradley_terry([0, 1, 2], [1, 2, 0], [1.0, 1.0, 1.0], 3)
    np.testing.assert_allclose(found.strength, 0, atol=1e-9)
    assert found.ranks() == [(1, 3)] * 3


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("eta", [-np.inf, -0.5, 1.0])
def test_the_maximum_is_that_of_a_general_optimiser(seed, eta):
    random = np.random.default_rng(seed)
    strengths = random.normal(0, 1, 6)
    i, j, y = drawn(random, strengths, eta, 400)
    found = bradley_terry(i, j, y, 6)
    strength, tie, likelihood = optimised(i, j, y, 6, bool((y == 0.5).any()))
    np.testing.assert_allclose(found.strength, strength, atol=2e-5)
    assert found.tie == pytest.approx(tie, abs=2e-5)
    assert found.log_likelihood == pytest.approx(likelihood, abs=1e-6)
    assert found.log_likelihood >= likelihood - 1e-9


def test_the_covariance_is_the_inverse_of_the_curvature():
    random = np.random.default_rng(0)
    i, j, y = drawn(random, np.array([1.0, 0.0, -1.0]), 0.0, 300)
    found = bradley_terry(i, j, y, 3)
    won, lost = y == 1, y == 0

    def likelihood(x):  # free: θ_0, θ_1 (θ_2 = −θ_0 − θ_1) and η
        p = np.array([x[0], x[1], -x[0] - x[1]])
        d = (p[i] - p[j]) / 2
        rows = np.stack([d, -d, np.full(len(i), x[2])])
        return (np.where(won, rows[0], np.where(lost, rows[1], rows[2])) - logsumexp(rows, 0)).sum()

    at, h, size = np.array([*found.strength[:2], found.tie]), 1e-4, 3
    hessian = np.zeros((size, size))
    for a in range(size):
        for b in range(size):
            e, f = np.eye(size)[a] * h, np.eye(size)[b] * h
            parts = likelihood(at + e + f) - likelihood(at + e - f) - likelihood(at - e + f) + likelihood(at - e - f)
            hessian[a, b] = parts / (4 * h * h)
    np.testing.assert_allclose(found.covariance[:2, :2], np.linalg.inv(-hessian)[:2, :2], rtol=1e-4)


def test_naming_and_turning_comparisons_changes_nothing():
    random = np.random.default_rng(1)
    i, j, y = drawn(random, random.normal(size=5), 0.0, 300)
    plain, turned = bradley_terry(i, j, y, 5), bradley_terry(j, i, 1 - y, 5)
    np.testing.assert_allclose(plain.strength, turned.strength, atol=1e-9)
    order = random.permutation(5)
    renamed = bradley_terry(order[i], order[j], y, 5)
    np.testing.assert_allclose(renamed.strength[order], plain.strength, atol=1e-9)
    negative = bradley_terry(i, j, 1 - y, 5)
    assert np.abs(negative.strength - plain.strength).max() > 0.1


@pytest.mark.parametrize("eta, n", [pytest.param(-np.inf, 400, marks=pytest.mark.slow), (0.3, 400)])
def test_intervals_cover_95_times_in_100(eta, n):
    random = np.random.default_rng(2)
    strengths = np.array([1.2, 0.5, 0.0, -0.6, -1.1])
    inside, pairs, trials = 0, 0, 200
    for _ in range(trials):
        found = bradley_terry(*drawn(random, strengths, eta, n), 5)
        low, high = found.interval()
        inside += ((low < strengths - strengths.mean()) & (strengths - strengths.mean() < high)).sum()
        pairs += sum(
            difference(found, a, b)[1] < strengths[a] - strengths[b] < difference(found, a, b)[2] for a, b in ((0, 1), (2, 4))
        )
    assert 0.93 < inside / (5 * trials) < 0.97
    assert 0.925 < pairs / (2 * trials) < 0.975


def test_answers_that_hang_together_need_the_clustered_interval():
    """Each task is answered five times alike: intervals that take the answers for independent are far too short."""
    random = np.random.default_rng(3)
    strengths = np.array([0.6, 0.0, -0.6])
    covered = {"clustered": 0, "independent": 0}
    for _ in range(150):
        i, j, y = (np.repeat(x, 5) for x in drawn(random, strengths, -np.inf, 120))
        for name, cluster in (("clustered", np.repeat(np.arange(120), 5)), ("independent", None)):
            low, high = bradley_terry(i, j, y, 3, cluster=cluster).interval()
            covered[name] += ((low < strengths) & (strengths < high)).sum()
    assert 0.92 < covered["clustered"] / 450 < 0.97
    assert covered["independent"] / 450 < 0.75


def test_the_clustered_variance_by_hand():
    """One task is won by all four, another lost by all four: d is 0, the information on it 8/4 = 2, and each task's score ±4/2.
    (2² + 2²) / 2² = 2, times 2 / (2 − 1) of two clusters, is a variance of 4.
    """
    found = bradley_terry([0] * 8, [1] * 8, [1] * 4 + [0] * 4, 2, cluster=[1] * 4 + [2] * 4)
    assert difference(found, 0, 1) == pytest.approx((0, -2 * 1.959964, 2 * 1.959964), abs=1e-5)


@pytest.mark.parametrize("prior_sd", [None, 1e4])
def test_few_tasks_leave_no_interval_narrower_than_that_of_independent_answers(prior_sd):
    """One task, won twice and lost once: d is ln 2 with the variance 1/2 + 1/1, although the scores of the task sum to 0."""
    found = bradley_terry([0] * 3, [1] * 3, [1, 1, 0], 2, cluster=[5] * 3, prior_sd=prior_sd)
    d, low, high = difference(found, 0, 1)
    assert (d, (high - low) / 2) == pytest.approx((np.log(2), 1.959964 * np.sqrt(1.5)), abs=1e-5)
    assert found.ranks() == [(1, 2), (1, 2)]
    # three pairs, each a task of its own that the strengths fit nearly exactly: 6 to 4, 6 to 4 and 7 to 3
    i, j, task = (np.repeat(x, 10) for x in ([0, 1, 0], [1, 2, 2], [0, 1, 2]))
    y = [1] * 6 + [0] * 4 + [1] * 6 + [0] * 4 + [1] * 7 + [0] * 3
    assert bradley_terry(i, j, y, 3, cluster=task, prior_sd=prior_sd).ranks() == [(1, 3)] * 3


def test_ranks_are_what_the_differences_leave_open():
    random = np.random.default_rng(4)
    i, j, y = drawn(random, np.array([3.0, 0.05, 0.0, -3.0]), -1.0, 600)
    assert bradley_terry(i, j, y, 4).ranks() == [(1, 1), (2, 3), (2, 3), (4, 4)]


@pytest.mark.parametrize(
    "first, second, outcome, said",
    [
        ([0], [1], [1.0], "never lost"),
        ([0, 0], [1, 1], [1.0, 0.5], "never lost"),
        ([0, 0], [1, 1], [0.5, 0.5], "or all are ties"),
        ([0, 1, 0], [1, 2, 2], [1.0, 1.0, 1.0], "never lost"),
        ([0, 0, 2, 2], [1, 1, 3, 3], [1.0, 0.0, 1.0, 0.0], "2 groups"),
        ([0, 0], [1, 1], [1.0, 0.0], "2 groups"),
    ],
)
def test_what_has_no_answer_is_said_and_a_prior_gives_one(first, second, outcome, said):
    n = max(2, *first, *second) + 1 if said == "2 groups" else max(*first, *second) + 1
    with pytest.raises(Undetermined, match=said):
        bradley_terry(first, second, outcome, n)
    found = bradley_terry(first, second, outcome, n, prior_sd=2.0)
    assert np.isfinite(found.strength).all() and np.isfinite(found.covariance).all() and found.prior_sd == 2


def test_ties_that_hold_a_chain_together_are_enough():
    # 0 and 1 beat one another, and so do 1 and 2; 0 and 2 only tied
    found = bradley_terry([0, 0, 1, 1, 0], [1, 1, 2, 2, 2], [1.0, 0.0, 1.0, 0.0, 0.5], 3)
    assert np.isfinite(found.strength).all()


def test_a_weak_prior_changes_little_and_a_strong_one_draws_together():
    random = np.random.default_rng(5)
    i, j, y = drawn(random, random.normal(size=4), 0.0, 2000)
    plain, weak, strong = (bradley_terry(i, j, y, 4, prior_sd=sd) for sd in (None, 100.0, 0.05))
    np.testing.assert_allclose(weak.strength, plain.strength, atol=1e-4)
    assert np.abs(strong.strength).max() < 0.5 * np.abs(plain.strength).max()


@pytest.mark.parametrize(
    "arguments, said",
    [
        (([], [], [], 2), "expected equal lengths above 0"),
        (([0], [1, 1], [1.0], 2), "expected equal lengths"),
        (([0], [0], [1.0], 2), "with itself"),
        (([0], [2], [1.0], 2), "outside 0 to 1"),
        (([-1], [1], [1.0], 2), "outside 0 to 1"),
        (([0], [1], [0.7], 2), "must be 1"),
    ],
)
def test_malformed_input_is_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        bradley_terry(*arguments)
    with pytest.raises(ValueError, match="prior_sd"):
        bradley_terry([0], [1], [1.0], 2, prior_sd=0)
