"""The rows of a run folder's files: the one place where their keys are named, for writers and readers.

Every file is JSON Lines: one object per line, strict JSON (NaN and infinities are the strings "NaN", "Infinity", "-Infinity").
Readers ignore keys that they do not know, and never rely on the order of keys.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, NotRequired, TypedDict

# Of run folders, rows and checkpoint manifests. It goes up when what is written today could be misread by yesterday's readers.
FORMAT = 1

PARTS = "eval/rewards/"
"""What the held-out figures of single reward functions begin with, beside those of their sum."""
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_LARGEST = 1e100  # beyond it the arithmetic of axes overflows; such a value is no figure of a run
_NUMBERS = re.compile(rb"\[[-+.0-9eE, ]+\]")


class Headline(NamedTuple):
    """The held-out figure that tells whether a run improves: the mean of the metric, else an accuracy, else the loss."""

    name: str
    value: float
    low: float | None
    high: float | None


def by_step(rows: Iterable[Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """The figures of each step, which may stand in several rows: what is written later counts."""
    found: dict[int, dict[str, Any]] = {}
    for row in rows:
        found.setdefault(row["step"], {}).update(row)
    return found


def first_and_last(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The first and the last evaluation of a run, to stand side by side; one of them where there was only one."""
    return [after] if before == after else [before, after]


def headline(row: Mapping[str, Any]) -> Headline | None:
    """The headline of a row of metrics, with its 95 % interval where there is one; None where the row is no evaluation."""
    means = [stem for key in row if (stem := metric_of(key))]
    with_interval = [key.removesuffix("/low") for key in row if key.startswith("eval/") and key.endswith("/low")]
    accuracies = [stem for stem in with_interval if stem in row and stem != "eval/kl"]
    key, stem = next(
        ((key, stem) for stem in [*means, *accuracies, "eval/loss"] for key in (f"{stem}/mean", stem) if key in row), ("", "")
    )
    value = row.get(key)
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return Headline(stem.removeprefix("eval/"), float(value), row.get(f"{stem}/low"), row.get(f"{stem}/high"))


def deciding(row: Mapping[str, Any], name: str = "", greater: bool | None = None) -> tuple[str, float, bool] | None:
    """The name and the value of the figure by which evaluations are compared, and whether more of it is better: `greater`, or
    unless its name ends in loss.

    It is that of `name`, with or without "eval/" or "eval_" before it, else the headline. None where the row has none.
    """
    stem = name.removeprefix("eval_").removeprefix("eval/").removesuffix("/mean")
    if not stem:
        stem = found.name if (found := headline(row)) else ""
    value = next((row[key] for key in (f"eval/{stem}", f"eval/{stem}/mean") if key in row), None)
    return None if value is None else (stem, number(value), not stem.endswith("loss") if greater is None else greater)


def metric_of(key: str) -> str:
    """The held-out metric ("eval/exact") whose mean a key of metrics.jsonl is; empty for every other key."""
    return key.removesuffix("/mean") if key.startswith("eval/") and key.endswith("/mean") and not key.startswith(PARTS) else ""


class RolloutRow(TypedDict):
    """One completion in rollouts.jsonl, written by language-model runs. Lists per token are as long as `completion_ids`."""

    step: int
    """Optimiser step that used it; of held-out completions, steps done before the evaluation."""
    kind: Literal["train", "eval"]
    """Whether it was trained on, or held out."""
    row: int
    """Index of the prompt's dataset row."""
    k: int
    """Number of the completion within its group."""
    prompt: str | Sequence[dict[str, Any]]
    """Text, or messages with "role" and "content"."""
    completion: str
    """Text of the completion."""
    completion_ids: list[int]
    """Its tokens; in episodes of several turns those of both sides."""
    reward: float | None
    """What it was trained on or measured by; None where it is unscored."""
    parts: dict[str, Any]
    """Reward function -> what it gave (None: nothing)."""
    status: str
    """scored; failed (a reward function raised or timed out); unscored."""
    reason: str
    """Why it failed or stayed unscored; else empty."""
    advantage: float | None
    """Mean over its tokens, where it was trained on."""
    finish_reason: Literal["stop", "length"]
    """Whether it ended by itself or was cut at the length limit."""
    seed: int
    """Seed that it was sampled with."""
    version: int
    """Optimiser steps that the sampling policy had behind it."""
    turns: NotRequired[int]
    """Turns of the policy, in episodes of several."""
    mask: NotRequired[list[int]]
    """In episodes of several turns: 1 for tokens that the policy chose."""
    cuts: NotRequired[list[dict[str, Any]]]
    """Answers of the environment that were cut, or dropped, which ends the episode: {"turn", "kind", "reason"}."""
    contexts: NotRequired[list[tuple[int, list[int]]]]
    """(place, prompt): from this token on the policy read this prompt, in place of what stood before. Of agents, and of episodes
    whose chat template rewrites the past.
    """
    step_rewards: NotRequired[list[list[float]]]
    """(place, reward) of rewards before the end."""
    logprobs: NotRequired[list[float]]
    """Per token: log-prob under the policy that sampled. This and what follows: of the first `record_tokens` groups of a step."""
    sampling_logprobs: NotRequired[list[float]]
    """Per token: log-prob under the distribution it was drawn from, where top-k and the like made that another one."""
    trained_logprobs: NotRequired[list[float]]
    """Per token: log-prob under the policy of the last pass over the row, before its optimiser step."""
    ref_logprobs: NotRequired[list[float]]
    """Per token: log-prob under the reference model."""
    entropy: NotRequired[list[float]]
    """Per token: entropy of the policy in nats."""
    advantages: NotRequired[list[float]]
    """Per token, where they are not all alike."""
    kept: NotRequired[bool]
    """False where a filter of the method left the row out of the loss."""


@dataclass(frozen=True, slots=True)
class RolloutFigures:
    """What an index keeps of a row of rollouts.jsonl, whatever wrote it: keys that are missing or malformed have a default."""

    step: int
    kind: str
    """train, eval, episode; "other" where there is none."""
    row: int
    """-1 where there is none."""
    k: int
    """Number within the group, or of the episode."""
    reward: float
    """NaN where there is none."""
    advantage: float
    """NaN where there is none."""
    status: str
    reason: str
    cut: bool
    """Whether the length limit ended it."""


def parse_row(line: bytes) -> dict[str, Any] | None:
    """A line as an object; None where it is none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def parse_step(line: bytes) -> dict[str, Any] | None:
    """A line as a row with a valid "step" (a whole number from 0), as those of metrics, timings and rollouts; else None."""
    row = parse_row(line)
    step = None if row is None else row.get("step")
    return row if type(step) is int and 0 <= step < 2**53 else None


def rollout_figures(line: bytes) -> RolloutFigures | None:
    """What an index needs of a line of rollouts.jsonl; None where the line is no row.

    About 100,000 lines of 1 kB a second: lists of numbers, half of a line's time, are emptied before it is parsed.
    """
    row = parse_step(_NUMBERS.sub(b"[]", line))
    if row is None:
        return None
    get = row.get
    name, k = get("row"), get("k", get("episode"))
    return RolloutFigures(
        row["step"],
        str(get("kind", "other")),
        name if type(name) is int else -1,
        k if type(k) is int else 0,
        number(get("reward")),
        number(get("advantage")),
        str(get("status", "")),
        str(get("reason", "")),
        get("finish_reason") == "length",
    )


def figures(row: Mapping[str, Any]) -> dict[str, float]:
    """The figures of a row of metrics.jsonl: every number but "step", "NaN" and the infinities among them."""
    found: dict[str, float] = {}
    for key, raw in row.items():
        value = raw if type(raw) is float else number(raw)
        if (value == value or raw == "NaN") and key != "step":
            found[key] = value
    return found


def number(value: Any) -> float:
    """A JSON value as a float: non-finite ones are written as strings; what is no number is NaN."""
    if isinstance(value, str):
        return _NON_FINITE.get(value, math.nan)
    if not isinstance(value, int | float):
        return math.nan
    return float(value) if not abs(value) >= _LARGEST else math.inf if value > 0 else -math.inf
