"""The unbounded grid: traps and treasures on an endless plane of cells (i, j), i, j >= 1, that exist before anyone looks.

What a cell holds is a hash of (world, i, j), so nothing is stored and every agent finds the same world in any order.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from psigrad.tabular.grid_world import Cell, GridWorld

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


class UnboundedGrid:
    """An environment with Gymnasium's reset and step. Actions R (i+1), L (i−1), U (j−1), D (j+1); the edge at 1 is a wall.

    Entering a treasure or a trap pays it and terminates; `max_steps` truncates. The observation is (i, j), i to the right and j
    down. `trap_reward` may be −inf. The cell (1, 1) is always free. With `slip` the move is another one, drawn uniformly.
    """

    actions = ("R", "L", "U", "D")
    moves: tuple[Cell, ...] = ((1, 0), (-1, 0), (0, -1), (0, 1))

    def __init__(
        self,
        world: int = 0,
        *,
        treasure_rate: float = 0.02,
        trap_rate: float = 0.05,
        treasure_reward: float = 1.0,
        trap_reward: float = -1.0,
        step_reward: float = 0.0,
        slip: float = 0.0,
        max_steps: int | None = 1_000,
    ) -> None:
        if treasure_rate < 0 or trap_rate < 0 or treasure_rate + trap_rate > 1:
            raise ValueError(
                f"treasure_rate is {treasure_rate} and trap_rate {trap_rate}; expected shares of the cells that sum to at most 1."
            )
        if not 0 <= slip <= 1:
            raise ValueError(f"slip is {slip}; expected a probability in [0, 1].")
        if max_steps is not None and max_steps < 1:
            raise ValueError(f"max_steps is {max_steps}; expected at least 1, or None for no limit.")
        self.world, self.treasure_rate, self.trap_rate = world, treasure_rate, trap_rate
        self.treasure_reward, self.trap_reward, self.step_reward = treasure_reward, trap_reward, step_reward
        self.slip, self.max_steps = slip, max_steps
        self._rng = np.random.default_rng()
        self._cell: Cell | None = None
        self._steps = 0

    def prize(self, cell: Cell) -> float | None:
        """What entering the cell (i, j) pays beyond the step reward; None for a free cell."""
        i, j = cell
        if i < 1 or j < 1:
            raise ValueError(f"There is no cell ({i}, {j}); cells count from (1, 1).")
        if (i, j) == (1, 1):
            return None
        u = _uniform(self.world, i, j)
        if u < self.treasure_rate:
            return self.treasure_reward
        return self.trap_reward if u < self.treasure_rate + self.trap_rate else None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Cell, dict[str, Any]]:
        """Starts at (1, 1), or at options["cell"]. The seed moves the slips only: the world is fixed."""
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        cell = (options or {}).get("cell", (1, 1))
        if self.prize(cell) is not None:
            raise ValueError(f"The cell {cell} holds a treasure or a trap; start at a free one.")
        self._cell, self._steps = cell, 0
        return cell, {}

    def step(self, action: int) -> tuple[Cell, float, bool, bool, dict[str, Any]]:
        """(observation, reward, terminated, truncated, info)."""
        if self._cell is None:
            raise ValueError("The episode is over or has not begun; call reset first.")
        if action not in range(4):
            raise ValueError(f"action is {action}; expected 0 (R), 1 (L), 2 (U) or 3 (D).")
        if self.slip and self._rng.random() < self.slip:
            action = int(self._rng.integers(4))
        di, dj = self.moves[action]
        before = self._cell
        cell = (max(before[0] + di, 1), max(before[1] + dj, 1))
        prize = self.prize(cell) if cell != before else None
        self._steps += 1
        terminated = prize is not None
        truncated = not terminated and self.max_steps is not None and self._steps >= self.max_steps
        self._cell = None if terminated or truncated else cell
        return cell, self.step_reward + (prize or 0.0), terminated, truncated, {}

    def window(self, rows: int, columns: int, *, gamma: float = 0.9) -> GridWorld:
        """The corner of i <= columns and j <= rows as a GridWorld with a wall around it, to be solved exactly.

        Cell (j − 1, i − 1) there is (i, j) here. GridWorld slips sideways only, so a grid with slip has no such window.
        """
        if self.slip:
            raise ValueError(
                f"The grid has slip={self.slip}, which GridWorld does not share; take a window of a grid without slip."
            )
        found = {(j - 1, i - 1): self.prize((i, j)) for j in range(1, rows + 1) for i in range(1, columns + 1)}
        prizes = {cell: reward for cell, reward in found.items() if reward is not None}
        return GridWorld(rows, columns, prizes, step_reward=self.step_reward, start=(0, 0), gamma=gamma)


def _mixed(x: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014)."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def _uniform(*counters: int) -> float:
    """A double in [0, 1) that depends on the counters only."""
    x = 0
    for counter in counters:
        x = _mixed((x + GOLDEN + counter) & MASK)
    return (x >> 11) * 2.0**-53
