"""The numbers behind one cell's value: its backup from the values of a frame, and its updates in the last episode.

planning     V(s) ← max_a [ Σ_s' P(s'|s, a)·(R(s, a, s') + γ·V(s')) ]
TD(0)        V(s) ← V(s) + α·(r + γ·V(s') − V(s))
Q-learning   Q(s,a) ← Q(s,a) + α·(r + γ·max_a' Q(s',a') − Q(s,a));  SARSA with Q(s',a'), expected SARSA with the mean
Monte Carlo  towards the return after the first visit
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from psigrad import tabular
from psigrad.tabular import MDP, Episode
from psigrad_studio.playback import ALGORITHMS, FloatArray, Frame, Playback, evaluated_policy


@dataclass(frozen=True)
class NextState:
    """One successor state s' of an action: its probability, its reward and its value."""

    probability: float
    cell: tuple[int, int]
    reward: float
    value: float
    ends: bool


@dataclass(frozen=True)
class ActionBackup:
    """Q(s, a) of an action, and the terms of which it is the sum."""

    action: int
    q: float
    outcomes: list[NextState]


@dataclass(frozen=True)
class TabularUpdate:
    """One update of a value in an episode: before + step·(target − before) = after."""

    t: int
    action: int
    reward: float
    cell: tuple[int, int]
    ends: bool
    ahead: float | None
    """V(s'), or Q(s', a') or the like in its place, without γ; None for Monte Carlo, whose target is the full return."""
    target: float
    before: float
    after: float


def model_backup(playback: Playback, frame: Frame, state: int) -> list[ActionBackup]:
    """Return Q(s, a) and its terms for each action, given the values of the frame. The list is empty for terminal states."""
    mdp = playback.mdp
    if mdp.is_terminal[state]:
        return []
    q = tabular.q_values(mdp, frame.value)[state]
    return [ActionBackup(a, float(q[a]), _outcomes(playback, frame, state, a)) for a in range(mdp.n_actions)]


def evaluated_probabilities(playback: Playback, state: int) -> list[float] | None:
    """Return π(a|s) of the evaluated policy; None for control and planning, which search for a policy."""
    if ALGORITHMS[playback.spec.algorithm].family != "prediction":
        return None
    policy = evaluated_policy(playback.spec, playback.mdp)
    row = policy[state] if policy.ndim == 2 else np.eye(playback.mdp.n_actions)[policy[state]]
    return [float(p) for p in row]


def _outcomes(playback: Playback, frame: Frame, state: int, action: int) -> list[NextState]:
    mdp, world = playback.mdp, playback.spec.world
    row = mdp.transitions[action * mdp.n_states + state]
    assert mdp.rewards_next is not None and not mdp.is_sparse
    paid = mdp.rewards_next[action * mdp.n_states + state]
    return [
        NextState(float(row[s]), world.cell(int(s)), float(paid[s]), float(frame.value[s]), bool(mdp.is_terminal[s]))
        for s in np.flatnonzero(row)
    ]


def updates(playback: Playback, frame: Frame, state: int) -> list[TabularUpdate]:
    """Return the updates of a cell in a learner's last episode, in order. The list is empty for planning."""
    return [update for where, update in replay(playback, frame) if where == state]


def replay(playback: Playback, frame: Frame) -> Iterator[tuple[int, TabularUpdate]]:
    """Yield (state, update) for every step of the last episode, in order, starting from the table before the episode."""
    if frame.episode is None or frame.before is None:
        return
    name, after = playback.spec.algorithm, frame.value if frame.q is None else frame.q
    if name in ("monte_carlo", "monte_carlo_evaluation"):
        yield from _returns(playback, frame.episode, frame.before, after)
    else:
        yield from _steps(playback, frame.episode, frame.before.copy())


def _steps(playback: Playback, episode: Episode, table: FloatArray) -> Iterator[tuple[int, TabularUpdate]]:
    """Yield the updates of an episode, by applying the rule of TD(0), SARSA, expected SARSA or Q-learning to `table` again."""
    alpha, gamma, world = playback.spec.options.step_size, playback.mdp.gamma, playback.spec.world
    steps = len(episode.actions)
    for t in range(steps):
        state, action, following = int(episode.states[t]), int(episode.actions[t]), int(episode.states[t + 1])
        ends = t == steps - 1 and episode.terminated
        next_action = int(episode.actions[t + 1]) if t + 1 < steps else None
        ahead = 0.0 if ends else _ahead(playback, table, following, next_action)
        reward = float(episode.rewards[t])
        target = reward + gamma * ahead
        where = state if table.ndim == 1 else (state, action)
        before = float(table[where])
        table[where] = before + alpha * (target - before)
        yield state, TabularUpdate(t, action, reward, world.cell(following), ends, ahead, target, before, float(table[where]))


def _ahead(playback: Playback, table: FloatArray, state: int, next_action: int | None) -> float:
    name, epsilon = playback.spec.algorithm, playback.spec.options.exploration
    if table.ndim == 1:
        return float(table[state])
    row = table[state]
    if name == "q_learning":
        return float(row.max())
    if name == "sarsa" and next_action is not None:
        return float(row[next_action])
    return float(epsilon * row.mean() + (1 - epsilon) * row.max())


def _returns(playback: Playback, episode: Episode, before: FloatArray, after: FloatArray) -> Iterator[tuple[int, TabularUpdate]]:
    """Yield Monte Carlo's updates: one for the first visit of each state (or state and action), with the return after it."""
    mdp, world = playback.mdp, playback.spec.world
    steps = len(episode.actions)
    total = 0.0 if episode.terminated else _tail(playback, mdp, before, int(episode.states[-1]))
    totals = np.empty(steps)
    for t in range(steps - 1, -1, -1):
        total = float(episode.rewards[t]) + mdp.gamma * total
        totals[t] = total
    seen: set[tuple[int, ...]] = set()
    for t in range(steps):
        state, action = int(episode.states[t]), int(episode.actions[t])
        where = (state,) if before.ndim == 1 else (state, action)
        if where in seen:
            continue
        seen.add(where)
        ends = t == steps - 1 and episode.terminated
        cell = world.cell(int(episode.states[t + 1]))
        reward = float(episode.rewards[t])
        yield (
            state,
            TabularUpdate(t, action, reward, cell, ends, None, float(totals[t]), float(before[where]), float(after[where])),
        )


def _tail(playback: Playback, mdp: MDP, table: FloatArray, state: int) -> float:
    """Return the value estimate that takes the place of the missing rewards of a truncated episode."""
    return float(table[state]) if table.ndim == 1 else _ahead(playback, table, state, None)
