"""Learners of V_π from episodes: Monte Carlo, temporal differences, and methods in between.

The learners are generators. They read episodes one by one and yield the estimate V [S] after each, as a new array. The targets of
a step t in an episode that stops at T are:

    Monte Carlo   G_t = r_t + γ·r_{t+1} + … + γ^{T−1−t}·r_{T−1}
    n-step TD     G_t^(n) = r_t + … + γ^{n−1}·r_{t+n−1} + γ^n·V(s_{t+n})
    TD(λ)         G_t^λ = (1 − λ)·Σ_n λ^{n−1}·G_t^(n) + λ^{T−t−1}·G_t

For an episode that was cut off (truncated), γ^{T−t}·V(s_T) replaces the rewards that were not seen. After termination, it is 0.
Source: Sutton and Barto 2018, Reinforcement Learning, chapters 5, 6, 7 and 12.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from psigrad.tabular.mdp import FloatArray, discounted
from psigrad.tabular.simulation import Episode, Schedule, at


def n_step_returns(episode: Episode, value: FloatArray, gamma: float, n: int | None = None) -> FloatArray:
    """Return [T]: the n-step returns G_t^(n) of an episode, given V [S]. n = None sums all remaining rewards (Monte Carlo)."""
    rewards, ahead = episode.rewards.tolist(), value[episode.states].tolist()
    if episode.terminated:
        ahead[-1] = 0.0
    steps = len(rewards)
    reach = steps if n is None else n
    stops = [min(t + reach, steps) for t in range(steps)]
    return np.array([discounted(rewards[t:stop], gamma, ahead[stop]) for t, stop in enumerate(stops)])


def lambda_returns(episode: Episode, value: FloatArray, gamma: float, lam: float) -> FloatArray:
    """Return [T]: the λ-returns, the forward view of TD(λ), by G_t^λ = r_t + γ·((1 − λ)·V(s_{t+1}) + λ·G_{t+1}^λ)."""
    _check_lambda(lam)
    target = 0.0 if episode.terminated else float(value[episode.states[-1]])
    following = value[episode.states[1:]].tolist()
    following[-1] = target
    out = np.empty(episode.rewards.size)
    for t in range(out.size - 1, -1, -1):
        target = episode.rewards[t] + gamma * ((1 - lam) * following[t] + lam * target)
        out[t] = target
    return out


def monte_carlo(
    episodes: Iterable[Episode],
    n_states: int,
    gamma: float,
    *,
    visit: Literal["first", "every"] = "first",
    alpha: Schedule | None = None,
    value: ArrayLike | None = None,
) -> Iterator[FloatArray]:
    """Learn by V(s) ← V(s) + α·(G_t − V(s)) at the first or at every visit of a state. α = None takes the mean of all returns.

    First-visit returns are unbiased. Every-visit returns are more numerous, but correlated and, with few episodes, biased.
    """
    if visit not in ("first", "every"):
        raise ValueError(f"visit is {visit!r}; expected 'first' or 'every'.")
    current, visits = _initial(n_states, value), [0] * n_states
    for episode in episodes:
        returns = _returns(episode, current, gamma)
        states = episode.states[:-1].tolist()
        seen: set[int] = set()
        for state, target in zip(states, returns, strict=True):
            if visit == "first" and state in seen:
                continue
            seen.add(state)
            visits[state] += 1
            step = 1.0 / visits[state] if alpha is None else at(alpha, visits[state], "alpha")
            current[state] += step * (target - current[state])
        yield np.array(current)


def _returns(episode: Episode, current: list[float], gamma: float) -> list[float]:
    """Return [T]: the Monte Carlo returns G_t of an episode, given V as a list."""
    total = 0.0 if episode.terminated else current[int(episode.states[-1])]
    out = []
    for reward in episode.rewards[::-1].tolist():
        total = reward + gamma * total
        out.append(total)
    return out[::-1]


def td(
    episodes: Iterable[Episode], n_states: int, gamma: float, *, n: int = 1, alpha: Schedule = 0.1, value: ArrayLike | None = None
) -> Iterator[FloatArray]:
    """Learn by n-step TD: V(s_t) ← V(s_t) + α·(G_t^(n) − V(s_t)), as soon as the n-th next step is taken. n = 1 is TD(0)."""
    if n < 1:
        raise ValueError(f"n is {n}; expected at least 1 step; for whole returns use monte_carlo.")
    current, visits = _initial(n_states, value), [0] * n_states
    for episode in episodes:
        states, rewards = episode.states.tolist(), episode.rewards.tolist()
        steps = len(rewards)
        for t in range(steps):
            stop = min(t + n, steps)
            ahead = 0.0 if stop == steps and episode.terminated else current[states[stop]]
            target = discounted(rewards[t:stop], gamma, ahead)
            state = states[t]
            visits[state] += 1
            current[state] += at(alpha, visits[state], "alpha") * (target - current[state])
        yield np.array(current)


def td_lambda(
    episodes: Iterable[Episode],
    n_states: int,
    gamma: float,
    *,
    lam: float = 0.9,
    alpha: Schedule = 0.1,
    trace: Literal["accumulating", "replacing"] = "accumulating",
    online: bool = True,
    value: ArrayLike | None = None,
) -> Iterator[FloatArray]:
    """Learn by the backward view of TD(λ), with eligibility traces e.

    Formula: δ_t = r_t + γ·V(s_{t+1}) − V(s_t), e ← γλ·e, e(s_t) ← e(s_t) + 1 (or ← 1), V ← V + α·δ_t·e

    online=False adds all changes of an episode at its end. With accumulating traces and a fixed α their sum is then exactly that
    of the forward view, α·Σ_t (G_t^λ − V(s_t)).
    """
    _check_lambda(lam)
    if trace not in ("accumulating", "replacing"):
        raise ValueError(f"trace is {trace!r}; expected 'accumulating' or 'replacing'.")
    initial = _initial(n_states, value)
    current, visits = np.array(initial), [0] * n_states
    for episode in episodes:
        change, eligibility = np.zeros(n_states), np.zeros(n_states)
        target_of = current.copy() if not online else current
        steps = episode.rewards.size
        for t, (state, following) in enumerate(zip(episode.states[:-1].tolist(), episode.states[1:].tolist(), strict=True)):
            ahead = 0.0 if t == steps - 1 and episode.terminated else target_of[following]
            error = episode.rewards[t] + gamma * ahead - target_of[state]
            eligibility *= gamma * lam
            eligibility[state] = 1.0 if trace == "replacing" else eligibility[state] + 1.0
            visits[state] += 1
            step = at(alpha, visits[state], "alpha") * error * eligibility
            if online:
                current += step
            else:
                change += step
        current += change
        yield current.copy()


def batch_monte_carlo(episodes: Iterable[Episode], n_states: int, gamma: float) -> FloatArray:
    """Return [S]: the fixpoint of Monte Carlo on a batch, which is the mean return after every visit of a state.

    It has the least squared error on the batch's returns. States that were not visited have 0. For episodes that were cut off,
    only the seen rewards count.
    """
    sums, visits = np.zeros(n_states), np.zeros(n_states)
    nothing = [0.0] * n_states
    for episode in episodes:
        np.add.at(sums, episode.states[:-1], _returns(episode, nothing, gamma))
        np.add.at(visits, episode.states[:-1], 1.0)
    return np.asarray(sums / np.maximum(visits, 1.0))


def batch_td(episodes: Iterable[Episode], n_states: int, gamma: float) -> FloatArray:
    """Return [S]: the fixpoint of TD(0) on a batch, the exact value of the chain estimated by the counts (certainty equivalence).

    It solves (I − γ·P̂)·V = R̂ over the visited states. A state that occurs only as the last one of a cut-off episode has 0.
    """
    counts, paid, visits = np.zeros((n_states, n_states)), np.zeros(n_states), np.zeros(n_states)
    for episode in episodes:
        steps = episode.rewards.size
        onward = steps - 1 if episode.terminated else steps
        np.add.at(counts, (episode.states[:onward], episode.states[1 : onward + 1]), 1.0)
        np.add.at(paid, episode.states[:-1], episode.rewards)
        np.add.at(visits, episode.states[:-1], 1.0)
    seen = np.flatnonzero(visits)
    value = np.zeros(n_states)
    model = counts[np.ix_(seen, seen)] / visits[seen, None]
    matrix = np.eye(seen.size) - gamma * model
    if seen.size and np.linalg.matrix_rank(matrix) < seen.size:
        raise ValueError("From some states of the batch no episode ends, and gamma is 1; add episodes that end, or lower gamma.")
    value[seen] = np.linalg.solve(matrix, paid[seen] / visits[seen])
    return value


def _initial(n_states: int, value: ArrayLike | None) -> list[float]:
    if value is None:
        return [0.0] * n_states
    given = np.asarray(value, dtype=np.float64)
    if given.shape != (n_states,):
        raise ValueError(f"value has shape {given.shape}; expected {n_states} numbers, one for each state.")
    return list(given.tolist())


def _check_lambda(lam: float) -> None:
    if not 0 <= lam <= 1:
        raise ValueError(f"lam is {lam}; expected λ in [0, 1]: 0 is TD(0), 1 is Monte Carlo.")
