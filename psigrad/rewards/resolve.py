"""From what a user writes to a reward function: a built-in's name, module:function, a mapping with parameters, or a callable."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from psigrad.errors import UserError, nearest

# Modules loaded from a file are named so: `math.py` must not become the `math` of everyone else.
FILE_MODULE = "_psigrad_reward_"


@dataclasses.dataclass(frozen=True)
class RewardSpec:
    """A reward function and the name its figures are logged under."""

    name: str
    function: Callable[..., Any]


def resolve(reward: str | Mapping[str, Any] | Callable[..., Any] | RewardSpec) -> RewardSpec:
    """The reward function that is meant.

    "exact" is a built-in, "module:function" the user's own (the current folder is importable), {"reward": "soft_overlong",
    "max_completion_length": 256} a built-in with parameters. Raises `UserError` for what does not exist, with the nearest name.
    """
    if isinstance(reward, RewardSpec):
        return reward
    if isinstance(reward, Mapping):
        return _with_parameters(dict(reward))
    if callable(reward):
        return RewardSpec(name_of(reward), reward)
    if not isinstance(reward, str):
        raise UserError(f"The reward {reward!r} is a {type(reward).__name__}; give a name, module:function or a function.")
    if ":" in reward:
        return RewardSpec(reward.rpartition(":")[2], imported(reward))
    from psigrad.rewards import builtin

    if reward not in builtin.NAMES:
        known = ", ".join(builtin.NAMES)
        raise UserError(
            f"There is no built-in reward {reward!r}; expected one of {known} or module:function{nearest(reward, builtin.NAMES)}"
        )
    return RewardSpec(reward, builtin.NAMES[reward])


def name_of(function: Callable[..., Any]) -> str:
    """A function's own name, or its class's."""
    return str(getattr(function, "__name__", type(function).__name__))


def imported(path: str, kind: str = "reward") -> Callable[..., Any]:
    """The object that "module:attribute" or "file.py:attribute" names; `kind` is what errors call it."""
    module_name, _, attribute = path.rpartition(":")
    module = _module(module_name, path, kind)
    function = getattr(module, attribute, None)
    if function is None:
        raise UserError(f"The {kind} {path!r}: {module_name} has no {attribute!r}{nearest(attribute, vars(module))}")
    if not callable(function):
        raise UserError(f"The {kind} {path!r} is a {type(function).__name__}; expected a function.")
    found: Callable[..., Any] = function
    return found


def _module(name: str, path: str, kind: str) -> Any:
    try:
        if name.endswith(".py"):
            file = Path(name).resolve()
            return load_file(FILE_MODULE + hashlib.sha256(str(file).encode()).hexdigest()[:12], str(file))
        if "" not in sys.path and "." not in sys.path:
            sys.path.insert(0, "")
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise UserError(f"The {kind} {path!r} cannot be imported: {type(error).__name__}: {error}.") from error


def load_file(name: str, file: str) -> Any:
    """The module in a file, under the given name."""
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _with_parameters(mapping: dict[str, Any]) -> RewardSpec:
    name = mapping.pop("reward", None)
    if name is None:
        raise UserError(f"The reward {mapping!r} has no 'reward'; write it as {{reward: name, parameter: value}}.")
    base = resolve(name)
    if not mapping:
        return base
    kind = type(base.function)
    if not dataclasses.is_dataclass(kind):
        raise UserError(f"The reward {name!r} takes no parameters and got {', '.join(mapping)}.")
    known = [f.name for f in dataclasses.fields(kind)]
    for key in mapping:
        if key not in known:
            raise UserError(f"The reward {name!r} has no parameter {key!r}; expected {', '.join(known)}{nearest(key, known)}")
    return RewardSpec(base.name, dataclasses.replace(base.function, **mapping))
