"""Reinforcement learning on Gymnasium environments, by the `PolicyGradient` objects that train language models.

    from psigrad.control import PPO
    agent = PPO("CartPole-v1").learn(100_000)

`agents` is what users see; `training` runs a whole run from settings; the rest is what they are made of: environments and
rollouts (`vector`, `rollouts`, `replay`, `video`), networks (`actor_critic`, `networks`, `distributions`), the declared methods
(`methods`, `hyperparameters`) and what they learn by (`learning`, `on_policy`, `trpo`, `dqn`).
"""

from __future__ import annotations

from psigrad.control.agents import (
    A2C,
    DQN,
    PPO,
    REINFORCE,
    TRPO,
    Agent,
    CheckpointCallback,
    EvalCallback,
    evaluate_policy,
)

__all__ = ["A2C", "DQN", "PPO", "REINFORCE", "TRPO", "Agent", "CheckpointCallback", "EvalCallback", "evaluate_policy"]
