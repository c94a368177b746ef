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
    """An object that translates the names under which users give settings into dotted names, such as optim.learning_rate."""

    def dotted_name(self, cls: Any, name: str) -> str:
        """Return a setting's dotted name in class `cls`: "learning_rate" -> "optim.learning_rate"; an unknown name unchanged."""

    def check(self, cls: Any, given: Iterable[tuple[str, Any]]) -> None:
        """Raise `UserError` if `given`, pairs (name, value), has one setting under two names with different values."""

    def of_file(
        self, cls: Any, in_file: Mapping[str, Any], flags: Mapping[str, Any], source: str
    ) -> tuple[dict[str, Any], list[GivenSetting]]:
        """Split the settings of a file `source` into a dict of those at their place in `cls` and a list of the others.

        `optim: {learning_rate: 1e-5}` goes into the dict, `learning_rate: 1e-5` into the list.
        """

    def translate(self, cls: Any, values: Mapping[str, Any], given: Sequence[GivenSetting]) -> list[GivenSetting]:
        """Return `given` with dotted names, and with each shortcut, such as `beta`, replaced by the settings that it stands for.

        `given` overrides `values`, the nested settings so far.
        """


class PlainNames:
    """A `Names` object that knows only psigrad's names, not those of other libraries."""

    def dotted_name(self, cls: Any, name: str) -> str:
        """Return the dotted name of a setting of `cls`. Return an unknown name unchanged."""
        return names_of(cls).get(name, name)

    def check(self, cls: Any, given: Iterable[tuple[str, Any]]) -> None:
        """Do nothing: if max_steps and run.max_steps are both given, the last one counts."""

    def of_file(
        self, cls: Any, in_file: Mapping[str, Any], flags: Mapping[str, Any], source: str
    ) -> tuple[dict[str, Any], list[GivenSetting]]:
        """See `Names.of_file`. `model: PATH` in a file means `model.path`. `flags` is ignored."""
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
        """Return `given` with dotted names and with shortcuts replaced; see `Names.translate`."""
        named = [GivenSetting(self.dotted_name(cls, one.name), one.value, one.source) for one in given]
        found, lacking = expand(cls, values, named)
        if lacking:
            raise UserError("\n".join(dict.fromkeys(sentence for _, sentence in lacking)))
        return found


OWN = PlainNames()
