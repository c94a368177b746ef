"""The numbers of a language model's run that change from step to step, besides weights and moments of the optimiser."""

from __future__ import annotations

from dataclasses import dataclass, field

from psigrad.language.rollout.types import Pending
from psigrad.step import RunState


@dataclass(frozen=True)
class State(RunState):
    """The state of a run between two steps."""

    cursor: int = 0
    """The number of prompts (online) or rows (SFT) drawn from the endless sequence of shuffled epochs."""
    algorithm: dict[str, float] = field(default_factory=dict)
    """The `PolicyGradient`'s own state: a moving-average baseline, an adaptive KL coefficient."""
    ledger: dict[str, int] = field(default_factory=dict)
    """The fate of the prompts drawn so far, in online runs; see `online/collect.py`."""
    pending: tuple[Pending, ...] = ()
    """The collections for later steps, in runs with a lag."""
    unscored: list[list[int]] = field(default_factory=list)
    """[faults of rewards, completions] of each of the last steps; see `rollout.scoring.check_unscored`."""
