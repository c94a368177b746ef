"""Reinforcement learning on Gymnasium environments, by the `PolicyGradient` objects that train language models.

    from psigrad.control import PPO
    agent = PPO("CartPole-v1").learn(100_000)

`agents` is what users see. `run` is a whole run, with the loop: collect and learn, evaluate, save. `builder` makes a trainer out
of settings, from the declared `methods` and the tuned `hyperparameters`. Trainers (`trainer`, `on_policy`, `trpo`, `dqn`) learn
on environments (`vector`, `normalizer`, `collector`, `replay`, `video`) with small
networks (`actor_critic`, `networks`, `distributions`, `optimizers`).
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
