"""Programs that a model wrote, run where they can do no harm: one executor, its limits, and what a machine can guarantee."""

from __future__ import annotations

from psigrad.processes.sandbox.choice import enclosing_command, executor_for, tier_of_this_machine
from psigrad.processes.sandbox.executor import Executor, Limits, Program, ProgramOutcome, SandboxError, Tier

__all__ = [
    "Executor",
    "Limits",
    "Program",
    "ProgramOutcome",
    "SandboxError",
    "Tier",
    "enclosing_command",
    "executor_for",
    "tier_of_this_machine",
]
