"""The collection of rollouts: a policy's steps in several environments, as trajectories."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from psigrad.control.environments.vector import MOST_STEPS, Environments, VectorStep
from psigrad.control.networks.distributions import Array, Normal
from psigrad.errors import UserError


class Normalizer:
    """The normalisation of observations and rewards by running statistics.

    Observations get mean 0 and standard deviation 1. Rewards are divided by the standard deviation of the discounted return. The
    statistics change only between rollouts, so that every step of a rollout is normalised alike.
    Source: Andrychowicz et al. 2021, arXiv:2006.05990; the `VecNormalize` of Stable-Baselines.
    """

    _CLIP = 10.0

    def __init__(self, size: int, count: int, gamma: float, observations: bool, rewards: bool) -> None:
        self.observations, self.rewards, self.gamma = observations, rewards, gamma
        self.observation_moments, self.return_moments = RunningMoments(size), RunningMoments(1)
        self.running: Array = np.zeros(count)
        """[E] the discounted return of the current episodes."""

    def see(self, observation: Array) -> Array:
        """Return observations [..., D] normalised for the network, or unchanged if this is off."""
        if not self.observations:
            return observation
        moments = self.observation_moments
        z = (observation - moments.mean.astype(np.float32)) / np.sqrt(moments.var + 1e-8).astype(np.float32)
        return np.clip(z, -self._CLIP, self._CLIP).astype(np.float32, copy=False)

    def scale(self, reward: Array) -> Array:
        """Return rewards normalised for the algorithm, or unchanged if this is off."""
        return (
            np.clip(reward / np.float32(np.sqrt(self.return_moments.var[0] + 1e-8)), -self._CLIP, self._CLIP)
            if self.rewards
            else reward
        )

    def learn_observations(self, observations: Array) -> None:
        """Add the observations [M, D] of a rollout to the statistics."""
        if self.observations and len(observations):
            self.observation_moments.add(observations)

    def learn_rewards(self, reward: Array, ended: Array) -> None:
        """Add the rewards and ends [T, E] of a rollout to the statistics."""
        if not self.rewards:
            return
        returns = np.empty(reward.shape)
        for t in range(len(reward)):
            self.running = self.gamma * self.running + reward[t]
            returns[t] = self.running
            self.running = np.where(ended[t], 0.0, self.running)
        self.return_moments.add(returns.reshape(-1, 1))

    def restart(self) -> None:
        """Set the running discounted returns to 0, when new episodes have started in all environments."""
        self.running = np.zeros(len(self.running))

    def copy(self) -> Normalizer:
        """Return a copy whose statistics do not change with those of this one."""
        made = copy.copy(self)
        made.observation_moments, made.return_moments = copy.copy(self.observation_moments), copy.copy(self.return_moments)
        return made

    def state(self) -> dict[str, list[float]]:
        """Return the statistics that a checkpoint stores."""
        seen, returns = self.observation_moments, self.return_moments
        found = {"mean": seen.mean.tolist(), "var": seen.var.tolist(), "seen": [seen.count]}
        return {**found, "returns": [float(returns.mean[0]), float(returns.var[0]), returns.count]}

    def restore(self, state: Mapping[str, list[float]]) -> None:
        """Restore the statistics from the result of `state`."""
        self.observation_moments = RunningMoments(0, np.array(state["mean"]), np.array(state["var"]), state["seen"][0])
        mean, var, count = state["returns"]
        self.return_moments = RunningMoments(1, np.array([mean]), np.array([var]), count)


class RunningMoments:
    """The mean [D], variance [D] and count of all added vectors (Chan et al. 1979)."""

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


_GIVE_A_LIMIT = (
    "Give the environment a time limit: gymnasium.wrappers.TimeLimit, or for an id env_kwargs={max_episode_steps: 1000}."
)
# The most steps of an episode when a rollout needs complete episodes and the environment declares no limit.
_NO_END = 100_000
# The number of last episodes over which metrics are averaged, as in Stable-Baselines3's stats_window_size.
WINDOW = 100


@dataclass(frozen=True, eq=False)
class Rollout:
    """The steps of several environments as N rows (trajectories).

    A row has consecutive steps of one episode, without steps whose action the environment ignored. Flat arrays have the M steps
    of all rows, row after row.
    """

    observation: Array
    """[M, D]"""
    action: Array
    """[M] or [M, A]"""
    reward: Array
    """[M]"""
    row: Array
    """[M] the row of each step."""
    column: Array
    """[M] the position of each step in its row, from 0."""
    terminated: Array
    """[N] bool: the row's episode ended in a terminal state."""
    truncated: Array
    """[N] bool: the row's episode was cut by its limit."""
    after: Array
    """[N, D] the observation after each row's last step. If the row is terminated, its value is taken as 0."""

    @property
    def lengths(self) -> Array:
        """[N] the number of steps of each row."""
        return np.bincount(self.row, minlength=len(self.terminated))


class EpisodeStatistics:
    """The returns (of rewards that are not normalised) and lengths of the last `window` episodes of E environments."""

    def __init__(self, count: int, window: int | None = WINDOW) -> None:
        self.returns: deque[float] = deque(maxlen=window)
        self.lengths: deque[int] = deque(maxlen=window)
        self.episodes = 0
        self._return, self._length = np.zeros(count), np.zeros(count, np.int64)

    def restart(self) -> None:
        """Set the returns and lengths of the current episodes to 0, when new ones start in all environments."""
        self._return[:], self._length[:] = 0, 0

    def add(self, step: VectorStep, counted: Array) -> Array:
        """Add a step in the environments where `counted` [E] is True. Return [E]: True where an episode ended with it."""
        self._return += step.reward * counted
        self._length += counted
        ended: Array = (step.terminated | step.truncated) & counted
        if ended.any():
            self._note(ended)
        return ended

    def leave(self, limit: int) -> Array:
        """Count the unfinished episodes with at least `limit` steps as ended. Return [E]: True for them."""
        lost: Array = self._length >= limit
        if lost.any():
            self._note(lost)
        return lost

    def _note(self, ended: Array) -> None:
        self.returns.extend(self._return[ended].tolist())
        self.lengths.extend(self._length[ended].tolist())
        self.episodes += int(ended.sum())
        self._return[ended], self._length[ended] = 0, 0

    @property
    def longest(self) -> int:
        """The number of steps of the longest current episode."""
        return int(self._length.max())

    def summary(self) -> dict[str, float]:
        """Return the mean return and length, under Stable-Baselines3's names; {} if no episode has ended."""
        if not self.returns:
            return {}
        return {
            "rollout/ep_rew_mean": float(np.mean(self.returns)),
            "rollout/ep_len_mean": float(np.mean(self.lengths)),
            "rollout/episodes": self.episodes,
        }

    def numbers(self) -> dict[str, list[float]]:
        """Return the statistics of ended episodes, for a checkpoint."""
        return {"returns": list(self.returns), "lengths": list(self.lengths), "episodes": [self.episodes]}

    def begun(self) -> dict[str, Any]:
        """Return the current return and length of each environment's unfinished episode."""
        return {"return": self._return.tolist(), "length": self._length.tolist()}

    def go_on(self, begun: Mapping[str, Any]) -> None:
        """Restore the unfinished episodes from the result of `begun`."""
        self._return[:], self._length[:] = begun["return"], begun["length"]

    def restore(self, numbers: Mapping[str, list[float]]) -> None:
        """Restore the statistics of ended episodes from the result of `numbers`."""
        self.returns.extend(numbers["returns"])
        self.lengths.extend(int(n) for n in numbers["lengths"])
        self.episodes = int(numbers["episodes"][0])


class ActionLog:
    """The log of all actions since the episodes of all environments were restarted from a seed.

    The memory of an environment cannot be saved. Replaying the actions restores it, so that a run can resume in the middle of an
    episode.
    """

    MOST = 1 << 26
    """The number of bytes after which a run restarts all episodes, so that the log stays small."""

    def __init__(self, seed: int, dtype: np.typing.DTypeLike) -> None:
        self.seed, self.dtype = seed, np.dtype(dtype)
        self._bytes, self._shape = bytearray(), (0,)

    def __len__(self) -> int:
        """Return the size of the log in bytes."""
        return len(self._bytes)

    def add(self, actions: Array) -> None:
        """Add the actions [T, E] or [T, E, A] of a rollout."""
        self._shape = actions.shape[1:]
        self._bytes += actions.astype(self.dtype).tobytes()

    def actions(self, size: int) -> Array:
        """Return a copy of the actions in the first `size` bytes of the log: [T, E] or [T, E, A]."""
        if not size:
            return np.zeros(0, self.dtype)
        return np.frombuffer(self._bytes, self.dtype, size // self.dtype.itemsize).reshape(-1, *self._shape).copy()


class Collector:
    """The collector of rollouts: it steps the environments with a policy, and remembers their current observations."""

    def __init__(self, envs: Environments, normalizer: Normalizer) -> None:
        self.envs, self.normalizer, self.statistics = envs, normalizer, EpisodeStatistics(envs.count)
        self.observation: Array = np.zeros((envs.count, envs.size), envs.dtype)
        self.resumable = False
        """True if actions are logged, so that a run can resume in the middle of an episode."""
        self.raw = False
        """True if rollouts have observations and rewards that are not normalised, for a replay buffer."""
        self._played: type = np.float32 if isinstance(envs.distribution, Normal) else np.int64
        # One byte is enough for a choice of at most 256 actions.
        self._logged: type = np.uint8 if self._played is np.int64 and envs.distribution.outputs <= 256 else self._played
        self.log = ActionLog(0, self._logged)

    def restart(self, seed: int) -> None:
        """Start new episodes in all environments from `seed`."""
        self.log = ActionLog(seed, self._logged)
        self.observation = self.envs.reset(seed)
        self.statistics.restart()
        self.normalizer.restart()

    def replay(self, seed: int, actions: Array) -> None:
        """Restart all episodes from `seed` and take the logged `actions` [T, E, …], to restore the environments' state."""
        self.restart(seed)
        for action in actions:  # converted step by step, since all at once would take eight times the memory of the log
            self.observation = self.envs.step(action.astype(self._played)).observation
        if len(actions):
            self.log.add(actions)

    def steps(self, act: Callable[[Array], Array], count: int) -> Rollout:
        """Return a rollout of `count` steps of every environment, which continues the previous rollout."""
        return self._collect(act, count, whole=0)

    def episodes(self, act: Callable[[Array], Array], count: int, seed: int) -> Rollout:
        """Return a rollout of `count` complete episodes of every environment, which start from `seed`.

        The number is equal for all environments, so some wait for the last. A rollout that stopped as soon as enough episodes
        have ended would favour short ones.
        """
        self.restart(seed)
        return self._collect(act, 0, whole=count)

    def _collect(self, act: Callable[[Array], Array], count: int, whole: int) -> Rollout:
        seen: list[Array] = []
        actions: list[Array] = []
        rewards: list[Array] = []
        chosen: list[Array] = []
        ends: tuple[list[Array], list[Array]] = ([], [])
        lasts: dict[tuple[int, int], Array] = {}
        left = np.full(self.envs.count, whole)
        t, see = 0, self.normalizer.see
        while t < count or (whole and left.any()):
            shown = see(self.observation)
            action = act(shown)
            step = self.envs.step(action)
            counted = step.chosen & (left > 0) if whole else step.chosen
            seen.append(self.observation)
            actions.append(action)
            rewards.append(step.reward)
            chosen.append(counted)
            ends[0].append(step.terminated)
            ends[1].append(step.truncated)
            lasts |= {(t, i): final for i, final in step.last.items()}
            ended = self.statistics.add(step, counted)
            if whole:
                left = left - ended
                if self.statistics.longest > _NO_END and not self.envs.ends:
                    raise UserError(
                        f"An episode has not ended after {_NO_END:,} steps, and this method learns only from whole episodes. "
                        f"{_GIVE_A_LIMIT} Or choose ppo or a2c with n_steps, which also learn from unfinished episodes."
                    )
            self.observation = step.observation
            t += 1
        played = np.array(actions)
        if self.resumable:
            self.log.add(played)
        # np.array stacks equal arrays in a third of np.stack's time.
        return self._cut(np.array([*seen, self.observation]), played, np.array(rewards), np.array(chosen), ends, lasts)

    def _cut(
        self,
        raw: Array,
        action: Array,
        reward: Array,
        chosen: Array,
        ends: tuple[list[Array], list[Array]],
        lasts: dict[tuple[int, int], Array],
    ) -> Rollout:
        """Return the recorded steps [T, E] as a rollout, whose rows are ordered by environment and time."""
        for name, values in (("reward", reward), ("observation", raw)):
            if not np.isfinite(values).all():
                raise UserError(f"The environment gave a {name} that is NaN or infinite; fix its step and reset.")
        terminated, truncated = np.array(ends[0]), np.array(ends[1])
        ended = (terminated | truncated) & chosen
        self.normalizer.learn_rewards(reward, ended)
        rewards = reward if self.raw else self.normalizer.scale(reward)
        first = chosen.copy()
        first[1:] &= ~chosen[:-1] | ended[:-1]
        e, t = chosen.T.nonzero()  # ordered by environment, then by time
        starts = first[t, e]
        row = starts.cumsum() - 1
        opened = starts.nonzero()[0]
        column = np.arange(len(t)) - opened[row]
        final = np.append(opened[1:], len(t)) - 1
        t_end, e_end = t[final], e[final]
        after = raw[t_end + 1, e_end]
        if lasts:
            for i, place in enumerate(zip(t_end.tolist(), e_end.tolist(), strict=True)):
                if place in lasts:
                    after[i] = lasts[place]
        cut = truncated[t_end, e_end] & ~terminated[t_end, e_end]
        shown, after = (raw[t, e], after) if self.raw else (self.normalizer.see(raw[t, e]), self.normalizer.see(after))
        rollout = Rollout(
            observation=shown,
            action=action[t, e],
            reward=rewards[t, e],
            row=row,
            column=column,
            terminated=terminated[t_end, e_end],
            truncated=cut,
            after=after,
        )
        self.normalizer.learn_observations(raw[:-1][chosen])  # last, so that training and acting see the same values
        return rollout


class Played(NamedTuple):
    """The returns and lengths of evaluated episodes."""

    returns: list[float]
    lengths: list[int]
    cut: int
    """The number of unfinished episodes. They count with their return and length so far."""


def play(
    envs: Environments, act: Callable[[Array], Array], episodes: int, seed: int, see: Callable[[Array], Array] | None = None
) -> Played:
    """Play `episodes` complete episodes with the policy `act`. `see` normalises the observations that it receives.

    Each environment plays a fixed share, since taking the episodes that end first would favour short ones. If an environment
    neither declares a limit nor can be given one, its episode is abandoned after `MOST_STEPS` steps.
    """
    observation, left, cut = envs.reset(seed), (episodes + np.arange(envs.count)) // envs.count, 0
    statistics = EpisodeStatistics(envs.count, window=None)
    while left.any():
        step = envs.step(act(observation if see is None else see(observation)))
        ended = statistics.add(step, step.chosen & (left > 0))
        if envs.cut_at and ended.any():
            last = np.array(list(statistics.lengths)[-int(ended.sum()) :])
            cut += int(((last >= envs.cut_at) & ~step.terminated[ended]).sum())
        left = left - ended
        if not envs.ends and (lost := statistics.leave(MOST_STEPS)).any():
            left[lost], cut = 0, cut + int(lost.sum())
        observation = step.observation
    return Played(list(statistics.returns), list(statistics.lengths), cut)
