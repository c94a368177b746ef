"""The exact gradient and the gradients by counting, each against an oracle that shares nothing with it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from psigrad.objective import PolicyOutputs
from psigrad.tabular import all_paths, evaluate, sample_paths, softmax_policy
from studies import problems, psi


def expected_return(mdp, theta) -> float:
    return float(mdp.start_distribution @ evaluate(mdp, softmax_policy(theta, 1.0)))


@pytest.mark.parametrize("gamma", [1.0, 0.8])
@pytest.mark.parametrize("at_the_end", [False, True])
def test_the_exact_gradient_is_that_of_the_expected_return_by_finite_differences(gamma, at_the_end):
    mdp = problems.line_walk(cells=3, steps=3, gamma=gamma, at_the_end=at_the_end)
    theta = np.random.default_rng(1).normal(size=(mdp.n_states, 2))
    found = problems.exact_gradient(mdp, softmax_policy(theta, 1.0))
    for index in np.ndindex(*theta.shape):
        step = np.zeros_like(theta)
        step[index] = 1e-5
        difference = (expected_return(mdp, theta + step) - expected_return(mdp, theta - step)) / 2e-5
        assert found[index] == pytest.approx(difference, abs=1e-8)
    assert np.abs(found).max() > 0.01


def test_the_line_walk_is_what_it_says():
    mdp = problems.line_walk(cells=4, steps=3, slip=0.25)
    right = np.zeros((mdp.n_states, 2))
    right[:, 1] = 1
    paths, p = all_paths(mdp, right)
    assert (paths.lengths == 3).all() and (paths.states[:, 0] == 2).all()
    np.testing.assert_array_equal(paths.rewards, paths.states[:, 1:] % 4)
    straight = (paths.states[:, 1:] % 4 == 3).all(1)
    assert p[straight].sum() == pytest.approx(0.75**3)
    ends, q = all_paths(problems.line_walk(cells=4, steps=3, slip=0.25, at_the_end=True), right)
    assert (ends.rewards[:, :2] == 0).all() and (ends.rewards[:, 2] == ends.states[:, 3] % 4).all()
    assert q.sum() == pytest.approx(1)


def by_autograd(method, batch, prepared, theta, sequences) -> np.ndarray:
    """−∇θ of the method's loss, with log π looked up in log softmax θ: no score matrix."""
    states, actions = batch.inputs["states"], batch.inputs["actions"]
    logp = theta.log_softmax(1)[states, actions]
    totals = replace(method.totals(prepared), sequences=sequences)
    loss = method.loss(prepared, PolicyOutputs(logp, value=batch.value), totals, method.initial_state())
    return -torch.autograd.grad(loss.value, theta)[0].numpy().ravel()


@pytest.mark.parametrize("form", psi.forms(1.0), ids=lambda f: f"{f.name} {f.critic}")
def test_gradients_by_counting_are_those_of_autograd(form):
    given = problems.problem(problems.line_walk())
    paths = sample_paths(given.mdp, given.policy, 12, seed=2)
    theta = torch.from_numpy(np.log(given.policy)).requires_grad_()
    found = psi.estimates(form, given, paths, 4)
    method, state = form.method, form.method.initial_state()
    for k in range(3):
        batch = problems.batch_of(paths.select(np.arange(4 * k, 4 * k + 4)), given.policy, given.critics[form.critic])
        prepared = method.prepare(batch, state)
        state = prepared.state
        np.testing.assert_allclose(found[k], by_autograd(method, batch, prepared, theta, 4), atol=1e-12)
    assert np.abs(found).max() > 0.1


def test_episodes_of_different_lengths_and_cut_ones_count_their_own_steps():
    from psigrad.tabular import random_walk

    mdp = random_walk(5)
    policy = np.ones((7, 1))
    paths = sample_paths(mdp, policy, 50, seed=0, max_steps=6)
    value = np.arange(7.0)
    batch = problems.batch_of(paths, policy, problems.TabularCritic(value, value[:, None]))
    assert batch.mask.sum(1).tolist() == paths.lengths.tolist()
    last = np.where(paths.terminated, 0, value[paths.states[:, -1]])
    assert batch.last_value.tolist() == last.tolist() and 0 < batch.truncated.sum() < 50
    weights = np.where(paths.mask, 1.0, np.nan)
    # one action in every state: its log-probability is 0 whatever θ is
    assert np.abs(problems.gradients(np.nan_to_num(weights), paths, policy, 5)).max() == 0
