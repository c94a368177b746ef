"""The settings of a run, as frozen dataclasses.

The string under a field is its help text on the command line. A setting that is also in TRL or transformers has the same name.
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
