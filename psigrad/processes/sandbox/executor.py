"""The protocol of an executor: programs in, outcomes out. Expected values are never part of a program.

Values that come out of a sandbox are read as plain Python values: nothing is executed, built or compared in there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from psigrad.errors import UserError

Status = Literal["exited", "timeout", "memory", "output"]
TierName = Literal["root", "user", "none"]


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


@dataclass(frozen=True)
class Tier:
    """Which kind of sandbox there is, and what it holds.

    root: namespaces made by root, and a user id of its own for each program. user: an unprivileged user namespace. none: no
    sandbox; code rewards are refused unless unsafe code is allowed.
    """

    name: TierName
    cgroups: tuple[str, ...] = ()
    """Controllers that limit a program's whole tree: pids, memory."""
    seccomp: bool = False
    why_not: str = ""
    """Where the tier is none: what is missing and what to do."""

    def sentence(self) -> str:
        """One line for people."""
        if self.name == "none":
            return "none, so code rewards are refused"
        parts = ["own user id per program" if self.name == "root" else "user namespace", "no network", "own processes and files"]
        parts.append("cgroups: " + ", ".join(self.cgroups) if self.cgroups else "no cgroups (limits hold per process)")
        parts.append("seccomp" if self.seccomp else "no seccomp on this processor")
        return f"{self.name}: {'; '.join(parts)}"


def decode_values(lines: Sequence[bytes], count: int) -> tuple[Any, ...]:
    """The values of `count` expressions from the driver's lines; what is missing or malformed is a `MissingValue`."""
    values = [_value(line) for line in lines[:count] if line]
    return (*values, *[MissingValue("the program ended before it was evaluated")] * (count - len(values)))


def _value(line: bytes) -> Any:
    try:
        answer = json.loads(line)
        return _plain(answer["value"], 0) if "value" in answer else MissingValue(str(answer["error"])[:400])
    except (ValueError, TypeError, KeyError, RecursionError, AttributeError):
        return MissingValue("its answer cannot be read")


def _plain(value: Any, depth: int) -> Any:
    """The inverse of the driver's `plain`."""
    if depth > 60:
        raise ValueError("nested too deeply")
    if value is None or isinstance(value, bool | str | float):
        return value
    ((kind, inner),) = value.items()
    match kind:
        case "int":
            return int(inner, 16)
        case "float":
            return float(inner)
        case "list":
            return [_plain(v, depth + 1) for v in inner]
        case "tuple":
            return tuple(_plain(v, depth + 1) for v in inner)
        case "set":
            return {_plain(v, depth + 1) for v in inner}
        case "dict":
            return {_plain(k, depth + 1): _plain(v, depth + 1) for k, v in inner}
    raise ValueError(f"unknown tag {kind!r}")
