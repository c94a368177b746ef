"""Control learned from experience: Monte Carlo control, SARSA, expected SARSA, Q-learning, Double Q-learning.

Each learner is a generator. It plays an episode, learns from it, and yields a `Learned`. Behaviour is ε-greedy, α is the step
size:

    SARSA            Q(s,a) ← Q(s,a) + α·(r + γ·Q(s',a') − Q(s,a)), a' the next action taken
    expected SARSA   … r + γ·Σ_a' π(a'|s')·Q(s',a') …
    Q-learning       … r + γ·max_a' Q(s',a') …

After a terminated step, the value of s' is 0. After a truncated one, it is Q(s', ·) as usual.
Sources: Watkins 1989; Rummery and Niranjan 1994; van Hasselt 2010; Sutton and Barto 2018, chapters 5, 6 and 7.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TypedDict, Unpack

import numpy as np
from numpy.typing import ArrayLike

from psigrad.tabular import simulation
from psigrad.tabular.bellman import greedy
from psigrad.tabular.mdp import MDP, FloatArray, IntArray, discounted
from psigrad.tabular.simulation import Bootstrap, DiscreteEnv, Episode, Learn, Schedule, Simulator, uniforms

Row = list[float]
Table = list[Row]


class LearnerOptions(TypedDict, total=False):
    """The keyword arguments of every learner besides `alpha`."""

    gamma: float | None
    """The discount; by default the MDP's."""
    epsilon: Schedule
    """The probability of a uniformly random action, as a schedule over episodes, counted from 0; by default 0.1."""
    seed: int
    """The seed of the environment and of the choices; by default 0."""
    q: ArrayLike | None
    """(S, A): the initial Q; by default 0."""
    max_steps: int | None
    """The number of steps after which an episode is cut off; by default there is no limit."""


@dataclass(frozen=True, eq=False)
class Learned:
    """The result of one episode of learning."""

    index: int
    """The number of the episode, from 0."""
    episode: Episode
    epsilon: float
    """ε of this episode."""
    q: FloatArray
    """(S, A): Q after the episode."""

    @cached_property
    def policy(self) -> IntArray:
        """[S]: the greedy policy of `q`."""
        return greedy(self.q)

    @property
    def undiscounted_return(self) -> float:
        """The sum of the episode's rewards, as in Gymnasium's statistics."""
        return float(self.episode.rewards.sum())


class _Actor:
    """An ε-greedy policy, which breaks ties at random: it chooses actions, and computes expected values."""

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
        """Return Σ_a π(a|s)·Q(s, a) = ε·mean + (1 − ε)·max of a row Q(s, ·). Ties do not matter."""
        return self.epsilon * sum(row) / self.n_actions + (1 - self.epsilon) * max(row)


class _Experience:
    """The part that all learners share: it plays ε-greedy episodes, and has the initial Q, the discount and the step sizes."""

    def __init__(
        self,
        env: MDP | DiscreteEnv,
        episodes: int,
        alpha: Schedule,
        *,
        gamma: float | None = None,
        epsilon: Schedule = 0.1,
        seed: int = 0,
        q: ArrayLike | None = None,
        max_steps: int | None = None,
    ) -> None:
        shape = simulation.sizes(env)
        mdp = env if isinstance(env, MDP) else env.mdp if isinstance(env, Simulator) else None
        if gamma is None and mdp is None:
            raise ValueError("gamma was not given; an environment has none of its own, so give the discount, such as gamma=0.99.")
        self.gamma = gamma if gamma is not None else mdp.gamma if mdp is not None else 1.0
        if not 0 <= self.gamma <= 1:
            raise ValueError(f"gamma is {self.gamma}; expected a discount in [0, 1].")
        table = np.zeros(shape) if q is None else np.asarray(q, dtype=np.float64)
        if table.shape != shape:
            raise ValueError(f"q has shape {table.shape}; expected {shape}.")
        self.q: Table = table.tolist()
        self.env, self.episodes, self.epsilon = simulation.environment(env, max_steps), episodes, epsilon
        self.seed, self.max_steps, self.alpha = seed, max_steps, alpha
        self.actor = _Actor(shape[1], uniforms(np.random.default_rng((seed, 2))))

    def step_size(self) -> Callable[[int, int], float]:
        """Return a function of (s, a) that returns its step size α. It counts visits only if the schedule needs them."""
        alpha, visits = self.alpha, dict[tuple[int, int], int]()
        if not callable(alpha):
            constant = simulation.at(alpha, 0, "alpha")
            return lambda state, action: constant

        def count_visit(state: int, action: int) -> float:
            visits[state, action] = count = visits.get((state, action), 0) + 1
            return simulation.at(alpha, count, "alpha")

        return count_visit

    def play(
        self, behaviour: Table, learn: Learn | None = None, bootstrap: Bootstrap | None = None
    ) -> Iterator[tuple[int, Episode]]:
        """Yield (index, episode) for each episode, played ε-greedily with the table `behaviour`."""
        actor, limit = self.actor, self.max_steps
        choose = lambda state: actor(behaviour[state])  # noqa: E731
        for index in range(self.episodes):
            actor.epsilon = simulation.at(self.epsilon, index, "epsilon")
            seed = self.seed if index == 0 else None
            yield index, simulation.play(self.env, choose, seed=seed, max_steps=limit, learn=learn, bootstrap=bootstrap)

    def learned(self, behaviour: Table, learn: Learn) -> Iterator[Learned]:
        """Play episodes, call `learn` after each step, and yield a `Learned` with `behaviour` as Q after each episode."""
        for index, episode in self.play(behaviour, learn):
            yield Learned(index, episode, self.actor.epsilon, np.array(behaviour))


def q_learning(
    env: MDP | DiscreteEnv, episodes: int, *, alpha: Schedule = 0.1, **options: Unpack[LearnerOptions]
) -> Iterator[Learned]:
    """Learn by Q-learning: the values of the greedy policy, while an ε-greedy one acts (off-policy).

    `alpha` is a schedule over the visits of (s, a), counted from 1. `options` are `gamma`, `epsilon`, `seed`, `q` and
    `max_steps`; see `LearnerOptions`.
    """
    return _one_step(_Experience(env, episodes, alpha, **options), max)


def expected_sarsa(
    env: MDP | DiscreteEnv, episodes: int, *, alpha: Schedule = 0.1, **options: Unpack[LearnerOptions]
) -> Iterator[Learned]:
    """Learn by expected SARSA: on-policy, with the expectation over a' instead of SARSA's sample, so with less variance.

    The arguments are those of `q_learning`.
    """
    experience = _Experience(env, episodes, alpha, **options)
    return _one_step(experience, experience.actor.mean)


def _one_step(experience: _Experience, ahead: Callable[[Row], float]) -> Iterator[Learned]:
    """Learn after each step with the target r + γ·ahead(Q(s', ·))."""
    q, gamma, step = experience.q, experience.gamma, experience.step_size()

    def learn(state: int, action: int, reward: float, following: int, terminated: bool) -> None:
        target = reward if terminated else reward + gamma * ahead(q[following])
        q[state][action] += step(state, action) * (target - q[state][action])

    return experience.learned(q, learn)


def double_q_learning(
    env: MDP | DiscreteEnv, episodes: int, *, alpha: Schedule = 0.1, **options: Unpack[LearnerOptions]
) -> Iterator[Learned]:
    """Learn by Double Q-learning: one table picks the best action, and another gives its value.

    So the maximum over noisy values has no upward bias. The update is
    Q_A(s,a) ← Q_A(s,a) + α·(r + γ·Q_B(s', argmax_a' Q_A(s',a')) − Q_A(s,a)), with A and B swapped at random. Behaviour is
    ε-greedy in the mean of both tables, which is also the yielded `q`. The arguments are those of `q_learning`.
    """
    experience = _Experience(env, episodes, alpha, **options)
    first, gamma, draw = experience.q, experience.gamma, experience.actor.draw
    second, mean = [row[:] for row in first], [row[:] for row in first]
    sides = ((first, second, experience.step_size()), (second, first, experience.step_size()))

    def learn(state: int, action: int, reward: float, following: int, terminated: bool) -> None:
        a, b, step = sides[draw() < 0.5]
        target = reward
        if not terminated:
            target += gamma * b[following][a[following].index(max(a[following]))]
        a[state][action] += step(state, action) * (target - a[state][action])
        mean[state][action] = (a[state][action] + b[state][action]) / 2

    return experience.learned(mean, learn)


def sarsa(
    env: MDP | DiscreteEnv, episodes: int, *, n: int = 1, alpha: Schedule = 0.1, **options: Unpack[LearnerOptions]
) -> Iterator[Learned]:
    """Learn by SARSA: the values of the policy that acts, exploration included (on-policy). n > 1 is n-step SARSA.

    When a_{t+n} is chosen, Q(s_t,a_t) is moved towards r_t + … + γ^{n−1}·r_{t+n−1} + γ^n·Q(s_{t+n}, a_{t+n}). If an episode is
    cut off before, Σ_a π(a|s')·Q(s',a) takes the place of the last Q. The other arguments are those of `q_learning`.
    """
    if n < 1:
        raise ValueError(f"n is {n}; expected at least 1 step; for whole returns use monte_carlo_control.")
    experience = _Experience(env, episodes, alpha, **options)
    q, gamma, actor, step = experience.q, experience.gamma, experience.actor, experience.step_size()

    def learn(states: list[int], actions: list[int], rewards: list[float], t: int, ahead: float) -> None:
        target = discounted(rewards[t : t + n], gamma, ahead)
        row, action = q[states[t]], actions[t]
        row[action] += step(states[t], action) * (target - row[action])

    def bootstrap(states: list[int], actions: list[int], rewards: list[float]) -> None:
        if len(rewards) >= n:
            learn(states, actions, rewards, len(rewards) - n, q[states[-1]][actions[-1]])

    for index, episode in experience.play(q, bootstrap=bootstrap):
        states, actions, rewards = episode.states.tolist(), episode.actions.tolist(), episode.rewards.tolist()
        for t in range(max(len(rewards) - n, 0), len(rewards)):
            learn(states, actions, rewards, t, 0.0 if episode.terminated else actor.mean(q[states[-1]]))
        yield Learned(index, episode, actor.epsilon, np.array(q))


def monte_carlo_control(
    env: MDP | DiscreteEnv, episodes: int, *, alpha: Schedule | None = None, **options: Unpack[LearnerOptions]
) -> Iterator[Learned]:
    """Learn by on-policy first-visit Monte Carlo: Q(s,a) moves towards the return after the first (s, a) of an episode.

    alpha = None takes the mean of all returns. For an episode that was cut off, the estimate Σ_a π(a|s_T)·Q(s_T,a) replaces the
    rewards that were not seen.
    """
    experience = _Experience(env, episodes, (lambda n: 1.0 / n) if alpha is None else alpha, **options)
    q, actor, step = experience.q, experience.actor, experience.step_size()
    for index, episode in experience.play(q):
        states, actions = episode.states.tolist(), episode.actions.tolist()
        total = 0.0 if episode.terminated else actor.mean(q[states[-1]])
        targets: dict[tuple[int, int], float] = {}
        for t in range(len(actions) - 1, -1, -1):
            total = float(episode.rewards[t]) + experience.gamma * total
            targets[states[t], actions[t]] = total  # the earliest visit overwrites the later ones
        for (state, action), target in targets.items():
            q[state][action] += step(state, action) * (target - q[state][action])
        yield Learned(index, episode, actor.epsilon, np.array(q))
