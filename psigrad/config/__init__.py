"""Every setting of a run, as frozen dataclasses. The configuration is the object: no second class, no registry.

A string under a field is its help text on the command line. Names are those of TRL and transformers where users know them.
"""

from __future__ import annotations

from psigrad.config.gymnasium import ControlConfig, Dqn, Network, Trpo
from psigrad.config.language import EvalConfig, OnlineConfig, PreferenceConfig, RewardConfig, SampleConfig, SFTConfig
from psigrad.config.sections import Data, Evaluation, Hub, Model, Optim, Placement, Reward, Run, Sampling
from psigrad.config.tooling import BenchConfig, LmEvalConfig, PlanConfig

__all__ = [
    "BenchConfig",
    "ControlConfig",
    "Data",
    "Dqn",
    "EvalConfig",
    "Evaluation",
    "Hub",
    "LmEvalConfig",
    "Model",
    "Network",
    "OnlineConfig",
    "Optim",
    "Placement",
    "PlanConfig",
    "PreferenceConfig",
    "Reward",
    "RewardConfig",
    "Run",
    "SFTConfig",
    "SampleConfig",
    "Sampling",
    "Trpo",
]
