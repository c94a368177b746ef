"""Grid worlds: an immutable description that is cheap to modify, its conversion to an MDP, and a grid without bounds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import ArrayLike
from scipy import sparse

from psigrad.tabular.mdp import DENSE_UP_TO, MDP, BoolArray, FloatArray, IntArray

Cell = tuple[int, int]
ACTIONS = ("up", "right", "down", "left")
ARROWS = "↑→↓←"
MOVES: tuple[Cell, ...] = ((-1, 0), (0, 1), (1, 0), (0, -1))


def _default_prizes() -> dict[Cell, float]:
    return {(1, 6): 1.0, (3, 4): -1.0}


@dataclass(frozen=True)
class GridWorld:
    """A grid of cells (row, column) counted from the top left, with four moves. Rewards are paid when a cell is ENTERED.

    A move against a wall or the border stays in its cell, which does not count as entering it. With probability `slip`, the agent
    moves at a right angle instead, to either side equally often. State r·columns + c is cell (r, c). Walls are states too, which
    are never entered, so that states keep their numbers when walls move. Change a grid with `dataclasses.replace` or `moved`.
    """

    rows: int = 8
    columns: int = 8
    prizes: Mapping[Cell, float] = field(default_factory=_default_prizes)
    """The reward of entering a cell on top of step_reward: treasures above 0, traps below."""
    walls: frozenset[Cell] = frozenset()
    slip: float = 0.0
    """The probability of a move at a right angle to the chosen one, in [0, 1]. FrozenLake's slippery ice has 2/3."""
    step_reward: float = 0.0
    """The reward of every step; negative for a cost."""
    ends: bool = True
    """True if entering a prize ends the episode. If False, the prize pays again each time it is entered."""
    start: Cell | None = None
    """The first cell; None: a random cell that is neither a wall nor terminal."""
    gamma: float = 0.9

    def __post_init__(self) -> None:
        object.__setattr__(self, "prizes", {_cell(c): float(r) for c, r in self.prizes.items()})
        object.__setattr__(self, "walls", frozenset(_cell(c) for c in self.walls))
        if self.rows < 1 or self.columns < 1:
            raise ValueError(f"The grid is {self.rows}×{self.columns}; expected at least one row and one column.")
        if not 0 <= self.slip <= 1:
            raise ValueError(f"slip is {self.slip}; expected a probability in [0, 1].")
        named = [("prize", c) for c in self.prizes] + [("wall", c) for c in self.walls]
        named += [] if self.start is None else [("start", self.start)]
        for what, (row, column) in named:
            if not (0 <= row < self.rows and 0 <= column < self.columns):
                raise ValueError(
                    f"The {what} at ({row}, {column}) is outside the {self.rows}×{self.columns} grid; move it inside."
                )
        for what, (row, column) in named:
            if what != "wall" and (row, column) in self.walls:
                raise ValueError(f"The {what} at ({row}, {column}) is in a wall; move the {what} or the wall.")
        if self.start is not None and self.ends and self.start in self.prizes:
            raise ValueError(f"The start {self.start} is a prize, where episodes end; move the start or the prize.")

    if not TYPE_CHECKING:  # A type checker would accept every name as existing.

        def __getattr__(self, name: str) -> NoReturn:
            """Raise an AttributeError. If an MDP has this name, the message suggests `grid.mdp()`, as for a grid in a solver."""
            there = hasattr(MDP, name) or name in MDP.__dataclass_fields__
            hint = " Its MDP has it; give grid.mdp() where an MDP is expected." if there else ""
            raise AttributeError(f"A GridWorld has no {name!r}.{hint}", name=name, obj=self)

    def state(self, cell: Cell) -> int:
        """Return the state of a cell (row, column)."""
        row, column = cell
        if not (0 <= row < self.rows and 0 <= column < self.columns):
            raise ValueError(f"There is no cell ({row}, {column}) in the {self.rows}×{self.columns} grid.")
        return row * self.columns + column

    def cell(self, state: int) -> Cell:
        """Return the cell (row, column) of a state."""
        if not 0 <= state < self.rows * self.columns:
            raise ValueError(
                f"There is no state {state}; the {self.rows}×{self.columns} grid has 0 to {self.rows * self.columns - 1}."
            )
        return divmod(int(state), self.columns)

    def moved(self, source: Cell, target: Cell) -> GridWorld:
        """Return the grid with the prize, the wall or the start at `source` moved to an empty cell `target`."""
        if target in self.prizes or target in self.walls or target == self.start:
            raise ValueError(f"The cell {target} is taken; move to an empty one.")
        if source in self.prizes:
            return replace(self, prizes={target if c == source else c: r for c, r in self.prizes.items()})
        if source in self.walls:
            return replace(self, walls=self.walls - {source} | {target})
        if source == self.start:
            return replace(self, start=target)
        raise ValueError(f"The cell {source} is empty; name the cell of a prize, a wall or the start.")

    def mdp(self, *, outcomes: bool = True) -> MDP:
        """Return the MDP, dense up to 512 states and CSR above. outcomes=False omits R(s, a, s'), which only simulation needs."""
        n_states = self.rows * self.columns
        terminal, bonus = self._terminal(), self._bonus()
        targets = self._targets()
        sides = [(1.0 - self.slip, 0), (self.slip / 2, 1), (self.slip / 2, 3)]
        sides = [(p, turn) for p, turn in sides if p > 0]
        directions = [[(a + turn) % 4 for _, turn in sides] for a in range(4)]
        indices = np.stack([targets[d].T for d in directions])[:, ~terminal].astype(np.int32)
        data = np.broadcast_to([p for p, _ in sides], indices.shape)
        lengths = np.tile(np.where(terminal, 0, len(sides)), 4)
        indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        matrix = sparse.csr_array((data.ravel().copy(), indices.ravel(), indptr), shape=(4 * n_states, n_states))
        matrix.sum_duplicates()
        here = np.repeat(np.tile(np.arange(n_states, dtype=np.int32), 4), np.diff(matrix.indptr))
        paid = np.where(matrix.indices == here, 0.0, bonus[matrix.indices]) + self.step_reward
        next_rewards = sparse.csr_array((paid, matrix.indices, matrix.indptr), shape=matrix.shape)
        expected = (sparse.csr_array((paid * matrix.data, matrix.indices, matrix.indptr), shape=matrix.shape)).sum(axis=1)
        rewards = np.asarray(expected).reshape(4, n_states).T
        dense = n_states <= DENSE_UP_TO
        start = None
        if self.start is not None:
            start = np.zeros(n_states)
            start[self.state(self.start)] = 1.0
        per_outcome = (next_rewards.toarray() if dense else next_rewards) if outcomes else None
        transitions = matrix.toarray() if dense else matrix
        return MDP(transitions, rewards, self.gamma, terminal=terminal, start=start, rewards_next=per_outcome)

    def _mask(self, cells: Iterable[Cell]) -> FloatArray:
        mask = np.zeros((self.rows, self.columns))
        for cell in cells:
            mask[cell] = 1.0
        return mask

    def _terminal(self) -> BoolArray:
        final = self._mask(self.walls) + (self._mask(self.prizes) if self.ends else 0.0)
        return np.asarray(final > 0).ravel()

    def _bonus(self) -> FloatArray:
        bonus = np.zeros((self.rows, self.columns))
        for cell, reward in self.prizes.items():
            bonus[cell] = reward
        return bonus.ravel()

    def _targets(self) -> IntArray:
        """Return (4, S): the next state after a move in each direction."""
        row, column = np.divmod(np.arange(self.rows * self.columns), self.columns)
        walls = self._mask(self.walls).ravel() > 0
        targets = np.empty((4, row.size), dtype=np.int64)
        for direction, (dr, dc) in enumerate(MOVES):
            r, c = np.clip(row + dr, 0, self.rows - 1), np.clip(column + dc, 0, self.columns - 1)
            targets[direction] = r * self.columns + c
            blocked = walls[targets[direction]]
            targets[direction, blocked] = np.flatnonzero(blocked)
        return targets

    def to_text(self) -> str:
        """Return the map as text: `.` free, `#` wall, `S` start, `+` prize 1, `-` prize −1, letters with a legend for others."""
        letters = {1.0: "+", -1.0: "-"}
        legend: list[str] = []
        for reward in sorted(set(self.prizes.values()) - {1.0, -1.0}):
            letters[reward] = chr(ord("a") + len(legend))
            legend.append(f"{letters[reward]} = {_shortest(reward)}")
        if len(legend) > 26:
            raise ValueError(f"The grid has {len(legend)} prizes of different worth; a text map can name 26.")
        rows = [["."] * self.columns for _ in range(self.rows)]
        marks = [(c, "#") for c in self.walls] + [(c, letters[r]) for c, r in self.prizes.items()]
        if self.start is not None:
            marks.append((self.start, "S"))
            legend += [f"S = {_shortest(self.prizes[self.start])}"] if self.start in self.prizes else []
        for (r, c), mark in marks:
            rows[r][c] = mark
        return "\n".join(["".join(row) for row in rows] + legend)

    @classmethod
    def from_text(
        cls, text: str, *, slip: float = 0.0, step_reward: float = 0.0, ends: bool = True, gamma: float = 0.9
    ) -> GridWorld:
        """Return the grid of a map in the format of `to_text`. The arguments give the fields that a map does not have."""
        lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
        worth, rows = {"+": 1.0, "-": -1.0}, []
        for line in lines:
            name, equals, number = (part.strip() for part in line.partition("="))
            if equals:
                worth[name] = _number(name, number)
            else:
                rows.append(line)
        if not rows:
            raise ValueError("The map is empty; expected rows of . # S + and -.")
        if len({len(row) for row in rows}) != 1:
            raise ValueError(f"The map has rows of lengths {[len(row) for row in rows]}; expected equal lengths.")
        cells = {(r, c): mark for r, row in enumerate(rows) for c, mark in enumerate(row)}
        unknown = sorted(set(cells.values()) - set(".#S") - set(worth))
        if unknown:
            raise ValueError(
                f"The map has the sign {unknown[0]!r}; expected . # S + - or a letter with a line such as 'a = 0.5'."
            )
        starts = [cell for cell, mark in cells.items() if mark == "S"]
        if len(starts) > 1:
            raise ValueError(f"The map has {len(starts)} starts S; expected at most one.")
        prizes = {cell: worth[mark] for cell, mark in cells.items() if mark in worth}
        walls = frozenset(cell for cell, mark in cells.items() if mark == "#")
        start = starts[0] if starts else None
        return cls(len(rows), len(rows[0]), prizes, walls, slip, step_reward, ends, start, gamma)

    def render(self, value: ArrayLike | None = None, policy: ArrayLike | None = None, decimals: int = 2) -> str:
        """Return the grid as text: values [S], and arrows of a policy, [S] or (S, A), for its most probable actions."""
        n_states = self.rows * self.columns
        numbers = None if value is None else np.asarray(value, dtype=np.float64)
        chosen = None if policy is None else np.asarray(policy)
        if numbers is not None and numbers.shape != (n_states,):
            raise ValueError(f"value has shape {numbers.shape}; expected {n_states} numbers.")
        texts = [self._cell_text(s, numbers, chosen, decimals) for s in range(n_states)]
        width = max(len(text) for text in texts)
        rows = [texts[r * self.columns : (r + 1) * self.columns] for r in range(self.rows)]
        return "\n".join(" ".join(text.rjust(width) for text in row) for row in rows)

    def _cell_text(self, state: int, value: FloatArray | None, policy: IntArray | FloatArray | None, decimals: int) -> str:
        cell = self.cell(state)
        if cell in self.walls:
            return "#"
        if cell in self.prizes and self.ends:
            return f"[{self.prizes[cell]:+g}]"
        number = "" if value is None else f"{value[state] + 0.0:.{decimals}f}"
        if policy is None:
            return number or ("S" if cell == self.start else ".")
        if policy.ndim == 1:
            return number + ARROWS[int(policy[state])]
        best = np.flatnonzero(policy[state] >= policy[state].max() - 1e-9)
        return number + "".join(ARROWS[int(a)] for a in best)


def _cell(cell: Cell) -> Cell:
    row, column = cell
    return int(row), int(column)


def _shortest(number: float) -> str:
    return repr(number).removesuffix(".0")


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"The map's legend says {name} = {text!r}; expected a number.") from None


class UnboundedGrid:
    """An environment with Gymnasium's reset and step: a grid without bounds to the right (i >= 1) and below (j >= 1).

    The actions are R (i+1), L (i−1), U (j−1), D (j+1); the edges above and on the left are walls. Entering a treasure or a trap
    pays its reward and terminates the episode; `max_steps` truncates it. The observation is (i, j). `trap_reward` may be −inf.
    The cell (1, 1) is always free. With probability `slip`, the move is replaced by a uniformly random one.
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
        """Return the reward of entering the cell (i, j), in addition to the step reward; None for a free cell."""
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
        """Start at (1, 1), or at options["cell"]. The seed affects only the slips, not the cells."""
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        cell = (options or {}).get("cell", (1, 1))
        if self.prize(cell) is not None:
            raise ValueError(f"The cell {cell} holds a treasure or a trap; start at a free one.")
        self._cell, self._steps = cell, 0
        return cell, {}

    def step(self, action: int) -> tuple[Cell, float, bool, bool, dict[str, Any]]:
        """Return (observation, reward, terminated, truncated, info)."""
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
        """Return the corner with i <= columns and j <= rows as a `GridWorld`, to be solved exactly.

        Its cell (j − 1, i − 1) is (i, j) here. Raises ValueError for a grid with slip, since a `GridWorld` slips only sideways.
        """
        if self.slip:
            raise ValueError(f"slip is {self.slip}; expected 0 for a window, since a GridWorld slips only sideways.")
        found = {(j - 1, i - 1): self.prize((i, j)) for j in range(1, rows + 1) for i in range(1, columns + 1)}
        prizes = {cell: reward for cell, reward in found.items() if reward is not None}
        return GridWorld(rows, columns, prizes, step_reward=self.step_reward, start=(0, 0), gamma=gamma)


# The content of a cell is a hash of (world, i, j). So nothing is stored, and cells do not depend on the order of visits.
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(x: int) -> int:
    """Return a well-mixed 64-bit hash of x, by the finaliser of SplitMix64 (Steele, Lea and Flood 2014)."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _uniform(*counters: int) -> float:
    """Return a double in [0, 1) that depends only on the counters."""
    x = 0
    for counter in counters:
        x = _mix((x + _GOLDEN + counter) & _MASK)
    return (x >> 11) * 2.0**-53
