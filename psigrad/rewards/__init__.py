"""Rewards: TRL's signature, typed results, and the processes that run them. Imports no torch, so that workers start at once."""

from __future__ import annotations

from psigrad.rewards.pool import RewardPool, check_unscored
from psigrad.rewards.resolve import RewardSpec, resolve
from psigrad.rewards.types import Failed, Failure, Result, RewardError, Samples, Scored, Scorer, Scoring, Unscored

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
