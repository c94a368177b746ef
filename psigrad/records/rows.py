"""The rows of a run folder's files. Both writers and readers take the keys from here.

Every file is JSON Lines: one strict JSON object per line. NaN and infinities are the strings "NaN", "Infinity" and "-Infinity".
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, NotRequired, TypedDict

# The version of run folders, rows and checkpoint manifests. It increases when older readers could misread the current format.
FORMAT = 1

PARTS = "eval/rewards/"
"""The prefix of held-out figures of a single reward function. Figures of the sum of all functions lack this prefix."""
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_LARGEST = 1e100  # larger numbers count as infinite: they overflow the arithmetic of axes, and no real figure is so large
_NUMBERS = re.compile(rb"\[[-+.0-9eE, ]+\]")


class Headline(NamedTuple):
    """The held-out figure that measures a run's progress: the mean of the first metric, or else an accuracy, or else the loss."""

    name: str
    value: float
    low: float | None
    high: float | None


def merge_by_step(rows: Iterable[Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return {step: figures}. The rows of each step are merged, and later rows take precedence."""
    found: dict[int, dict[str, Any]] = {}
    for row in rows:
        found.setdefault(row["step"], {}).update(row)
    return found


def first_and_last(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return [`before`, `after`], the first and the last evaluation of a run, or only [`after`] if they are the same."""
    return [after] if before == after else [before, after]


def headline(row: Mapping[str, Any]) -> Headline | None:
    """Return the `Headline` of a row of metrics; None if the row has no such figure, or if the figure is not finite."""
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


def comparison_figure(row: Mapping[str, Any], name: str = "", greater: bool | None = None) -> tuple[str, float, bool] | None:
    """Return (name, value, True if greater is better) of the figure by which evaluations are compared; None if the row lacks it.

    `name` may have the prefix "eval/" or "eval_"; "" means the row's `headline`. If `greater` is None, greater is better unless
    the name ends in "loss".
    """
    stem = name.removeprefix("eval_").removeprefix("eval/").removesuffix("/mean")
    if not stem:
        stem = found.name if (found := headline(row)) else ""
    value = next((row[key] for key in (f"eval/{stem}", f"eval/{stem}/mean") if key in row), None)
    return None if value is None else (stem, number(value), not stem.endswith("loss") if greater is None else greater)


def metric_of(key: str) -> str:
    """Return the held-out metric of which `key` is the mean: "eval/exact" for "eval/exact/mean"; "" for any other key."""
    return key.removesuffix("/mean") if key.startswith("eval/") and key.endswith("/mean") and not key.startswith(PARTS) else ""


class RolloutRow(TypedDict):
    """A completion in rollouts.jsonl of a language-model run. Lists with a value per token are as long as `completion_ids`."""

    step: int
    """The optimiser step that trained on the completion. For held-out completions: the number of steps before the evaluation."""
    kind: Literal["train", "eval"]
    """The use of the completion: "train" if it was trained on, "eval" if it was held out."""
    row: int
    """Index of the prompt's dataset row."""
    k: int
    """Index of the completion within its group."""
    prompt: str | Sequence[dict[str, Any]]
    """Text, or messages with "role" and "content". An image is a part of the content, with "sha256", "width" and "height"."""
    completion: str
    """Text of the completion."""
    completion_ids: list[int]
    """Tokens of the completion. In episodes of several turns, the environment's tokens are included."""
    reward: float | None
    """The reward, or for held-out completions the metric; None if the completion is unscored."""
    parts: dict[str, Any]
    """Reward function -> its value (None: no value)."""
    status: str
    """scored; failed (a reward function raised or timed out); unscored."""
    reason: str
    """The reason why the status is failed or unscored; otherwise empty."""
    advantage: float | None
    """Mean advantage over the completion's tokens; None if it was not trained on."""
    finish_reason: Literal["stop", "length"]
    """The end of the completion: "stop" if it ended by itself, "length" if the length limit cut it."""
    seed: int
    """Seed with which the completion was sampled."""
    version: int
    """Number of optimiser steps of the policy that sampled the completion."""
    turns: NotRequired[int]
    """Number of the policy's turns, in episodes of several turns."""
    mask: NotRequired[list[int]]
    """In episodes of several turns: 1 for tokens that the policy chose."""
    seat: NotRequired[int]
    """In a game with several players: the number of the seat (player) whose turns the completion contains."""
    cuts: NotRequired[list[dict[str, Any]]]
    """Replies of the environment that were too long: {"turn", "kind", "reason"}. A reply of kind "dropped" ended the episode."""
    contexts: NotRequired[list[tuple[int, list[int]]]]
    """(position, prompt): at this position of `completion_ids`, the context was replaced by this prompt.

    Present for agents, for seats, and for episodes whose chat template rewrites earlier turns.
    """
    step_rewards: NotRequired[list[list[float]]]
    """(position in `completion_ids`, reward) of rewards that were given before the end of the completion."""
    logprobs: NotRequired[list[float]]
    """Per token: log-prob under the sampling policy. Only the first `record_tokens` groups have this and the next five keys."""
    sampling_logprobs: NotRequired[list[float]]
    """Per token: log-prob under the distribution that the token was drawn from, if top_p, top_k or min_p filtered it."""
    trained_logprobs: NotRequired[list[float]]
    """Per token: log-prob in the last forward pass of training over the row, before the optimiser step."""
    ref_logprobs: NotRequired[list[float]]
    """Per token: log-prob under the reference model."""
    entropy: NotRequired[list[float]]
    """Per token: entropy of the policy in nats."""
    advantages: NotRequired[list[float]]
    """Per token: advantage; absent if all are equal."""
    kept: NotRequired[bool]
    """False if a filter of the method excluded the row from the loss; otherwise the key is absent."""


@dataclass(frozen=True, slots=True)
class RolloutFigures:
    """The main fields of a row of rollouts.jsonl, without its texts. Missing or malformed keys have a default."""

    step: int
    kind: str
    """train, eval or episode; "other" if the key is missing."""
    row: int
    """Index of the dataset row; -1 if the key is missing."""
    k: int
    """Index of the completion within its group, or of the episode; 0 if the key is missing."""
    reward: float
    """NaN if there is no reward."""
    advantage: float
    """NaN if there is no advantage."""
    status: str
    reason: str
    cut: bool
    """True if the length limit ended the completion."""


def parse_row(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object in a line; None if the line is not a JSON object."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def parse_step(line: bytes) -> dict[str, Any] | None:
    """Return the row in a line of metrics, timings or rollouts; None if its "step" is not a non-negative integer."""
    row = parse_row(line)
    step = None if row is None else row.get("step")
    return row if type(step) is int and 0 <= step < 2**53 else None


def rollout_figures(line: bytes) -> RolloutFigures | None:
    """Return the `RolloutFigures` of a line of rollouts.jsonl; None if the line is not a row."""
    row = parse_step(_NUMBERS.sub(b"[]", line))  # twice as fast without lists of numbers
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
    """Return the figures of a row of metrics.jsonl: every number except "step", including NaN and infinities."""
    found: dict[str, float] = {}
    for key, raw in row.items():
        value = raw if type(raw) is float else number(raw)
        if (value == value or raw == "NaN") and key != "step":
            found[key] = value
    return found


def number(value: Any) -> float:
    """Return a JSON number, or a string such as "Infinity", as a float. Return ±inf beyond ±1e100, and NaN for other values."""
    if isinstance(value, str):
        return _NON_FINITE.get(value, math.nan)
    if not isinstance(value, int | float):
        return math.nan
    return float(value) if not abs(value) >= _LARGEST else math.inf if value > 0 else -math.inf
