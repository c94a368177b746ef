"""Small problems with published answers. Source: Sutton and Barto 2018, unless another one is named."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from psigrad.tabular.grid_world import MOVES, Cell
from psigrad.tabular.mdp import MDP

Rule = Callable[[Cell, Cell], tuple[Cell, float]]


def _grid(rows: int, columns: int, rule: Rule, gamma: float, terminal: list[Cell], start: Cell | None = None) -> MDP:
    """Return the MDP of a deterministic grid: `rule(cell, move)` returns the next cell and the reward."""
    n_states = rows * columns
    transitions, rewards = np.zeros((4, n_states, n_states)), np.zeros((n_states, 4))
    for state in range(n_states):
        for action, move in enumerate(MOVES):
            (r, c), rewards[state, action] = rule(divmod(state, columns), move)
            transitions[action, state, r * columns + c] = 1.0
    final = np.zeros(n_states, bool)
    final[[r * columns + c for r, c in terminal]] = True
    first = None if start is None else np.eye(n_states)[start[0] * columns + start[1]]
    return MDP(transitions, rewards, gamma, terminal=final, start=first)


def _clip(cell: Cell, move: Cell, rows: int, columns: int) -> Cell:
    return min(max(cell[0] + move[0], 0), rows - 1), min(max(cell[1] + move[1], 0), columns - 1)


def shortest_path_4x4() -> MDP:
    """Return example 4.1: −1 a step, two corners end the episode, γ = 1. The far corners are worth −22 under the random
    policy.
    """
    return _grid(4, 4, lambda cell, move: (_clip(cell, move, 4, 4), -1.0), 1.0, [(0, 0), (3, 3)])


def teleport_5x5() -> MDP:
    """Return examples 3.5 and 3.8: two teleporting cells in a 5×5 grid, with γ = 0.9 and no end.

    Every move from (0, 1) pays 10 and leads to (4, 1); from (0, 3) it pays 5 and leads to (2, 3). Bumping into the border costs
    1. Moves are up, right, down, left.
    """

    def rule(cell: Cell, move: Cell) -> tuple[Cell, float]:
        if cell in ((0, 1), (0, 3)):
            return ((4, 1), 10.0) if cell == (0, 1) else ((2, 3), 5.0)
        target = _clip(cell, move, 5, 5)
        return target, -1.0 if target == cell else 0.0

    return _grid(5, 5, rule, 0.9, [])


def cliff_walking() -> MDP:
    """Return example 6.6: 4×12, −1 a step, γ = 1; stepping off the cliff costs 100 and leads back to the start."""

    def rule(cell: Cell, move: Cell) -> tuple[Cell, float]:
        target = _clip(cell, move, 4, 12)
        return ((3, 0), -100.0) if target[0] == 3 and 0 < target[1] < 11 else (target, -1.0)

    return _grid(4, 12, rule, 1.0, [(3, 11)], (3, 0))


def windy_gridworld() -> MDP:
    """Return example 6.5: 7×10, −1 a step, γ = 1. A cell's wind blows upwards as it is left. The best path takes 15 steps."""
    wind = (0, 0, 0, 1, 1, 1, 2, 2, 1, 0)

    def rule(cell: Cell, move: Cell) -> tuple[Cell, float]:
        return _clip(cell, (move[0] - wind[cell[1]], move[1]), 7, 10), -1.0

    return _grid(7, 10, rule, 1.0, [(3, 7)], (3, 0))


def random_walk(n: int = 19, *, left: float = -1.0, right: float = 1.0) -> MDP:
    """Return examples 6.2 and 7.1: n states in a row, one action, a random step to a side; the ends pay `left` and `right`.

    States 1 … n, terminal states 0 and n + 1, start in the middle, γ = 1. V(i) = left + (right − left)·i/(n + 1).
    """
    if n < 1 or n % 2 == 0:
        raise ValueError(f"n is {n}; expected an odd number of states, so that there is a middle to start from.")
    transitions, rewards = np.zeros((1, n + 2, n + 2)), np.zeros((1, n + 2, n + 2))
    for state in range(1, n + 1):
        transitions[0, state, [state - 1, state + 1]] = 0.5
    rewards[0, 1, 0], rewards[0, n, n + 1] = left, right
    ends = np.zeros(n + 2, bool)
    ends[[0, -1]] = True
    return MDP(transitions, rewards, 1.0, terminal=ends, start=np.eye(n + 2)[(n + 1) // 2])


def forest(states: int = 3, *, old: float = 4.0, cut: float = 2.0, fire: float = 0.1, gamma: float = 0.9) -> MDP:
    """Return pymdptoolbox's forest: wait (it grows, or burns with probability `fire`) or cut; the oldest pays `old` or `cut`."""
    if states < 2:
        raise ValueError(f"states is {states}; expected at least 2 ages of the forest.")
    transitions, rewards = np.zeros((2, states, states)), np.zeros((states, 2))
    for age in range(states):
        transitions[0, age, min(age + 1, states - 1)] += 1 - fire
        transitions[0, age, 0] += fire
        transitions[1, age, 0] = 1.0
    rewards[-1] = old, cut
    rewards[1:-1, 1] = 1.0
    return MDP(transitions, rewards, gamma)
