"""A sandbox for untrusted code: its command line, the executors of programs, and the guarantees that a machine can give."""

from __future__ import annotations

from psigrad.processes.sandbox.choice import enclosure_of_workers, executor_for, tier_of_this_machine
from psigrad.processes.sandbox.enclosure import Enclosure
from psigrad.processes.sandbox.executor import Executor, Limits, Program, ProgramOutcome, SandboxError, Tier

__all__ = [
    "Enclosure",
    "Executor",
    "Limits",
    "Program",
    "ProgramOutcome",
    "SandboxError",
    "Tier",
    "enclosure_of_workers",
    "executor_for",
    "tier_of_this_machine",
]
