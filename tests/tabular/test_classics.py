"""The small problems cell by cell, against what the book says of them and against other libraries' tables."""

from __future__ import annotations

import gymnasium as gym
import mdptoolbox.example
import numpy as np
import pytest

import psigrad.tabular as tabular
from psigrad.tabular import MDP

UP, RIGHT, DOWN, LEFT = range(4)


def outcome(mdp: MDP, state: int, action: int) -> int:
    """Where a step that is sure leads."""
    (target,) = np.flatnonzero(mdp.transitions[action * mdp.n_states + state])
    return int(target)


def test_the_wind_blows_as_figure_6_5_says():
    """A step up from row 5 ends above by one and the wind of its column; at the border it is cut."""
    mdp, columns = tabular.windy_gridworld(), 10
    for column, wind in enumerate("0001112210"):
        if (5, column) != (3, 7):
            assert outcome(mdp, 5 * columns + column, UP) == (4 - int(wind)) * columns + column
            assert outcome(mdp, column, UP) == column, "no further than the first row"
            assert outcome(mdp, 6 * columns + column, DOWN) == min(6, 7 - int(wind)) * columns + column
    assert (mdp.n_states, mdp.gamma, int(mdp.start.argmax())) == (70, 1.0, 30)
    assert np.flatnonzero(mdp.is_terminal).tolist() == [37]
    assert (mdp.rewards[~mdp.is_terminal] == -1).all()
    solution = tabular.solve(mdp)
    assert solution.value[30] == -15


def test_the_cliff_is_gymnasiums():
    mdp, peer = tabular.cliff_walking(), gym.make("CliffWalking-v1").unwrapped
    assert peer.nS == mdp.n_states and int(np.flatnonzero(mdp.start)[0]) == peer.start_state_index == 36
    assert np.flatnonzero(mdp.is_terminal).tolist() == [47]
    for state in range(37):  # from the cliff itself nobody steps
        for action in range(4):
            ((chance, target, reward, ended),) = peer.P[state][action]
            assert (chance, target, reward) == (1.0, outcome(mdp, state, action), mdp.rewards[state, action])
            assert ended == bool(mdp.is_terminal[target])


@pytest.mark.parametrize(("states", "old", "cut", "fire"), [(3, 4.0, 2.0, 0.1), (5, 7.0, 3.0, 0.25), (2, 1.0, 9.0, 0.5)])
def test_the_forest_is_pymdptoolboxs(states, old, cut, fire):
    theirs, rewards = mdptoolbox.example.forest(states, old, cut, fire)
    mine = tabular.forest(states, old=old, cut=cut, fire=fire)
    np.testing.assert_array_equal(mine.transitions.reshape(2, states, states), theirs)
    np.testing.assert_array_equal(mine.rewards, rewards)


def test_the_forest_of_nobody_who_asks_for_more_is_pymdptoolboxs_too():
    theirs, rewards = mdptoolbox.example.forest()
    np.testing.assert_array_equal(tabular.forest().transitions.reshape(2, 3, 3), theirs)
    np.testing.assert_array_equal(tabular.forest().rewards, rewards)
    assert tabular.forest().gamma == 0.9


@pytest.mark.parametrize(("n", "ends"), [(19, {}), (5, {"left": 0.0, "right": 1.0}), (1, {"left": 2.0, "right": 3.0})])
def test_the_walk_steps_left_or_right_by_a_coin(n, ends):
    mdp = tabular.random_walk(n, **ends)
    left, right = ends.get("left", -1.0), ends.get("right", 1.0)
    assert (mdp.n_states, mdp.n_actions, mdp.gamma) == (n + 2, 1, 1.0)
    assert np.flatnonzero(mdp.start).tolist() == [(n + 1) // 2] and np.flatnonzero(mdp.is_terminal).tolist() == [0, n + 1]
    for state in range(1, n + 1):
        assert np.flatnonzero(mdp.transitions[state]).tolist() == [state - 1, state + 1]
        assert (mdp.transitions[state, [state - 1, state + 1]] == 0.5).all()
    value = tabular.evaluate(mdp, np.zeros(n + 2, int))
    expected = [left + (right - left) * i / (n + 1) for i in range(1, n + 1)]
    np.testing.assert_allclose(value[1:-1], expected, atol=1e-12)


def test_the_teleporting_grid_moves_as_example_3_5_says():
    mdp = tabular.teleport_5x5()
    assert not mdp.is_terminal.any() and mdp.gamma == 0.9
    for action in range(4):
        assert (outcome(mdp, 1, action), mdp.rewards[1, action]) == (21, 10.0)
        assert (outcome(mdp, 3, action), mdp.rewards[3, action]) == (13, 5.0)
    for state in (0, 2, 4, 12, 20, 24):
        row, column = divmod(state, 5)
        for action, (down, over) in enumerate([(-1, 0), (0, 1), (1, 0), (0, -1)]):
            inside = 0 <= row + down < 5 and 0 <= column + over < 5
            target = (row + down) * 5 + column + over if inside else state
            assert (outcome(mdp, state, action), mdp.rewards[state, action]) == (target, 0.0 if inside else -1.0)


def test_the_4x4_grid_costs_a_step_everywhere():
    mdp = tabular.shortest_path_4x4()
    assert np.flatnonzero(mdp.is_terminal).tolist() == [0, 15] and mdp.gamma == 1.0
    assert (mdp.rewards[1:15] == -1).all()
    value = tabular.solve(mdp).value.reshape(4, 4)
    assert [[min(r + c, 6 - r - c) for c in range(4)] for r in range(4)] == (-value).tolist()


def test_slips_of_the_grid_without_end_are_as_often_as_asked_and_even():
    """A slip is a move drawn from all four: the wanted one keeps 1 − slip + slip/4."""
    grid = tabular.UnboundedGrid(treasure_rate=0.0, trap_rate=0.0, slip=0.4, max_steps=None)
    grid.reset(seed=0, options={"cell": (10_000, 10_000)})
    counts, before = dict.fromkeys([(1, 0), (-1, 0), (0, -1), (0, 1)], 0), (10_000, 10_000)
    for _ in range(20_000):
        cell, *_ = grid.step(0)
        counts[cell[0] - before[0], cell[1] - before[1]] += 1
        before = cell
    assert abs(counts[1, 0] / 20_000 - 0.7) < 0.015
    assert all(abs(counts[move] / 20_000 - 0.1) < 0.01 for move in ((-1, 0), (0, -1), (0, 1)))


def test_the_grid_without_end_ends_by_itself_after_a_thousand_steps():
    grid = tabular.UnboundedGrid(treasure_rate=0.0, trap_rate=0.0)
    grid.reset(seed=0)
    cut = [grid.step(0)[3] for _ in range(1000)]
    assert cut == [False] * 999 + [True]


def test_a_slip_is_a_probability():
    for slip in (-0.1, 1.1):
        with pytest.raises(ValueError, match=r"slip is .+ expected a probability in \[0, 1\]"):
            tabular.UnboundedGrid(slip=slip)
    assert tabular.UnboundedGrid(slip=0.0).slip == 0 and tabular.UnboundedGrid(slip=1.0).slip == 1
