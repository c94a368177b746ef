"""Gymnasium's values, by its vector environments and wrappers."""

from __future__ import annotations

from types import SimpleNamespace

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics

from museum import exhibit, worlds

_APPLICABLE = ("reused_array", "reward_scale", "episode_length")
NOT_APPLICABLE = dict.fromkeys(set(exhibit.names_of(*exhibit.MODULES)) - {*_APPLICABLE}, "it has environments and no learner")


def reused_array(x: SimpleNamespace) -> list[float]:
    env = SyncVectorEnv([lambda: worlds.Steps(x.limit)], autoreset_mode=AutoresetMode.SAME_STEP)
    env.reset()
    infos = [env.step(np.zeros(1, np.int64))[4] for _ in range(x.limit)][-1]
    return infos["final_obs"][0].tolist()


def reward_scale(x: SimpleNamespace) -> list[float]:
    env = gym.wrappers.NormalizeReward(worlds.Steps(x.limit), gamma=x.gamma)
    for _ in range(x.steps // x.limit):
        env.reset()
        found = [env.step(0)[1] for _ in range(x.limit)]
    return [float(found[-1])]


def episode_length(x: SimpleNamespace) -> list[float]:
    same_step = SyncVectorEnv([lambda: worlds.Steps(x.limit)], autoreset_mode=AutoresetMode.SAME_STEP)
    env = RecordEpisodeStatistics(same_step)
    env.reset()
    infos = [env.step(np.zeros(1, np.int64))[4] for _ in range(3 * x.limit)]
    return [float(info["episode"]["l"][0]) for info in infos if "episode" in info]
