"""Observations and rewards on a common scale, by figures that run along."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import numpy as np

from psigrad.control.networks.distributions import Array


class Normalizer:
    """Observations less their running mean over their running deviation, and rewards over that of the discounted return.

    The figures change between rollouts only, so that every step of a rollout is normalised alike.
    Source: Andrychowicz et al. 2021, arXiv:2006.05990; the `VecNormalize` of Stable-Baselines.
    """

    _CLIP = 10.0

    def __init__(self, size: int, count: int, gamma: float, observations: bool, rewards: bool) -> None:
        self.observations, self.rewards, self.gamma = observations, rewards, gamma
        self.observation_moments, self.return_moments = RunningMoments(size), RunningMoments(1)
        self.running: Array = np.zeros(count)
        """[E] the discounted return of the episodes that go on."""

    def see(self, observation: Array) -> Array:
        """Observations [..., D] as the network is shown them."""
        if not self.observations:
            return observation
        moments = self.observation_moments
        z = (observation - moments.mean.astype(np.float32)) / np.sqrt(moments.var + 1e-8).astype(np.float32)
        return np.clip(z, -self._CLIP, self._CLIP).astype(np.float32, copy=False)

    def scale(self, reward: Array) -> Array:
        """Rewards as the algorithm is shown them."""
        return (
            np.clip(reward / np.float32(np.sqrt(self.return_moments.var[0] + 1e-8)), -self._CLIP, self._CLIP)
            if self.rewards
            else reward
        )

    def learn_observations(self, observations: Array) -> None:
        """Take in the observations [M, D] of a rollout."""
        if self.observations and len(observations):
            self.observation_moments.add(observations)

    def learn_rewards(self, reward: Array, ended: Array) -> None:
        """Take in the rewards and ends [T, E] of a rollout."""
        if not self.rewards:
            return
        returns = np.empty(reward.shape)
        for t in range(len(reward)):
            self.running = self.gamma * self.running + reward[t]
            returns[t] = self.running
            self.running = np.where(ended[t], 0.0, self.running)
        self.return_moments.add(returns.reshape(-1, 1))

    def restart(self) -> None:
        """New episodes have begun everywhere."""
        self.running = np.zeros(len(self.running))

    def copy(self) -> Normalizer:
        """The same, which learns no more when this one does."""
        made = copy.copy(self)
        made.observation_moments, made.return_moments = copy.copy(self.observation_moments), copy.copy(self.return_moments)
        return made

    def state(self) -> dict[str, list[float]]:
        """What must survive a stop."""
        seen, returns = self.observation_moments, self.return_moments
        found = {"mean": seen.mean.tolist(), "var": seen.var.tolist(), "seen": [seen.count]}
        return {**found, "returns": [float(returns.mean[0]), float(returns.var[0]), returns.count]}

    def restore(self, state: Mapping[str, list[float]]) -> None:
        """The inverse of `state`."""
        self.observation_moments = RunningMoments(0, np.array(state["mean"]), np.array(state["var"]), state["seen"][0])
        mean, var, count = state["returns"]
        self.return_moments = RunningMoments(1, np.array([mean]), np.array([var]), count)


class RunningMoments:
    """Mean [D], variance [D] and count of all that was added (Chan et al. 1979)."""

    def __init__(self, size: int, mean: Array | None = None, var: Array | None = None, count: float = 1e-4) -> None:
        self.mean = np.zeros(size) if mean is None else mean
        self.var = np.ones(size) if var is None else var
        self.count = count

    def add(self, x: Array) -> None:
        """Add M vectors [M, D]."""
        n, total = len(x), self.count + len(x)
        delta = x.mean(0, dtype=np.float64) - self.mean
        spread = self.var * self.count + x.var(0, dtype=np.float64) * n + delta**2 * self.count * n / total
        self.mean, self.var, self.count = self.mean + delta * n / total, spread / total, total
