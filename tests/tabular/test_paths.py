"""Episodes side by side: enumerated ones against the exact solvers, sampled ones against the enumeration."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import sparse, stats

from psigrad.tabular import (
    MDP,
    GridWorld,
    all_paths,
    cliff_walking,
    discounted_return,
    evaluate,
    occupancy,
    random_walk,
    rollouts,
    sample_paths,
    softmax_policy,
)


def ladder(steps: int = 3, **options) -> MDP:
    """Five states in a line that drift to the end; two actions, two outcomes each, rewards by outcome."""
    n = steps + 2
    transitions, rewards = np.zeros((2, n, n)), np.zeros((2, n, n))
    for s in range(steps):
        for a, p in ((0, 0.3), (1, 0.8)):
            transitions[a, s, [s + 1, s + 2]] = p, 1 - p
            rewards[a, s, [s + 1, s + 2]] = s + a, -1.0
    return MDP(transitions, rewards, 0.9, terminal=np.arange(n) >= steps, **options)


def policy_of(mdp: MDP, seed: int = 3) -> np.ndarray:
    return softmax_policy(np.random.default_rng(seed).normal(size=(mdp.n_states, mdp.n_actions)), 1.0)


@pytest.mark.parametrize("as_sparse", [False, True])
def test_all_paths_have_the_exact_return_and_the_exact_visits(as_sparse):
    mdp = ladder()
    if as_sparse:
        parts = [sparse.csr_array(mdp.transitions[a * 5 : a * 5 + 5]) for a in range(2)]
        paid = [sparse.csr_array(mdp.rewards_next[a * 5 : a * 5 + 5]) for a in range(2)]
        mdp = MDP(parts, paid, 0.9, terminal=mdp.terminal)
    policy = policy_of(mdp)
    paths, p = all_paths(mdp, policy)
    assert p.sum() == pytest.approx(1, abs=1e-14) and p.min() > 0
    assert len({(*s, *a) for s, a in zip(paths.states.tolist(), paths.actions.tolist(), strict=True)}) == len(p)
    returns = np.array([discounted_return(paths.episode(i).rewards, 0.9) for i in range(len(p))])
    assert p @ returns == pytest.approx(mdp.start_distribution @ evaluate(mdp, policy), abs=1e-13)
    discount = 0.9 ** np.arange(paths.actions.shape[1])
    visits = np.zeros(5)
    np.add.at(visits, paths.states[:, :-1][paths.mask], (p[:, None] * discount)[np.broadcast_to(paths.mask, paths.mask.shape)])
    np.testing.assert_allclose(visits, occupancy(mdp, policy), atol=1e-13)


def test_sampled_paths_have_the_enumerated_probabilities():
    mdp = ladder()
    policy = policy_of(mdp)
    every, p = all_paths(mdp, policy)
    index = {(*s, *a): i for i, (s, a) in enumerate(zip(every.states.tolist(), every.actions.tolist(), strict=True))}
    played = sample_paths(mdp, policy, 50_000, seed=1)
    rows = [index[(*s, *a)] for s, a in zip(played.states.tolist(), played.actions.tolist(), strict=True)]
    np.testing.assert_array_equal(played.rewards, every.rewards[rows])
    np.testing.assert_array_equal(played.lengths, every.lengths[rows])
    counts = np.bincount(rows, minlength=len(p))
    assert stats.chisquare(counts, p * counts.sum()).pvalue > 0.001
    # the negative control: the same counts do not fit another policy
    other = {(*s, *a): q for (s, a), q in zip(_keys(mdp, policy_of(mdp, 4)), all_paths(mdp, policy_of(mdp, 4))[1], strict=True)}
    wrong = np.array([other[key] for key in index])
    assert stats.chisquare(counts, wrong * counts.sum()).pvalue < 1e-6


def _keys(mdp, policy):
    paths, _ = all_paths(mdp, policy)
    return [(tuple(s), tuple(a)) for s, a in zip(paths.states.tolist(), paths.actions.tolist(), strict=True)]


def test_they_agree_with_episodes_played_one_by_one():
    mdp = GridWorld(4, 4, {(0, 3): 1.0, (2, 2): -1.0}, slip=0.2, gamma=0.9).mdp()
    policy = policy_of(mdp)
    one = list(rollouts(mdp, policy, 4000, seed=5))
    side = sample_paths(mdp, policy, 4000, seed=6)
    for a, b in (
        ([e.rewards.sum() for e in one], side.rewards.sum(1)),
        ([e.actions.size for e in one], side.lengths),
        ([e.states[0] for e in one], side.states[:, 0]),
        ([e.states[-1] for e in one], side.states[:, -1]),
    ):
        assert stats.ks_2samp(a, b).pvalue > 0.001


def test_a_start_that_is_spread_out_and_episodes_of_many_lengths():
    mdp = random_walk(5)
    paths = sample_paths(mdp, np.zeros(7, int), 2000, seed=0)
    assert paths.terminated.all() and set(paths.states[:, 0]) == {3}
    assert (np.diff(paths.states, axis=1)[paths.mask] ** 2 == 1).all()
    ends = paths.states[np.arange(2000), paths.lengths]
    np.testing.assert_array_equal(paths.rewards.sum(1), np.where(ends == 6, 1.0, -1.0))
    assert (paths.rewards[~paths.mask] == 0).all() and (paths.actions[~paths.mask] == 0).all()


def test_cut_off_episodes_are_not_terminated_and_show_what_they_showed():
    mdp = random_walk(5)
    whole = sample_paths(mdp, np.zeros(7, int), 500, seed=0)
    cut = whole.cut(4)
    assert cut.lengths.max() == 4
    np.testing.assert_array_equal(cut.terminated, whole.lengths <= 4)
    for row in range(20):
        a, b = cut.episode(row), whole.episode(row)
        np.testing.assert_array_equal(a.states, b.states[:5])
        np.testing.assert_array_equal(a.rewards, b.rewards[:4])
    short = sample_paths(mdp, np.zeros(7, int), 500, seed=0, max_steps=4)
    np.testing.assert_array_equal(short.states, cut.states)
    np.testing.assert_array_equal(short.terminated, cut.terminated)
    every, p = all_paths(mdp, np.zeros(7, int), max_steps=4)
    # from the middle of 5 an end is 3 steps away: 2 of the 8 ways of 3 steps lead there, and no fourth step ends
    assert p.sum() == pytest.approx(1) and p[~every.terminated].sum() == pytest.approx(0.75)


def test_rows_can_be_picked_and_lose_what_none_of_them_needs():
    whole = sample_paths(random_walk(5), np.zeros(7, int), 100, seed=0)
    rows = np.argsort(whole.lengths)[:10]
    picked = whole.select(rows)
    assert picked.actions.shape[1] == whole.lengths[rows].max()
    np.testing.assert_array_equal(picked.episode(3).states, whole.episode(int(rows[3])).states)


def test_an_end_that_leads_to_no_state_shows_the_state_that_was_left():
    mdp = MDP(np.array([[[0.5, 0.25], [0.0, 0.0]]]), np.array([[1.0], [0.0]]), 1.0, end=np.array([[0.25], [1.0]]),
              terminal=np.array([False, False]), start=np.array([1.0, 0.0]), rewards_end=np.array([[7.0], [3.0]]))  # fmt: skip
    paths = sample_paths(mdp, np.ones((2, 1)), 20_000, seed=0)
    last = paths.lengths - 1
    rows = np.arange(20_000)
    np.testing.assert_array_equal(paths.states[rows, last], paths.states[rows, last + 1])
    assert set(paths.rewards[rows, last]) == {7.0, 3.0}
    # E = 1 step reward until the end: V(0) = 0.5·(1 + V0) + 0.25·(1 + 3) + 0.25·7
    assert paths.rewards.sum(1).mean() == pytest.approx((0.5 + 1 + 1.75) / 0.5, rel=0.02)


def test_one_seed_is_one_sample():
    mdp = ladder()
    a, b, c = (sample_paths(mdp, policy_of(mdp), 50, seed=s) for s in (0, 0, 1))
    np.testing.assert_array_equal(a.states, b.states)
    assert a.states.shape != c.states.shape or (a.states != c.states).any()


def test_mistakes_are_refused():
    walk = random_walk(3)
    with pytest.raises(ValueError, match="episodes is 0"):
        sample_paths(walk, np.zeros(5, int), 0, seed=0)
    with pytest.raises(ValueError, match="max_steps 0"):
        sample_paths(walk, np.zeros(5, int), 1, seed=0, max_steps=0)
    with pytest.raises(ValueError, match="steps is 0"):
        sample_paths(walk, np.zeros(5, int), 1, seed=0).cut(0)
    with pytest.raises(ValueError, match="more than 1,000,000 episodes"):
        all_paths(cliff_walking(), np.full((48, 4), 0.25))
    with pytest.raises(ValueError, match="state 3, which is terminal"):
        all_paths(ladder(start=np.array([0, 0, 0, 1.0, 0])), policy_of(ladder()))
    with pytest.raises(ValueError, match="policy has shape"):
        all_paths(ladder(), np.zeros(3))
