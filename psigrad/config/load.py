"""Load settings into frozen dataclasses from YAML, flags and overrides `a.b=c`. Turn these dataclasses into plain values."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, TypeVar, cast, get_origin

from pydantic import TypeAdapter, ValidationError

from psigrad.config.fields import (
    PATH,
    STEPS,
    WRITTEN,
    cached,
    device_defaults,
    find_marked,
    settings_of,
    types_of,
    unread_settings,
)
from psigrad.config.language import OnlineConfig
from psigrad.config.methods import other_methods
from psigrad.config.names import OWN, Names
from psigrad.config.nested import GivenSetting, field_types, flat_names, put, read_file, read_value, value_below
from psigrad.errors import UserError, kind_of, nearest
from psigrad.paths import TypedPath, expand, find_absolute

T = TypeVar("T")


def load(
    cls: type[T],
    path: str | Path | None = None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
    names: Names = OWN,
) -> T:
    """Load settings of class `cls`. Flags beat overrides (name=value), overrides beat the YAML file, the file beats `defaults`.

    The keys of `flags` are dotted names or their last parts ("optim.learning_rate" or "learning_rate"). `names` translates other
    libraries' names. Raises `UserError` if a setting is unknown or invalid.
    """
    types = dict(field_types(cls))
    values, given = names.of_file(cls, read_file(path) if path else {}, flags or {}, str(path))
    usual: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(cls) if f.name in ("algorithm", "loss")}  # type: ignore[arg-type]
    for name, value in (defaults or {}).items():
        put(usual, name, value, "default")
    values = {name: _merge(usual.get(name), values[name]) if name in values else usual[name] for name in {**usual, **values}}
    names.check(cls, (override.partition("=")[::2] for override in overrides))
    for override in overrides:
        name, sign, text = override.partition("=")
        if not sign:
            raise UserError(
                f"The override {override!r} has no value; write it as name=value, for example optim.learning_rate=1e-5."
            )
        given.append(
            GivenSetting(name, read_value(text, types.get(names.dotted_name(cls, name)), name), f"override {override!r}")
        )
    given += [GivenSetting(name, value, f"--{name}") for name, value in (flags or {}).items()]
    beside: set[str] = set()
    for name, value, source in names.translate(cls, values, given):
        put(values, name, value, source)
        beside = beside | {name} if source != str(path) else beside - {name}
    _add_device_defaults(cls, values)
    return _locate(_build(cls, values, str(path) if path else "", beside, names))


def _locate(config: T) -> T:
    """Expand `~`, and make the paths of local inputs absolute, since user code may change the working folder."""
    made: Any = config
    for mark, find in ((PATH, find_absolute), (WRITTEN, expand)):
        for name in find_marked(type(config), mark):
            section, _, leaf = name.rpartition(".")
            owner = getattr(made, section) if section else made
            value = getattr(owner, leaf)
            if not isinstance(value, str | list | tuple):
                continue
            several = value if isinstance(value, list | tuple) else [value]
            found = [find(one) if isinstance(one, str) else one for one in several]
            owner = dataclasses.replace(owner, **{leaf: found[0] if isinstance(value, str) else type(value)(found)})
            made = dataclasses.replace(made, **{section: owner}) if section else owner
    return cast(T, made)


def _add_device_defaults(cls: type[Any], values: dict[str, Any]) -> None:
    """If the run uses a GPU, add the GPU's defaults (`DeviceDefault`) to `values`, for settings that were not given."""
    table = device_defaults(cls, "cuda")
    asked = str(value_below(cls, values, "run.device")) if table else ""
    if not (asked.startswith("cuda") or (asked == "auto" and has_cuda())):
        return
    for name, value in table.items():
        section, _, leaf = name.rpartition(".")
        within = values.get(section, {}) if section else values
        if isinstance(within, Mapping) and leaf not in within:
            put(values, name, value, "default of a GPU")


def has_cuda() -> bool:
    """Return True if torch finds a GPU, which a run then uses by default."""
    import torch

    return torch.cuda.is_available()


def _merge(below: Any, above: Any) -> Any:
    """Merge a section's given values `above` into its defaults `below`. For any other setting, return `above`."""
    sections = isinstance(below, dict) and isinstance(above, dict) and "preset" not in below
    return {**below, **above} if sections else above


def from_dict(cls: type[T], values: Mapping[str, Any], source: str) -> T:
    """Build a `cls` from the output of `to_dict`. Raise `UserError` that names the file `source` if a value is invalid."""
    return _build(cls, {name: value for name, value in values.items() if name not in ("format", "recipe")}, source)


def to_dict(config: Any) -> dict[str, Any]:
    """Return the settings as plain JSON values. Loading them gives the same settings, except for rows given from Python.

    Functions become "module:name", and rows given from Python become "rows:<count>:<SHA-256>".
    """
    return {f.name: _plain(getattr(config, f.name), f.name) for f in dataclasses.fields(config)}


@cached
def _adapter(cls: Any) -> TypeAdapter[Any]:
    return TypeAdapter(cls)


def _build(cls: type[T], values: Mapping[str, Any], source: str, beside: Set[str] = frozenset(), names: Names = OWN) -> T:
    """Return a `cls` with `values`. Errors name the file `source`, except for settings from elsewhere (`beside`)."""

    def locate(name: str) -> str:
        return f"{source}: {name}" if source and name not in beside else name

    _refuse_unknown(cls, values, source, "", names)
    values = _drop_unread(cls, values, f"{source}: " if source else "")
    try:
        made: T = _adapter(cls).validate_python(_convert_types(cls, values))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"] if not str(part).startswith(("function-", "callable", "str")))
        words = re.findall(r"'([^']+)'", first["msg"]) if first["type"] == "literal_error" else []
        near = nearest(str(first["input"]), words) or "."
        setting = settings_of(cls).get(place)
        if setting and STEPS in setting.marks and isinstance(first["input"], float) and 0 < first["input"] < 1:
            near = ", since psigrad counts steps, not shares of a run."
        what = _MODELS if place in ("reference", "critic", "model.path") else reword(first["msg"])
        raise UserError(f"{locate(place)} is {_brief(first['input'])}; {what}{near}") from None
    for name in settings_of(cls):
        found: Any = functools.reduce(getattr, name.split("."), made)
        if any(isinstance(one, float) and not math.isfinite(one) for one in (found if isinstance(found, tuple) else (found,))):
            raise UserError(f"{locate(name)} is {found}; expected a finite number.")
    for name in ("dataset", "eval_dataset"):
        value = getattr(getattr(made, "data", None), name, ())
        if not isinstance(value, Iterable):
            where = locate(f"data.{name}")
            raise UserError(f"{where} is {value!r}; expected the name of a file, folder or hub dataset, or rows.")
    return made


def _drop_unread(cls: type[Any], values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return `values` without the settings that the command does not read. A replaced setting's value moves to its replacement.

    Raises `UserError` if a value that differs from the default would have no effect.
    """
    made: dict[str, Any] = {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}
    for name, instead in unread_settings(cls).items():
        section, _, leaf = name.rpartition(".")
        if not isinstance(made.get(section), dict) or leaf not in made[section]:
            continue
        value, (of, own) = made[section].pop(leaf), instead.split(".") if instead else ("", "")
        if (tuple(value) if isinstance(value, list) else value) == getattr(getattr(cls(), section), leaf):
            continue
        if not instead and value is False:  # disabling a feature that this command never uses is harmless
            continue
        if not instead or made.get(of, {}).get(own, value) != value:
            what = f"means {instead}, which is also given" if instead else "has no effect on this command"
            raise UserError(f"{source}{name} is {value!r} and {what}; remove it.")
        put(made, instead, value, source)
    return made


def _refuse_unknown(cls: type[Any], values: Mapping[str, Any], source: str, prefix: str, names: Names) -> None:
    hints = types_of(cls)
    known = [f.name for f in dataclasses.fields(cls)]
    for name, value in values.items():
        if name not in known:
            where = f"{source}: " if source else ""
            within = f" in {prefix[:-1]}" if prefix else ""
            theirs = names.dotted_name(OnlineConfig, str(name))
            mine = theirs.rpartition(".")[2]  # another library may write optim: {lr: …}
            near = f"; did you mean {mine!r}?" if mine != name and mine in known else other_methods(cls, theirs)
            near = near or nearest(str(name), {*known, *(() if prefix else dict(flat_names(cls)))} - {str(name)})
            raise UserError(f"{where}there is no setting {name!r}{within}{near or '.'}")
        if dataclasses.is_dataclass(hints[name]):
            if not isinstance(value, Mapping):
                if dataclasses.is_dataclass(value):
                    continue
                raise UserError(
                    f"{source + ': ' if source else ''}{prefix}{name} is {value!r}; expected a mapping of names to values."
                )
            _refuse_unknown(hints[name], value, source, f"{prefix}{name}.", names)


def _convert_types(cls: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Turn paths into text and single values of tuple fields into tuples, and add `cls`'s defaults to each section."""
    hints = types_of(cls)
    made: dict[str, Any] = {}
    for name, value in values.items():
        if dataclasses.is_dataclass(hints[name]) and isinstance(value, Mapping):
            # A section keeps the defaults of this recipe. SFT's learning rate, for example, differs from that of online recipes.
            blank = getattr(cls(), name)
            usual = {f.name: getattr(blank, f.name) for f in dataclasses.fields(blank)}
            made[name] = {**usual, **_convert_types(hints[name], value)}
        elif get_origin(hints[name]) is tuple and not isinstance(value, list | tuple):
            made[name] = (value,)
        else:
            made[name] = os.fspath(value) if isinstance(value, os.PathLike) else value
    return made


def _brief(value: Any) -> str:
    """Return a value's `repr` for a message, or only its type if the `repr` is longer than 200 characters."""
    return text if len(text := repr(value)) <= 200 else f"{kind_of(value)}"


_WORDS = {
    "less than inf": "a finite number",
    "valid integer": "whole number",
    "valid ": "",
    "a string": "text",
    "a boolean": "true or false",
    "greater than or equal to": "at least",
    "greater than": "above",
    "less than or equal to": "at most",
    "less than": "below",
    "Input should be": "expected",
}
_MODELS = "expected the folder or hub name of a model"


def reword(message: str) -> str:
    """Return one of pydantic's error messages in psigrad's wording."""
    message = re.sub(r", (unable to|got a) .*", "", message.removeprefix("Value error, ").removesuffix("."))
    for theirs, ours in _WORDS.items():
        message = message.replace(theirs, ours)
    return message[0].lower() + message[1:]


def identify(value: Any) -> str:
    """Return text that identifies a value that JSON cannot express: a hash for bytes, arrays and images, else its `str`."""
    data = value if isinstance(value, bytes) else value.tobytes() if hasattr(value, "tobytes") else None
    if data is None:
        return str(value)
    return f"{getattr(value, 'size', '')} {hashlib.sha256(data).hexdigest()}"


def _plain(value: Any, field: str = "") -> Any:
    if field in ("dataset", "eval_dataset") and not isinstance(value, str):
        rows = list(value)
        if rows and all(isinstance(name, str) for name in rows):
            return [_plain(name) for name in rows]
        return f"rows:{len(rows)}:{hashlib.sha256(json.dumps(rows, sort_keys=True, default=identify).encode()).hexdigest()}"
    if field == "callbacks":
        return [_plain(v) if isinstance(v, str | Mapping) else _name(v) for v in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        name, plain = type(value).__module__, to_dict(value)
        ours = re.match(r"psigrad\.(config\b|\w+\.settings$)", name)
        return plain if ours else {"part": f"{name}:{type(value).__qualname__}", **plain}
    if isinstance(value, TypedPath):
        return value.typed
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if callable(value):
        return _name(value)
    return value


def _name(value: Any) -> str:
    """Return the module:name of a function or class, or of an object's class."""
    return f"{getattr(value, '__module__', '?')}:{getattr(value, '__qualname__', type(value).__qualname__)}"
