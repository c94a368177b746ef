"""Environments in a plain loop, and the stand-in for those that are not there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from psigrad.control.environments import spaces as meanings
from psigrad.control.networks.distributions import Array
from psigrad.errors import UserError

RETURNS = "Gymnasium's reset returns (observation, info), and its step (observation, reward, terminated, truncated, info)."


class Serial:
    """Environments in a plain loop, each begun again in the step that ends it (`SAME_STEP`).

    For a handful of cheap environments: Gymnasium's own `SyncVectorEnv` takes twice the time over copies and infos.
    """

    def __init__(self, envs: Sequence[gym.Env[Any, Any]]) -> None:
        self.envs, self.num_envs = envs, len(envs)
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.single_observation_space = envs[0].observation_space
        self.single_action_space = envs[0].action_space

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Array, dict[str, Any]]:
        """As `VectorEnv.reset`."""
        seeds = [None] * self.num_envs if seed is None else range(seed, seed + self.num_envs)
        return self._stacked([_begun(env.reset(seed=s)) for env, s in zip(self.envs, seeds, strict=True)]), {}

    def step(self, actions: Array) -> tuple[Array, Array, Array, Array, dict[str, Any]]:
        """As `VectorEnv.step`."""
        n = self.num_envs
        reward, terminated, truncated = np.empty(n, np.float32), np.empty(n, bool), np.empty(n, bool)
        seen, finals = [], {}
        for i, env in enumerate(self.envs):
            observation, reward[i], terminated[i], truncated[i], _ = env.step(actions[i])
            if terminated[i] or truncated[i]:
                finals[i] = observation
                observation = _begun(env.reset())
            seen.append(observation)
        return self._stacked(seen), reward, terminated, truncated, {"final_obs": finals}

    def _stacked(self, seen: Sequence[Any]) -> Any:
        return meanings.stacked(self.single_observation_space, seen)

    def render(self) -> tuple[Any, ...]:
        """The picture of each, as `VectorEnv.render`."""
        return tuple(env.render() for env in self.envs)

    def close(self) -> None:
        """Close every environment."""
        for env in self.envs:
            env.close()


class Absent(gym.Env[Any, Any]):
    """Spaces without an environment, of a policy that is loaded without one: it can act, and to play is refused in a sentence."""

    def __init__(self, observation_space: spaces.Space[Any], action_space: spaces.Space[Any], reason: str) -> None:
        self.observation_space, self.action_space, self.reason = observation_space, action_space, reason

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Raises `UserError`."""
        raise UserError(
            f"This policy was loaded without an environment: {self.reason.rstrip('.')}. Give it one: agent.set_env(env), or "
            "env=… to load."
        )


def _begun(returned: Any) -> Any:
    """The observation that `reset` returned. An array of two numbers would unpack as well, so the type is asked."""
    if not (isinstance(returned, tuple) and len(returned) == 2):
        raise UserError(f"The environment's reset returned a value of type {type(returned).__name__}. {RETURNS}")
    return returned[0]
