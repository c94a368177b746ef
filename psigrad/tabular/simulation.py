"""Episodes of a policy in an MDP, or in any environment with Gymnasium's reset and step. Schedules of ε and step sizes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike
from scipy import sparse

from psigrad.tabular.bellman import check_policy
from psigrad.tabular.grid_world import GridWorld
from psigrad.tabular.mdp import MDP, FloatArray, IntArray, discounted_return
from psigrad.tabular.termination import can_end

BLOCK = 4096
# The function `learn(s, a, r, s', terminated)` is called after each step, before the next action is chosen.
Learn = Callable[[int, int, float, int, bool], None]
# The function `bootstrap(states, actions, rewards)` is called after each choice of the next action, which is the last in
# `actions`.
Bootstrap = Callable[[list[int], list[int], list[float]], None]
# The schedule of ε over episodes, or of step sizes over visits: a number, or a function of the count.
Schedule = float | Callable[[int], float]


class DiscreteEnv(Protocol):
    """The interface of an environment: Gymnasium's reset and step with integer observations and actions."""

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Return (observation, info)."""

    def step(self, action: int) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Return (observation, reward, terminated, truncated, info)."""


@dataclass(frozen=True, eq=False)
class Episode:
    """An episode: states s_0 … s_T, actions a_0 … a_{T−1}, rewards r_0 … r_{T−1}, where r_t is paid for (s_t, a_t)."""

    states: IntArray
    """[T + 1]: the last one is the state in which the episode stopped."""
    actions: IntArray
    """[T]"""
    rewards: FloatArray
    """[T]"""
    terminated: bool
    """True if the episode ended by itself. If False, it was cut off, and the last state still has value."""

    def discounted_return(self, gamma: float) -> float:
        """Return G_0 = Σ_t γ^t·r_t over the steps of the episode."""
        return discounted_return(self.rewards, gamma)


def uniforms(rng: np.random.Generator) -> Callable[[], float]:
    """Return a function that returns a random number in [0, 1), like rng.random(). It draws in blocks, which is faster."""
    block: list[float] = []

    def draw() -> float:
        if not block:
            block.extend(rng.random(BLOCK)[::-1].tolist())
        return block.pop()

    return draw


class Simulator:
    """An environment with Gymnasium's reset and step that samples an MDP. Episodes are truncated after `max_steps`.

    An outcome pays R(s, a, s') if the MDP has it, and otherwise R(s, a).
    """

    def __init__(self, mdp: MDP, *, max_steps: int | None = None, seed: int = 0) -> None:
        if max_steps is not None and max_steps < 1:
            raise ValueError(f"max_steps is {max_steps}; expected at least 1, or None for no limit.")
        self.mdp, self.max_steps = mdp, max_steps
        self._terminal = mdp.is_terminal.tolist()
        self._start = list(accumulate(mdp.start_distribution.tolist()))
        self._rows: dict[int, tuple[list[float], list[int], list[float]]] = {}
        self._draw = uniforms(np.random.default_rng(seed))
        self._state, self._steps = -1, 0

    def reset(self, *, seed: int | None = None) -> tuple[int, dict[str, Any]]:
        """Draw the first state. If a seed is given, restart the random generator from it."""
        if seed is not None:
            self._draw = uniforms(np.random.default_rng(seed))
        self._state = min(bisect_right(self._start, self._draw() * self._start[-1]), len(self._start) - 1)
        self._steps = 0
        if self._terminal[self._state]:
            raise ValueError(f"The episode would start in state {self._state}, which is terminal; give the MDP another `start`.")
        return self._state, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        """Return (state, reward, terminated, truncated, info). A step that ends the episode through `end` keeps the state."""
        state = self._state
        if state < 0:
            raise ValueError("The episode is over or has not begun; call reset first.")
        row = self._rows.get(action * self.mdp.n_states + state) or self._row(state, action)
        cumulative, targets, rewards = row
        outcome = bisect_right(cumulative, self._draw() * cumulative[-1])
        target = targets[min(outcome, len(targets) - 1)]
        reward = rewards[min(outcome, len(targets) - 1)]
        self._steps += 1
        terminated = target < 0 or self._terminal[target]
        truncated = not terminated and self.max_steps is not None and self._steps >= self.max_steps
        self._state = -1 if terminated or truncated else target
        return (state if target < 0 else target), reward, terminated, truncated, {}

    def _row(self, state: int, action: int) -> tuple[list[float], list[int], list[float]]:
        """Return (cumulative probabilities, next states, rewards) of the outcomes of (s, a).

        State −1 is the end through `end`.
        """
        if not 0 <= action < self.mdp.n_actions:
            raise ValueError(f"action is {action}; expected 0 to {self.mdp.n_actions - 1}.")
        ends, pays, probabilities = outcomes(self.mdp, state, action)
        row = (list(accumulate(probabilities)), ends, pays)
        self._rows[action * self.mdp.n_states + state] = row
        return row


def outcomes(mdp: MDP, state: int, action: int) -> tuple[list[int], list[float], list[float]]:
    """Return (next states, rewards, probabilities) of the outcomes of (s, a). State −1 is the end of an episode through `end`."""
    index = action * mdp.n_states + state
    targets, p = _nonzero(mdp.transitions, index)
    rewards = np.full(p.size, mdp.rewards[state, action])
    if mdp.rewards_next is not None:
        rewards = np.asarray(mdp.rewards_next[[index]].toarray()[0] if mdp.is_sparse else mdp.rewards_next[index])[targets]
    probabilities, ends, pays = p.tolist(), targets.tolist(), rewards.tolist()
    if mdp.end is not None and mdp.end[state, action] > 0:
        table = mdp.rewards if mdp.rewards_end is None else mdp.rewards_end
        probabilities.append(float(mdp.end[state, action]))
        ends.append(-1)
        pays.append(float(table[state, action]))
    return ends, pays, probabilities


def _nonzero(matrix: Any, row: int) -> tuple[IntArray, FloatArray]:
    """Return (columns, values) of the entries of a row that are not 0, for a dense or CSR matrix."""
    if sparse.issparse(matrix):
        a, b = matrix.indptr[row], matrix.indptr[row + 1]
        return matrix.indices[a:b], matrix.data[a:b]
    columns = np.flatnonzero(matrix[row])
    return columns, matrix[row][columns]


def environment(env: MDP | DiscreteEnv, max_steps: int | None) -> DiscreteEnv:
    """Return an environment unchanged, or the simulator of an MDP. Raises ValueError for an MDP whose episodes can't end."""
    if not isinstance(env, MDP):
        return env
    if max_steps is None and not can_end(env.transitions, env.start_distribution, env.end_probability, env.is_terminal):
        raise ValueError(
            "No episode of this MDP can end: no terminal state is reached from its start; give max_steps, such as max_steps=100."
        )
    return Simulator(env, max_steps=max_steps)


def sizes(env: Any) -> tuple[int, int]:
    """Return (S, A) of an MDP, a Simulator, or an environment with discrete spaces."""
    if isinstance(env, Simulator):
        env = env.mdp
    if isinstance(env, MDP):
        return env.n_states, env.n_actions
    try:
        observations, actions = env.observation_space, env.action_space
        offsets = int(observations.start), int(actions.start)
        counts = int(observations.n), int(actions.n)
    except AttributeError:
        hint = "an MDP or an environment with both"
        hint = f"gymnasium.make({env!r})" if isinstance(env, str) else "grid.mdp()" if isinstance(env, GridWorld) else hint
        raise ValueError(f"{type(env).__name__} has no discrete observation_space and action_space; give {hint}.") from None
    if offsets != (0, 0):
        raise ValueError(f"The spaces of {type(env).__name__} start at {offsets}; expected states and actions counted from 0.")
    return counts


def rollouts(
    env: MDP | DiscreteEnv, policy: ArrayLike, episodes: int, *, seed: int, max_steps: int | None = None
) -> Iterator[Episode]:
    """Yield episodes of a fixed policy, [S] actions or (S, A) probabilities. `max_steps` cuts an episode off (truncation)."""
    table = check_policy(*sizes(env), policy)
    chosen: list[int] = [int(a) for a in table] if table.ndim == 1 else []
    cumulative = [list(accumulate(row)) for row in table.tolist()] if table.ndim == 2 else []
    draw = uniforms(np.random.default_rng((seed, 1)))
    player = environment(env, max_steps)

    def choose(state: int) -> int:
        if chosen:
            return chosen[state]
        row = cumulative[state]
        return min(bisect_right(row, draw() * row[-1]), len(row) - 1)

    for index in range(episodes):
        yield play(player, choose, seed=seed if index == 0 else None, max_steps=max_steps)


def play(
    env: DiscreteEnv,
    choose: Callable[[int], int],
    *,
    seed: int | None,
    max_steps: int | None,
    learn: Learn | None = None,
    bootstrap: Bootstrap | None = None,
) -> Episode:
    """Play an episode with the actions `choose(s)`. Call `learn` after each step, and `bootstrap` after each next action."""
    observation, _ = env.reset(seed=seed)
    states, rewards = [int(observation)], list[float]()
    actions = [choose(states[0])]
    while True:
        observation, reward, terminated, truncated, _ = env.step(actions[-1])
        states.append(int(observation))
        rewards.append(float(reward))
        if learn is not None:
            learn(states[-2], actions[-1], rewards[-1], states[-1], bool(terminated))
        if terminated or truncated or (max_steps is not None and len(actions) >= max_steps):
            return Episode(np.array(states), np.array(actions), np.array(rewards), bool(terminated))
        actions.append(choose(states[-1]))
        if bootstrap is not None:
            bootstrap(states, actions, rewards)


@dataclass(frozen=True)
class linear:
    """A schedule from `first` to `last` in equal steps over `count`, then `last`: first + (last − first)·min(k/count, 1)."""

    first: float
    last: float
    count: int

    def __call__(self, k: int) -> float:
        """Return the value after k episodes."""
        return self.first + (self.last - self.first) * min(k / self.count, 1.0)


@dataclass(frozen=True)
class exponential:
    """The schedule max(first·decay^k, last)."""

    first: float
    last: float
    decay: float

    def __call__(self, k: int) -> float:
        """Return the value after k episodes."""
        return max(self.first * self.decay**k, self.last)


@dataclass(frozen=True)
class inverse_visits:
    """The schedule 1/n^power at the n-th visit, n >= 1. Its sum is infinite and its sum of squares finite (Robbins, Monro)."""

    power: float = 1.0

    def __post_init__(self) -> None:
        if not 0.5 < self.power <= 1:
            raise ValueError(f"power is {self.power}; expected a number in (0.5, 1], since other powers do not converge.")

    def __call__(self, n: int) -> float:
        """Return the step size at the n-th visit."""
        return float(n**-self.power)


def at(schedule: Schedule, count: int, name: str) -> float:
    """Return the value of a schedule at `count`. Raises ValueError if it is outside [0, 1]."""
    value = schedule(count) if callable(schedule) else schedule
    if not 0 <= value <= 1:
        raise ValueError(f"{name} is {value} at count {count}; expected a number in [0, 1].")
    return value
