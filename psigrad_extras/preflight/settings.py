"""The settings of `psigrad plan`."""

from __future__ import annotations

from dataclasses import dataclass

from psigrad.config.sections import CountOrZero, PositiveOrZero


@dataclass(frozen=True)
class PlanConfig:
    """The settings of the plan itself, besides those of the planned method."""

    memory: str = ""
    """Memory to fit in, such as 24GB; empty: this machine's."""
    prompt_length: CountOrZero = 0
    """Mean tokens of a prompt; 0: the dataset's, or a guess."""
    completion_length: CountOrZero = 0
    """Mean tokens of a completion; 0: the dataset's, or the longest that may be sampled."""
    tflops: PositiveOrZero = 0.0
    """Speed of matrix products in TFLOP/s; 0: measured on this machine."""
    gpu: str = ""
    """Name of a GPU, such as h100, to plan with its memory, speed and bandwidth without having one."""
    devices: CountOrZero = 0
    """Show how to divide this many such devices between training and sampling; 0: plan the settings as given."""
    network: PositiveOrZero = 50.0
    """With devices: speed of the network between them in GB/s (50 is 400 Gb/s)."""
    json: bool = False
    """Print one JSON object instead of the table."""
