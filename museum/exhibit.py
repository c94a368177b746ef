"""The form of an exhibit, and the verdict on a library's values."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any, NamedTuple

LIBRARIES = ("psigrad", "trl", "transformers", "stable_baselines3", "gymnasium")
MODULES = ("museum.losses", "museum.tokens", "museum.control")


class Case(NamedTuple):
    """The inputs and values of an exhibit."""

    inputs: SimpleNamespace
    """What every adapter receives."""
    right: Sequence[float]
    """The values by the derivation."""
    wrong: Sequence[float]
    """The values by the faulty formula."""
    tolerance: float = 1e-4
    """The largest deviation of one value that still counts as right."""


class Refusal(Exception):
    """An error for a library that cannot compute the value and raises an error, so that the fault cannot happen silently."""


@dataclass(frozen=True)
class Exhibit:
    """A public fault with its right value."""

    name: str
    sources: tuple[str, ...]
    """Threads on GitHub, as owner/repository#number."""
    psigrad_too: bool
    """True if psigrad had this fault as well."""
    story: str
    """The fault in one sentence, then the derivation."""
    build: Callable[[], Case]

    @cached_property
    def case(self) -> Case:
        """The inputs and values, computed on first access."""
        return self.build()

    @property
    def title(self) -> str:
        """The fault in one sentence."""
        return self.story.split("\n\n")[0].replace("\n", " ")

    @property
    def links(self) -> list[str]:
        """The addresses of the threads."""
        return [f"https://github.com/{source.replace('#', '/issues/')}" for source in self.sources]

    def deviation(self, values: Sequence[float]) -> float:
        """Return the largest deviation of `values` from the right ones; infinite if their number differs or one is NaN."""
        if len(values) != len(self.case.right):
            return math.inf
        found = [abs(value - right) for value, right in zip(values, self.case.right, strict=True)]
        return math.inf if any(map(math.isnan, found)) else max(found)

    def accepts(self, values: Sequence[float]) -> bool:
        """Return True if these values are right."""
        return self.deviation(values) <= self.case.tolerance


EXHIBITS: dict[str, Exhibit] = {}


def exhibit(*sources: str, psigrad_too: bool = False) -> Callable[[Callable[[], Case]], Callable[[], Case]]:
    """Register a function as an exhibit. Its name is the exhibit's, and its docstring explains the fault."""

    def register(build: Callable[[], Case]) -> Callable[[], Case]:
        name = build.__name__.replace("_", "-")
        EXHIBITS[name] = Exhibit(name, sources, psigrad_too, inspect.getdoc(build) or "", build)
        return build

    return register


def load() -> dict[str, Exhibit]:
    """Return all exhibits by name."""
    for module in MODULES:
        importlib.import_module(module)
    return EXHIBITS


def names_of(*modules: str) -> list[str]:
    """Return the names of the exhibits' functions in these modules."""
    return [item.build.__name__ for item in load().values() if item.build.__module__ in modules]


class Finding(NamedTuple):
    """The result of a library on an exhibit."""

    state: str
    """right, wrong, refuses, or n/a."""
    note: str


def find(adapter: Any, item: Exhibit) -> Finding:
    """Compute an exhibit's values with the module `adapter`, and compare them."""
    key = item.name.replace("-", "_")
    if key in adapter.NOT_APPLICABLE:
        return Finding("n/a", adapter.NOT_APPLICABLE[key])
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):  # trainers print a lot
            values = [float(value) for value in getattr(adapter, key)(item.case.inputs)]
    except Refusal as error:
        return Finding("refuses", str(error))
    if item.accepts(values):
        return Finding("right", show(values))
    return Finding("wrong", f"{show(values)} instead of {show(item.case.right)}")


def show(values: Sequence[float]) -> str:
    """Return the values as text, rounded to significant digits."""
    return ", ".join(f"{value:.4g}" for value in values)
