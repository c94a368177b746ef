"""Values that come out of a sandbox, as plain Python values: nothing is executed, built or compared in there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from psigrad.processes.sandbox.executor import MissingValue


def decoded(lines: Sequence[bytes], count: int) -> tuple[Any, ...]:
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
