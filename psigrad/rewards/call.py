"""One call of reward functions on a few samples: arguments chosen, returns checked, parts combined, all in this process."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from psigrad.rewards.types import Failed, Failure, Result, Scored, Unscored

# Characters of an exception's message that a reason keeps: reasons are logged once per sample.
_REASON = 500


class Malformed(ValueError):
    """A reward function returned what is no reward."""


# What one function said of one sample: a number, None (not applicable), a Failure (the policy's fault) or a Malformed (ours).
Said = float | None | Failure | Malformed
# What one function said of each sample that it was shown; or why nothing came of the call.
Answer = list[Said] | str


def answer_of(name: str, function: Callable[..., Any], samples: dict[str, Any]) -> Answer:
    """What `function` says of each sample, or the reason why it says nothing.

    Whatever it raises, SystemExit included, is such a reason; only Ctrl-C passes.
    """
    try:
        return call(name, function, samples)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return reason(name, error)


def call(name: str, function: Callable[..., Any], samples: dict[str, Any]) -> list[Said]:
    """What `function` says of each sample. `samples` has prompts, completions, completion_ids and the columns, as equally
    long lists.

    Raises what the function raises, and `Malformed` where the return as a whole is no list of rewards. A `Failure` raised for one
    sample alone is its result; raised for several it does not say which is at fault, and is raised here too.
    """
    count = len(samples["completions"])
    try:
        returned = function(**_accepted(function, samples))
        if inspect.isawaitable(returned):
            returned = _finished(returned)
    except Failure as failure:
        if count > 1:
            raise
        return [Failure(_text(failure))]
    tolist = getattr(returned, "tolist", None)  # arrays and tensors, without importing either
    values = tolist() if callable(tolist) else returned
    if isinstance(values, str | bytes | bytearray) or not isinstance(values, Sequence):
        raise Malformed(f"{name} returned a {type(returned).__name__}; expected a list with one number or None per completion")
    if len(values) != count:
        raise Malformed(f"{name} returned {len(values)} rewards for {count} completions")
    return [_said(name, value) for value in values]


def _finished(returned: Any) -> Any:
    import asyncio  # a third of a worker's start-up, and few rewards need it

    async def result() -> Any:
        return await returned

    work: Coroutine[Any, Any, Any] = result()
    return asyncio.run(work)


def _accepted(function: Callable[..., Any], samples: dict[str, Any]) -> dict[str, Any]:
    """Only the arguments that the function takes, where it does not take all."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return samples
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return samples
    return {p.name: samples[p.name] for p in parameters if p.name in samples}


def _said(name: str, value: Any) -> Said:
    """One value of a returned list as a plain Python object, which any process can read."""
    if isinstance(value, Failure):
        return Failure(_text(value))
    kind = type(value).__name__
    item = getattr(value, "item", None)  # a scalar of numpy or torch
    if callable(item):
        try:
            value = item()
        except (RuntimeError, TypeError, ValueError):
            return Malformed(f"{name} returned a {kind} for one completion; expected a number or None")
    if value is None:
        return None
    if not isinstance(value, numbers.Real):
        return Malformed(f"{name} returned a {kind} for one completion; expected a number or None")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        return Malformed(f"{name} returned {number} for one completion; expected a finite number or None")
    return number


def reason(name: str, error: BaseException) -> str:
    """Why a function said nothing."""
    if isinstance(error, Malformed):
        return str(error)
    return f"{name} raised {type(error).__name__}: {_text(error)}"


def _text(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception as second:
        text = f"(its message raised {type(second).__name__})"
    return text if len(text) <= _REASON else text[:_REASON] + "…"


def combine(names: Sequence[str], weights: Sequence[float], said: Sequence[Said], failure_value: float) -> Result:
    """The result of one sample: sum of weight × reward over the functions that apply to it (TRL's nansum).

    A sample that no function with a weight applies to is `Unscored`: TRL's 0 would be a reward that nobody gave.
    """
    for one in said:
        if isinstance(one, Malformed):
            return Unscored(str(one))
    parts = {name: one if isinstance(one, float) else None for name, one in zip(names, said, strict=True)}
    for name, one in zip(names, said, strict=True):
        if isinstance(one, Failure):
            return Failed(failure_value, f"{name}: {one}", parts)
    terms = [w * v for w, v in zip(weights, parts.values(), strict=True) if v is not None and w != 0]
    if not terms:
        return Unscored(f"no reward function applies to it ({', '.join(names)} gave None or have weight 0)")
    total = sum(terms)
    if not math.isfinite(total):
        return Unscored("the weighted sum of its rewards is beyond floating point")
    return Scored(total, parts)
