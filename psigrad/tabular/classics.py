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
    """Return example 4.1: a 4×4 grid with reward −1 per step, in which two corners end the episode, and γ = 1.

    Under the random policy, the other two corners have value −22.
    """
    return _grid(4, 4, lambda cell, move: (_clip(cell, move, 4, 4), -1.0), 1.0, [(0, 0), (3, 3)])


def teleport_5x5() -> MDP:
    """Return examples 3.5 and 3.8: a 5×5 grid with two teleporting cells. Episodes never end, and γ = 0.9.

    Every move from (0, 1) pays 10 and leads to (4, 1); from (0, 3) it pays 5 and leads to (2, 3). A move against the border has
    reward −1. The moves are up, right, down, left.
    """

    def rule(cell: Cell, move: Cell) -> tuple[Cell, float]:
        if cell in ((0, 1), (0, 3)):
            return ((4, 1), 10.0) if cell == (0, 1) else ((2, 3), 5.0)
        target = _clip(cell, move, 5, 5)
        return target, -1.0 if target == cell else 0.0

    return _grid(5, 5, rule, 0.9, [])


def cliff_walking() -> MDP:
    """Return example 6.6: a 4×12 grid with reward −1 per step and γ = 1.

    A step off the cliff pays −100 and leads to the start.
    """

    def rule(cell: Cell, move: Cell) -> tuple[Cell, float]:
        target = _clip(cell, move, 4, 12)
        return ((3, 0), -100.0) if target[0] == 3 and 0 < target[1] < 11 else (target, -1.0)

    return _grid(4, 12, rule, 1.0, [(3, 11)], (3, 0))


def windy_gridworld() -> MDP:
    """Return example 6.5: a 7×10 grid with reward −1 per step and γ = 1.

    The wind of the cell that is left moves the agent upwards. The shortest path takes 15 steps.
    """
    wind = (0, 0, 0, 1, 1, 1, 2, 2, 1, 0)

    def rule(cell: Cell, move: Cell) -> tuple[Cell, float]:
        return _clip(cell, (move[0] - wind[cell[1]], move[1]), 7, 10), -1.0

    return _grid(7, 10, rule, 1.0, [(3, 7)], (3, 0))


def random_walk(n: int = 19, *, left: float = -1.0, right: float = 1.0) -> MDP:
    """Return examples 6.2 and 7.1: a chain of n states. Its one action steps left or right with equal probability.

    The states 1 … n lie between the terminal states 0 and n + 1, whose entry pays `left` and `right`. Episodes start in the
    middle, and γ = 1. V(i) = left + (right − left)·i/(n + 1).
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
    """Return pymdptoolbox's forest, whose states are the ages of a forest, with the actions wait and cut.

    If the agent waits, the forest burns down with probability `fire` and otherwise grows. Waiting in the oldest state pays `old`.
    Cutting resets the age. It pays `cut` in the oldest state, 1 in between, and 0 in the youngest.
    """
    if states < 2:
        raise ValueError(f"states is {states}; expected at least 2, one for each age of the forest.")
    transitions, rewards = np.zeros((2, states, states)), np.zeros((states, 2))
    for age in range(states):
        transitions[0, age, min(age + 1, states - 1)] += 1 - fire
        transitions[0, age, 0] += fire
        transitions[1, age, 0] = 1.0
    rewards[-1] = old, cut
    rewards[1:-1, 1] = 1.0
    return MDP(transitions, rewards, gamma)
