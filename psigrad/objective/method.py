"""A method is declared once: its name, what it is in a line, its mathematics, and the settings that go with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar, cast

A = TypeVar("A")
B = TypeVar("B")


@dataclass(frozen=True)
class Method(Generic[A]):
    """A method as users choose it."""

    name: str
    """What it is called on the command line and in Python."""
    summary: str
    """What it is, in a line of `psigrad --help`."""
    algorithm: A
    """Its mathematics."""
    defaults: Mapping[str, Any]
    """Settings whose default is another than in `OnlineConfig` or `PreferenceConfig`; what the user sets wins."""


class Catalog(dict[str, Method[A]]):
    """Methods by name, in the order of their declarations."""

    def declare(self, name: str, summary: str, algorithm: B, **defaults: Any) -> B:
        """Enter a method and return its algorithm with that name."""
        named: B = replace(algorithm, name=name)  # type: ignore[type-var]
        self[name] = Method(name, summary, cast(A, named), defaults)
        return named
