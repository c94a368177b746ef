"""Learning to act from experience: Monte Carlo control, SARSA, expected SARSA, Q-learning, Double Q-learning.

Each is a generator that plays an episode, learns from it, and yields a `Learned`. With ε-greedy behaviour and step size α:

    SARSA            Q(s,a) ← Q(s,a) + α·(r + γ·Q(s',a') − Q(s,a)), a' the action that is taken next
    expected SARSA   … r + γ·Σ_a' π(a'|s')·Q(s',a') …
    Q-learning       … r + γ·max_a' Q(s',a') …

After a terminated step nothing follows; after a truncated one Q(s', ·) still counts.
Sources: Watkins 1989; Rummery and Niranjan 1994; van Hasselt 2010; Sutton and Barto 2018, chapters 5, 6 and 7.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from psigrad.tabular.bellman import greedy
from psigrad.tabular.mdp import MDP, FloatArray, IntArray
from psigrad.tabular.sampling import DiscreteEnv, Episode, Simulator, environment, sizes, uniforms
from psigrad.tabular.schedules import Schedule, at

__all__ = ["Learned", "double_q_learning", "expected_sarsa", "monte_carlo_control", "q_learning", "sarsa"]

Row = list[float]
Table = list[Row]


@dataclass(frozen=True, eq=False)
class Learned:
    """One episode of learning."""

    index: int
    """Counts from 0."""
    episode: Episode
    epsilon: float
    """ε of this episode."""
    q: FloatArray
    """(S, A): Q after it."""

    @cached_property
    def policy(self) -> IntArray:
        """[S]: greedy in q."""
        return greedy(self.q)

    @property
    def undiscounted_return(self) -> float:
        """The sum of the episode's rewards, as Gymnasium's statistics count it."""
        return float(self.episode.rewards.sum())


class _Actor:
    """ε-greedy choices with ties broken at random, and probabilities of the same policy."""

    def __init__(self, n_actions: int, draw: Callable[[], float]) -> None:
        self.n_actions, self.draw, self.epsilon = n_actions, draw, 0.0

    def __call__(self, row: Row) -> int:
        if self.epsilon and self.draw() < self.epsilon:
            return int(self.draw() * self.n_actions)
        best = max(row)
        if row.count(best) == 1:
            return row.index(best)
        ties = [a for a, q in enumerate(row) if q == best]
        return ties[int(self.draw() * len(ties))]

    def mean(self, row: Row) -> float:
        """Σ_a π(a|s)·Q(s, a) = ε·mean + (1 − ε)·max, whatever the ties."""
        return self.epsilon * sum(row) / self.n_actions + (1 - self.epsilon) * max(row)


@dataclass(frozen=True)
class _Setting:
    """What all learners share: the environment, the discount, and Q to begin with."""

    env: DiscreteEnv
    gamma: float
    tables: Table
    actor: _Actor
    max_steps: int | None


def _setting(env: MDP | DiscreteEnv, gamma: float | None, q: ArrayLike | None, seed: int, max_steps: int | None) -> _Setting:
    n_states, n_actions = sizes(env)
    mdp = env if isinstance(env, MDP) else env.mdp if isinstance(env, Simulator) else None
    if gamma is None and mdp is None:
        raise ValueError("gamma was not given; an environment has none of its own, so give the discount, such as gamma=0.99.")
    discount = gamma if gamma is not None else mdp.gamma if mdp is not None else 1.0
    if not 0 <= discount <= 1:
        raise ValueError(f"gamma is {discount}; expected a discount in [0, 1].")
    table = np.zeros((n_states, n_actions)) if q is None else np.asarray(q, dtype=np.float64)
    if table.shape != (n_states, n_actions):
        raise ValueError(f"q has shape {table.shape}; expected ({n_states}, {n_actions}).")
    actor = _Actor(n_actions, uniforms(np.random.default_rng((seed, 2))))
    return _Setting(environment(env, max_steps), discount, table.tolist(), actor, max_steps)


class _Counter:
    """Step sizes by visits of (s, a), counted only when the schedule asks."""

    def __init__(self, alpha: Schedule, n_actions: int) -> None:
        self.alpha, self.n_actions = alpha, n_actions
        self.visits: dict[int, int] = {}
        if not callable(alpha):
            at(alpha, 0, "alpha")

    def __call__(self, state: int, action: int) -> float:
        if not callable(self.alpha):
            return self.alpha
        key = state * self.n_actions + action
        self.visits[key] = count = self.visits.get(key, 0) + 1
        return at(self.alpha, count, "alpha")


Learn = Callable[[int, int, float, int, bool], None]


def _episodes(
    setting: _Setting, episodes: int, epsilon: Schedule, seed: int, behaviour: Table, learn: Learn | None
) -> Iterator[tuple[int, Episode]]:
    """Plays ε-greedily in `behaviour`; `learn(s, a, r, s', terminated)` after each step, before the next action is chosen."""
    env, actor = setting.env, setting.actor
    for index in range(episodes):
        actor.epsilon = at(epsilon, index, "epsilon")
        observation, _ = env.reset(seed=seed if index == 0 else None)
        state = int(observation)
        states, actions, rewards = [state], [], []
        terminated = truncated = False
        while not (terminated or truncated):
            action = actor(behaviour[state])
            observation, reward, terminated, truncated, _ = env.step(action)
            following = int(observation)
            states.append(following)
            actions.append(action)
            rewards.append(float(reward))
            if learn is not None:
                learn(state, action, rewards[-1], following, bool(terminated))
            state = following
            truncated = truncated or (setting.max_steps is not None and len(actions) >= setting.max_steps)
        yield index, Episode(np.array(states), np.array(actions), np.array(rewards), bool(terminated))


def q_learning(
    env: MDP | DiscreteEnv,
    episodes: int,
    *,
    gamma: float | None = None,
    alpha: Schedule = 0.1,
    epsilon: Schedule = 0.1,
    seed: int = 0,
    q: ArrayLike | None = None,
    max_steps: int | None = None,
) -> Iterator[Learned]:
    """Off-policy: learns the value of the greedy policy while it explores.

    `epsilon` is a schedule of the episode from 0, `alpha` of the visits of (s, a) from 1; `gamma` defaults to the MDP's; `q`
    (S, A) is where learning starts; `max_steps` cuts episodes off.
    """
    setting = _setting(env, gamma, q, seed, max_steps)
    return _one_step(setting, episodes, alpha, epsilon, seed, max)


def expected_sarsa(
    env: MDP | DiscreteEnv,
    episodes: int,
    *,
    gamma: float | None = None,
    alpha: Schedule = 0.1,
    epsilon: Schedule = 0.1,
    seed: int = 0,
    q: ArrayLike | None = None,
    max_steps: int | None = None,
) -> Iterator[Learned]:
    """On-policy as SARSA, with the mean over a' in place of the sampled one: less variance. Arguments of q_learning."""
    setting = _setting(env, gamma, q, seed, max_steps)
    return _one_step(setting, episodes, alpha, epsilon, seed, setting.actor.mean)


def _one_step(
    setting: _Setting, episodes: int, alpha: Schedule, epsilon: Schedule, seed: int, ahead: Callable[[Row], float]
) -> Iterator[Learned]:
    q, gamma = setting.tables, setting.gamma
    step = _Counter(alpha, setting.actor.n_actions)

    def learn(state: int, action: int, reward: float, following: int, terminated: bool) -> None:
        target = reward if terminated else reward + gamma * ahead(q[following])
        q[state][action] += step(state, action) * (target - q[state][action])

    for index, episode in _episodes(setting, episodes, epsilon, seed, q, learn):
        yield Learned(index, episode, setting.actor.epsilon, np.array(q))


def double_q_learning(
    env: MDP | DiscreteEnv,
    episodes: int,
    *,
    gamma: float | None = None,
    alpha: Schedule = 0.1,
    epsilon: Schedule = 0.1,
    seed: int = 0,
    q: ArrayLike | None = None,
    max_steps: int | None = None,
) -> Iterator[Learned]:
    """Two tables, of which one picks the action and the other says its worth: no bias from the max over noise.

    Q_A(s,a) ← Q_A(s,a) + α·(r + γ·Q_B(s', argmax_a' Q_A(s',a')) − Q_A(s,a)), or with A and B swapped, by a coin. Behaviour is
    ε-greedy in, and `q` yields, the mean of both. Arguments of q_learning.
    """
    setting = _setting(env, gamma, q, seed, max_steps)
    first, gamma_, draw = setting.tables, setting.gamma, setting.actor.draw
    second = [row[:] for row in first]
    mean = [row[:] for row in first]
    sides = ((first, second, _Counter(alpha, setting.actor.n_actions)), (second, first, _Counter(alpha, setting.actor.n_actions)))

    def learn(state: int, action: int, reward: float, following: int, terminated: bool) -> None:
        a, b, step = sides[draw() < 0.5]
        target = reward
        if not terminated:
            target += gamma_ * b[following][a[following].index(max(a[following]))]
        a[state][action] += step(state, action) * (target - a[state][action])
        mean[state][action] = (a[state][action] + b[state][action]) / 2

    for index, episode in _episodes(setting, episodes, epsilon, seed, mean, learn):
        yield Learned(index, episode, setting.actor.epsilon, np.array(mean))


def sarsa(
    env: MDP | DiscreteEnv,
    episodes: int,
    *,
    n: int = 1,
    gamma: float | None = None,
    alpha: Schedule = 0.1,
    epsilon: Schedule = 0.1,
    seed: int = 0,
    q: ArrayLike | None = None,
    max_steps: int | None = None,
) -> Iterator[Learned]:
    """On-policy: learns the value of the policy that it plays, exploration included. n > 1 is n-step SARSA.

    Q(s_t,a_t) is moved towards r_t + … + γ^{n−1}·r_{t+n−1} + γ^n·Q(s_{t+n}, a_{t+n}), once a_{t+n} is chosen. Where an episode
    is cut off, Σ_a π(a|s')·Q(s',a) stands for the action that was not taken. Arguments of q_learning.
    """
    if n < 1:
        raise ValueError(f"n is {n}; expected at least 1 step; for whole returns use monte_carlo_control.")
    setting = _setting(env, gamma, q, seed, max_steps)
    table, discount, actor = setting.tables, setting.gamma, setting.actor
    step = _Counter(alpha, actor.n_actions)

    def learn(states: list[int], actions: list[int], rewards: list[float], t: int, ahead: float) -> None:
        target = ahead
        for reward in reversed(rewards[t : t + n]):
            target = reward + discount * target
        row, action = table[states[t]], actions[t]
        row[action] += step(states[t], action) * (target - row[action])

    for index in range(episodes):
        actor.epsilon = at(epsilon, index, "epsilon")
        observation, _ = setting.env.reset(seed=seed if index == 0 else None)
        states, rewards = [int(observation)], []
        actions = [actor(table[states[0]])]
        terminated = truncated = False
        while not (terminated or truncated):
            observation, reward, terminated, truncated, _ = setting.env.step(actions[-1])
            states.append(int(observation))
            rewards.append(float(reward))
            truncated = truncated or (max_steps is not None and len(rewards) >= max_steps)
            if not (terminated or truncated):
                actions.append(actor(table[states[-1]]))
                if len(rewards) >= n:
                    learn(states, actions, rewards, len(rewards) - n, table[states[-1]][actions[-1]])
        for t in range(max(len(rewards) - n, 0), len(rewards)):
            learn(states, actions, rewards, t, 0.0 if terminated else actor.mean(table[states[-1]]))
        episode = Episode(np.array(states), np.array(actions), np.array(rewards), bool(terminated))
        yield Learned(index, episode, actor.epsilon, np.array(table))


def monte_carlo_control(
    env: MDP | DiscreteEnv,
    episodes: int,
    *,
    gamma: float | None = None,
    alpha: Schedule | None = None,
    epsilon: Schedule = 0.1,
    seed: int = 0,
    q: ArrayLike | None = None,
    max_steps: int | None = None,
) -> Iterator[Learned]:
    """On-policy first-visit Monte Carlo: Q(s,a) moves towards the return after the first (s, a) of an episode.

    alpha = None is the mean of all returns. An episode that was cut off counts with Σ_a π(a|s_T)·Q(s_T,a) for the rest.
    """
    setting = _setting(env, gamma, q, seed, max_steps)
    table, actor = setting.tables, setting.actor
    step = _Counter((lambda n: 1.0 / n) if alpha is None else alpha, actor.n_actions)
    for index, episode in _episodes(setting, episodes, epsilon, seed, table, None):
        states, actions = episode.states.tolist(), episode.actions.tolist()
        total = 0.0 if episode.terminated else actor.mean(table[states[-1]])
        targets: dict[tuple[int, int], float] = {}
        for t in range(len(actions) - 1, -1, -1):
            total = float(episode.rewards[t]) + setting.gamma * total
            targets[states[t], actions[t]] = total  # the earliest visit overwrites the later ones
        for (state, action), target in targets.items():
            table[state][action] += step(state, action) * (target - table[state][action])
        yield Learned(index, episode, actor.epsilon, np.array(table))
