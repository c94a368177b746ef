"""The settings of `psigrad plan` and `psigrad check`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from psigrad.config import OnlineConfig
from psigrad.config.sections import CountOrZero, PositiveOrZero

CHECK = """\
Check that a model, its data and its settings will train correctly. Print the first rows as the model reads them, and what
rewards, tools and the environment answer. Compute values, such as log-probs, in two ways that must agree. Nothing is trained.
With a METHOD, such as dpo, rows and flags are those of its command; without one, the flags are grpo's. --json prints JSON."""


def for_check(config: Any, method: str) -> tuple[OnlineConfig, str]:
    """Return (the settings for `psigrad check`, the dataset type on which `method` trains, or "" without a method)."""
    from psigrad.language.recipes.row_limits import dataset_form  # imported here, since it imports torch

    form = dataset_form(config) if method else ""
    if isinstance(config, OnlineConfig):
        return config, form
    same = {f.name: getattr(config, f.name) for f in fields(OnlineConfig) if hasattr(config, f.name)}
    return OnlineConfig(**same), form


@dataclass(frozen=True)
class PlanConfig:
    """The settings of the plan itself, besides those of the planned method."""

    memory: str = ""
    """Memory that the run must fit in, such as 24GB; empty: that of `gpu` or of this machine."""
    prompt_length: CountOrZero = 0
    """Mean tokens of a prompt; 0: the dataset's, or without one a guess."""
    completion_length: CountOrZero = 0
    """Mean tokens of a completion; 0: in online methods max_completion_length, otherwise the dataset's or a guess."""
    tflops: PositiveOrZero = 0.0
    """Speed of matrix products in TFLOP/s; 0: that of `gpu`, or measured on this machine."""
    gpu: str = ""
    """Name of a GPU, such as h100, whose memory, speed and bandwidth the plan assumes, even if this machine has none."""
    devices: CountOrZero = 0
    """Show how to divide this many identical devices between training and sampling; 0: plan the settings as given."""
    network: PositiveOrZero = 50.0
    """With `devices`: speed of the network between them in GB/s (50 is 400 Gb/s)."""
    json: bool = False
    """Print one JSON object instead of the table."""
