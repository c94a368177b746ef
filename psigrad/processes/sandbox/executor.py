"""The protocol of an executor: programs in, outcomes out. Expected values are never part of a program.

Values that come out of a sandbox are read as plain Python values: nothing is executed, built or compared in there.
"""

from __future__ import annotations

import datetime
import json
import operator
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from typing import Any, Literal, Protocol

from psigrad.errors import UserError

Status = Literal["exited", "timeout", "memory", "output", "stopped"]
TierName = Literal["root", "user", "none"]


class SandboxError(UserError):
    """The sandbox itself is at fault, or there is none: the program was not judged."""


@dataclass(frozen=True)
class Limits:
    """What one program may use. Beyond a limit it is killed with everything that it started."""

    seconds: float = 5.0
    """CPU time of each process, rounded up to whole seconds, and for each expression anew: a busy machine fails nobody."""
    wall_seconds: float = 0.0
    """Wall-clock time of each expression, or of the run; 0: five times `seconds`."""
    memory_mb: int = 512
    """Address space of each process; with cgroups, also the memory of all of them and of their files together."""
    processes: int = 32
    """Processes and threads at once."""
    output_kb: int = 1024
    """What it may print, standard output and standard error each."""
    files_mb: int = 16
    """The size of its /tmp, the only place that it can write to."""
    packages: bool = False
    """Whether it may import the packages of our own environment, such as numpy."""

    @property
    def wall(self) -> float:
        """Seconds by the clock."""
        return self.wall_seconds or 5 * self.seconds


@dataclass(frozen=True)
class Program:
    """A Python program to run once: with `stdin`, or, where there are `expressions`, with each of them evaluated after it."""

    source: str
    stdin: str = ""
    expressions: tuple[str, ...] = ()
    until: Callable[[int, Any], bool] | None = field(default=None, compare=False)
    """Asked for each expression's value as it comes; the program is killed where it says True. It stays outside."""


@dataclass(frozen=True)
class ProgramOutcome:
    """What came of a program."""

    status: Status
    """exited: it ended by itself, well or badly; timeout, memory, output: it was killed at that limit; stopped: by `until`."""
    code: int = 0
    """Exit status; -n for signal n."""
    stdout: str = ""
    stderr: str = ""
    values: tuple[Any, ...] = field(default=())
    """Of each expression its value, made of plain types of the standard library; or a `MissingValue`."""
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


# Hexadecimal digits of a number, and different values of one hash in one container.
_DIGITS, _ALIKE = 1 << 18, 1000


@dataclass(frozen=True)
class Items:
    """What an iterator gave: equal to no list, as in Python, until one is made of it."""

    items: tuple[Any, ...]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


def _decimal(text: str) -> Decimal:
    """A decimal that no arithmetic takes long over."""
    found = Decimal(text)
    if found.is_finite() and abs(found.adjusted()) > 1000:
        raise ValueError("a decimal too large or small to be read")
    return found


def _range(bounds: list[int]) -> range:
    """A range whose list fits in memory."""
    found = range(*bounds)
    if len(found) > 1_000_000:
        raise ValueError("a range too long to be read")
    return found


def _int(digits: str) -> int:
    """A whole number that no arithmetic takes long over."""
    if len(digits) > _DIGITS:
        raise ValueError("a number too long to be read")
    return int(digits, 16)


# What a tagged value is made of: of a text, or of a list of values.
_OF_TEXT: dict[str, Callable[[str], Any]] = {
    "int": _int,
    "float": float,
    "complex": complex,
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "Decimal": _decimal,
}
_OF_VALUES: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
    "iterator": lambda values: Items(tuple(values)),
    "Fraction": lambda values: Fraction(*values),
    "range": _range,
    "date": lambda values: datetime.date(*values),
    "time": lambda values: datetime.time(*values),
    "datetime": lambda values: datetime.datetime(*values),
    "timedelta": lambda values: datetime.timedelta(*values),
}


def decode_values(lines: Sequence[bytes], count: int) -> tuple[Any, ...]:
    """The values of `count` expressions from the driver's lines; what is missing or malformed is a `MissingValue`."""
    values = [decode_value(line) for line in lines[:count] if line]
    return (*values, *[MissingValue("the program ended before it was evaluated")] * (count - len(values)))


def decode_value(line: bytes) -> Any:
    """The value in one line of the driver, or why there is none."""
    try:
        answer = json.loads(line)
        return _plain(answer["value"], 0) if "value" in answer else MissingValue(str(answer["error"])[:400])
    except (ValueError, TypeError, KeyError, RecursionError, AttributeError, ArithmeticError):
        return MissingValue("its answer cannot be read")


def _plain(value: Any, depth: int) -> Any:
    """The inverse of the driver's `plain`: {tag: parts} is made of its parts."""
    if depth > 60:
        raise ValueError("nested too deeply")
    if value is None or isinstance(value, bool | str | float):
        return value
    ((kind, inner),) = value.items()
    if isinstance(inner, str):
        return _OF_TEXT[kind](inner)
    if kind == "dict":
        keys = _unlike([k for k, _ in inner], depth)
        return {key: _plain(v, depth + 1) for key, (_, v) in zip(keys, inner, strict=True)}
    return _OF_VALUES[kind](_unlike(inner, depth))


def _unlike(parts: list[Any], depth: int) -> list[Any]:
    """The values of these parts. Raises `ValueError` where a thousand different ones have one hash: a set of n such takes n²
    steps, and numbers can be chosen so.
    """
    values = [_plain(part, depth + 1) for part in parts]
    if len(values) > _ALIKE:
        different = {json.dumps(part): value for part, value in zip(parts, values, strict=True)}
        hashes = sorted(map(_hash, different.values()))
        if any(map(operator.eq, hashes, hashes[_ALIKE:])):
            raise ValueError("too many values with one hash")
    return values


def _hash(value: Any) -> int:
    try:
        return hash(value)
    except TypeError:  # it stands in no set
        return id(value)
