"""Settings under the names of TRL, verl and others, for the command line and `psigrad.train`."""

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
    """The names of psigrad and of other libraries. Batch sizes are computed from those of other libraries."""

    def dotted_name(self, cls: Any, name: str) -> str:
        """See `Names`."""
        return our_name(cls, name)

    def check(self, cls: Any, given: Iterable[tuple[str, Any]]) -> None:
        """See `Names`."""
        refuse_two_values(cls, given)

    def of_file(
        self, cls: Any, in_file: Mapping[str, Any], flags: Mapping[str, Any], source: str
    ) -> tuple[dict[str, Any], list[GivenSetting]]:
        """See `Names`. A file of rl-zoo3 has a section for each environment."""
        if cls.__name__ == "ControlConfig":
            in_file = open_zoo_file(in_file, flags.get("env"), source)
        return split_file(cls, in_file, source)

    def translate(self, cls: Any, values: Mapping[str, Any], given: Sequence[GivenSetting]) -> list[GivenSetting]:
        """See `Names`."""
        return translate(cls, values, given).or_refuse()


load = partial(own.load, names=ForeignNames())
"""`psigrad.config.load.load`, but with the names of other libraries too."""


def resolve_names(cls: type[Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by dotted name, from leaf names, dotted names and names of other libraries.

    Raises `UserError` for an unknown name, and one `UserError` for all foreign names that mean something else in psigrad.
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
