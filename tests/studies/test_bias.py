"""Bias and variance of TD, n-step, λ and Monte Carlo targets: solved, enumerated and sampled."""

from __future__ import annotations

import numpy as np
import pytest

from psigrad.errors import UserError
from psigrad.tabular import all_paths, evaluate, lambda_returns, n_step_returns, sample_paths, softmax_policy
from studies import bias, problems
from studies.bias import SolvedWorld, Target

TARGETS = [Target(n=1), Target(n=3), Target(n=50), Target(lam=0.0), Target(lam=0.7), Target(lam=1.0)]


@pytest.fixture(scope="module")
def tree() -> tuple[SolvedWorld, np.ndarray]:
    """A process whose episodes can be enumerated, with rewards that depend on the outcome, and a V̂ that is quite wrong."""
    mdp = problems.line_walk(cells=4, steps=5, slip=0.3, gamma=0.9)
    policy = softmax_policy(np.random.default_rng(1).normal(size=(mdp.n_states, 2)), 1.0)
    value = np.random.default_rng(2).normal(size=mdp.n_states) * ~mdp.is_terminal
    return SolvedWorld(mdp, policy, evaluate(mdp, policy)), value


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
def test_the_solved_moments_are_those_of_all_episodes_through_the_library(tree, target):
    world, value = tree
    paths, p = all_paths(world.mdp, world.policy)
    whole = [(np.arange(len(p)), bias._batch(world, paths, value))]
    found = bias.whole_returns(target, world, whole)
    mean, variance = bias.exact(target, world, bias.chain(world), value)
    start = int(paths.states[0, 0])
    assert p @ found == pytest.approx(mean[start], abs=1e-12)
    assert p @ (found - p @ found) ** 2 == pytest.approx(variance[start], abs=1e-12)
    assert target.lam < 1 or target.n == 1 or target.n == 3 or mean[start] == pytest.approx(world.value[start])


@pytest.mark.parametrize("world", ["walk", "grid"])
@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
def test_targets_are_those_of_the_tabular_room(world, target):
    world = bias.WORLDS[world]()
    value = bias.critics(world, 0.5)[bias.NOISY]
    paths = sample_paths(world.mdp, world.policy, 40, seed=3)
    found = bias.whole_returns(target, world, bias._by_length(world, paths, value))
    gamma = world.mdp.gamma
    for row in range(40):
        episode = paths.episode(row)
        slow = n_step_returns(episode, value, gamma, target.n) if target.n else lambda_returns(episode, value, gamma, target.lam)
        assert found[row] == pytest.approx(slow[0], abs=1e-12)
    if target.n:
        np.testing.assert_allclose(bias.cut_returns(target, world, paths, value), found, atol=1e-12)


@pytest.fixture(
    scope="module", params=[pytest.param(("walk", 6, 800), marks=pytest.mark.long), ("grid", 8, 1_000)], ids=["walk", "grid"]
)
def sampled(request):
    world, seeds, episodes = request.param
    return bias.run(bias.BiasSettings(world=world, seeds=seeds, episodes=episodes))


def test_sampled_figures_are_the_exact_ones_within_their_intervals(sampled):
    """Twice the width of a 95 % interval; seeds are fixed. Targets share their episodes, so misses would come in crowds."""
    assert len(sampled.rows) == 42
    for row in sampled.rows:
        for found, exact in ((row.bias2, row.exact_bias2), (row.variance, row.exact_variance)):
            assert abs(found.mean - exact) <= 2 * (found.high - found.mean) + 1e-12, row


def test_theory_on_every_world(sampled):
    rows = {(row.critic, row.n, row.lam): row for row in sampled.rows}
    for lam in bias.LAMBDA:
        assert rows[bias.PERFECT, 0, lam].exact_bias2 < 1e-20
    for critic in (bias.PERFECT, bias.SHRUNK, bias.NOISY):
        assert rows[critic, 0, 1.0].exact_bias2 < 1e-20  # Monte Carlo knows no V̂
        assert rows[critic, 0, 1.0].exact_variance == pytest.approx(rows[bias.PERFECT, 0, 1.0].exact_variance)
        assert rows[critic, 1, 1.0].exact_variance == pytest.approx(rows[critic, 0, 0.0].exact_variance)  # n = 1 is λ = 0
    for critic in (bias.SHRUNK, bias.NOISY):
        falling = [rows[critic, 0, lam].exact_bias2 for lam in bias.LAMBDA]
        assert falling == sorted(falling, reverse=True) and falling[0] > 0.01
        falling = [rows[critic, n, 1.0].exact_bias2 for n in bias.N]
        assert falling == sorted(falling, reverse=True)
    growing = [rows[bias.PERFECT, 0, lam].exact_variance for lam in bias.LAMBDA]
    assert growing == sorted(growing)


def test_the_worse_the_critic_the_larger_the_best_lambda(sampled):
    for kind in (bias.SHRUNK, bias.NOISY):
        curves = [curve for curve in sampled.curves if curve.critic == kind]
        best = [curve.best for curve in curves]
        assert best == sorted(best) and best[0] == 0 and 0.85 < best[-1] < 1
        assert [curve.mse[-1] for curve in curves] == pytest.approx([curves[0].mse[-1]] * 5)


def test_one_step_of_the_walk_by_hand():
    """TD(0) from state i with V̂ = V: 0.1·(±1) beside the middle, so variance 0.01; Monte Carlo: a coin of ±1 with mean V."""
    world = bias.walk()
    step = bias.chain(world)
    mean, variance = bias.exact(Target(n=1), world, step, world.value)
    np.testing.assert_allclose(variance[1:20], 0.01, atol=1e-12)
    np.testing.assert_allclose(mean, world.value, atol=1e-12)
    _, variance = bias.exact(Target(lam=1.0), world, step, np.zeros(21))
    np.testing.assert_allclose(variance[1:20], 1 - world.value[1:20] ** 2, atol=1e-10)


def test_the_two_wrong_critics_are_equally_wrong():
    world = bias.grid()
    off = [np.sqrt(((v - world.value) ** 2).mean()) for v in bias.critics(world, 0.3).values()]
    assert off[0] == 0 and off[1] == pytest.approx(off[2]) and off[1] == pytest.approx(0.3 * np.sqrt((world.value**2).mean()))


def test_too_few_episodes_are_refused_with_a_number_that_helps():
    with pytest.raises(UserError, match=r"Fewer than two of .* raise --episodes to about 380"):
        bias.run(bias.BiasSettings(episodes=20, seeds=1))
