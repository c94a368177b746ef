"""Parsing of flags and configuration files written for other libraries, before the names in them are translated."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from functools import partial
from typing import Any

from psigrad.compat.translate import is_known, is_refused, one_value, our_name, refusal, refuse_two_values
from psigrad.config.fields import settings_of, types_of
from psigrad.config.nested import GivenSetting, names_of, read_value
from psigrad.config.shortcuts import shortcuts_of
from psigrad.errors import UserError, nearest

_TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def split_file(cls: type[Any], in_file: Mapping[str, Any], source: str) -> tuple[dict[str, Any], list[GivenSetting]]:
    """Return (psigrad's sections with their settings, all other settings by dotted name) of a file, which may have both.

    Outside the sections are single names, such as `learning_rate: 1e-5`, and the leaves of verl's trees:
    actor_rollout_ref: {actor: {optim: {lr: 1e-6}}}. Raises `UserError` if one setting has two values.
    """
    nested: dict[str, Any] = {}
    flat: list[GivenSetting] = []
    hints = types_of(cls)
    for name, value in in_file.items():
        section = is_dataclass(hints.get(name))
        if section and isinstance(value, Mapping):
            fields = types_of(hints[name])
            theirs = {key: inner for key, inner in value.items() if key not in fields and is_known(f"{name}.{key}")}
            flat += [GivenSetting(f"{name}.{key}", inner, source) for key, inner in theirs.items()]
            nested[name] = {key: inner for key, inner in value.items() if key not in theirs}
        elif name == "algorithm" and isinstance(value, Mapping):  # verl has a tree of this name
            trees = {key: _leaves(cls, f"algorithm.{key}", inner) for key, inner in value.items()}
            verls = [key for key, leaves in trees.items() if any(is_known(leaf) for leaf, _ in leaves)]
            flat += [GivenSetting(leaf, inner, source) for key in verls for leaf, inner in trees[key]]
            if len(verls) < len(value) or not value:
                nested[name] = {key: inner for key, inner in value.items() if key not in verls}
        elif name == "model" and isinstance(value, str | os.PathLike):
            flat.append(GivenSetting("model.path", value, source))
        elif name in hints and not (name == "optim" and isinstance(value, str)):
            nested[name] = value
        else:
            flat += [GivenSetting(leaf, inner, source) for leaf, inner in _leaves(cls, str(name), value)]
    sections = [(name, value if isinstance(value, Mapping) else {"": value}) for name, value in nested.items()]
    deep = [(f"{name}.{key}".rstrip("."), inner) for name, section in sections for key, inner in section.items()]
    refuse_two_values(cls, [*((one.name, one.value) for one in flat), *deep], f"{source}: ")
    return nested, flat


def _leaves(cls: type[Any], name: str, value: Any) -> list[tuple[str, Any]]:
    """Return (dotted name, value) of each leaf of a tree.

    A mapping under the name of a setting is not a tree but the setting's value: `columns: {a: prompt}`.
    """
    if is_known(name) or our_name(cls, name) in settings_of(cls) or not isinstance(value, Mapping) or not value:
        return [(name, value)]
    return [leaf for key, inner in value.items() for leaf in _leaves(cls, f"{name}.{key}", inner)]


def split_flags(
    cls: type[Any], arguments: Sequence[str], switches: Mapping[str, bool], flag_of: Callable[[str], str]
) -> tuple[list[str], dict[str, Any]]:
    """Return (the arguments with psigrad's flags, the settings under other libraries' names that are not flags of psigrad).

    Users of TRL type flags with underscores, under TRL's names, and `--flag true` for a flag that takes no value in psigrad.
    `switches` maps each flag of psigrad to True if it takes no value. Raises one `UserError` that lists all flags without an
    equivalent in psigrad.
    """
    ours: list[str] = []
    others: dict[str, Any] = {}
    wrong: list[str] = []
    typed_flags = [(text, values) for text, values in _group(arguments) if text.startswith("--")]
    refuse_two_values(cls, [(_name(text), _read(text, values)) for text, values in typed_flags])
    flags = {name: flag for name in (*names_of(cls).values(), *shortcuts_of(cls)) if (flag := flag_of(name)) in switches}
    for text, values in _group(arguments):
        typed, sign, value = text.partition("=")
        flag = typed.replace("_", "-")
        name = _name(text)
        if typed.startswith("--") and typed not in switches and flag not in switches:
            flag = flags.get(our_name(cls, name), flag) if name != "reward_funcs" else flag  # its values need translation too
        if not text.startswith("--"):
            ours += [text, *values]
        elif flag in switches:
            given = value if sign else values[0] if values else ""
            if switches[flag] and given.lower() in _TRUTH:
                ours += [flag if _TRUTH[given.lower()] else f"--no-{flag[2:]}", *values[0 if sign else 1 :]]
            else:
                ours += [f"{flag}{sign}{value}", *values]
        elif is_known(name):
            others[name] = _read(text, values)
            if our_name(cls, name) not in flags and is_refused(name, one := one_value(others[name])):
                wrong.append(refusal(name, one, typed))
        else:
            ours += [f"{flag}{sign}{value}", *values]
    if wrong:
        raise UserError("\n".join(wrong))
    return ours, others


def _group(arguments: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each flag with the values after it. Yield each argument before the first flag alone."""
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


def _name(text: str) -> str:
    return text.partition("=")[0].lstrip("-").replace("-", "_")


def _read(text: str, values: Sequence[str]) -> Any:
    """Return the value of a flag: the text after its "=", or the values that follow it, or True."""
    _, sign, behind = text.partition("=")
    read = partial(read_value, name=text.partition("=")[0])
    return read(behind) if sign else one_value([read(value) for value in values]) if values else True


_SCHEDULES = {"learning_rate": "lr_scheduler_type", "clip_range": "clip_range_schedule"}


def open_zoo_file(in_file: Mapping[str, Any], env: Any, source: str) -> dict[str, Any]:
    """Return the settings of a file. If it is a file of rl-zoo3, which has a section per environment, return one section.

    It is the section of `env`, or the only section if `env` is None. Linear schedules and `normalize` become psigrad's
    settings. Raises `UserError` if the file has no section for the environment, or several and `env` is None.
    """
    sections = {name: part for name, part in in_file.items() if isinstance(part, Mapping) and {"policy", "n_timesteps"} & {*part}}
    if not sections or len(sections) < len(in_file):
        return dict(in_file)
    name = env if env is not None else next(iter(sections))
    if name not in sections or (env is None and len(sections) > 1):
        asked = f"no section for the environment {env!r}" if env is not None else "a section for each of several environments"
        raise UserError(f"{source} has {asked}; give --env one of {', '.join(sections)}{nearest(str(name), sections) or '.'}")
    found: dict[str, Any] = {"env": name}
    for key, value in sections[name].items():
        if isinstance(value, str) and key in _SCHEDULES and value.startswith("lin_"):  # decays linearly to 0
            found[key], found[_SCHEDULES[key]] = float(value[4:]), "linear"
        elif key == "normalize":
            found |= _normalize(value, source)
        else:
            found[key] = int(value) if isinstance(value, float) and value.is_integer() and value > 1 else value
    return found


def _normalize(value: Any, source: str) -> dict[str, Any]:
    """Return psigrad's settings for rl-zoo3's `normalize`: a boolean, or VecNormalize's arguments as the text of a dict."""
    try:
        asked = ast.literal_eval(value) if isinstance(value, str) else value
    except (ValueError, SyntaxError):
        asked = None
    names = {"norm_obs": "normalize_observations", "norm_reward": "normalize_rewards"}
    asked = dict.fromkeys(names, asked) if isinstance(asked, bool) else asked
    if isinstance(asked, Mapping) and asked.keys() <= names.keys() and all(isinstance(one, bool) for one in asked.values()):
        return {ours: asked.get(name, True) for name, ours in names.items()}
    raise UserError(
        f"{source}: normalize is {value!r}; expected true, false, or norm_obs and norm_reward with true or false. Other settings "
        "of VecNormalize have no equivalent in psigrad."
    )
