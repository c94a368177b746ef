"""Edges of the tabular half: shapes, discounts, episodes that are cut off, states that pay nothing, slips."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import sparse

import psigrad.tabular as tabular
from psigrad.tabular import MDP
from psigrad.tabular.grid_world import UnboundedGrid
from psigrad.tabular.simulation import Episode
from psigrad.tabular.sweeps import rounding
from psigrad.tabular.termination import closed_classes
from psigrad.tabular.trajectories import sample_paths

WALK = tabular.random_walk(5, left=0.0, right=1.0)
ONLY = np.zeros(7, int)
LAST = np.array([False, False, True])
# one action: 0 → 1 → 2 (terminal), rewards −1 and +1
CHAIN = MDP(np.array([[[0, 1.0, 0], [0, 0, 1.0], [0, 0, 1.0]]]), np.array([[-1.0], [1.0], [0.0]]), 0.9, terminal=LAST)


def square(n: int) -> sparse.csr_array:
    return sparse.csr_array(np.eye(n))


@pytest.mark.parametrize(
    "given",
    [
        [square(2), square(3)],
        [sparse.csr_array(np.ones((2, 3)) / 3)] * 2,
        [sparse.csr_array(np.ones((3, 2)) / 2)] * 2,
    ],
)
def test_lists_of_sparse_matrices_are_square_and_alike(given):
    with pytest.raises(ValueError, match="expected \\(S, S\\) for each"):
        MDP(given, np.zeros((2, 2)), 0.9)


@pytest.mark.parametrize("given", [np.ones(4), np.ones((3, 2)) / 2, np.ones((0, 2)), np.ones((2, 0)), np.ones((2, 2, 2, 2))])
def test_stacked_matrices_have_a_multiple_of_s_rows(given):
    with pytest.raises(ValueError, match=r"expected an array \(A, S, S\)"):
        MDP(given, np.zeros((2, 1)), 0.9)


def test_a_stack_of_more_actions_than_states_is_taken():
    stacked = np.concatenate([np.eye(2), np.eye(2)[::-1], np.eye(2)])
    assert MDP(stacked, np.zeros((2, 3)), 0.9).n_actions == 3


@pytest.mark.parametrize("gamma", [-0.5, 1.5])
@pytest.mark.parametrize("learn", [tabular.q_learning, tabular.sarsa, tabular.monte_carlo_control])
def test_learners_refuse_what_is_no_discount(learn, gamma):
    with pytest.raises(ValueError, match="expected a discount in"):
        list(learn(WALK, 1, gamma=gamma))


@pytest.mark.parametrize("action", [-1, 1, 2])
def test_an_action_that_is_not_there_is_refused(action):
    player = tabular.Simulator(WALK)
    player.reset(seed=0)
    with pytest.raises(ValueError, match="expected 0 to 0"):
        player.step(action)


@pytest.mark.parametrize("starts", [(1, 0), (0, 1), (-1, 0)])
def test_spaces_that_do_not_start_at_0_are_refused(starts):
    spaces = [SimpleNamespace(n=2, start=start) for start in starts]
    with pytest.raises(ValueError, match="expected states and actions counted from 0"):
        list(tabular.rollouts(SimpleNamespace(observation_space=spaces[0], action_space=spaces[1]), np.zeros(2, int), 1, seed=0))


def test_a_terminal_state_is_visited_only_where_an_episode_ends_in_it():
    mdp = MDP(CHAIN.transitions, CHAIN.rewards, 0.9, terminal=LAST, start=np.array([0.25, 0.25, 0.5]))
    visits = tabular.occupancy(mdp, np.zeros(3, int))
    assert visits == pytest.approx([0.25, 0.25 + 0.9 * 0.25, 0.0])
    assert visits[:2] @ np.array([-1.0, 1.0]) == pytest.approx(-0.25 + 0.25 + 0.9 * 0.25)


@pytest.mark.parametrize("terminated", [True, False])
def test_a_long_episode_ends_with_its_own_last_step(terminated):
    """More steps than Python keeps small integers for."""
    steps = 300
    episode = Episode(np.arange(steps + 1) % 3, np.zeros(steps, int), np.full(steps, 0.5), terminated)
    start = np.array([1.0, 2.0, 4.0])
    for n in (1, 5):
        (found,) = tabular.td([episode], 3, 0.9, n=n, alpha=0.5, value=start.copy())
        value = start.copy()
        for t in range(steps):
            stop = min(t + n, steps)
            target = 0.0 if stop == steps and terminated else value[episode.states[stop]]
            for _ in range(stop - t):
                target = 0.5 + 0.9 * target
            value[episode.states[t]] += 0.5 * (target - value[episode.states[t]])
        np.testing.assert_allclose(found, value)


def test_an_episode_that_is_cut_off_counts_with_what_it_showed():
    cut = Episode(np.array([0, 1, 0]), np.zeros(2, int), np.array([1.0, 2.0]), False)
    found = tabular.batch_monte_carlo([cut], 3, 0.5)
    assert found.tolist() == [2.0, 2.0, 0.0]


def test_monte_carlo_control_goes_on_from_the_last_state_of_an_episode_that_was_cut_off():
    # 0 → 1 → 2 → 3 → …, cut after two steps; Q of the state that was reached is what the rest counts
    n = 5
    transitions = np.zeros((1, n, n))
    transitions[0, np.arange(n), np.minimum(np.arange(n) + 1, n - 1)] = 1.0
    mdp = MDP(transitions, np.ones((n, 1)), 0.5, start=np.eye(n)[0])
    q = np.array([[10.0], [20.0], [40.0], [80.0], [160.0]])
    (learned,) = tabular.monte_carlo_control(mdp, 1, alpha=lambda k: 1.0, q=q, max_steps=2)
    found = np.asarray(learned.q)
    assert found[:3, 0].tolist() == [1 + 0.5 * (1 + 0.5 * 40.0), 1 + 0.5 * 40.0, 40.0]


def test_the_error_of_a_backup_counts_the_terms_of_the_longest_row():
    value = np.array([-3.0, 1.0, 0.0])
    assert rounding(CHAIN, value) == pytest.approx((3 + 3) * 2.0**-53 * (1 + 0.9 * 3), abs=0)
    assert rounding(CHAIN, -value) == pytest.approx((3 + 3) * 2.0**-53 * (1 + 0.9 * 3), abs=0)
    assert rounding(CHAIN, np.array([-3.0, -2.0, -5.0])) == pytest.approx((3 + 3) * 2.0**-53 * (1 + 0.9 * 5), abs=0)


def test_solvers_say_how_many_sweeps_they_made_and_what_changed():
    solution = tabular.solve(CHAIN, method="policy_iteration")
    sweeps = list(tabular.policy_iteration(CHAIN))
    assert solution.iterations == len(sweeps) and [s.changed for s in sweeps if s.step == "improve"][-1] == 0
    assert [s.changed for s in sweeps if s.step == "evaluate"] == [0] * sum(s.step == "evaluate" for s in sweeps)
    np.testing.assert_allclose(solution.value, [-1 + 0.9, 1.0, 0.0])


def test_every_sweep_says_how_far_the_values_moved():
    before = np.zeros(3)
    for sweep in tabular.prioritised_sweeping(CHAIN, backups=1):
        assert sweep.residual == pytest.approx(float(np.abs(sweep.value - before).max()))
        before = sweep.value


@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.9])
def test_an_exact_evaluation_is_known_to_be_exact(gamma):
    mdp = MDP(CHAIN.transitions, CHAIN.rewards, gamma, terminal=LAST)
    for sweep in tabular.policy_iteration(mdp):
        if sweep.step == "evaluate":
            assert sweep.error_bound < 1e-12


def test_no_paths_have_no_steps():
    paths = sample_paths(WALK, ONLY, 4, seed=0)
    none = paths.select(np.array([], dtype=int))
    assert none.actions.shape == (0, 0) and none.states.shape == (0, 1)
    shortest = np.array([int(paths.lengths.argmin())])
    assert paths.select(shortest).actions.shape[1] == paths.lengths.min()


def test_the_world_is_that_of_number_0_and_only_the_corner_is_always_free():
    grid, zero, one = UnboundedGrid(), UnboundedGrid(0), UnboundedGrid(1)
    cells = [(i, j) for i in range(1, 40) for j in range(1, 40)]
    assert [grid.prize(c) for c in cells] == [zero.prize(c) for c in cells] != [one.prize(c) for c in cells]
    full = UnboundedGrid(treasure_rate=1.0, trap_rate=0.0)
    assert full.prize((1, 1)) is None and all(full.prize(c) == 1.0 for c in ((1, 2), (2, 1), (2, 2)))


def test_without_slips_moves_are_those_that_are_asked_for():
    grid = UnboundedGrid(treasure_rate=0.0, trap_rate=0.0)
    grid.reset(seed=0)
    assert [grid.step(a)[0] for a in (0, 0, 3, 1, 2)] == [(2, 1), (3, 1), (3, 2), (2, 2), (2, 1)]
    slippery = UnboundedGrid(treasure_rate=0.0, trap_rate=0.0, slip=1.0)
    slippery.reset(seed=0)
    cells = [slippery.step(0)[0] for _ in range(50)]
    assert any(b[1] != a[1] for a, b in itertools.pairwise(cells)), "every move is drawn anew"


def test_a_learner_repeats_itself_by_its_seed():
    def learnt(seed: int) -> list:
        return [np.asarray(found.q).tolist() for found in tabular.q_learning(WALK, 10, seed=seed, gamma=0.9)][-1]

    assert learnt(1) == learnt(1) != learnt(2)


def test_seeds_of_moves_and_of_choices_are_two_streams():
    """A policy that draws like the world would slip where it means to."""
    half = np.full((7, 1), 1.0)
    first = [e.states.tolist() for e in tabular.rollouts(WALK, half, 20, seed=3)]
    assert first == [e.states.tolist() for e in tabular.rollouts(WALK, ONLY, 20, seed=3)]


def test_choices_are_drawn_from_the_second_stream_of_the_seed():
    """One step of two equal actions: the second where the number drawn is 1/2 or more. The first stream is the world's."""
    bandit = MDP(np.stack([[[0.0, 1.0], [0.0, 1.0]]] * 2), np.zeros((2, 2)), 1.0, terminal=[False, True], start=[1.0, 0.0])
    chosen = [int(e.actions[0]) for e in tabular.rollouts(bandit, np.full((2, 2), 0.5), 20, seed=3)]
    assert chosen == (np.random.default_rng((3, 1)).random(20) >= 0.5).astype(int).tolist()


@pytest.mark.parametrize(("gamma", "nowhere"), [(1.0, [True, False, False]), (0.9, [False] * 3)])
def test_a_state_from_which_nothing_leads_on_is_said_where_gamma_is_1(gamma, nowhere):
    """The first state stays where it is for ever, the second ends in the third, for 1."""
    stays = np.array([[[1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 1.0]]])
    mdp = MDP(stays, np.array([[0.0], [1.0], [0.0]]), gamma, terminal=[False, False, True])
    *_, last = tabular.value_iteration(mdp)
    assert last.leads_nowhere.tolist() == nowhere and last.value.tolist() == [0.0, 1.0, 0.0]


@pytest.mark.parametrize(("in_place", "low"), [(False, 1.0), (True, -1.0)])
def test_a_sweep_in_place_bounds_what_is_left_from_both_sides(in_place, low):
    """One state that pays 1 for ever, gamma 1/2: the first sweep moves V by 1, and what is left is 1/2/(1 - 1/2)·1 = 1. From old
    values alone it is known to be that; in place only that it is no more.
    """
    one = MDP(np.ones((1, 1, 1)), np.ones((1, 1)), 0.5)
    sweep = next(iter(tabular.policy_evaluation(one, [0], in_place=in_place)))
    assert (sweep.low, sweep.high) == pytest.approx((low, 1.0), abs=1e-12)


def test_a_grid_without_end_ends_at_the_first_row_and_column():
    """From (2, 2) one cell each way, right, left, up and down; from (1, 1) left and up lead nowhere."""
    grid = UnboundedGrid(treasure_rate=0.0, trap_rate=0.0)

    def after(start):
        found = []
        for action in range(4):
            grid.reset(options={"cell": start})
            found.append(grid.step(action)[0])
        return found

    assert after((2, 2)) == [(3, 2), (1, 2), (2, 1), (2, 3)]
    assert after((1, 1)) == [(2, 1), (1, 1), (1, 1), (1, 2)]


def test_a_class_is_closed_where_a_chain_comes_back_and_never_leaves():
    """0 leads to the pair 1, 2, which goes round for ever; 3 stays, and ends; 4 goes to 3."""
    chain = np.zeros((5, 5))
    for state, after in enumerate((1, 2, 1, 3, 3)):
        chain[state, after] = 1.0
    ends = np.array([0.0, 0.0, 0.0, 0.5, 0.0])
    assert [sorted(found.tolist()) for found in closed_classes(chain, ends)] == [[1, 2]]
    assert sorted(sorted(found.tolist()) for found in closed_classes(chain, 0 * ends)) == [[1, 2], [3]]
