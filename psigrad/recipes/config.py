"""The settings live in `psigrad/config.py`, a leaf that every room but objective/ may import."""

from __future__ import annotations

from psigrad.config import Data, EvalConfig, Evaluation, Model, OnlineConfig, Optim, Run, Sampling, SFTConfig

__all__ = ["Data", "EvalConfig", "Evaluation", "Model", "OnlineConfig", "Optim", "Run", "SFTConfig", "Sampling"]
