"""Bias and variance of each form of Ψ: closed forms, enumeration of whole batches, and sampled figures within their intervals."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from psigrad.intervals import over_seeds
from psigrad.objective.parts.advantage import batch_mean, leave_one_out, moving_average, reward_to_go
from psigrad.tabular import MDP, all_paths, sample_paths
from studies import problems, psi
from studies.psi import PsiForm

FORMS = psi.forms(1.0)
UNBIASED_IF_ROUGH = "G − V"


def bandit(means: tuple[float, ...], *, spread: float = 0.0) -> MDP:
    """One step, one state, an arm for each mean; an arm pays its mean + spread or its mean − spread by a coin."""
    arms = len(means)
    transitions, rewards = np.zeros((arms, 3, 3)), np.zeros((arms, 3, 3))
    transitions[:, 0, 1:] = 0.5
    rewards[:, 0, 1], rewards[:, 0, 2] = np.add(means, spread), np.subtract(means, spread)
    return MDP(transitions, rewards, 1.0, terminal=np.array([False, True, True]), start=np.array([1.0, 0.0, 0.0]))


@pytest.fixture(scope="module")
def walk():
    return problems.problem(problems.line_walk())


@pytest.fixture(scope="module")
def rows(walk):
    found = psi.rows(walk, FORMS, seeds=8, episodes=2_000, batch_size=8)
    return {(row.name, row.critic): row for row in found}


def mean_of(form, given, batch_size=8):
    return psi.moments(form, given, batch_size, 100)[0]


@pytest.mark.parametrize("at_the_end", [False, True])
@pytest.mark.parametrize("form", FORMS, ids=lambda f: f"{f.name} {f.critic}")
def test_which_forms_are_unbiased(form, at_the_end):
    given = problems.problem(problems.line_walk(at_the_end=at_the_end))
    off = np.linalg.norm(mean_of(form, given) - given.gradient) / np.linalg.norm(given.gradient)
    if form.psi is batch_mean:
        assert off == pytest.approx(1 / 8, abs=1e-12)
    elif form.psi is psi.minus_action_value:
        assert off == pytest.approx(1, abs=1e-12)
    elif form.critic == problems.ROUGH and form.name != UNBIASED_IF_ROUGH:
        assert off > 0.01
    else:
        assert off < 1e-12


def test_one_step_of_a_rough_critic_has_one_expectation_however_it_is_written(walk):
    td, q, advantage = (
        mean_of(form, walk) for form in FORMS if form.critic == problems.ROUGH and form.name in ("TD residual", "Q", "A = Q − V")
    )
    np.testing.assert_allclose(td, q, atol=1e-12)
    np.testing.assert_allclose(td, advantage, atol=1e-12)


def test_gae_loses_its_bias_as_lambda_grows(walk):
    by_name = {form.name: form for form in FORMS if form.critic == problems.ROUGH}
    off = [
        np.linalg.norm(mean_of(by_name[name], walk) - walk.gradient)
        for name in ("TD residual", "GAE, λ = 0.5", "GAE, λ = 0.9", "G − V")
    ]
    assert off == sorted(off, reverse=True) and off[-1] < 1e-12


def test_a_discount_without_gamma_to_the_t_is_a_bias():
    """The library's reward to go weighs late steps as much as early ones: not the gradient of the discounted return."""
    given = problems.problem(problems.line_walk(gamma=0.8))
    off = {form.name: np.linalg.norm(mean_of(form, given) - given.gradient) for form in psi.forms(0.8) if not form.critic}
    assert off["total return R"] < 1e-12 < 0.05 < off["reward to go G"]


def arm_gradient(p: float, first: bool) -> np.ndarray:
    """∂ log π / ∂θ of an arm with probability p for the first of two, by hand."""
    return np.array([1 - p, p - 1]) if first else np.array([-p, p])


@pytest.mark.parametrize("means", [(1.0, 0.0), (3.0, 5.0)])
def test_two_armed_bandit_by_hand(means):
    mdp = bandit(means)
    given = problems.problem(mdp)
    p = float(given.policy[0, 0])
    weighted = [(p, means[0], arm_gradient(p, True)), (1 - p, means[1], arm_gradient(p, False))]
    truth = p * (1 - p) * (means[0] - means[1]) * np.array([1, -1])
    np.testing.assert_allclose(given.gradient[:2], truth, atol=1e-14)
    value = p * means[0] + (1 - p) * means[1]
    for name, baseline in (("total return R", 0.0), ("reward to go G", 0.0), ("G − V", value), ("Q", 0.0), ("A = Q − V", value)):
        form = next(form for form in FORMS if form.name == name and form.critic != problems.ROUGH)
        mean, variance = psi.moments(form, given, 4, 10)
        np.testing.assert_allclose(mean[:2], truth, atol=1e-14)
        second = sum(q * ((r - baseline) ** 2) * (s @ s) for q, r, s in weighted)
        assert variance == pytest.approx(second - truth @ truth, abs=1e-13)


def every_batch(given, size: int):
    """All sequences of `size` episodes as one set of paths, and the probability of each sequence."""
    paths, p = all_paths(given.mdp, given.policy)
    chosen = np.array(list(itertools.product(range(len(p)), repeat=size)))
    return paths, chosen, p[chosen].prod(1)


@pytest.mark.parametrize("part", [leave_one_out, batch_mean])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_forms_that_look_at_the_batch_have_the_moments_of_all_batches(part, size):
    given = problems.problem(bandit((1.0, 2.0, 4.0), spread=0.7))
    paths, chosen, p = every_batch(given, size)
    g = psi.estimates(PsiForm("", part), given, paths.select(chosen.ravel()), size)
    mean, variance = psi.moments(PsiForm("", part), given, size, 10)
    np.testing.assert_allclose(p @ g, mean, atol=1e-12)
    assert size * float(p @ ((g - p @ g) ** 2).sum(1)) == pytest.approx(variance, rel=1e-10)


@pytest.mark.parametrize("size", [2, 3])
def test_a_baseline_for_each_step_has_the_moments_of_all_batches(size):
    given = problems.problem(problems.line_walk(cells=3, steps=2, gamma=0.9))
    form = PsiForm("", psi.reward_to_go_minus_others(0.9))
    paths, chosen, p = every_batch(given, size)
    g = psi.estimates(form, given, paths.select(chosen.ravel()), size)
    mean, variance = psi.moments(form, given, size, 10)
    np.testing.assert_allclose(p @ g, mean, atol=1e-12)
    assert size * float(p @ ((g - p @ g) ** 2).sum(1)) == pytest.approx(variance, rel=1e-10)
    np.testing.assert_allclose(mean, mean_of(PsiForm("", reward_to_go(0.9)), given), atol=1e-12)


def test_the_moving_average_has_the_moments_of_all_sequences_of_batches():
    given, form = problems.problem(bandit((1.0, 2.0), spread=0.7)), PsiForm("", moving_average(0.6))
    paths, chosen, p = every_batch(given, 4)  # two batches of two
    g = np.stack([psi.estimates(form, given, paths.select(row), 2) for row in chosen])
    mean, variance = psi.moments(form, given, 2, 2)
    np.testing.assert_allclose(np.einsum("n,nkd->kd", p, g), np.tile(mean, (2, 1)), atol=1e-12)
    assert 2 * float(p @ ((g - mean) ** 2).sum(2).mean(1)) == pytest.approx(variance, rel=1e-10)


def test_sampled_figures_are_the_exact_ones_within_their_intervals(rows):
    """40 intervals of 8 seeds: one of 95 % would miss here and there, so twice their width, which misses once in a thousand."""
    for row in rows.values():
        for sampled, exact in ((row.along, row.exact_along), (row.variance, row.exact_variance)):
            assert abs(sampled.mean - exact) < 2 * (sampled.high - sampled.mean), row
            assert sampled.high - sampled.low < 0.15 * max(1, abs(exact))


def test_no_bias_is_rejected_where_there_is_one_and_only_there(rows):
    for row in rows.values():
        if row.exact_bias < 1e-9:
            assert row.p > 0.001, row
        elif row.exact_bias > 0.05:
            assert row.p < 1e-6, row


def test_the_order_of_the_variances_on_this_example(rows):
    order = [
        ("total return R", ""),
        ("reward to go G", ""),
        ("Q", problems.EXACT),
        ("R − moving average", ""),
        ("G − others' mean", ""),
        ("G − V", problems.EXACT),
        ("GAE, λ = 0.9", problems.EXACT),
        ("GAE, λ = 0.5", problems.EXACT),
        ("TD residual", problems.EXACT),
        ("A = Q − V", problems.EXACT),
    ]
    for larger, smaller in itertools.pairwise(order):
        assert rows[larger].exact_variance > rows[smaller].exact_variance
        assert rows[larger].variance.low > rows[smaller].variance.high, (larger, smaller)


def test_paid_at_the_end_reward_to_go_is_the_total_return():
    given = problems.problem(problems.line_walk(at_the_end=True))
    variance = {form.name: psi.moments(form, given, 8, 100)[1] for form in FORMS if not form.critic}
    assert variance["reward to go G"] == pytest.approx(variance["total return R"], rel=1e-12)
    assert variance["R − others' mean"] < 0.6 * variance["total return R"]


def test_the_error_of_a_batch_is_bias_and_variance_together(walk, rows):
    row, length = rows["TD residual", problems.ROUGH], np.linalg.norm(walk.gradient)
    assert row.error**2 == pytest.approx(row.exact_bias**2 + row.exact_variance / 8 / length**2)


def test_the_probability_of_no_bias_is_uniform_when_there_is_none():
    rng = np.random.default_rng(0)
    root = rng.normal(size=(5, 5))
    root[:, 3] = root[:, 2]  # a covariance without full rank
    p = np.array([psi.no_bias(rng.normal(size=(200, 5)) @ root + 1, np.ones(5)) for _ in range(500)])
    assert 0.02 < (p < 0.05).mean() < 0.08 and 0.4 < (p < 0.5).mean() < 0.6
    assert psi.no_bias(rng.normal(size=(200, 5)) @ root + 1, np.zeros(5)) < 1e-6
    few = np.array([psi.no_bias(rng.normal(size=(8, 5)) @ root, np.zeros(5)) for _ in range(500)])  # χ² would reject most
    assert 0.02 < (few < 0.05).mean() < 0.08
    assert psi.no_bias(rng.normal(size=(5, 5)) @ root, np.zeros(5)) is None


def test_intervals_are_students():
    found = over_seeds([1.0, 2.0, 3.0, 4.0])
    assert found.mean == 2.5 and found.high - 2.5 == pytest.approx(3.182446 * np.std([1, 2, 3, 4], ddof=1) / 2, rel=1e-6)
    assert over_seeds([3.0]) == (3.0, 3.0, 3.0)


def test_a_moving_average_of_several_batches_has_the_weights_of_its_definition():
    """E b² over four batches, by the recursion m ← d·m + (1 − d)·mean, b = m/(1 − dᵏ) on sampled means."""
    means = 3 + 0.5 * np.random.default_rng(0).normal(size=(400_000, 3))
    m, b = np.zeros(400_000), [np.zeros(400_000)]
    for k in range(3):
        m = 0.6 * m + 0.4 * means[:, k]
        b.append(m / (1 - 0.6 ** (k + 1)))
    first, second = psi._average_moments(0.6, 3.0, 0.25, 4)
    assert np.mean(b) == pytest.approx(first, rel=1e-3) and np.mean(np.square(b)) == pytest.approx(second, rel=1e-3)


def test_each_seed_starts_its_moving_average_afresh(walk):
    """Two seeds together are the mean of each by itself."""
    form = PsiForm("", moving_average())
    played = [sample_paths(walk.mdp, walk.policy, 64, seed=s) for s in (0, 1)]
    alone = [float(psi.estimates(form, walk, paths, 8).mean(0) @ walk.gradient) for paths in played]
    both = psi.rows(walk, [form], seeds=2, episodes=64, batch_size=8)[0]
    assert both.along.mean == pytest.approx(np.mean(alone) / (walk.gradient @ walk.gradient) - 1)
