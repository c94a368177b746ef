"""Flags as TRL's users write them: underscores, its names, and `--flag true` where the flag alone is enough."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from psigrad.compat import other_names
from psigrad.config.fields import flag_of
from psigrad.config.load import read_value
from psigrad.errors import UserError

_TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def divided(cls: type[Any], arguments: Sequence[str], switches: Mapping[str, bool]) -> tuple[list[str], dict[str, Any]]:
    """(arguments with flags as we write them, settings of others that are no flags of ours).

    `switches` has our flags, and which of them take no value. Raises `UserError` for names that mean something else
    here, all of them at once.
    """
    ours: list[str] = []
    others: dict[str, Any] = {}
    wrong: list[str] = []
    other_names.refuse_two_values(cls, _spelt(arguments))
    for text, values in _flags(arguments):
        typed, sign, value = text.partition("=")
        flag = typed.replace("_", "-")
        name = typed.lstrip("-").replace("-", "_")
        if typed.startswith("--") and typed not in switches and flag not in switches:
            flag = _flag(other_names.ours(cls, name), switches) or flag
        if not text.startswith("--"):
            ours += [text, *values]
        elif flag in switches:
            given = value if sign else values[0] if values else ""
            if switches[flag] and given.lower() in _TRUTH:
                ours += [flag if _TRUTH[given.lower()] else f"--no-{flag[2:]}", *values[0 if sign else 1 :]]
            else:
                ours += [f"{flag}{sign}{value}", *values]
        elif other_names.is_known(name):
            others[name] = _value(value if sign else None, values)
            if other_names.refused(name, one := other_names.value_of(others[name])):
                wrong.append(other_names.refusal(name, one, typed))
        else:
            ours += [f"{flag}{sign}{value}", *values]
    if wrong:
        raise UserError("\n".join(wrong))
    return ours, others


def _spelt(arguments: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """(name, value) of each flag as it was typed; of one that stands there twice the last holds, as everywhere."""
    for text, values in _flags(arguments):
        typed, sign, value = text.partition("=")
        if typed.startswith("--"):
            yield typed[2:].replace("-", "_"), _value(value if sign else None, values)


def _flags(arguments: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each flag with the values behind it; what stands before the first flag comes by itself."""
    flag, values = "", list[str]()
    for text in arguments:
        if text.startswith("--") or not flag:
            if flag:
                yield flag, values
            flag, values = (text, []) if text.startswith("--") else ("", [])
            if not flag:
                yield text, []
        else:
            values.append(text)
    if flag:
        yield flag, values


def _flag(name: str, switches: Mapping[str, bool]) -> str:
    """Our flag of a dotted setting, where there is one."""
    return flag_of(name) if flag_of(name) in switches else ""


def _value(behind: str | None, values: Sequence[str]) -> Any:
    if behind is not None:
        return read_value(behind)
    if not values:
        return True
    return read_value(values[0]) if len(values) == 1 else [read_value(value) for value in values]
