"""Procedural tasks from reasoning-gym as dataset rows, and imperfect demonstrations of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from psigrad import seeds
from psigrad.errors import UserError, nearest


def generate(name: str, size: int, seed: int, **settings: Any) -> list[dict[str, Any]]:
    """`size` rows of a reasoning-gym task: `prompt`, `answer`, `task` and `metadata`, ready for the `reasoning_gym` reward.

    Row i depends on (seed, i) only.
    """
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        raise UserError(f"There is no reasoning-gym task {name!r}{nearest(name, DATASETS)}; `psigrad tasks` lists them.")
    dataset = reasoning_gym.create_dataset(name, size=size, seed=seed, **settings)
    return [
        {"prompt": entry["question"], "answer": entry["answer"], "task": name, "metadata": entry["metadata"]} for entry in dataset
    ]
