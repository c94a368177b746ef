"""What is known of a setting, read off its field: type and range, default, help, and marks that say how it behaves.

A fact about a setting stands on its field and nowhere else. Help, the settings page, what a run pins and what a callback may
change are read here.
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
    """What a field may say of its setting besides its type: `Annotated[int, LIVE]`.

    A setting that says nothing of a run that goes on is pinned: another value is refused, unless `run.allow` names it.
    """

    FREE = "may be another when a run goes on: it is of this start alone"
    RECORDED = "may be another when a run goes on, which is recorded: it changes results by rounding at most"
    LENGTH = "may grow with `run.extend` when a run goes on"
    LIVE = "a callback may change it during a run"
    MACHINE = "is of the machine, and not of what is trained"
    STEPS = "counts steps, where TRL takes a share of the run too"
    SEVERAL = "may be one name or several"
    MAIN = "is in the short help"
    PATH = "may name files of this disk, which are found from the folder in which the command began"
    WRITTEN = "names what is written"


FREE, RECORDED, LENGTH, LIVE = Mark.FREE, Mark.RECORDED, Mark.LENGTH, Mark.LIVE
MACHINE, STEPS, SEVERAL, MAIN = Mark.MACHINE, Mark.STEPS, Mark.SEVERAL, Mark.MAIN
PATH, WRITTEN = Mark.PATH, Mark.WRITTEN


class On:
    """What a setting of a run that trains is on a type of device unless it is given: `Annotated[str, On(cuda="bfloat16")]`."""

    def __init__(self, **values: Any) -> None:
        self.values = values


class NotRead:
    """Settings of a section that a command does not read: `run: Annotated[Run, NotRead("max_steps")]`. Where another one stands
    for it, its dotted name: `NotRead(temperature="evaluation.eval_temperature")`.
    """

    def __init__(self, *names: str, **instead: str) -> None:
        self.settings = {**dict.fromkeys(names, ""), **instead}


class ReadBy:
    """The algorithms that read a setting, or all settings of a section: `Annotated[Dqn, ReadBy("dqn")]`, or all but these."""

    def __init__(self, *algorithms: str, but: Collection[str] = ()) -> None:
        self.algorithms, self.but = algorithms, but


class Needs:
    """What a setting, or those of a section, has no effect without: one of these settings, each by its dotted name or with a
    value. `Annotated[float, Needs("sampling.sampler=vllm")]`.
    """

    def __init__(self, *settings: str) -> None:
        self.settings = settings


class Setting(NamedTuple):
    """One setting of a settings class."""

    owner: type[Any]
    """The class with its field: of `optim.learning_rate` it is `Optim`."""
    type: Any
    annotated: Any
    """The type with its range and its marks."""
    default: Any
    marks: frozenset[Mark]


def asked_once(question: C) -> C:
    """A question about a class, answered once for each: `cache`, with the types of the function, since mypy takes no class of
    unknown kind for hashable.
    """
    return cast(C, cache(question))


@asked_once
def settings_of(cls: Any) -> dict[str, Setting]:
    """Every setting that a settings class is read for, by its dotted name, in the order of the fields. Sections have the defaults
    that `cls` gives them.
    """
    return {name: setting for name, setting in _fields_of(cls()).items() if name not in unread_of(cls)}


@asked_once
def unread_of(cls: Any) -> dict[str, str]:
    """The settings of its sections that a class is not read for, each with the one that stands for it here, or nothing. They are
    no settings of its command: its help leaves them out, and they are refused, unless what is never on there is switched off.
    """
    sections = types_of(cls, notes=True)
    found = {name: mark for name, annotated in sections.items() for mark in _extras(annotated) if isinstance(mark, NotRead)}
    return {f"{name}.{leaf}": instead for name, mark in found.items() for leaf, instead in mark.settings.items()}


@asked_once
def types_of(cls: Any, notes: bool = False) -> Mapping[str, Any]:
    """The types of a class's fields by name, with the notes of `Annotated` or without; read once, which takes milliseconds."""
    return MappingProxyType(get_type_hints(cls, include_extras=notes))


def usual_on(cls: Any, device: str) -> dict[str, Any]:
    """The table of defaults of a type of device, "cuda", for a settings class: by dotted name what differs from the field's own.
    A class that trains nothing has none.
    """
    trains = "optim" in types_of(cls)
    return {name: mark.values[device] for name, mark in _notes(cls, On) if trains and device in mark.values}


def unread_by(cls: Any, algorithm: str) -> set[str]:
    """The settings, by dotted name, that this algorithm does not read; none where no algorithm is named."""
    return {name for name, mark in _notes(cls, ReadBy)
            if algorithm and (algorithm in mark.but or algorithm not in (mark.algorithms or (algorithm,)))}  # fmt: skip


def idle(config: Any) -> dict[str, str]:
    """A sentence for each setting of `config` away from its default that has no effect for want of another (`Needs`)."""
    found, settings = {}, settings_of(type(config))
    for name, mark in _notes(type(config), Needs):
        value = _value(config, name)
        if value != settings[name].default and not any(_is_set(config, one) for one in mark.settings):
            known = [one for one in mark.settings if _value(config, one.partition("=")[0]) is not None]
            found[name] = f"{name} is {value!r} and has no effect without {' or '.join(known)}."
    return found


def _notes(cls: Any, kind: type[N]) -> Iterator[tuple[str, N]]:
    """(dotted name, note) of the notes of a kind on a setting, or on the section that it stands in."""
    sections = types_of(cls, notes=True)
    for name, setting in settings_of(cls).items():
        section = sections[name.partition(".")[0]] if "." in name else None
        yield from ((name, one) for one in (*_extras(section), *_extras(setting.annotated)) if isinstance(one, kind))


def _is_set(config: Any, need: str) -> bool:
    name, _, wanted = need.partition("=")
    value = _value(config, name)
    return str(value) == wanted if wanted else bool(value)


def _value(config: Any, name: str) -> Any:
    """A setting by its dotted name; None where the class has no such setting."""
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
    """Dotted names of the settings with a mark."""
    return [name for name, setting in settings_of(cls).items() if mark in setting.marks]


def flag_of(name: str) -> str:
    """The flag of a setting: `optim.learning_rate` has --learning-rate; `model.path` has --model, as every user types it."""
    section, _, leaf = name.rpartition(".")
    return "--" + (section if leaf == "path" else leaf).replace("_", "-")


def defaults_of(cls: Any) -> dict[str, Any]:
    """The settings of `cls` as they are unless they are given, as JSON has them."""
    return dict(json.loads(json.dumps(dataclasses.asdict(cls()))))


def help_of(cls: Any, name: str) -> str:
    """The string under the field, on one line."""
    leaf = name.rpartition(".")[2]
    owners = settings_of(cls)[name].owner.__mro__
    return next((docs[leaf] for owner in owners if leaf in (docs := _docs(owner))), "")


@cache
def _docs(cls: Any) -> dict[str, str]:
    """Field -> the string under it in the source of its class."""
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
