"""The facts about a setting, read from its field: type and range, default, help text, and marks for its behaviour.

They are stored nowhere else.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import json
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping
from enum import Enum
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, cast, get_type_hints

N = TypeVar("N")
C = TypeVar("C", bound=Callable[..., Any])


class Mark(Enum):
    """The marks that a field may carry besides its type: `Annotated[int, LIVE]`.

    A setting without FREE, RECORDED or LENGTH is pinned: a resumed run rejects a changed value unless `run.allow` names it.
    """

    FREE = "may differ when a run resumes: it applies only to this start"
    RECORDED = "may differ when a run resumes, and the change is recorded: it changes results by rounding at most"
    LENGTH = "may grow with `run.extend` when a run resumes"
    LIVE = "a callback may change it during a run"
    MACHINE = "describes the machine, not what is trained"
    STEPS = "counts steps; TRL also accepts a share of the run"
    SEVERAL = "may be one name or several"
    MAIN = "is in the short help"
    PATH = "may name local files, relative to the folder in which the command started"
    WRITTEN = "names an output"


FREE, RECORDED, LENGTH, LIVE = Mark.FREE, Mark.RECORDED, Mark.LENGTH, Mark.LIVE
MACHINE, STEPS, SEVERAL, MAIN = Mark.MACHINE, Mark.STEPS, Mark.SEVERAL, Mark.MAIN
PATH, WRITTEN = Mark.PATH, Mark.WRITTEN


class DeviceDefault:
    """An annotation of a setting: its default on a type of device, as in `Annotated[str, DeviceDefault(cuda="bfloat16")]`."""

    def __init__(self, **values: Any) -> None:
        self.values = values


class Unread:
    """An annotation of a section: the settings that a command does not read, as in `run: Annotated[Run, Unread("max_steps")]`.

    `Unread(temperature="evaluation.eval_temperature")` also names the setting that replaces it.
    """

    def __init__(self, *names: str, **instead: str) -> None:
        self.settings = {**dict.fromkeys(names, ""), **instead}


class ReadBy:
    """An annotation of a setting or section: the algorithms that read it, as in `Annotated[Dqn, ReadBy("dqn")]`.

    With the argument `but`, all algorithms except those in `but` read it.
    """

    def __init__(self, *algorithms: str, but: Collection[str] = ()) -> None:
        self.algorithms, self.but = algorithms, but


class Needs:
    """An annotation: the setting or section has no effect unless at least one condition in `settings` is true.

    "sampling.sampler=vllm" is true if the setting has this value; "environment" is true if it is not False, 0 or empty.
    """

    def __init__(self, *settings: str) -> None:
        self.settings = settings


class Setting(NamedTuple):
    """One setting of a settings class: its type, its default and its marks, read from a field."""

    owner: type[Any]
    """The class that has the field: `Optim` for `optim.learning_rate`."""
    type: Any
    annotated: Any
    """The type with its range and its marks."""
    default: Any
    marks: frozenset[Mark]


def cached(function: C) -> C:
    """Return the function with its results cached and its type unchanged."""
    # The type from `functools.cache` needs hashable arguments, and mypy does not accept some classes as hashable.
    return cast(C, cache(function))


@cached
def settings_of(cls: Any) -> dict[str, Setting]:
    """Return {dotted name: setting} for each setting that the command of the settings class `cls` reads, in field order.

    Defaults are those of `cls`, not those of its sections' classes.
    """
    return {name: setting for name, setting in _fields_of(cls()).items() if name not in unread_settings(cls)}


@cached
def unread_settings(cls: Any) -> dict[str, str]:
    """Return {setting that the command of `cls` does not read: the setting that replaces it, or "" if there is none}."""
    sections = types_of(cls, notes=True)
    found = {name: mark for name, annotated in sections.items() for mark in _extras(annotated) if isinstance(mark, Unread)}
    return {f"{name}.{leaf}": instead for name, mark in found.items() for leaf, instead in mark.settings.items()}


@cached
def types_of(cls: Any, notes: bool = False) -> Mapping[str, Any]:
    """Return {name: type} of a class's fields, with or without the notes of `Annotated`."""
    return MappingProxyType(get_type_hints(cls, include_extras=notes))


def device_defaults(cls: Any, device: str) -> dict[str, Any]:
    """Return {dotted name: default on `device`} from the `DeviceDefault` notes; {} if the command of `cls` does not train."""
    trains = "optim" in types_of(cls)
    return {name: mark.values[device] for name, mark in _notes(cls, DeviceDefault) if trains and device in mark.values}


def unread_by(cls: Any, algorithm: str) -> set[str]:
    """Return the dotted names of the settings that this algorithm does not read; an empty set if `algorithm` is ""."""
    return {name for name, mark in _notes(cls, ReadBy)
            if algorithm and (algorithm in mark.but or algorithm not in (mark.algorithms or (algorithm,)))}  # fmt: skip


def idle(config: Any) -> dict[str, str]:
    """Return {name: message} for each changed setting that has no effect, because its `Needs` note is not satisfied."""
    found, settings = {}, settings_of(type(config))
    for name, mark in _notes(type(config), Needs):
        value = _value(config, name)
        if value != settings[name].default and not any(_is_set(config, one) for one in mark.settings):
            known = [one for one in mark.settings if _value(config, one.partition("=")[0]) is not None]
            found[name] = f"{name} is {value!r} and has no effect without {' or '.join(known)}; remove it."
    return found


def _notes(cls: Any, kind: type[N]) -> Iterator[tuple[str, N]]:
    """Yield (dotted name, note) for each note of the class `kind` on a setting or on its section."""
    sections = types_of(cls, notes=True)
    for name, setting in settings_of(cls).items():
        section = sections[name.partition(".")[0]] if "." in name else None
        yield from ((name, one) for one in (*_extras(section), *_extras(setting.annotated)) if isinstance(one, kind))


def _is_set(config: Any, need: str) -> bool:
    name, _, wanted = need.partition("=")
    value = _value(config, name)
    return str(value) == wanted if wanted else bool(value)


def _value(config: Any, name: str) -> Any:
    """Return a setting by its dotted name, or None if the class has no such setting."""
    return functools.reduce(lambda inner, part: getattr(inner, part, None), name.split("."), config)


def _fields_of(instance: Any, prefix: str = "") -> dict[str, Setting]:
    owner = type(instance)
    plain, annotated = types_of(owner), types_of(owner, notes=True)
    found: dict[str, Setting] = {}
    for f in dataclasses.fields(owner):
        name, default = f.name, getattr(instance, f.name)
        if dataclasses.is_dataclass(plain[name]):
            found |= _fields_of(default, f"{prefix}{name}.")
        else:
            marks = frozenset(one for one in _extras(annotated[name]) if isinstance(one, Mark))
            found[prefix + name] = Setting(owner, plain[name], annotated[name], default, marks)
    return found


def _extras(annotated: Any) -> tuple[Any, ...]:
    return tuple(getattr(annotated, "__metadata__", ()))


def find_marked(cls: Any, mark: Mark) -> list[str]:
    """Return the dotted names of the settings with a mark."""
    return [name for name, setting in settings_of(cls).items() if mark in setting.marks]


def flag_of(name: str) -> str:
    """Return the flag of a setting: the last part of its name, such as --learning-rate, but --model for `model.path`."""
    section, _, leaf = name.rpartition(".")
    return "--" + (section if leaf == "path" else leaf).replace("_", "-")


def defaults_of(cls: Any) -> dict[str, Any]:
    """Return the default settings of `cls` as JSON values."""
    return dict(json.loads(json.dumps(dataclasses.asdict(cls()))))


def help_of(cls: Any, name: str) -> str:
    """Return the help text of a setting, which is the string under its field, on one line."""
    leaf = name.rpartition(".")[2]
    owners = settings_of(cls)[name].owner.__mro__
    return next((docs[leaf] for owner in owners if leaf in (docs := _docs(owner))), "")


@cache
def _docs(cls: Any) -> dict[str, str]:
    """Return {field: the string under it} from the source code of the class."""
    if not dataclasses.is_dataclass(cls):
        return {}
    source: Any = cls
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(source))).body
    assert isinstance(definition, ast.ClassDef)
    docs = {}
    for field, below in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            assert isinstance(field.target, ast.Name)
            docs[field.target.id] = " ".join(str(below.value.value).split())
    return docs
