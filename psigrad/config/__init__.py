"""The settings of a run, as frozen dataclasses. The configuration is the object itself: there is no second class or registry.

The string under a field is its help text on the command line. The names are those of TRL and transformers where they exist.
"""

from __future__ import annotations

from psigrad.config.language import (
    EvalConfig,
    LmEvalConfig,
    OnlineConfig,
    PreferenceConfig,
    RewardConfig,
    SampleConfig,
    SFTConfig,
)
from psigrad.config.sections import Data, Evaluation, Hub, Model, Optim, Placement, Reward, Run, Sampling

__all__ = [
    "Data",
    "EvalConfig",
    "Evaluation",
    "Hub",
    "LmEvalConfig",
    "Model",
    "OnlineConfig",
    "Optim",
    "Placement",
    "PreferenceConfig",
    "Reward",
    "RewardConfig",
    "Run",
    "SFTConfig",
    "SampleConfig",
    "Sampling",
]
