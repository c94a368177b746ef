"""Reward functions from a user's notation: a built-in's name, module:function, a mapping with parameters, or a callable."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from psigrad.errors import UserError, kind_of, nearest
from psigrad.importing import imported_callable, with_colon

# Functions of trl.rewards, which TRL's command line accepts without a module.
OF_TRL = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")


@dataclasses.dataclass(frozen=True)
class RewardSpec:
    """A reward function and its name in the log."""

    name: str
    function: Callable[..., Any]


def resolve(reward: str | Mapping[str, Any] | Callable[..., Any] | RewardSpec) -> RewardSpec:
    """Return the reward function that a setting names.

    "exact" names a built-in reward. "module:function" names the user's own; the current folder is importable, and TRL's
    "module.function" works too. {"reward": "soft_overlong", "max_completion_length": 256} is a built-in with parameters. Raise
    `UserError` for an unknown name, with the nearest known one.
    """
    if isinstance(reward, RewardSpec):
        return reward
    if isinstance(reward, Mapping):
        return _with_parameters(dict(reward))
    if callable(reward):
        return RewardSpec(name_of(reward), reward)
    if not isinstance(reward, str):
        raise UserError(f"The reward {reward!r} is {kind_of(reward)}; give a name, module:function or a function.")
    if ":" in reward:
        return RewardSpec(reward.rpartition(":")[2], imported_callable(reward, "reward"))
    from psigrad.language.rewards import builtin

    if reward not in builtin.NAMES:
        if (own := with_colon(reward)) != reward:
            return resolve(own)
        if reward in OF_TRL:
            return resolve(f"trl.rewards:{reward}")
        known = ", ".join(builtin.NAMES)
        raise UserError(
            f"There is no built-in reward {reward!r}; expected one of {known} or module:function{nearest(reward, builtin.NAMES)}"
        )
    return RewardSpec(reward, builtin.find_reward(reward))


def name_of(function: Callable[..., Any]) -> str:
    """Return a function's own name, or its class's."""
    return str(getattr(function, "__name__", type(function).__name__))


def _with_parameters(mapping: dict[str, Any]) -> RewardSpec:
    name = mapping.pop("reward", None)
    if name is None:
        raise UserError(f"The reward {mapping!r} has no 'reward'; write it as {{reward: name, parameter: value}}.")
    base = resolve(name)
    if not mapping:
        return base
    kind = type(base.function)
    if not dataclasses.is_dataclass(kind) or not dataclasses.fields(kind):
        raise UserError(f"The reward {name!r} takes no parameters, but got {', '.join(mapping)}; give its name alone.")
    known = [f.name for f in dataclasses.fields(kind)]
    for key, value in mapping.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"The reward {name!r} has {key}={value}; expected a finite number.")
        if key not in known:
            raise UserError(f"The reward {name!r} has no parameter {key!r}; expected {', '.join(known)}{nearest(key, known)}")
    return RewardSpec(base.name, dataclasses.replace(base.function, **mapping))
