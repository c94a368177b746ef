"""Learning V from episodes: textbook numbers, equalities between methods, and convergence to exact values."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import psigrad.tabular as tabular
from psigrad.tabular import MDP, Episode

WALK = tabular.random_walk(5, left=0.0, right=1.0)
TRUE = np.array([0, 1, 2, 3, 4, 5, 0]) / 6
ONLY = np.zeros(7, int)


def walks(n: int, seed: int) -> list[Episode]:
    return list(tabular.rollouts(WALK, ONLY, n, seed=seed))


def last(estimates):
    *_, value = estimates
    return value


def episode(states, rewards, terminated=True) -> Episode:
    return Episode(np.array(states), np.zeros(len(rewards), int), np.array(rewards, float), terminated)


@st.composite
def batches(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    out = []
    for _ in range(draw(st.integers(1, 4))):
        steps = draw(st.integers(1, 12))
        out.append(episode(rng.integers(0, 4, steps + 1), rng.normal(size=steps), draw(st.booleans())))
    return out, rng.normal(size=4)


def slow_return(e: Episode, value, gamma: float, t: int, n: int) -> float:
    """G_t^(n), term by term."""
    steps = len(e.rewards)
    total = sum(gamma**k * e.rewards[t + k] for k in range(min(n, steps - t)))
    if t + n < steps:
        return total + gamma**n * value[e.states[t + n]]
    return total + (0 if e.terminated else gamma ** (steps - t) * value[e.states[-1]])


@given(batches(), st.floats(0, 1), st.integers(1, 6), st.floats(0, 1))
def test_targets_are_their_definitions(batch, gamma, n, lam):
    for e in batch[0]:
        steps = len(e.rewards)
        multi = [[slow_return(e, batch[1], gamma, t, k) for k in range(1, steps + 1)] for t in range(steps)]
        np.testing.assert_allclose(
            tabular.n_step_returns(e, batch[1], gamma, n), [multi[t][min(n, steps - t) - 1] for t in range(steps)], atol=1e-10
        )
        whole = [multi[t][-1] for t in range(steps)]
        np.testing.assert_allclose(tabular.n_step_returns(e, batch[1], gamma), whole, atol=1e-10)
        mixed = [
            (1 - lam) * sum(lam ** (k - 1) * multi[t][k - 1] for k in range(1, steps - t)) + lam ** (steps - t - 1) * whole[t]
            for t in range(steps)
        ]
        np.testing.assert_allclose(tabular.lambda_returns(e, batch[1], gamma, lam), mixed, atol=1e-10)


@given(batches(), st.floats(0, 1), st.floats(0, 1))
def test_offline_the_forward_view_is_the_backward_view(batch, gamma, lam):
    value = batch[1]
    for e in batch[0]:
        forward = value.copy()
        for t, target in enumerate(tabular.lambda_returns(e, value, gamma, lam)):
            forward[e.states[t]] += 0.1 * (target - value[e.states[t]])
        backward = last(tabular.td_lambda([e], 4, gamma, lam=lam, alpha=0.1, online=False, value=value))
        np.testing.assert_allclose(backward, forward, atol=1e-12)


def test_negative_control_online_and_replacing_traces_are_other_numbers():
    e = episode([0, 1, 0, 1, 2], [1, 2, 3, 4])
    base = {"lam": 0.8, "alpha": 0.1}
    reference = last(tabular.td_lambda([e], 4, 0.9, online=False, **base))
    for other in ({"online": True}, {"online": False, "trace": "replacing"}):
        assert np.abs(last(tabular.td_lambda([e], 4, 0.9, **base, **other)) - reference).max() > 1e-3


@given(batches(), st.floats(0, 1))
def test_special_cases_are_the_same_numbers(batch, gamma):
    episodes, value = batch
    ends = [Episode(e.states, e.actions, e.rewards, True) for e in episodes]
    zero = last(tabular.td_lambda(episodes, 4, gamma, lam=0, alpha=0.2, value=value))
    np.testing.assert_allclose(zero, last(tabular.td(episodes, 4, gamma, alpha=0.2, value=value)), atol=1e-12)
    every = last(tabular.monte_carlo(ends, 4, gamma, visit="every", alpha=0.2, value=value))
    np.testing.assert_allclose(every, last(tabular.td(ends, 4, gamma, n=99, alpha=0.2, value=value)), atol=1e-12)
    offline = [value]
    for e in ends:
        new = offline[-1].copy()
        for t, target in enumerate(tabular.n_step_returns(e, offline[-1], gamma)):
            new[e.states[t]] += 0.2 * (target - offline[-1][e.states[t]])
        offline.append(new)
    one = last(tabular.td_lambda(ends, 4, gamma, lam=1, alpha=0.2, online=False, value=value))
    np.testing.assert_allclose(one, offline[-1], atol=1e-12)


def test_td_by_hand():
    # 0 →(1) 1 →(2) 0 →(3) end, γ = ½, α = ½ from V = 0
    e = episode([0, 1, 0, 2], [1, 2, 3])
    first = 0.5 * 1
    second = 0.5 * (2 + 0.5 * first)
    third = first + 0.5 * (3 - first)
    assert last(tabular.td([e], 3, 0.5, alpha=0.5)).tolist() == [third, second, 0]
    # two-step targets: 1 + ½·2 + ¼·V(0), then 2 + ½·3, then 3
    a = 0.5 * 2
    assert last(tabular.td([e], 3, 0.5, n=2, alpha=0.5)).tolist() == [a + 0.5 * (3 - a), 0.5 * 3.5, 0]
    # returns 2.75, 3.5, 3
    assert last(tabular.monte_carlo([e], 3, 0.5)).tolist() == [2.75, 3.5, 0]
    assert last(tabular.monte_carlo([e], 3, 0.5, visit="every")).tolist() == [2.875, 3.5, 0]


def test_batches_of_a_and_b():
    # Sutton and Barto, example 6.4: eight episodes from B or from A over B
    batch = [episode([0, 1, 2], [0, 0])] + [episode([1, 2], [1])] * 6 + [episode([1, 2], [0])]
    np.testing.assert_allclose(tabular.batch_td(batch, 3, 1.0), [0.75, 0.75, 0], atol=1e-14)
    np.testing.assert_allclose(tabular.batch_monte_carlo(batch, 3, 1.0), [0, 0.75, 0], atol=1e-14)


def test_batch_td_is_where_td_settles_on_the_same_episodes():
    batch = walks(6, seed=3)
    value = np.zeros(7)
    for _ in range(4000):
        change = np.zeros(7)
        for e in batch:
            for t, r in enumerate(e.rewards):
                ahead = 0 if t == len(e.rewards) - 1 else value[e.states[t + 1]]
                change[e.states[t]] += 0.02 * (r + ahead - value[e.states[t]])
        value += change
    np.testing.assert_allclose(tabular.batch_td(batch, 7, 1.0), value, atol=1e-9)
    assert np.abs(tabular.batch_monte_carlo(batch, 7, 1.0) - value).max() > 0.01  # control: Monte Carlo settles elsewhere


def test_means_converge_to_the_exact_values():
    episodes = walks(6000, seed=1)
    returns = {
        s: [float(tabular.n_step_returns(e, TRUE, 1.0)[list(e.states).index(s)]) for e in episodes if s in e.states[:-1]]
        for s in range(1, 6)
    }
    value = last(tabular.monte_carlo(episodes, 7, 1.0))
    for s in range(1, 6):
        assert value[s] == pytest.approx(np.mean(returns[s]))
        assert abs(value[s] - TRUE[s]) < 4 * np.std(returns[s]) / np.sqrt(len(returns[s]))
    for method in (
        tabular.monte_carlo(episodes, 7, 1.0, visit="every"),
        tabular.td(episodes, 7, 1.0, alpha=tabular.inverse_visits(0.7)),
        tabular.td(episodes, 7, 1.0, n=4, alpha=tabular.inverse_visits(0.8)),
        tabular.td_lambda(episodes, 7, 1.0, lam=0.5, alpha=tabular.inverse_visits(0.8)),
        tabular.td_lambda(episodes, 7, 1.0, lam=0.5, trace="replacing", alpha=tabular.inverse_visits(0.8)),
    ):
        np.testing.assert_allclose(last(method), TRUE, atol=0.03)
    np.testing.assert_allclose(tabular.batch_td(episodes, 7, 1.0), TRUE, atol=0.03)
    assert np.abs(last(tabular.td(islice(episodes, 5), 7, 1.0, alpha=0.05)) - TRUE).max() > 0.2  # control: five do not do


def test_first_visit_is_unbiased_after_one_episode_and_every_visit_is_not():
    # one state, reward 1 a step, ends with probability 0.3: E[G] = 1/0.3; the mean of k, k−1, …, 1 is (k + 1)/2
    mdp = MDP(np.array([[[0.7]]]), np.array([[1.0]]), 1.0, end=np.array([[0.3]]))
    runs = list(tabular.rollouts(mdp, [0], 4000, seed=2))
    spread = 4 * np.sqrt(0.7) / 0.3 / np.sqrt(4000)
    first, every = (
        np.mean([last(tabular.monte_carlo([e], 1, 1.0, visit=visit))[0] for e in runs]) for visit in ("first", "every")
    )
    assert abs(first - 1 / 0.3) < spread
    assert abs(every - (1 / 0.3 + 1) / 2) < spread / 2


def test_a_cut_off_episode_still_has_value_ahead():
    forever = MDP(np.array([[[1.0]]]), np.array([[1.0]]), 0.9)  # V = 10
    cut = list(tabular.rollouts(forever, [0], 600, seed=0, max_steps=5))
    assert not any(e.terminated for e in cut) and all(len(e.rewards) == 5 for e in cut)
    for method in (
        tabular.td(cut, 1, 0.9),
        tabular.td(cut, 1, 0.9, n=3),
        tabular.td_lambda(cut, 1, 0.9),
        tabular.monte_carlo(cut, 1, 0.9, alpha=0.1),
    ):
        assert last(method)[0] == pytest.approx(10, abs=1e-3)
    assert tabular.batch_td(cut, 1, 0.9)[0] == pytest.approx(10)
    wrong = [Episode(e.states, e.actions, e.rewards, True) for e in cut]
    assert last(tabular.td(wrong, 1, 0.9))[0] < 9.5  # control: truncation taken for termination


def test_the_sampler_has_the_probabilities_and_rewards_of_the_model():
    rng = np.random.default_rng(0)
    end = np.array([[0.2, 0.0], [0.1, 0.3], [0.0, 0.5]])
    transitions = rng.dirichlet(np.ones(3), (2, 3)) * (1 - end.T)[:, :, None]
    paid = rng.normal(size=(2, 3, 3))
    rewards = np.einsum("ast,ast->sa", transitions, paid) + end * 7
    mdp = MDP(transitions, rewards, 1.0, end=end, rewards_next=paid.reshape(6, 3), rewards_end=np.full((3, 2), 7.0))
    counts, ends, seen = np.zeros((2, 3, 3)), np.zeros((3, 2)), np.zeros((3, 2))
    for e in tabular.rollouts(mdp, tabular.uniform_policy(mdp), 8000, seed=5):
        for t, (s, a) in enumerate(zip(e.states[:-1], e.actions, strict=True)):
            seen[s, a] += 1
            if t == len(e.actions) - 1:
                ends[s, a] += 1
                assert e.rewards[t] == 7
            else:
                counts[a, s, e.states[t + 1]] += 1
                assert e.rewards[t] == paid[a, s, e.states[t + 1]]
    spread = 5 / np.sqrt(seen.min())
    np.testing.assert_allclose(counts / seen.T[:, :, None], transitions, atol=spread)
    np.testing.assert_allclose(ends / seen, end, atol=spread)


def test_seeds_decide_everything():
    one, two, other = (walks(20, seed) for seed in (1, 1, 2))
    assert all((a.states == b.states).all() for a, b in zip(one, two, strict=True))
    assert [a.states.tolist() for a in one] != [a.states.tolist() for a in other]


@settings(max_examples=20)
@given(st.integers(0, 1000))
def test_the_order_of_a_batch_does_not_matter(seed):
    batch = walks(5, seed)
    for method in (tabular.batch_td, tabular.batch_monte_carlo):
        np.testing.assert_allclose(method(batch, 7, 1.0), method(batch[::-1], 7, 1.0), atol=1e-12)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: last(tabular.td(walks(1, 0), 7, 1.0, n=0)), "n is 0"),
        (lambda: last(tabular.td(walks(1, 0), 7, 1.0, alpha=2.0)), "alpha is 2.0"),
        (lambda: last(tabular.td(walks(1, 0), 7, 1.0, value=[0])), "expected 7 numbers"),
        (lambda: last(tabular.td_lambda(walks(1, 0), 7, 1.0, lam=1.5)), "lam is 1.5"),
        (lambda: last(tabular.td_lambda(walks(1, 0), 7, 1.0, trace="dutch")), "trace is 'dutch'"),
        (lambda: last(tabular.monte_carlo(walks(1, 0), 7, 1.0, visit="last")), "visit is 'last'"),
        (lambda: tabular.random_walk(4), "n is 4; expected an odd"),
        (lambda: tabular.inverse_visits(0.4), "power is 0.4"),
        (lambda: tabular.forest(1), "states is 1"),
        (lambda: tabular.batch_td([episode([0, 0], [1], False)], 1, 1.0), "no episode ends"),
        (lambda: tabular.Simulator(WALK, max_steps=0), "max_steps is 0"),
        (lambda: tabular.Simulator(WALK).step(0), "call reset first"),
    ],
)
def test_a_mistake_is_one_sentence(make, sentence):
    with pytest.raises(ValueError, match=sentence) as error:
        make()
    assert str(error.value).endswith(".") and "\n" not in str(error.value)
