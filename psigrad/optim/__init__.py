"""Optimisers for any network: update rules, learning rates, and the `Optimizer` that applies them."""

from __future__ import annotations

from psigrad.optim.optimizer import MAX_NONFINITE, NonFiniteError, Optimizer, add_up, apply_together, step_together
from psigrad.optim.rules import check_schedule, learning_rate

__all__ = [
    "MAX_NONFINITE",
    "NonFiniteError",
    "Optimizer",
    "add_up",
    "apply_together",
    "check_schedule",
    "learning_rate",
    "step_together",
]
