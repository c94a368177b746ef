"""The accepted names of settings. An entrance may also know those of other libraries (`psigrad/compat/foreign_names.py`)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, Protocol

from psigrad.config.fields import types_of
from psigrad.config.nested import Given, names_of
from psigrad.config.shortcuts import expand
from psigrad.errors import UserError


class Names(Protocol):
    """An object that knows names of settings and translates them into psigrad's dotted names."""

    def own(self, cls: Any, name: str) -> str:
        """Return the dotted name of a setting of class `cls`: "learning_rate" -> "optim.learning_rate". Keep unknown names."""
        ...

    def check(self, cls: Any, given: Iterable[tuple[str, Any]]) -> None:
        """Raise `UserError` if one setting has two values under two names."""
        ...

    def of_file(
        self, cls: Any, in_file: Mapping[str, Any], flags: Mapping[str, Any], source: str
    ) -> tuple[dict[str, Any], list[Given]]:
        """Return (settings by section, settings by name alone) of a file. A file may hold both."""
        ...

    def translate(self, cls: Any, values: Mapping[str, Any], given: Sequence[Given]) -> list[Given]:
        """Return the given settings under dotted names, with shortcuts expanded. They beat `values`. Raises `UserError`."""
        ...


class OwnNames:
    """psigrad's names only."""

    def own(self, cls: Any, name: str) -> str:
        """See `Names`."""
        return names_of(cls).get(name, name)

    def check(self, cls: Any, given: Iterable[tuple[str, Any]]) -> None:
        """See `Names`."""

    def of_file(
        self, cls: Any, in_file: Mapping[str, Any], flags: Mapping[str, Any], source: str
    ) -> tuple[dict[str, Any], list[Given]]:
        """See `Names`."""
        nested: dict[str, Any] = {}
        flat: list[Given] = []
        hints = types_of(cls)
        for name, value in in_file.items():
            if name == "model" and isinstance(value, str | os.PathLike):
                flat.append(Given("model.path", value, source))
            elif name in hints and (isinstance(value, Mapping) or not is_dataclass(hints[name])):
                nested[name] = value
            else:
                flat.append(Given(str(name), value, source))
        return nested, flat

    def translate(self, cls: Any, values: Mapping[str, Any], given: Sequence[Given]) -> list[Given]:
        """See `Names`."""
        named = [Given(self.own(cls, one.name), one.value, one.source) for one in given]
        found, lacking = expand(cls, values, named)
        if lacking:
            raise UserError("\n".join(dict.fromkeys(sentence for _, sentence in lacking)))
        return found


OWN = OwnNames()
