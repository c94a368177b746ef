"""The protocol of an executor: programs in, outcomes out. Expected values are never part of a program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from psigrad.errors import UserError

Status = Literal["exited", "timeout", "memory", "output"]


class SandboxError(UserError):
    """The sandbox itself is at fault, or there is none: the program was not judged."""


@dataclass(frozen=True)
class Limits:
    """What one program may use. Beyond a limit it is killed with everything that it started."""

    seconds: float = 5.0
    """Wall-clock time."""
    memory_mb: int = 512
    """Address space of each process; with cgroups, also the memory of all of them and of their files together."""
    processes: int = 32
    """Processes and threads at once."""
    output_kb: int = 64
    """What it may print, standard output and standard error each."""
    files_mb: int = 16
    """The size of its /tmp, the only place that it can write to."""


@dataclass(frozen=True)
class Program:
    """A Python program to run once: with `stdin`, or, where there are `expressions`, with each of them evaluated after it."""

    source: str
    stdin: str = ""
    expressions: tuple[str, ...] = ()


@dataclass(frozen=True)
class ProgramOutcome:
    """What came of a program."""

    status: Status
    """exited: it ended by itself, well or badly; timeout, memory, output: it was killed at that limit."""
    code: int = 0
    """Exit status; -n for signal n."""
    stdout: str = ""
    stderr: str = ""
    values: tuple[Any, ...] = field(default=())
    """Of each expression its value, made of None, bool, int, float, str, list, tuple, dict and set; or a `MissingValue`."""
    seconds: float = 0.0


@dataclass(frozen=True)
class MissingValue:
    """Why an expression has no value: it raised, never ran, or is no plain value."""

    reason: str


class Executor(Protocol):
    """Who runs programs. bubblewrap does it here, `RemoteExecutor` asks a service over HTTP."""

    def run(self, programs: Sequence[Program], limits: Limits) -> list[ProgramOutcome]:
        """One outcome for each program, in order; none sees anything of another. Raises `SandboxError` where a program could
        not be run for reasons that are not its own.
        """
        ...
