"""The plan of a run before it starts: its peak memory item by item, the arithmetic of its batches, its speed.

Only the model's configuration is read. `predict` computes the plan, and `plan` is the command that prints it. `plan.warning` is
printed at the start of a run that may not fit in memory.
"""

from __future__ import annotations

from psigrad_extras.preflight.plan.arithmetic import Lengths
from psigrad_extras.preflight.plan.hardware import Machine, machine, parse_bytes
from psigrad_extras.preflight.plan.memory import by_weights
from psigrad_extras.preflight.plan.predict import Plan, lengths_of, predict
from psigrad_extras.preflight.plan.shape import shape_of

__all__ = ["Lengths", "Machine", "Plan", "by_weights", "lengths_of", "machine", "parse_bytes", "predict", "shape_of"]
