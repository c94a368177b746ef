"""Stable-Baselines3's values, by its algorithms, buffers and vector environments."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from stable_baselines3 import A2C, DQN
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from museum import exhibit, worlds

NOT_APPLICABLE = dict.fromkeys(exhibit.names_of("museum.losses", "museum.tokens"), "it has no language models")


def time_limit(x: SimpleNamespace) -> list[float]:
    env = DummyVecEnv([lambda: gym.wrappers.TimeLimit(worlds.Steps(x.limit), x.limit)])
    model = A2C("MlpPolicy", env, n_steps=x.limit, gamma=x.gamma, gae_lambda=0.0)
    with torch.no_grad():
        model.policy.value_net.weight.zero_()
        model.policy.value_net.bias.fill_(x.value)
    model.train = lambda: None  # the rollout alone
    model.learn(x.limit)
    return model.rollout_buffer.advantages[:, 0].tolist()


def reused_array(x: SimpleNamespace) -> list[float]:
    env = DummyVecEnv([lambda: worlds.Steps(x.limit)])
    env.reset()
    infos = [env.step([0])[3] for _ in range(x.limit)][-1]
    return infos[0]["terminal_observation"].tolist()


def _replay(env: Any, steps: int, **settings: Any) -> Any:
    wrapped = VecNormalize(DummyVecEnv([env]), **settings)
    model = DQN("MlpPolicy", wrapped, learning_starts=16, train_freq=4, buffer_size=1000, policy_kwargs={"net_arch": [8]})
    return model.learn(steps).replay_buffer.sample(256, env=wrapped)


def normalised_bytes(x: SimpleNamespace) -> list[float]:
    space = gym.spaces.Box(0, 10, x.shape, np.uint8)
    seen = _replay(lambda: worlds.Steps(x.limit, space), x.steps, norm_reward=False).observations
    return [float(seen.mean()), float(seen.abs().max())]


def replayed_scale(x: SimpleNamespace) -> list[float]:
    rewards = _replay(lambda: worlds.Steps(x.limit), x.steps, norm_obs=False, gamma=x.gamma).rewards
    return [float(rewards.max() / rewards.min())]


def discrete_start(x: SimpleNamespace) -> list[float]:
    env = worlds.Steps(8, actions=gym.spaces.Discrete(x.count, start=x.start))
    A2C("MlpPolicy", DummyVecEnv([lambda: env]), n_steps=8).learn(x.steps)
    return [sum(not env.action_space.contains(a) for a in env.received)]


def reward_scale(x: SimpleNamespace) -> list[float]:
    env = VecNormalize(DummyVecEnv([lambda: worlds.Steps(x.limit)]), norm_obs=False, gamma=x.gamma)
    env.reset()
    return [float([env.step([0])[1] for _ in range(x.steps)][-1][0])]


def episode_length(x: SimpleNamespace) -> list[float]:
    env = DummyVecEnv([lambda: Monitor(worlds.Steps(x.limit))])
    env.reset()
    infos = [env.step([0])[3][0] for _ in range(3 * x.limit)]
    return [info["episode"]["l"] for info in infos if "episode" in info]
