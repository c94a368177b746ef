"""The settings of `psigrad plan`."""

from __future__ import annotations

from dataclasses import dataclass

from psigrad.config.sections import CountOrZero, PositiveOrZero


@dataclass(frozen=True)
class PlanConfig:
    """What only a plan is told; the rest are the settings of the method that is planned."""

    memory: str = ""
    """Memory to fit, as 24GB; empty: this machine's."""
    prompt_length: CountOrZero = 0
    """Mean tokens of a prompt; 0: the dataset's, or a guess."""
    completion_length: CountOrZero = 0
    """Mean tokens of a completion; 0: the dataset's, or the longest that may be sampled."""
    tflops: PositiveOrZero = 0.0
    """Speed of matrix products in TFLOP/s; 0: measured here."""
    gpu: str = ""
    """A GPU by name, as h100: its memory, its speed and its bandwidth, without having it here."""
    devices: CountOrZero = 0
    """Show how to divide this many such devices between training and sampling; 0: the plan of the settings as they are."""
    network: PositiveOrZero = 50.0
    """With devices: speed of the network between them in GB/s (50 is 400 Gb/s)."""
    json: bool = False
    """Print one JSON object in place of the table."""
