"""Settings from YAML, `a.b=c` overrides and flags onto the frozen dataclasses of `psigrad/config/`, and back."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError

from psigrad.compat import other_names, zoo_names
from psigrad.compat.elsewhere import elsewhere
from psigrad.config.fields import STEPS, settings_of
from psigrad.config.nested import Given, put
from psigrad.errors import UserError, kind_of, nearest

T = TypeVar("T")


class _Loader(yaml.SafeLoader):
    """YAML that reads 1e-5 as a number, as every user means it; YAML 1.1 takes it for a string."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(?:[0-9][0-9_]*\.?[0-9_]*(?:[eE][-+]?[0-9]+)|[0-9][0-9_]*\.[0-9_]*|\.[0-9]+(?:[eE][-+]?[0-9]+)?|\.inf|\.nan)$"
    ),
    list("-+0123456789."),
)


def load(
    cls: type[T],
    path: str | Path | None = None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> T:
    """Settings of class `cls`: flags beat overrides, those the YAML file, that `defaults`, those the class's own.

    `flags` has names ("optim.learning_rate", or the last part alone). Names and batch sizes of TRL, verl and others are taken
    everywhere (other_names.py). Raises `UserError` naming the file or override, the field, the value and what was expected.
    """
    in_file = read_file(path) if path else {}
    if cls.__name__ == "ControlConfig":
        in_file = zoo_names.of_environment(in_file, (flags or {}).get("env"), str(path))
    hints = dict(_hints(cls))
    other_names.refuse_two_values(cls, other_names.leaves_of(in_file, cls), f"{path}: ")
    values, given = other_names.divided(cls, in_file, str(path))
    usual: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(cls) if f.name in ("algorithm", "loss")}  # type: ignore[arg-type]
    for name, value in (defaults or {}).items():
        put(usual, name, value, "default")
    values = {name: _over(usual.get(name), values[name]) if name in values else usual[name] for name in {**usual, **values}}
    other_names.refuse_two_values(cls, (override.partition("=")[::2] for override in overrides))
    for override in overrides:
        name, sign, text = override.partition("=")
        if not sign:
            raise UserError(
                f"The override {override!r} has no value; write it as name=value, for example optim.learning_rate=1e-5."
            )
        name = other_names.ours(cls, name)
        given.append(Given(name, read_value(text, hints.get(name)), f"override {override!r}"))
    given += [Given(other_names.ours(cls, name), value, f"--{name}") for name, value in (flags or {}).items()]
    beside: set[str] = set()
    for name, value, source in other_names.translated(cls, values, given):
        put(values, name, value, source)
        beside = beside | {name} if source != str(path) else beside - {name}
    return _build(cls, values, str(path) if path else "", beside)


def _over(below: Any, above: Any) -> Any:
    """A section of a file over the defaults of a method, name by name; an algorithm is taken as a whole."""
    sections = isinstance(below, dict) and isinstance(above, dict) and "preset" not in below
    return {**below, **above} if sections else above


def to_dict(config: Any) -> dict[str, Any]:
    """The settings as plain JSON values; `load` of them gives the same settings.

    Functions become "module:name", rows given from Python "rows:<count>:<SHA-256>".
    """
    return {f.name: _plain(getattr(config, f.name), f.name) for f in dataclasses.fields(config)}


def flat_names(cls: type[Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """(leaf, dotted name) of every field: ("learning_rate", "optim.learning_rate")."""
    for name, _ in _hints(cls, prefix):
        yield name.rpartition(".")[2], name


def _hints(cls: type[Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, type) of every field."""
    for name, hint in get_type_hints(cls).items():
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            yield from _hints(hint, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", hint


def resolve_names(cls: type[Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by leaf name, dotted name or a name of others -> by dotted name where it is ours.

    Raises `UserError` for a name that nobody knows, and, all at once, for those of others that mean something else here.
    """
    other_names.refuse_two_values(cls, settings.items())
    leaves = dict(flat_names(cls))
    dotted = set(leaves.values()) | {f.name for f in dataclasses.fields(cls)}
    named, wrong = {}, []
    for name, value in settings.items():
        mine = other_names.ours(cls, name)
        if mine not in dotted and other_names.refused(mine, one := other_names.value_of(value)):
            wrong.append(other_names.refusal(name, one))
        elif mine not in dotted and not other_names.is_known(name):
            raise UserError(f"There is no setting {name!r}{elsewhere(cls, name) or nearest(name, [*leaves, *dotted]) or '.'}")
        elif value is not None or name not in other_names.SAME:  # ref_model=None is a default of TRL's
            named[mine] = value
    if wrong:
        raise UserError("\n".join(wrong))
    return named


def read_file(path: str | Path) -> dict[str, Any]:
    """The settings in a YAML file."""
    try:
        values = yaml.load(Path(path).read_text(), _Loader)
    except OSError as error:
        raise UserError(f"The settings file {str(path)!r} cannot be read: {error.strerror}.") from error
    except yaml.YAMLError as error:
        said = " ".join(str(error).replace(' in "<unicode string>",', " at").split())
        hint = " Indent with spaces, not with tabs." if "'\\t'" in said else ""
        raise UserError(f"The settings file {str(path)!r} is not YAML: {said}.{hint}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UserError(f"The settings file {str(path)!r} holds {kind_of(values)}; expected name: value pairs.")
    return values


def read_value(text: str, hint: Any = None) -> Any:
    """A value as YAML reads it, or the text itself: where YAML cannot read it, and where `hint` says that the setting is text.

    `output_dir=2024` is a name. A setting that may be text or more, as `metric` may, is text unless it begins as a mapping does,
    and one of several texts unless it begins as a list does: `report_to=[]`.
    """
    if hint is str or (str in get_args(hint) and not text.startswith("[" if get_origin(hint) is tuple else "{")):
        return text
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError:
        return text


@cache
def _adapter(cls: Any) -> TypeAdapter[Any]:
    return (
        TypeAdapter(cls, config=ConfigDict(arbitrary_types_allowed=True))
        if not dataclasses.is_dataclass(cls)
        else TypeAdapter(cls)
    )


def _build(cls: type[T], values: Mapping[str, Any], source: str, beside: Set[str] = frozenset()) -> T:
    """The settings; `source` is the file that errors name, but for those of `beside`, which were given beside it."""
    _refuse_unknown(cls, values, source, "")
    try:
        made: T = _adapter(cls).validate_python(_as_meant(cls, values))  # type: ignore[arg-type]
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"] if not str(part).startswith(("function-", "callable", "str")))
        where = f"{source}: " if source and place not in beside else ""
        words = re.findall(r"'([^']+)'", first["msg"]) if first["type"] == "literal_error" else []
        near = nearest(str(first["input"]), words) or "."
        setting = settings_of(cls).get(place)
        if setting and STEPS in setting.marks and isinstance(first["input"], float) and 0 < first["input"] < 1:
            near = ", since steps are counted, not shares of a run."
        what = _MODELS if place in ("reference", "critic", "model.path") else expected(first["msg"])
        raise UserError(f"{where}{place} is {_brief(first['input'])}; {what}{near}") from None
    for name in ("dataset", "eval_dataset"):
        value = getattr(getattr(made, "data", None), name, ())
        if not isinstance(value, Iterable):
            where = f"{source}: " if source else ""
            raise UserError(f"{where}data.{name} is {value!r}; expected the name of a file, folder or hub dataset, or rows.")
    return made


def _refuse_unknown(cls: type[Any], values: Mapping[str, Any], source: str, prefix: str) -> None:
    hints = get_type_hints(cls)
    known = [f.name for f in dataclasses.fields(cls)]
    for name, value in values.items():
        if name not in known:
            where = f"{source}: " if source else ""
            within = f" in {prefix[:-1]}" if prefix else ""
            near = elsewhere(cls, str(name)) or nearest(str(name), known if prefix else {*known, *dict(flat_names(cls))})
            raise UserError(f"{where}there is no setting {name!r}{within}{near or '.'}")
        if dataclasses.is_dataclass(hints[name]):
            if not isinstance(value, Mapping):
                if dataclasses.is_dataclass(value):
                    continue
                raise UserError(f"{source + ': ' if source else ''}{prefix}{name} is {value!r}; expected name: value pairs.")
            _refuse_unknown(hints[name], value, source, f"{prefix}{name}.")


def _as_meant(cls: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` as people mean them: `reward: exact` is a tuple of one, a `Path` is its name."""
    hints = get_type_hints(cls)
    made: dict[str, Any] = {}
    for name, value in values.items():
        if dataclasses.is_dataclass(hints[name]) and isinstance(value, Mapping):
            # a section keeps the defaults that this recipe gives it: SFT's learning rate is not the online recipes'
            blank = getattr(cls(), name)
            usual = {f.name: getattr(blank, f.name) for f in dataclasses.fields(blank)}
            made[name] = {**usual, **_as_meant(hints[name], value)}
        elif get_origin(hints[name]) is tuple and not isinstance(value, list | tuple):
            made[name] = (value,)
        else:
            made[name] = os.fspath(value) if isinstance(value, os.PathLike) else value
    return made


def _brief(value: Any) -> str:
    """A value as a message shows it: a model's own text fills a screen."""
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


def expected(message: str) -> str:
    """What pydantic says of a value, in our words."""
    message = re.sub(r", (unable to|got a) .*", "", message.removeprefix("Value error, ").removesuffix("."))
    for theirs, ours in _WORDS.items():
        message = message.replace(theirs, ours)
    return message[0].lower() + message[1:]


def _plain(value: Any, field: str = "") -> Any:
    if field in ("dataset", "eval_dataset") and not isinstance(value, str):
        rows = list(value)
        if rows and all(isinstance(name, str) for name in rows):
            return rows
        return f"rows:{len(rows)}:{hashlib.sha256(json.dumps(rows, sort_keys=True, default=str).encode()).hexdigest()}"
    if field == "callbacks":
        return [_plain(v) if isinstance(v, str | Mapping) else _named(v) for v in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        name = type(value).__module__
        plain = to_dict(value)
        return (
            plain
            if re.match(r"psigrad\.(config\b|\w+\.settings$)", name)
            else {"part": f"{name}:{type(value).__qualname__}", **plain}
        )
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if callable(value):
        return _named(value)
    return value


def _named(value: Any) -> str:
    """module:name of a function or class, or of an object's class."""
    return f"{getattr(value, '__module__', '?')}:{getattr(value, '__qualname__', type(value).__qualname__)}"
