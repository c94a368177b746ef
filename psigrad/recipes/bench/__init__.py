"""A model's training steps, timed: seconds by phase, tokens per second, peak memory, the time to the first step; beside TRL's.

Each side runs in a process of its own on the same weights, prompts, batch shape and precision. `beside` is the comparison,
`alone` psigrad's side by itself.
"""

from __future__ import annotations

from psigrad.recipes.bench.compare import PEERS, alone, beside, table
from psigrad.recipes.bench.workload import Workload, build, prepare

__all__ = ["PEERS", "Workload", "alone", "beside", "build", "prepare", "table"]
