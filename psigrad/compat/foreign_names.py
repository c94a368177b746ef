"""Loading of settings under the names of TRL, verl and others, for the command line and `psigrad.train`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from psigrad.compat.entrances import open_zoo_file, split_file
from psigrad.compat.translate import is_known, is_refused, one_value, our_name, our_value, refusal, refuse_two_values, translate
from psigrad.config import load as own
from psigrad.config.fields import unread_settings
from psigrad.config.language import OnlineConfig
from psigrad.config.methods import other_methods
from psigrad.config.nested import GivenSetting, flat_names
from psigrad.errors import UserError, nearest


class ForeignNames:
    """A `Names` that accepts the names of psigrad and of other libraries, and converts other libraries' batch sizes."""

    def dotted_name(self, cls: Any, name: str) -> str:
        """Return psigrad's dotted name of a setting of class `cls`: "lr" -> "optim.learning_rate". Keep an unknown name."""
        return our_name(cls, name)

    def check(self, cls: Any, given: Iterable[tuple[str, Any]]) -> None:
        """Raise `UserError` if one setting is given under two names with two values."""
        refuse_two_values(cls, given)

    def of_file(
        self, cls: Any, in_file: Mapping[str, Any], flags: Mapping[str, Any], source: str
    ) -> tuple[dict[str, Any], list[GivenSetting]]:
        """Return (psigrad's sections with their settings, all other settings) of a file. See `split_file` and `open_zoo_file`."""
        if cls.__name__ == "ControlConfig":
            in_file = open_zoo_file(in_file, flags.get("env"), source)
        return split_file(cls, in_file, source)

    def translate(self, cls: Any, values: Mapping[str, Any], given: Sequence[GivenSetting]) -> list[GivenSetting]:
        """Return the given settings under psigrad's names. Raises `UserError` for those without an equivalent."""
        return translate(cls, values, given).or_refuse()


load = partial(own.load, names=ForeignNames())
"""`psigrad.config.load.load`, which also accepts the names of other libraries."""


def resolve_names(cls: type[Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return `settings` under psigrad's dotted names. The given names may be dotted, undotted, or another library's.

    Raises `UserError` for an unknown name, and one `UserError` for all names of other libraries that have no equivalent.
    """
    refuse_two_values(cls, settings.items())
    leaves = dict(flat_names(cls))
    dotted = {*leaves.values(), *unread_settings(cls), *(f.name for f in dataclasses.fields(cls))}
    named, wrong = {}, []
    for name, value in settings.items():
        mine = our_name(cls, name)
        if mine not in dotted and is_refused(mine, one := one_value(value)):
            wrong.append(refusal(name, one))
        elif mine not in dotted and not is_known(name):
            near = other_methods(cls, our_name(OnlineConfig, name)) or nearest(name, [*leaves, *dotted]) or "."
            raise UserError(f"There is no setting {name!r}{near}")
        elif value is not None or mine == name or name in leaves:  # ref_model=None is TRL's default
            named[mine] = our_value(name, value)
    if wrong:
        raise UserError("\n".join(wrong))
    return named
