"""Reinforcement learning on Gymnasium environments, with the same `PolicyGradient` objects that train language models.

    from psigrad.control import PPO
    agent = PPO("CartPole-v1").learn(100_000)

`agents` and `agent_callbacks` are the interface for users. `run` is a complete training run: collect and learn, evaluate, save.
`builder` builds a trainer from `settings` and the tuned `hyperparameters`. `methods` has the `presets` of policy gradients and
the trainers (`trainer`, `on_policy`, `trpo`, `dqn`), which learn on `environments` with small `networks`.
"""

from __future__ import annotations

from typing import Any

from psigrad.control.agent_callbacks import CheckpointCallback, EvalCallback, StopTrainingOnRewardThreshold
from psigrad.control.agents import A2C, DQN, PPO, REINFORCE, TRPO, Agent, evaluate_policy
from psigrad.control.policies import ELSEWHERE

__all__ = [
    "A2C",
    "DQN",
    "PPO",
    "REINFORCE",
    "TRPO",
    "Agent",
    "CheckpointCallback",
    "EvalCallback",
    "StopTrainingOnRewardThreshold",
    "evaluate_policy",
]


def __getattr__(name: str) -> Any:
    if name in ELSEWHERE:  # `from … import` would drop the message of an AttributeError
        raise ImportError(f"There is no {name} in psigrad.control: {ELSEWHERE[name]}.")
    raise AttributeError(f"module 'psigrad.control' has no attribute {name!r}")
