"""Settings as nested mappings, before they are built."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, NamedTuple

from psigrad.errors import UserError


class Given(NamedTuple):
    """One setting as it was given: its name, its value, and where, for error messages."""

    name: str
    value: Any
    source: str


def put(values: dict[str, Any], name: str, value: Any, source: str) -> None:
    """Set `a.b.c`, making the mappings on the way.

    On the way through `algorithm` and `loss` a preset's name becomes {preset: name}, a part's {part: name}, and null nothing.
    """
    first, *parents, leaf = [*name.split(".")] if "." in name else ["", name]
    for parent in [first, *parents] if first else []:
        inner = values.setdefault(parent, {})
        if parent in ("algorithm", "loss") and isinstance(inner, str):
            inner = values[parent] = {"preset": inner}
        elif first in ("algorithm", "loss") and (inner is None or isinstance(inner, str)):
            inner = values[parent] = {} if inner is None else {"part": inner}
        if not isinstance(inner, dict):
            raise UserError(f"The {source} goes into {parent!r}, which is {inner!r} and has no fields.")
        values = inner
    values[leaf] = deepcopy(value) if isinstance(value, dict) else value  # the caller's own stays as it is
