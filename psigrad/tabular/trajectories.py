"""Many episodes in parallel: sampled step by step for all at once, or enumerated with their probabilities.

`simulation.rollouts` plays one episode after the other in any environment with reset and step. Here the MDP is known, so one
search in a table takes a step of all episodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from psigrad.tabular.bellman import check_policy
from psigrad.tabular.mdp import MDP, BoolArray, FloatArray, IntArray
from psigrad.tabular.simulation import Episode, outcomes


@dataclass(frozen=True, eq=False)
class Paths:
    """N episodes, padded to T steps. After the end of an episode, its last state is repeated, and actions and rewards are 0."""

    states: IntArray
    """[N, T + 1]"""
    actions: IntArray
    """[N, T]"""
    rewards: FloatArray
    """[N, T]"""
    lengths: IntArray
    """[N] the number of steps of each episode."""
    terminated: BoolArray
    """[N] False for episodes that were cut off."""

    @property
    def mask(self) -> BoolArray:
        """[N, T]: True on the steps that were taken."""
        return np.asarray(np.arange(self.actions.shape[1]) < self.lengths[:, None])

    def select(self, rows: IntArray) -> Paths:
        """Return the episodes with these indices, in this order, padded to the longest of them."""
        steps = int(self.lengths[rows].max()) if len(rows) else 0
        return Paths(
            self.states[rows, : steps + 1],
            self.actions[rows, :steps],
            self.rewards[rows, :steps],
            self.lengths[rows],
            self.terminated[rows],
        )

    def cut(self, steps: int) -> Paths:
        """Return the episodes cut off after this number of steps. Those that were longer are then not terminated."""
        if steps < 1:
            raise ValueError(f"steps is {steps}; expected at least 1.")
        return Paths(
            self.states[:, : steps + 1],
            self.actions[:, :steps],
            self.rewards[:, :steps],
            np.minimum(self.lengths, steps),
            self.terminated & (self.lengths <= steps),
        )

    def episode(self, row: int) -> Episode:
        """Return the episode in this row, without padding."""
        n = int(self.lengths[row])
        return Episode(self.states[row, : n + 1], self.actions[row, :n], self.rewards[row, :n], bool(self.terminated[row]))


@dataclass(frozen=True, eq=False)
class _Outcomes:
    """The outcomes (action, next state) of a policy's steps. Those of state s are entries first[s] … first[s] + count[s] − 1."""

    first: IntArray
    count: IntArray
    action: IntArray
    target: IntArray
    reward: FloatArray
    ends: BoolArray
    probability: FloatArray
    cumulative: FloatArray
    """s + the sum of the state's probabilities up to the entry. It is sorted over all states: one search serves all episodes."""


def _outcomes(mdp: MDP, policy: ArrayLike) -> _Outcomes:
    table = check_policy(mdp.n_states, mdp.n_actions, policy)
    if table.ndim == 1:
        table = np.eye(mdp.n_actions)[table]
    columns: list[tuple[int, int, float, bool, float]] = []
    cumulative: list[float] = []
    count = np.zeros(mdp.n_states, dtype=np.int64)
    for state in np.flatnonzero(~mdp.is_terminal).tolist():
        here = len(columns)
        for action in np.flatnonzero(table[state]).tolist():
            for target, reward, p in zip(*outcomes(mdp, state, action), strict=True):
                over = target < 0 or bool(mdp.is_terminal[target])
                columns.append((action, state if target < 0 else target, reward, over, p * float(table[state, action])))
        sums = np.cumsum([row[4] for row in columns[here:]])
        cumulative += (state + sums / sums[-1]).tolist()
        count[state] = len(columns) - here
    return _Outcomes(
        first=np.cumsum(count) - count,
        count=count,
        action=np.array([row[0] for row in columns], dtype=np.int64),
        target=np.array([row[1] for row in columns], dtype=np.int64),
        reward=np.array([row[2] for row in columns], dtype=np.float64),
        ends=np.array([row[3] for row in columns], dtype=np.bool_),
        probability=np.array([row[4] for row in columns], dtype=np.float64),
        cumulative=np.array(cumulative),
    )


def sample_paths(mdp: MDP, policy: ArrayLike, episodes: int, *, seed: int, max_steps: int | None = None) -> Paths:
    """Sample episodes of a fixed policy, [S] actions or (S, A) probabilities, all at once. `max_steps` cuts them off.

    Raises ValueError if an episode would start in a terminal state, or if `episodes` or `max_steps` is below 1.
    """
    if episodes < 1 or (max_steps is not None and max_steps < 1):
        raise ValueError(f"episodes is {episodes} and max_steps {max_steps}; expected at least 1 of each, or max_steps=None.")
    found, rng = _outcomes(mdp, policy), np.random.default_rng(seed)
    starts = _starts(mdp)
    state = starts[np.searchsorted(np.cumsum(mdp.start_distribution[starts])[:-1], rng.random(episodes), side="right")]
    states: list[IntArray] = [state]
    actions: list[IntArray] = []
    rewards: list[FloatArray] = []
    lengths, terminated = np.zeros(episodes, dtype=np.int64), np.zeros(episodes, bool)
    live = np.arange(episodes)
    while live.size and (max_steps is None or len(actions) < max_steps):
        now = states[-1][live]
        entry = np.searchsorted(found.cumulative, now + rng.random(live.size), side="right")
        entry = np.minimum(entry, found.first[now] + found.count[now] - 1)
        states.append(states[-1].copy())
        actions.append(np.zeros(episodes, dtype=np.int64))
        rewards.append(np.zeros(episodes))
        states[-1][live], actions[-1][live], rewards[-1][live] = found.target[entry], found.action[entry], found.reward[entry]
        lengths[live] += 1
        terminated[live] = found.ends[entry]
        live = live[~found.ends[entry]]
    return Paths(np.stack(states, 1), np.stack(actions, 1), np.stack(rewards, 1), lengths, terminated)


def all_paths(mdp: MDP, policy: ArrayLike, *, max_steps: int | None = None, most: int = 1_000_000) -> tuple[Paths, FloatArray]:
    """Return every possible episode of a policy and its probability [N]; the probabilities sum to 1.

    `max_steps` cuts episodes off. Raises ValueError if there are more than `most`.
    """
    found, starts = _outcomes(mdp, policy), _starts(mdp)
    states, probability = starts[:, None], mdp.start_distribution[starts]
    actions, rewards = np.zeros((starts.size, 0), dtype=np.int64), np.zeros((starts.size, 0))
    done: list[tuple[IntArray, IntArray, FloatArray, FloatArray, bool]] = []
    n_done = 0
    while states.size and (max_steps is None or actions.shape[1] < max_steps):
        now = states[:, -1]
        total = int(found.count[now].sum())
        if total + n_done > most:
            raise ValueError(f"There are more than {most:,} episodes; give max_steps or a smaller MDP, or raise `most`.")
        parent = np.repeat(np.arange(now.size), found.count[now])
        within = np.arange(total) - np.repeat(np.cumsum(found.count[now]) - found.count[now], found.count[now])
        entry = found.first[now[parent]] + within
        states = np.concatenate([states[parent], found.target[entry, None]], axis=1)
        actions = np.concatenate([actions[parent], found.action[entry, None]], axis=1)
        rewards = np.concatenate([rewards[parent], found.reward[entry, None]], axis=1)
        probability, over = probability[parent] * found.probability[entry], found.ends[entry]
        done.append((states[over], actions[over], rewards[over], probability[over], True))
        n_done += int(over.sum())
        states, actions, rewards, probability = states[~over], actions[~over], rewards[~over], probability[~over]
    return _gather([*done, (states, actions, rewards, probability, False)])


def _starts(mdp: MDP) -> IntArray:
    starts = np.flatnonzero(mdp.start_distribution)
    over = starts[mdp.is_terminal[starts]]
    if over.size:
        raise ValueError(f"An episode would start in state {over[0]}, which is terminal; give the MDP another `start`.")
    return starts


def _gather(parts: list[tuple[IntArray, IntArray, FloatArray, FloatArray, bool]]) -> tuple[Paths, FloatArray]:
    """Return (the paths of all `parts`, padded to the longest, their probabilities). All paths of a part have one length."""
    parts = [part for part in parts if part[3].size]
    longest = max(part[1].shape[1] for part in parts)
    lengths = np.concatenate([np.full(part[3].size, part[1].shape[1]) for part in parts])
    states, actions, rewards = (
        np.concatenate([np.pad(part[i], ((0, 0), (0, longest - part[1].shape[1])), mode=mode) for part in parts])  # type: ignore[call-overload]
        for i, mode in enumerate(("edge", "constant", "constant"))
    )
    terminated = np.concatenate([np.full(part[3].size, part[4]) for part in parts])
    return Paths(states, actions, rewards, lengths, terminated), np.concatenate([part[3] for part in parts])
