"""The interface `Executor`, which runs programs and returns their outcomes. Expected values are never part of a program.

Values from a sandbox are decoded as plain Python values: decoding them executes no code.
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
    """An error for a failure of the sandbox itself, or for a missing sandbox. The program was not judged."""


@dataclass(frozen=True)
class Limits:
    """The limits of one program. A program that exceeds one is killed, with all processes that it started."""

    seconds: float = 5.0
    """CPU time of each process for each expression, rounded up to whole seconds.

    CPU time does not depend on the machine's load.
    """
    wall_seconds: float = 0.0
    """Wall-clock time of each expression, or of the run; 0: five times `seconds`."""
    memory_mb: int = 512
    """Address space of each process; with cgroups, also the memory of all of them and of their files together."""
    processes: int = 32
    """Processes and threads at once."""
    output_kb: int = 1024
    """The most that the program may print, on standard output and standard error each."""
    files_mb: int = 16
    """The size of the program's /tmp, the only folder to which it can write."""
    packages: bool = False
    """True if the program may import the packages of psigrad's own environment, such as numpy."""

    @property
    def wall(self) -> float:
        """The limit of wall-clock time in seconds."""
        return self.wall_seconds or 5 * self.seconds


@dataclass(frozen=True)
class Program:
    """A Python program to run once, with the input `stdin`. Afterwards each of the `expressions` is evaluated."""

    source: str
    stdin: str = ""
    expressions: tuple[str, ...] = ()
    until: Callable[[int, Any], bool] | None = field(default=None, compare=False)
    """A function (number, value) that is called for each expression's value, outside the sandbox.

    If it returns True, the program is killed.
    """


@dataclass(frozen=True)
class ProgramOutcome:
    """The outcome of a program."""

    status: Status
    """exited: it ended by itself, with any exit status.

    timeout, memory, output: it was killed at that limit. stopped: it was killed because `until` returned True.
    """
    code: int = 0
    """Exit status; -n for signal n."""
    stdout: str = ""
    stderr: str = ""
    values: tuple[Any, ...] = field(default=())
    """The value of each expression, made of types of the standard library; or a `MissingValue`."""
    seconds: float = 0.0


@dataclass(frozen=True)
class MissingValue:
    """The reason why an expression has no value: it raised, never ran, or has a value of a non-standard type."""

    reason: str


class Executor(Protocol):
    """An interface for running programs: bubblewrap on this machine, `RemoteExecutor` through a service over HTTP."""

    def run(self, programs: Sequence[Program], limits: Limits) -> list[ProgramOutcome]:
        """Return one outcome for each program, in order. No program sees anything of another.

        Raise `SandboxError` if a program could not be run and is not itself the cause.
        """


@dataclass(frozen=True)
class Tier:
    """The kind of sandbox of a machine, and its guarantees.

    `root`: namespaces made by root, and a separate user id for each program. `user`: an unprivileged user namespace. `none`: no
    sandbox; code rewards raise an error unless unsafe code is allowed.
    """

    name: TierName
    cgroups: tuple[str, ...] = ()
    """Controllers that limit a program's whole tree: pids, memory."""
    seccomp: bool = False
    why_not: str = ""
    """The missing program or permission and how to get it, if the tier is none."""

    def sentence(self) -> str:
        """Return a one-line description of the tier."""
        if self.name == "none":
            return "none, so code rewards are refused"
        how, own = ("running as root", "user id, ") if self.name == "root" else ("in a user namespace", "")
        limits = f"limits by cgroups ({', '.join(self.cgroups)})" if self.cgroups else "no cgroups (limits hold per process)"
        calls = "system calls filtered by seccomp" if self.seccomp else "no seccomp on this processor"
        return f"{how}: each program gets its own {own}processes and files, and no network; {limits}; {calls}"


# The most hexadecimal digits of a number, and the most different values with the same hash in one container.
_DIGITS, _ALIKE = 1 << 18, 1000


@dataclass(frozen=True)
class Items:
    """The items of an iterator that an expression returned. As in Python, they equal no list until they are converted to one."""

    items: tuple[Any, ...]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


def _decimal(text: str) -> Decimal:
    """Return the decimal in `text`. Raise `ValueError` for a very large or small one, with which arithmetic would be slow."""
    found = Decimal(text)
    if found.is_finite() and abs(found.adjusted()) > 1000:
        raise ValueError("a decimal too large or small to be read")
    return found


def _range(bounds: list[int]) -> range:
    """Return the range with these bounds. Raise `ValueError` if its list might not fit in memory."""
    found = range(*bounds)
    if len(found) > 1_000_000:
        raise ValueError("a range too long to be read")
    return found


def _int(digits: str) -> int:
    """Return the integer with these hexadecimal `digits`. Raise `ValueError` for a very long one, which would be slow."""
    if len(digits) > _DIGITS:
        raise ValueError("a number too long to be read")
    return int(digits, 16)


# Type -> a function that builds a value from the content of its tag: a text, or a list of values.
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
    """Return the values of `count` expressions from the driver's lines. Missing or malformed ones become a `MissingValue`."""
    values = [decode_value(line) for line in lines[:count] if line]
    return (*values, *[MissingValue("the program ended before it was evaluated")] * (count - len(values)))


def decode_value(line: bytes) -> Any:
    """Return the value in one line of the driver's output, or a `MissingValue` with the reason why there is none."""
    try:
        answer = json.loads(line)
        return _plain(answer["value"], 0) if "value" in answer else MissingValue(str(answer["error"])[:400])
    except (ValueError, TypeError, KeyError, RecursionError, AttributeError, ArithmeticError):
        return MissingValue("the answer cannot be read")


def _plain(value: Any, depth: int) -> Any:
    """Return the value that the driver's `plain` encoded: {tag: content} becomes a value of that type."""
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
    """Return the decoded `parts`: the items of a set, or the keys of a dictionary.

    Raise `ValueError` if about a thousand different items have the same hash. Building a set of n such items takes n² steps, and
    a program can choose its values so.
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
    except TypeError:  # the value cannot be in a set
        return id(value)
