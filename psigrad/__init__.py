"""Reinforcement learning from a grid world to the post-training of language models, on one identity.

    import psigrad
    psigrad.train("grpo", model="…", dataset="prompts.jsonl", reward=my_reward, max_steps=100)

Importing psigrad is quick: torch and transformers are loaded by the first thing that needs them.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

# OpenMP threads that wait spin on their core; where another program wants that core too, each waits for the other and a step
# takes ten times as long. Without a spin the core of a virtual machine falls asleep between two small kernels, and wakes late.
# libgomp reads this when torch is first imported.
os.environ.setdefault("GOMP_SPINCOUNT", "100000")

if TYPE_CHECKING:
    from psigrad.api import evaluate, score, train
    from psigrad.config.algorithms import explain
    from psigrad.objective import PolicyGradient
    from psigrad.runs.callbacks import Callback

# public name -> the module it lives in
_HOMES = {
    "PolicyGradient": "psigrad.objective",
    "explain": "psigrad.config.algorithms",
    "train": "psigrad.api",
    "Callback": "psigrad.runs.callbacks",
    "evaluate": "psigrad.api",
    "score": "psigrad.api",
}

__all__ = ["Callback", "PolicyGradient", "__version__", "evaluate", "explain", "score", "train"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'psigrad' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
