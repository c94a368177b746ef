"""What a run will take before it starts: peak memory item by item, the arithmetic of its batches, its speed.

Nothing of the model is read but its configuration. `predict` is the plan, `show.table` and `show.figures` what is printed,
`warning` the line that a real run begins with where it may not fit.
"""

from __future__ import annotations

from psigrad.planning.hardware import Machine, machine, parse_bytes
from psigrad.planning.memory import by_weights
from psigrad.planning.predict import Plan, lengths_of, predict
from psigrad.planning.shape import shape_of
from psigrad.planning.work import Lengths

__all__ = ["Lengths", "Machine", "Plan", "by_weights", "lengths_of", "machine", "parse_bytes", "predict", "shape_of"]
