"""Reinforcement learning, from a grid world to the post-training of language models.

    import psigrad
    psigrad.train("grpo", model="…", dataset="prompts.jsonl", reward=my_reward, max_steps=100)

Importing psigrad is fast: torch and transformers are imported when they are first needed.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

# A waiting OpenMP thread spins on its core. If another program needs that core, the threads wait for each other and a step takes
# ten times as long. Without any spinning, the core of a virtual machine sleeps between two small kernels and wakes late. With
# this value, threads spin for a short time. libgomp reads it when torch is first imported.
os.environ.setdefault("GOMP_SPINCOUNT", "100000")

if TYPE_CHECKING:
    from psigrad.api import evaluate, score, train
    from psigrad.config.algorithms import explain
    from psigrad.objective import PolicyGradient
    from psigrad.runs.callbacks import Callback

# Public name -> the module from which the name is imported when it is first used.
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
