"""Reward functions written for other libraries, under the signature of this one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from psigrad.errors import UserError
from psigrad.importing import imported_callable
from psigrad.language.rewards.outcomes import text_of


@dataclass(frozen=True)
class Verl:
    """A verl reward: `compute_score(data_source, solution_str, ground_truth, extra_info)` -> number or {"score": number, …}.

    Reads verl's columns: `data_source`, `reward_model` ({"ground_truth": …}; or a column `ground_truth`) and `extra_info`.
    """

    function: str = ""

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """One score per completion, from verl's columns."""
        compute = _adapted("verl", self.function)
        count = len(completions)
        sources, extras = (columns.get(name) or [None] * count for name in ("data_source", "extra_info"))
        models = columns.get("reward_model") or [{"ground_truth": g} for g in columns.get("ground_truth") or [None] * count]
        scores: list[float | None] = []
        for completion, source, model, extra in zip(completions, sources, models, extras, strict=True):
            score = compute(source, text_of(completion), (model or {}).get("ground_truth"), extra)
            scores.append(score["score"] if isinstance(score, Mapping) else score)
        return scores


@dataclass(frozen=True)
class Verifiers:
    """A verifiers rubric function: any of `prompt, completion, answer, info, state` by argument name -> number; may be async.

    `answer` and `info` are the columns of that name.
    """

    function: str = ""

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """One score per completion."""
        rubric = _adapted("verifiers", self.function)
        wanted = inspect.signature(rubric).parameters
        scores: list[float | None] = []
        for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            given: dict[str, Any] = {"prompt": prompt, "completion": completion, "state": {}}
            given |= {name: (columns.get(name) or [None] * len(completions))[i] for name in ("answer", "info")}
            value = rubric(**{name: given[name] for name in wanted if name in given})
            scores.append(_awaited(value) if inspect.iscoroutine(value) else value)
        return scores


def _awaited(coroutine: Any) -> float | None:
    import asyncio  # a third of a worker's start-up, and few rewards need it

    value: float | None = asyncio.run(coroutine)
    return value


@cache
def _adapted(kind: str, function: str) -> Callable[..., Any]:
    """The function that an adapter wraps."""
    if not function:
        raise UserError(f"The reward {kind!r} wraps a function; write it as {{reward: {kind}, function: module:name}}.")
    found: Callable[..., Any] = imported_callable(function, "reward")
    return found
