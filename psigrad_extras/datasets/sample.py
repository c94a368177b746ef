"""Writing a model's completions as a dataset (all, the best of each prompt, or pairs), and pairs from rankings and ratings."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from psigrad import seeds
from psigrad.config import SampleConfig
from psigrad.config.sections import parse_columns
from psigrad.errors import UserError, kind_of
from psigrad.language.data.dataset_layouts import map_columns
from psigrad.language.data.dataset_rows import BadRow
from psigrad.language.data.image_rows import to_json_row
from psigrad.language.data.row_files import read_file
from psigrad.language.data.templates import completion_for_reward
from psigrad.language.recipes import evaluate
from psigrad.language.rollout.types import Trajectory
from psigrad.paths import check_output
from psigrad_extras.datasets import preferences
from psigrad_extras.datasets.preferences import Converted


@dataclass(frozen=True)
class Written:
    """The result of writing a dataset: path and number of rows, and counts of prompts with equal rewards and empty completions.

    `unscored` is a message on the completions without a reward; empty if all have one, or if no reward was given.
    """

    path: Path
    rows: int
    ties: int
    empty: int = 0
    unscored: str = ""


def run(config: SampleConfig) -> Written:
    """Sample `num_generations_eval` completions of each prompt, score them, and write rows to `output`.

    keep=all writes every completion with its reward (null if it has none). keep=best writes, for each prompt, the completion with
    the highest reward (rejection sampling, for `psigrad sft`). keep=pairs writes the best and the worst completion as a pair (for
    `psigrad dpo` and `psigrad reward`). The latter two drop empty completions, since they cannot be trained on. Raises
    `UserError` on invalid settings or data.
    """
    if not config.output:
        raise UserError("No output file was given; name a JSONL file with --output (output).")
    scored = bool(config.reward or config.reward_model or config.environment or config.asks)
    if config.keep != "all" and not scored:
        raise UserError(
            f"keep={config.keep} chooses completions by their reward, but no reward was given; name one with "
            "--reward or --reward-model."
        )
    sampled = evaluate.sample_and_score(config, scored)
    size = config.evaluation.num_generations_eval
    empty = 0 if config.keep == "all" else sum(not _has_text(t) for t in sampled.trajectories)
    if config.keep == "pairs" and config.bradley_terry:
        rows, ties = _draw_pairs(sampled, size, config.bradley_terry, config.run.seed), 0
    else:
        rows, ties = _rows(config.keep, sampled, size, scored)
    write_jsonl(Path(config.output), rows)
    return Written(Path(config.output), len(rows), ties, empty, sampled.unscored if scored else "")


def _rows(keep: str, sampled: evaluate.Report, size: int, scored: bool) -> tuple[list[dict[str, Any]], int]:
    if keep == "all":
        return [_row(t, sampled) | _describe(t, scored) for t in sampled.trajectories], 0
    made, ties = [], 0
    for group in filter(None, _scored_groups(sampled, size)):
        best, worst = max(group, key=_reward), min(group, key=_reward)
        if keep == "best":
            made.append(_row(best, sampled) | {"reward": best.reward})
        elif _reward(best) > _reward(worst):
            good, bad = _row(best, sampled), _row(worst, sampled)
            made.append(_pair(good, bad) | {"score_chosen": best.reward, "score_rejected": worst.reward})
        else:
            ties += 1
    return made, ties


def _draw_pairs(sampled: evaluate.Report, size: int, steadiness: float, seed: int) -> list[dict[str, Any]]:
    """Return pairs of adjacent completions of each prompt. The chosen one is drawn by a Bradley–Terry model of the rewards.

    `steadiness` multiplies the difference of rewards. Such pairs simulate noisy human votes whose true preferences are known.
    """
    made = []
    for group in _scored_groups(sampled, size):
        for a, b in zip(group[0::2], group[1::2], strict=False):
            if a.text == b.text:
                continue
            chance = 1 / (1 + math.exp(-steadiness * (_reward(a) - _reward(b))))
            draw = random.Random(seeds.derive(seed, "preference", a.row, a.k)).random()
            best, worst = (_row(t, sampled) for t in ((a, b) if draw < chance else (b, a)))
            made.append(_pair(best, worst))
    return made


def _scored_groups(sampled: evaluate.Report, size: int) -> Iterator[list[Trajectory]]:
    """Yield the completions of each prompt that have a reward and a text."""
    for start in range(0, len(sampled.trajectories), size):
        yield [t for t in sampled.trajectories[start : start + size] if t.reward is not None and _has_text(t)]


def _pair(best: dict[str, Any], worst: dict[str, Any]) -> dict[str, Any]:
    """Return a preference pair as a row, with the other columns of `best`."""
    own = {key: value for key, value in best.items() if key != "completion"}
    return {**own, "chosen": best["completion"], "rejected": worst["completion"]}


def _describe(trajectory: Trajectory, scored: bool) -> dict[str, Any]:
    """Return columns that describe a completion: reward (or the reason why there is none), finish reason, and log-prob.

    `logprob` is the sum over its tokens, if their log-probs are known.
    """
    own = trajectory.completion
    known = {"logprob": math.fsum(own.logprobs)} if own.logprobs else {}
    why = {"reason": trajectory.reason} if scored and trajectory.reward is None else {}
    return {"reward": trajectory.reward if scored else None, "finish_reason": own.finish_reason, **known, **why}


def _has_text(trajectory: Trajectory) -> bool:
    """Return True if the completion has any text before its end."""
    return bool(trajectory.text or trajectory.messages)


def _reward(trajectory: Trajectory) -> float:
    return trajectory.reward or 0.0


def _row(trajectory: Trajectory, sampled: evaluate.Report) -> dict[str, Any]:
    row = sampled.rows[trajectory.row]
    completion = list(trajectory.messages) or completion_for_reward(row, trajectory.text)
    return to_json_row({**row.columns, "prompt": row.dataset_prompt, "completion": completion})


def convert(
    dataset: str, output: str, *, columns: str | Mapping[str, str] = "", scale: int = 10, tie: float = 0.0
) -> tuple[Written, Converted]:
    """Write pairs from rankings (`ranking`, 1 is best), ratings (`ratings` of several completions), or one `rating` per row.

    `columns` renames columns first. Ties are dropped and counted. Raises `UserError` naming row and column.
    """
    if not dataset or not output:
        raise UserError("pairs takes --dataset FILE.jsonl and --output FILE.jsonl; one of them is missing.")
    check_output(output)
    rows = read_rows(dataset)
    if renamed := parse_columns(columns):
        rows = [map_columns(row, renamed, f"{dataset}:{i}") for i, row in enumerate(rows, 1)]
    first = rows[0] if rows else {}
    if "ranking" in first:
        made = preferences.from_rankings(rows, dataset)
    elif "ratings" in first:
        made = preferences.from_ratings(rows, dataset, scale=scale, tie=tie)
    elif "rating" in first:
        made = preferences.from_ratings(preferences.group_by_prompt(rows, "rating", dataset), dataset, scale=scale, tie=tie)
    else:
        found = ", ".join(first) or "none"
        raise UserError(
            f"{dataset} has the columns {found}; expected prompt and completions with ranking or ratings, or prompt, completion "
            "and rating."
        )
    write_jsonl(Path(output), made.rows)
    return Written(Path(output), len(made.rows), made.ties), made


def read_rows(path: str) -> list[dict[str, Any]]:
    """Read the raw rows of a file. Raises `UserError` if it cannot be read."""
    rows = []
    for row in read_file(Path(path), path):
        if isinstance(row, BadRow):
            raise UserError(f"{row}.")
        if not isinstance(row.value, dict):
            raise UserError(f"{row.source} is {kind_of(row.value)}; expected an object with named columns.")
        rows.append(row.value)
    return rows


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]] | Sequence[Mapping[str, Any]]) -> None:
    """Write one JSON object per line. A value that JSON cannot represent, such as a date of a Parquet file, becomes text."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row, default=str) + "\n" for row in rows))
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}.") from error
