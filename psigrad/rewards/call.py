"""One call of reward functions on a few samples: arguments chosen, returns checked, parts combined, all in this process."""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

from psigrad.rewards.types import Failed, Failure, Result, Scored, Unscored

# What one function said of one sample: a number, None (not applicable), a Failure (the policy's fault) or a Malformed (ours).
Said = float | None | Failure


class Malformed(ValueError):
    """A reward function returned what is no reward."""


def call(name: str, function: Callable[..., Any], samples: dict[str, Any]) -> list[Said | Malformed]:
    """What `function` says of each sample. `samples` has prompts, completions, completion_ids and the columns, as equally long lists.

    Raises what the function raises, and `Malformed` where the return as a whole is no list of rewards.
    """
    count = len(samples["completions"])
    try:
        returned = function(**_accepted(function, samples))
        if inspect.isawaitable(returned):
            returned = asyncio.run(_awaited(returned))
    except Failure as failure:
        return [failure] * count
    if isinstance(returned, str | bytes | dict) or not hasattr(returned, "__len__"):
        raise Malformed(f"{name} returned a {type(returned).__name__}; expected a list with one number or None per completion")
    values = returned.tolist() if hasattr(returned, "tolist") else list(returned)
    if len(values) != count:
        raise Malformed(f"{name} returned {len(values)} rewards for {count} completions")
    return [_said(name, i, value) for i, value in enumerate(values)]


async def _awaited(returned: Any) -> Any:
    return await returned


def _accepted(function: Callable[..., Any], samples: dict[str, Any]) -> dict[str, Any]:
    """Only the arguments that the function takes, where it does not take all."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return samples
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return samples
    return {p.name: samples[p.name] for p in parameters if p.name in samples}


def _said(name: str, index: int, value: Any) -> Said | Malformed:
    if hasattr(value, "item") and getattr(value, "size", 1) in (1, ()) or callable(getattr(value, "item", None)):
        value = value.item()
    if value is None or isinstance(value, Failure):
        return value
    if not isinstance(value, numbers.Real):
        return Malformed(f"{name} returned a {type(value).__name__} at index {index}; expected a number or None")
    if not math.isfinite(value):
        return Malformed(f"{name} returned {float(value)} at index {index}; expected a finite number or None")
    return float(value)


def combine(names: Sequence[str], weights: Sequence[float], said: Sequence[Said | Malformed], failure_value: float) -> Result:
    """The result of one sample: sum of weight × reward over the functions that apply to it (TRL's nansum)."""
    for one in said:
        if isinstance(one, Malformed):
            return Unscored(str(one))
    parts = {name: one if isinstance(one, float) else None for name, one in zip(names, said, strict=True)}
    for name, one in zip(names, said, strict=True):
        if isinstance(one, Failure):
            return Failed(failure_value, f"{name}: {one}", parts)
    if all(value is None for value in parts.values()):
        return Unscored(f"no reward function applies to it ({', '.join(names)} gave None)")
    return Scored(math.fsum(w * v for w, v in zip(weights, parts.values(), strict=True) if v is not None), parts)
