"""Run folders as data. Anything may be missing or torn: a report is wanted most when a run has gone wrong."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from psigrad.errors import UserError

_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True)
class RunData:
    """One run. `metrics`, `timings` and `rollouts` are rows with a "step", in the order they were written."""

    name: str
    path: Path
    config: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    timings: list[dict[str, Any]] = field(default_factory=list)
    rollouts: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    summary: list[dict[str, Any]] = field(default_factory=list)

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Steps and values of one metric (or timing) where it is a finite number."""
        rows = self.timings if key.startswith("time/") or key in ("step_time", "tokens_per_second") else self.metrics
        points = [(row["step"], number(row[key])) for row in rows if key in row]
        points = [(step, value) for step, value in points if math.isfinite(value)]
        return [step for step, _ in points], [value for _, value in points]

    def keys(self, prefix: str) -> list[str]:
        """Names of metrics that begin with `prefix`, in the order in which they first occur."""
        return list(dict.fromkeys(key for row in self.metrics for key in row if key.startswith(prefix)))

    @property
    def held_out_metric(self) -> str:
        """The name of the held-out metric ("eval/exact"), or an empty string."""
        means = [key for key in self.keys("eval/") if key.endswith("/mean")]
        return means[0].removesuffix("/mean") if means else ""

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """Held-out figures by step, in order."""
        by_step: dict[int, dict[str, Any]] = {}
        for row in self.metrics:
            found = {key: value for key, value in row.items() if key.startswith("eval/")}
            if found:
                by_step.setdefault(row["step"], {"step": row["step"]}).update(found)
        return [by_step[step] for step in sorted(by_step)]


def number(value: Any) -> float:
    """A JSON value as a float: non-finite ones are written as strings; what is no number is NaN."""
    if isinstance(value, str):
        return _NUMBERS.get(value, math.nan)
    return float(value) if isinstance(value, int | float) else math.nan


def load(folder: str | Path) -> RunData:
    """The run in `folder`. Raises `UserError` where it is no run folder."""
    path = Path(folder)
    if not path.is_dir():
        raise UserError(f"There is no folder {str(folder)!r}; name the output_dir of a run.")
    if not any((path / name).exists() for name in ("config.json", "metrics.jsonl")):
        raise UserError(
            f"{str(folder)!r} is no run folder: it has neither config.json nor metrics.jsonl; name the output_dir of a run."
        )
    summary = _json(path / "summary.json").get("rows", [])
    return RunData(
        name=path.resolve().name,
        path=path,
        config=_json(path / "config.json"),
        metrics=[row for row in lines(path / "metrics.jsonl") if _stepped(row)],
        timings=[row for row in lines(path / "timings.jsonl") if _stepped(row)],
        rollouts=[row for row in lines(path / "rollouts.jsonl") if _stepped(row)],
        events=list(lines(path / "events.jsonl")),
        summary=[row for row in summary if isinstance(row, Mapping) and "name" in row and "value" in row],
    )


def _stepped(row: Mapping[str, Any]) -> bool:
    return isinstance(row.get("step"), int)


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a JSONL file that are whole."""
    if not path.exists():
        return
    with path.open("rb") as stream:
        for line in stream:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                yield row


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
