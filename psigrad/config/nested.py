"""Settings as nested mappings: reading, naming and merging, before the dataclasses are built."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin

import yaml

from psigrad.config.fields import cached, settings_of, unread_settings
from psigrad.errors import UserError, kind_of


class GivenSetting(NamedTuple):
    """A setting as it was given: its name, its value, and its source, which error messages name."""

    name: str
    value: Any
    source: str


def put(values: dict[str, Any], name: str, value: Any, source: str) -> None:
    """Set the setting with the dotted name `name` in nested `values`, and create the missing mappings on the path.

    A value on the path that is only the name of a preset or part is replaced by a mapping. Error messages name the `source`.
    """
    first, *parents, leaf = [*name.split(".")] if "." in name else ["", name]
    for parent in [first, *parents] if first else []:
        inner = values.setdefault(parent, {})
        if parent in ("algorithm", "loss") and isinstance(inner, str):
            inner = values[parent] = {"preset": inner}
        elif first in ("algorithm", "loss") and (inner is None or isinstance(inner, str)):
            inner = values[parent] = {} if inner is None else {"part": inner}
        if not isinstance(inner, dict):
            raise UserError(
                f"{name} ({source}) sets a field of {parent!r}, but {parent!r} is {inner!r}, which has no fields; "
                f"remove {name} or {parent}."
            )
        values = inner
    values[leaf] = deepcopy(value) if isinstance(value, dict) else value  # the caller's object must not change


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return nested dictionaries as one dictionary with dotted names."""
    if not isinstance(value, Mapping) or not value:
        return {prefix: value} if prefix else {}
    return {k: v for name, inner in value.items() for k, v in flatten(inner, f"{prefix}.{name}" if prefix else str(name)).items()}


def flat_names(cls: type[Any]) -> Iterator[tuple[str, str]]:
    """Return (leaf, dotted name) of every setting: ("learning_rate", "optim.learning_rate")."""
    return ((name.rpartition(".")[2], name) for name in settings_of(cls))


def field_types(cls: type[Any]) -> Iterator[tuple[str, Any]]:
    """Return (dotted name, type) of every setting."""
    return ((name, setting.type) for name, setting in settings_of(cls).items())


MOST_VALUES = 100_000
"""The maximum number of values in a file of settings."""


class _Loader(yaml.SafeLoader):
    """A YAML loader without the surprises of YAML 1.1: 1e-5 is a number, a date is text, and a repeated key is an error."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)  # before merges (<<), since a key may override a merged one
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge"]
        for i, key in enumerate(keys):
            if any((key.tag, key.value) == (other.tag, other.value) for other in keys[:i]):
                raise yaml.MarkedYAMLError(problem=f"{key.value!r} is given twice", problem_mark=key.start_mark)
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)  # replaces merges (<<) by their keys, which nested merges multiply
        if len(node.value) > MOST_VALUES:
            raise yaml.MarkedYAMLError(problem=f"<< merges more than {MOST_VALUES:,} keys", problem_mark=node.start_mark)


def _check_size(values: Any) -> None:
    """Raise `ValueError` for more than `MOST_VALUES` values. Nested aliases can give even a small file too many."""
    found = [values]
    for value in found:
        found += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        if len(found) > MOST_VALUES:
            raise ValueError(f"the file has more than {MOST_VALUES:,} values")


_Loader.add_constructor("tag:yaml.org,2002:timestamp", lambda loader, node: node.value)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(?:[0-9][0-9_]*\.?[0-9_]*(?:[eE][-+]?[0-9]+)|[0-9][0-9_]*\.[0-9_]*|\.[0-9]+(?:[eE][-+]?[0-9]+)?|\.inf|\.nan)$"
    ),
    list("-+0123456789."),
)


def read_file(path: str | Path) -> dict[str, Any]:
    """Read the settings in a YAML file. Raises `UserError` if it cannot be read or does not contain a mapping."""
    try:
        values = yaml.load(Path(path).read_text(), _Loader)
        _check_size(values)
    except OSError as error:
        raise UserError(f"The settings file {str(path)!r} cannot be read: {error.strerror}.") from error
    except RecursionError:
        raise UserError(f"The settings file {str(path)!r} is nested too deeply; expected a few levels of settings.") from None
    except (yaml.YAMLError, ValueError) as error:
        said = " ".join(str(error).replace(' in "<unicode string>",', " at").split())
        hint = " Indent with spaces, not with tabs." if "'\\t'" in said else ""
        raise UserError(f"The settings file {str(path)!r} is not YAML: {said}.{hint}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UserError(f"The settings file {str(path)!r} holds {kind_of(values)}; expected a mapping of names to values.")
    return values


_OBJECT = re.compile(r'\s*\{\s*"')


def read_value(text: str, hint: Any = None, name: str = "a value") -> Any:
    """Read a value as YAML. Return the text itself if it is not YAML, or if the type of the setting, `hint`, is text."""
    # `output_dir=2024` is text. So is `metric`, which may be a mapping, unless it starts with `{`, and `report_to`, which may be
    # several texts, unless it starts with `[`.
    if hint is str or (str in get_args(hint) and not text.startswith("[" if get_origin(hint) is tuple else "{")):
        return text
    if _OBJECT.match(text):  # not as YAML, which takes a misspelt `false` for text
        try:
            return json.loads(text)
        except ValueError as error:
            raise UserError(f"{name} is {text!r}, which starts like a JSON object but is not valid JSON ({error}).") from None
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError:
        return text


@cached
def names_of(cls: Any) -> dict[str, str]:
    """Return {name: dotted name}: max_steps and run.max_steps both map to run.max_steps. A section's name maps to itself."""
    meant = {
        **{dotted: dotted for dotted, _ in field_types(cls)},
        **{name: other or name for name, other in unread_settings(cls).items()},
    }
    leaves = {name: other for dotted, other in meant.items() for name in (dotted.rpartition(".")[2], dotted)}
    return leaves | {f.name: f.name for f in fields(cls)}


def value_below(cls: Any, values: Mapping[str, Any], name: str) -> Any:
    """Return the value of the setting `name` in nested `values`. If it is not there, return its default in `cls`."""
    first, _, rest = name.partition(".")
    inner = values.get(first, getattr(cls(), first))
    if not rest:
        return inner
    return inner[rest] if isinstance(inner, Mapping) and rest in inner else getattr(getattr(cls(), first), rest)
