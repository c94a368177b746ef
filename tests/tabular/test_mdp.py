"""What an MDP accepts, what it refuses, and what a policy is worth in it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy import sparse

import psigrad.tabular as tabular
from psigrad.tabular import MDP

P = np.array([[[0.5, 0.5], [0.0, 1.0]], [[0.0, 1.0], [0.5, 0.5]]])  # (A, S, S)
R = np.array([[5.0, 10.0], [-1.0, -2.0]])  # (S, A)


def random_arrays(seed: int, n_states: int = 6, n_actions: int = 3) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    transitions = rng.dirichlet(np.full(n_states, 0.3), size=(n_actions, n_states))
    return transitions, rng.normal(size=(n_states, n_actions))


def test_dense_sparse_stacked_and_state_first_are_the_same_process():
    transitions, rewards = random_arrays(0)
    forms = [
        MDP(transitions, rewards, 0.9),
        MDP([sparse.csr_array(p) for p in transitions], rewards, 0.9),
        MDP([sparse.csr_matrix(p) for p in transitions], rewards, 0.9),
        MDP(sparse.csr_array(transitions.reshape(-1, 6)), rewards, 0.9),
        MDP.from_state_first(transitions.swapaxes(0, 1), rewards, 0.9),
    ]
    value = np.arange(6.0)
    slow = [[rewards[s, a] + 0.9 * sum(transitions[a, s, t] * value[t] for t in range(6)) for a in range(3)] for s in range(6)]
    for mdp in forms:
        np.testing.assert_allclose(tabular.q_values(mdp, value), slow, rtol=0, atol=1e-13)
        assert (mdp.n_states, mdp.n_actions) == (6, 3)


def test_rewards_of_an_outcome_and_of_a_state_become_expected_rewards():
    transitions, _ = random_arrays(1)
    per_outcome = np.random.default_rng(2).normal(size=transitions.shape)
    expected = np.array([[transitions[a, s] @ per_outcome[a, s] for a in range(3)] for s in range(6)])
    np.testing.assert_allclose(MDP(transitions, per_outcome, 0.9).rewards, expected, atol=1e-14)
    as_sparse = [sparse.csr_array(p) for p in transitions], [sparse.csr_array(r) for r in per_outcome]
    np.testing.assert_allclose(MDP(*as_sparse, 0.9).rewards, expected, atol=1e-14)
    assert (MDP(transitions, np.arange(6.0), 0.9).rewards == np.arange(6.0)[:, None]).all()


def test_rewards_of_an_outcome_may_have_another_form_than_the_transitions():
    """Three states in a row: to the right pays 1, then 2; from the last to the first 4."""
    transitions, paid = np.roll(np.eye(3), 1, axis=1)[None], np.zeros((1, 3, 3))
    paid[0, 0, 1], paid[0, 1, 2], paid[0, 2, 0] = 1.0, 2.0, 4.0
    forms = [lambda x: x, lambda x: x[0], lambda x: [sparse.csr_array(x[0])], lambda x: sparse.coo_array(x[0])]
    for of_transitions in forms:
        for of_rewards in forms:
            given = of_transitions(transitions), of_rewards(paid)
            later = MDP(given[0], np.zeros((3, 1)), 0.9, rewards_next=given[1])
            for mdp in (MDP(*given, 0.9), later):
                (episode,) = tabular.rollouts(mdp, [0, 0, 0], 1, seed=0, max_steps=5)
                first = int(episode.states[0])
                assert episode.rewards.tolist() == [(1.0, 2.0, 4.0)[(first + t) % 3] for t in range(5)]
                assert tabular.sample_paths(mdp, [0, 0, 0], 2, seed=0, max_steps=3).rewards.sum(1).tolist() == [7.0, 7.0]
            assert MDP(*given, 0.9).rewards[:, 0].tolist() == [1.0, 2.0, 4.0]
    for wrong in ({"rewards": paid[:, :2, :2]}, {"rewards": np.zeros((3, 1)), "rewards_next": paid[:, :2, :2]}):
        with pytest.raises(ValueError, match=r"R\(s, a, s'\) has shape \(2, 2\); expected \(3, 3\), as transitions has"):
            MDP(transitions, gamma=0.9, **wrong)


def test_a_terminal_state_is_worth_nothing_whatever_its_row_says():
    mdp = MDP(P, R, 0.9, terminal=np.array([False, True]))
    assert mdp.transitions[[1, 3]].sum() == 0 and (mdp.rewards[1] == 0).all()
    # action 0: V = 5 + 0.9·0.5·V, so 5/0.55; action 1 pays 10 and ends
    np.testing.assert_allclose(tabular.evaluate(mdp, [0, 0]), [5 / 0.55, 0], atol=1e-14)
    np.testing.assert_allclose(tabular.solve(mdp).value, [10, 0], atol=1e-12)
    as_sparse = MDP([sparse.csr_array(p) for p in P], R, 0.9, terminal=np.array([False, True]))
    np.testing.assert_array_equal(as_sparse.transitions.toarray(), mdp.transitions)


def test_an_episode_can_end_with_a_step_that_leads_to_no_terminal_state():
    # one state: 1 a step, ends with probability 1/4 each step, so V = 1/(1 − γ·3/4)
    for gamma in (0.5, 1.0):
        mdp = MDP(np.array([[[0.75]]]), np.array([[1.0]]), gamma, end=np.array([[0.25]]))
        np.testing.assert_allclose(tabular.evaluate(mdp, [0]), 1 / (1 - gamma * 0.75))
        np.testing.assert_allclose(tabular.expected_steps(mdp, [0]), 1 / (1 - gamma * 0.75))


def test_the_discounted_return_is_the_sum_by_hand():
    assert tabular.discounted_return([1, 2, 3], 0.5) == 1 + 1 + 0.75
    assert tabular.discounted_return([], 0.5) == 0
    assert tabular.discounted_return([1.0, 1.0], 1.0) == 2


def test_replace_changes_the_discount_and_nothing_else():
    mdp = MDP(P, R, 0.9, terminal=np.array([False, True]))
    other = replace(mdp, gamma=0.5)
    assert other.gamma == 0.5 and other.transitions is mdp.transitions
    np.testing.assert_array_equal(other.rewards, mdp.rewards)


MISTAKES = {
    "discount": ({"gamma": 1.5}, r"gamma is 1.5; expected a discount in \[0, 1\]"),
    "nan discount": ({"gamma": float("nan")}, "gamma is nan"),
    "row sum": ({"transitions": P * 0.9}, "state 0, action 0 sum to 0.9; expected 1"),
    "row sum beyond rounding": ({"transitions": P * (1 - 2e-5)}, "sum to 0.99998; expected 1"),
    "negative": ({"transitions": np.array([[[1.5, -0.5], [0, 1]]] * 2)}, "negative or non-finite"),
    "nan": ({"transitions": P * np.nan}, "negative or non-finite"),
    "states first": ({"transitions": np.ones((2, 3, 2)) / 2}, "use MDP.from_state_first"),
    "not square": ({"transitions": np.ones((2, 3, 4))}, r"shape \(2, 3, 4\); expected an array \(A, S, S\)"),
    "reward shape": ({"rewards": np.ones((3, 2))}, r"rewards has shape \(3, 2\); expected \(2, 2\)"),
    "infinite reward": ({"rewards": np.array([[5, 10], [-1, -np.inf]])}, r"rewards\[1, 1\] is -inf; expected a finite number"),
    "terminal": ({"terminal": np.array([0, 1])}, "expected 2 booleans"),
    "start": ({"start": np.array([0.5, 0.6])}, "sum 1.1; expected 2 probabilities"),
    "no end": ({"gamma": 1.0}, "gamma is 1 and from state 0 no terminal state can be reached"),
    "sparse shapes": ({"transitions": [sparse.eye_array(2), sparse.eye_array(3)]}, r"expected \(S, S\) for each"),
    "end": ({"end": np.full((2, 2), -0.1)}, "`end` has a negative number"),
    "end shape": ({"end": np.zeros(2)}, r"expected finite numbers of shape \(2, 2\)"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence(mistake):
    changes, sentence = MISTAKES[mistake]
    with pytest.raises(ValueError, match=sentence) as error:
        MDP(**{"transitions": P, "rewards": R, "gamma": 0.9} | changes)
    assert str(error.value).endswith(".") and "\n" not in str(error.value)


@pytest.mark.parametrize("form", ["dense", "sparse", "end"])
def test_a_table_in_float32_is_divided_by_its_sums(form):
    """Thirds in float32 sum to 1 + 3e-8. With equal rows, V = r̄ + 2.7·V/3 of its own, so V(s) = R(s) + 9·R̄, R̄ = 2."""
    exact = np.full((1, 3, 3), 1 / 3)
    table, end = exact.astype(np.float32), None
    assert abs(float(table[0, 0].astype(np.float64).sum()) - 1) > 1e-9
    if form == "sparse":
        table = [sparse.csr_array(table[0])]
    if form == "end":
        table, end = (0.5 * exact).astype(np.float32), np.full((3, 1), 0.5)
    mdp = MDP(table, np.array([[1.0], [2.0], [3.0]]), 0.9, end=end, start=np.full(3, 1 / 3, np.float32))
    sums = np.asarray(mdp.transitions.sum(axis=1)).ravel()
    np.testing.assert_allclose(sums + (0 if end is None else mdp.end[:, 0]), 1, rtol=0, atol=1e-15)
    assert mdp.start.sum() == pytest.approx(1, abs=1e-15)
    mean = 18.0 if form != "end" else 2 * 0.45 / 0.55  # γ·V̄: 0.9·20, and 0.45·V̄ with V̄ = 2/0.55
    np.testing.assert_allclose(tabular.solve(mdp).value, np.array([1.0, 2.0, 3.0]) + mean, rtol=1e-6)


def test_a_policy_that_is_none_is_refused():
    mdp = MDP(P, R, 0.9)
    for policy, sentence in [
        ([0, 2], "names action 2; expected 0 to 1"),
        ([0, -1], "names action -1"),
        ([[0.5, 0.6], [1, 0]], "rows that are not probabilities"),
        ([0.0, 1.0], "expected 2 action numbers"),
        ([0], "expected 2 action numbers"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            tabular.evaluate(mdp, policy)
    with pytest.raises(ValueError, match="expected 2 finite numbers"):
        next(tabular.value_iteration(mdp, value=[1, 2, 3]))


def test_the_mean_advantage_of_a_policy_is_zero_and_of_another_tells_the_gain():
    transitions, rewards = random_arrays(3)
    mdp = MDP(transitions, rewards, 0.9)
    rng = np.random.default_rng(4)
    old, new = rng.dirichlet(np.ones(3), 6), rng.dirichlet(np.ones(3), 6)
    table = tabular.advantages(mdp, old)
    np.testing.assert_allclose((old * table).sum(1), 0, atol=1e-12)
    # performance difference lemma (Kakade and Langford 2002): J(new) − J(old) = Σ_s d_new(s)·Σ_a new(a|s)·A_old(s, a)
    gain = mdp.start @ (tabular.evaluate(mdp, new) - tabular.evaluate(mdp, old))
    np.testing.assert_allclose(tabular.occupancy(mdp, new) @ (new * table).sum(1), gain, atol=1e-12)
    assert abs(tabular.occupancy(mdp, old) @ (new * table).sum(1) - gain) > 1e-3  # control: the old visits do not do


def test_occupancy_is_the_sum_over_time_dense_and_sparse():
    transitions, rewards = random_arrays(5)
    terminal = np.arange(6) == 5
    for form in (transitions, [sparse.csr_array(p) for p in transitions]):
        mdp = MDP(form, rewards, 0.8, terminal=terminal)
        policy = tabular.uniform_policy(mdp)
        model = tabular.policy_model(mdp, policy)[0]
        visits, now = np.zeros(6), mdp.start.copy()
        for k in range(200):
            visits += 0.8**k * now
            now = now @ model
        visits[5] = 0
        np.testing.assert_allclose(tabular.occupancy(mdp, policy), visits, atol=1e-12)
        np.testing.assert_allclose(tabular.occupancy(mdp, policy).sum(), mdp.start @ tabular.expected_steps(mdp, policy))


def test_ties_are_stable():
    q = np.array([[1.0, 1.0 + 1e-15], [0.0, 1.0], [3.0, 3.0]])
    assert tabular.greedy(q).tolist() == [0, 1, 0]
    assert tabular.greedy(q, np.array([1, 0, 1])).tolist() == [1, 1, 1]
    assert q.argmax(1).tolist() == [1, 1, 0]  # control: plain argmax follows rounding


def test_stochastic_policies_are_probabilities_with_their_limits():
    q = np.array([[1.0, 2.0, 2.0], [0.0, -1.0, -2.0]])
    np.testing.assert_allclose(tabular.epsilon_greedy(q, 0.3), [[0.1, 0.45, 0.45], [0.8, 0.1, 0.1]])
    np.testing.assert_allclose(tabular.softmax_policy(q, 1e-3)[1], [1, 0, 0], atol=1e-12)
    e = np.exp([0.0, -1.0, -2.0])
    np.testing.assert_allclose(tabular.softmax_policy(q, 1.0)[1], e / e.sum())
    with pytest.raises(ValueError, match="epsilon is 2"):
        tabular.epsilon_greedy(q, 2)
    with pytest.raises(ValueError, match="temperature is 0"):
        tabular.softmax_policy(q, 0)


def test_an_mdp_prints_as_one_line():
    mdp = tabular.GridWorld().mdp()
    assert repr(mdp) == "MDP(64 states, 2 of them terminal, 4 actions, gamma=0.9, dense)"
