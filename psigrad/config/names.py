"""Look-up of settings by psigrad's names. `psigrad/compat/foreign_names.py` also accepts the names of other libraries."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, Protocol

from psigrad.config.fields import types_of
from psigrad.config.nested import GivenSetting, names_of
from psigrad.config.shortcuts import expand
from psigrad.errors import UserError


class Names(Protocol):
    """An object that translates names of settings into psigrad's dotted names."""

    def dotted_name(self, cls: Any, name: str) -> str:
        """Return a setting's dotted name in `cls`: "learning_rate" -> "optim.learning_rate". Return other names unchanged."""

    def check(self, cls: Any, given: Iterable[tuple[str, Any]]) -> None:
        """Raise `UserError` if `given` has two values for one setting under two names."""

    def of_file(
        self, cls: Any, in_file: Mapping[str, Any], flags: Mapping[str, Any], source: str
    ) -> tuple[dict[str, Any], list[GivenSetting]]:
        """Split a file's settings into (those at their place in `cls`, such as in the section `optim`; all others).

        `in_file` is the content of the file `source`, and `flags` are the settings of the command line. In a file of rl-zoo3,
        each section is for one environment, and `env` in `flags` selects a section.
        """

    def translate(self, cls: Any, values: Mapping[str, Any], given: Sequence[GivenSetting]) -> list[GivenSetting]:
        """Return the settings `given` under dotted names. Replace shortcuts, such as `beta`, by the settings that they stand for.

        `given` overrides `values`, which are already in sections. Raises `UserError` if the method lacks what a shortcut sets.
        """


class PlainNames:
    """A `Names` object that knows only psigrad's names, not those of other libraries."""

    def dotted_name(self, cls: Any, name: str) -> str:
        """Return the dotted name of a setting of `cls`. Return an unknown name unchanged."""
        return names_of(cls).get(name, name)

    def check(self, cls: Any, given: Iterable[tuple[str, Any]]) -> None:
        """Do nothing, since each setting has only one name."""

    def of_file(
        self, cls: Any, in_file: Mapping[str, Any], flags: Mapping[str, Any], source: str
    ) -> tuple[dict[str, Any], list[GivenSetting]]:
        """See `Names.of_file`. `model: PATH` becomes `model.path`. `flags` is not read."""
        nested: dict[str, Any] = {}
        flat: list[GivenSetting] = []
        hints = types_of(cls)
        for name, value in in_file.items():
            if name == "model" and isinstance(value, str | os.PathLike):
                flat.append(GivenSetting("model.path", value, source))
            elif name in hints and (isinstance(value, Mapping) or not is_dataclass(hints[name])):
                nested[name] = value
            else:
                flat.append(GivenSetting(str(name), value, source))
        return nested, flat

    def translate(self, cls: Any, values: Mapping[str, Any], given: Sequence[GivenSetting]) -> list[GivenSetting]:
        """Return the settings `given` under dotted names, with shortcuts expanded; see `Names.translate`."""
        named = [GivenSetting(self.dotted_name(cls, one.name), one.value, one.source) for one in given]
        found, lacking = expand(cls, values, named)
        if lacking:
            raise UserError("\n".join(dict.fromkeys(sentence for _, sentence in lacking)))
        return found


OWN = PlainNames()
