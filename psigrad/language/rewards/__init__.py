"""Reward functions with TRL's signature, their typed results, and the worker processes that run them.

No module here imports torch, so that workers start fast.
"""

from __future__ import annotations

from psigrad.language.rewards.resolve import RewardSpec, resolve
from psigrad.language.rewards.reward_pool import RewardPool
from psigrad.language.rollout.scoring import (
    Failed,
    Failure,
    Result,
    RewardError,
    Samples,
    Scored,
    Scorer,
    Scoring,
    Unscored,
    check_unscored,
)

__all__ = [
    "Failed",
    "Failure",
    "Result",
    "RewardError",
    "RewardPool",
    "RewardSpec",
    "Samples",
    "Scored",
    "Scorer",
    "Scoring",
    "Unscored",
    "check_unscored",
    "resolve",
]
