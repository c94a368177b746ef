"""Reading and checking of rows with prompts and completions, and grouping of the completions by prompt."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from psigrad.errors import UserError
from psigrad.language.data.dataset_rows import BadRow, RowError, show, validate
from psigrad.language.images import COLUMNS
from psigrad.records.row_lines import read_lines, rollout_files
from psigrad.records.rows import parse_step

ROLLOUTS = "rollouts.jsonl"
"""The file of a run folder that contains the sampled completions."""
# The columns of a rollout that are stored with a completion and exported.
ROLLOUT = ("step", "kind", "row", "k", "reward", "advantage", "version", "seed", "finish_reason", "status")
LINEAGE = ("run", *ROLLOUT, "sampler", "source")
_OWN = (
    *("prompt", "completion", "completions", "chosen", "rejected", "rating", "ratings", "ranking", "label", "tools"),
    *("run", "sampler", "samplers", "source", "lineage"),
)
# The columns of a rollout that do not belong to its prompt.
_MECHANICS = ("completion_ids", "parts", "reason", "turns", "mask", "step_rewards", "margin", "score_chosen", "score_rejected")


@dataclass
class SourcedCompletion:
    """A completion, and its known origin (keys of `LINEAGE`)."""

    content: Any
    about: dict[str, Any]
    hash: str = ""

    def __post_init__(self) -> None:
        self.hash = digest(self.content)


@dataclass
class PromptGroup:
    """A prompt with its completions by hash. `columns` are the dataset columns with equal values in all of its rows.

    `best` is the hash of the better completion, if it is known.
    """

    prompt: Any
    columns: dict[str, Any]
    completions: dict[str, list[SourcedCompletion]] = field(default_factory=dict)
    best: str | None = None


@dataclass
class CompletionGroups:
    """The groups of a file by key, in order of first appearance. `unusable` counts rows that are empty or damaged."""

    groups: dict[str, PromptGroup] = field(default_factory=dict)
    unusable: int = 0


def digest(value: Any) -> str:
    """Return SHA-256 of a JSON value. The order of names in objects does not matter."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, allow_nan=False).encode()).hexdigest()


def gather(
    rows: Iterable[tuple[str, Any]],
    *,
    run: str | None = None,
    sampler: str | None = None,
    gold: bool = False,
    skip_unusable: bool = False,
) -> CompletionGroups:
    """Group rows by prompt. `rows` are pairs (place, row), where the place is "file:line".

    A row has `prompt` and either `completion`, `completions` or `chosen` and `rejected`. `sampler` (in the row, or given here)
    names the source of the completion; `samplers` is a list parallel to `completions`. Other columns stay with the prompt. With
    `gold`, the chosen completion of a pair counts as known to be better. With `skip_unusable`, empty or damaged rows are counted
    and skipped; otherwise they raise an error. Raises `UserError` naming place and column.
    """
    found = CompletionGroups()
    for place, row in rows:
        try:
            answers = _answers(row, place)
            # A dataset may have columns with these names too; only a rollout has both step and k.
            said = ROLLOUT if {"step", "k"} <= row.keys() else ("reward", "finish_reason")
            own = {k: v for k, v in row.items() if k not in (*_OWN, *said, *_MECHANICS) and v is not None}
            if row.get("tools"):
                own["tools"] = row["tools"]
            prompt = validate({**own, "prompt": row["prompt"]}, "prompt-only", place).prompt
        except RowError:
            if not skip_unusable:
                raise
            found.unusable += 1
            continue
        group = _join(found.groups, prompt, own)
        for i, (answer, made_by) in enumerate(answers):
            about = {name: row[name] for name in said if row.get(name) is not None}
            known = {"run": row.get("run") or run, "sampler": made_by or row.get("sampler") or sampler, "source": place}
            one = SourcedCompletion(answer, about | {name: value for name, value in known.items() if value is not None})
            group.completions.setdefault(one.hash, []).append(one)
            if gold and i == 0 and "chosen" in row:
                group.best = one.hash
    return found


def _join(groups: dict[str, PromptGroup], prompt: Any, own: dict[str, Any]) -> PromptGroup:
    group = groups.setdefault(digest(prompt), PromptGroup(prompt, dict(own)))
    for name in set(group.columns) - {n for n, v in own.items() if n in group.columns and v == group.columns[n]}:
        del group.columns[name]
    return group


def _answers(row: Any, place: str) -> list[tuple[Any, str | None]]:
    """Return (completion, sampler's name or None) for each completion of a row, after checking them."""
    if not isinstance(row, Mapping):
        raise RowError(BadRow(place, "", f"is {show(row)}; a row must be an object with named columns"))
    if column := next((name for name in COLUMNS if row.get(name)), ""):
        raise RowError(BadRow(place, column, "has an image, but labelling shows only text; remove such rows"))
    try:
        digest(row)
    except (ValueError, TypeError, RecursionError) as error:
        raise RowError(BadRow(place, "", f"cannot be stored as JSON ({error}); numbers must be finite")) from error
    if row.get("completions") is not None:
        return _listed(row, place)
    if row.get("chosen") is not None:
        checked = validate(row, "preference", place)
        return [(checked.completion, None), (checked.rejected, None)]
    return [(validate({n: row[n] for n in ("prompt", "completion") if n in row}, "prompt-completion", place).completion, None)]


def _listed(row: Mapping[str, Any], place: str) -> list[tuple[Any, str | None]]:
    completions, samplers = row["completions"], row.get("samplers")
    if not isinstance(completions, list) or not completions:
        raise RowError(BadRow(place, "completions", f"is {show(completions)}; it must be a list of at least one completion"))
    if samplers is None:
        samplers = [None] * len(completions)
    if not isinstance(samplers, list) or len(samplers) != len(completions):
        raise RowError(BadRow(place, "samplers", "must be a list with one entry for each completion"))
    made = []
    for i, (completion, by) in enumerate(zip(completions, samplers, strict=True)):
        try:
            made.append(
                (validate({"prompt": row.get("prompt"), "completion": completion}, "prompt-completion", place).completion, by)
            )
        except RowError as error:
            column = error.bad.column.replace("completion", f"completions[{i}]", 1)
            raise RowError(BadRow(place, column, error.bad.reason)) from None
    return made


def lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield (place, row) for each line of a JSONL file. The place is "file:line".

    Raises `UserError` if a line is not JSON. An incomplete last line without a newline is allowed: a killed process leaves one.
    """
    try:
        with path.open("rb") as stream:
            for number, line in enumerate(stream, 1):
                if not line.strip():
                    continue
                try:
                    yield f"{path}:{number}", json.loads(line)
                except (ValueError, RecursionError) as error:
                    if line.endswith(b"\n"):
                        raise UserError(f"{path}:{number} is not JSON ({error}); expected one object per line.") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error


def rollouts(folder: Path, kind: str | None, steps: range | None, damaged: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield (place, row) from a run's rollouts.jsonl, if given only of one kind ("train" or "eval") and of some steps.

    Completions of conversations become messages, and the `sampler` of each row is its step. Lines that are not rollouts are
    skipped, and their places are added to `damaged`. Raises `UserError` if no line is a rollout.
    """
    file = folder / ROLLOUTS if folder.is_dir() else folder
    if not file.is_file():
        raise UserError(f"{folder} has no {ROLLOUTS}; name the output_dir of an online run.")
    files = rollout_files(folder) if folder.is_dir() else [file]
    none = True
    placed = ((f"{one}:{number}", line) for one in files for number, line in enumerate(read_lines(one), 1))
    for place, line in placed:
        row = parse_step(line)
        if row is None or not {"prompt", "completion"} <= row.keys():
            damaged += [place] if line.strip() and line.endswith(b"\n") else []  # a killed run leaves a line without a newline
            continue
        none = False
        if (kind and row.get("kind") != kind) or (steps is not None and row["step"] not in steps):
            continue
        text = row["completion"]
        talk = isinstance(row["prompt"], list) and isinstance(text, str) and text
        answer = [{"role": "assistant", "content": text}] if talk else text
        yield place, {**row, "completion": answer, "sampler": f"step {row['step']}"}
    if none and damaged:
        raise UserError(f"{damaged[0]} is not a rollout; expected an object with step, prompt and completion.")
