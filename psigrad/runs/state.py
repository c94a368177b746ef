"""What the cycle itself knows of a run: how far it is, and what callbacks have asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from psigrad.errors import UserError

# Consecutive steps without a finite gradient after which a run stops.
MAX_NONFINITE = 3


class NonFiniteError(UserError):
    """The gradient was not finite for `MAX_NONFINITE` steps in a row."""


@dataclass(frozen=True)
class RunState:
    """The numbers of every run; each kind of training adds its own. A checkpoint holds them, and what they vouch for."""

    step: int = 0
    """What rows and checkpoints are numbered by."""
    tokens: int = 0
    """Tokens sampled or trained on; 0 where a run has none."""
    nonfinite: int = 0
    """Steps in a row, up to this one, whose gradient was not finite."""
    evaluated: bool = False
    """The model was evaluated before its first step."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Settings that callbacks have changed, by dotted name."""
    callbacks: dict[str, Any] = field(default_factory=dict)
    """What callbacks remember, by their names."""
    ended: bool = False
    """A callback has ended the run."""

    @property
    def turns(self) -> int:
        """How often the cycle has turned, which save_steps and eval_steps count."""
        return self.step
