"""Small environments whose every number is known."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from psigrad.control import run


def commanded(monkeypatch: Any) -> list[Any]:
    """A list that gets the settings of each run that `psigrad control` would start, and none does."""
    seen: list[Any] = []
    monkeypatch.setattr(run, "run", seen.append)
    monkeypatch.setattr("psigrad.records.report.terminal.print_result", lambda result: None)
    return seen


class Counter(gym.Env[Any, Any]):
    """Observation [episode, step]; episode k ends after `lengths[k % len]` steps, in turn terminated and truncated. Reward: the
    step's number, from 1.
    """

    def __init__(self, lengths: tuple[int, ...] = (2, 3)) -> None:
        self.observation_space = spaces.Box(-1e6, 1e6, (2,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.lengths, self.episode, self.step_number = lengths, -1, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.episode = -1
        self.episode, self.step_number = self.episode + 1, 0
        return self._seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.step_number += 1
        over = self.step_number == self.lengths[self.episode % len(self.lengths)]
        return self._seen(), float(self.step_number), over and self.episode % 2 == 0, over and self.episode % 2 == 1, {}

    def _seen(self) -> Any:
        return np.array([self.episode, self.step_number], np.float32)


class Chain(gym.Env[Any, Any]):
    """States 0 … n − 1; right moves on, left goes back to 0. Reward 1 for reaching the end, where the episode terminates, and
    −0.02 for going left. Cut after `limit` steps.
    """

    def __init__(self, n: int = 4, limit: int = 20) -> None:
        self.n, self.limit = n, limit
        self.observation_space, self.action_space = spaces.Discrete(n), spaces.Discrete(2)
        self.state = self.count = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.state = self.count = 0
        return self.state, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        self.state = self.state + 1 if action == 1 else 0
        over = self.state == self.n - 1
        return self.state, 1.0 if over else -0.02 * float(action == 0), over, self.count >= self.limit and not over, {}


class Locks(gym.Env[Any, Any]):
    """One step: half the reward for turning to the colour that is shown, half for pressing where the dial is above 0.

    The best policy earns 1, the best one that sees nothing 5/12. Keys lie in another order than the flat numbers.
    """

    def __init__(self, binary: bool = False) -> None:
        shown = {"dial": spaces.Box(-1, 1, (1,), np.float32), "colour": spaces.Discrete(3 - binary, start=1)}
        self.observation_space = spaces.Dict(shown)
        self.action_space = spaces.MultiBinary(2) if binary else spaces.MultiDiscrete([3, 2], start=[4, 0])
        self.first = 0 if binary else 4

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.shown = self.observation_space.sample()
        return self.shown, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        right = int(action[0]) - self.first == int(self.shown["colour"]) - 1
        pressed = bool(action[1]) == bool(self.shown["dial"][0] > 0)
        return self.shown, 0.5 * right + 0.5 * pressed, True, False, {}


class Target(gym.Env[Any, Any]):
    """One step: the reward is minus the squared distance of a real action from the observed number."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-1, 1, (1,), np.float32)
        self.action_space = spaces.Box(-2, 2, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.wanted = self.np_random.uniform(-1, 1, 1).astype(np.float32)
        return self.wanted, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.wanted, -float(((action - self.wanted) ** 2).sum()), True, False, {}
