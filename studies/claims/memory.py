"""RLOO and GRPO against PPO on one model: peak memory and seconds per step, measured and as `psigrad plan` predicts them.

The claim is that of Huang and Ahmadian 2024 (Putting RL back in RLHF, Hugging Face). RLOO takes 50 to 70 % less memory than PPO
and is 2 to 3 times as fast. The reason is PPO's critic, which is as large as the policy and is also trained.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.text import Text

from psigrad.errors import UserError
from studies import drawing, trials
from studies.settings import MemorySettings
from studies.trials import ClaimVerdict

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from plan import make_plan
from timed.timing import alone
from timed.workload import Workload

ARMS = {"RLOO": ("rloo", 1), "GRPO": ("grpo", 1), "PPO, 1 pass": ("ppo", 1), "PPO, 4 passes": ("ppo", 4)}
LESS, FASTER = (0.5, 0.7), (2.0, 3.0)


@dataclass(frozen=True)
class MemoryRow:
    """The figures of one method."""

    name: str
    peak_mb: float
    predicted_mb: float
    seconds: float
    predicted_seconds: float


@dataclass(frozen=True)
class MemoryResult:
    """The results of `run`."""

    settings: MemorySettings
    start_mb: float
    """The peak with a model of a few thousand parameters: the cost of every method before its models."""
    rows: tuple[MemoryRow, ...]
    less: dict[str, float]
    """The share of PPO's memory that RLOO saves: of the peak, of the peak above the start, and as planned."""
    faster: dict[str, float]
    """The seconds of PPO divided by those of RLOO."""
    findings: tuple[ClaimVerdict, ...]


def check(s: MemorySettings) -> None:
    """Raise an error for invalid settings."""
    for name in ("hidden", "layers", "prompts", "generations", "completion_tokens", "steps", "threads"):
        if getattr(s, name) < 1:
            raise UserError(f"{name} is {getattr(s, name)}; it must be at least 1.")
    if s.hidden % 64:
        raise UserError(f"hidden is {s.hidden}; expected a multiple of 64, the width of an attention head.")


def run(s: MemorySettings) -> MemoryResult:
    """Measure every method in a separate process, and compute its plan."""
    rows = tuple(measure(s, name, kind, passes) for name, (kind, passes) in ARMS.items())
    start = alone(workload(replace(s, hidden=64, layers=1, steps=1), "start", "rloo", 1), "float32", s.threads)["ours"]["peak_mb"]
    by = {row.name: row for row in rows}
    rloo, ppo = by["RLOO"], by["PPO, 1 pass"]
    less = {
        "of the peak": 1 - rloo.peak_mb / ppo.peak_mb,
        "above the start": 1 - (rloo.peak_mb - start) / (ppo.peak_mb - start),
        "predicted": 1 - rloo.predicted_mb / ppo.predicted_mb,
    }
    faster = {name: by[name].seconds / rloo.seconds for name in ("PPO, 1 pass", "PPO, 4 passes")}
    findings = (
        inside("RLOO takes 50 to 70 % less memory than PPO", "less above the start", less["above the start"], LESS),
        inside("RLOO is 2 to 3 times as fast as PPO of one pass", "seconds", faster["PPO, 1 pass"], FASTER),
        inside("RLOO is 2 to 3 times as fast as PPO of four passes", "seconds", faster["PPO, 4 passes"], FASTER),
    )
    return MemoryResult(s, start, rows, less, faster, findings)


def inside(claim: str, what: str, found: float, bounds: tuple[float, float]) -> ClaimVerdict:
    """Return the verdict on the claim that a measurement lies within these bounds."""
    low, high = bounds
    return trials.exactly(claim, f"{what}: between {low:g} and {high:g}", found, low <= found <= high)


def workload(s: MemorySettings, name: str, kind: str, passes: int) -> Workload:
    """Return the work of one method."""
    return Workload(
        name,
        name,
        kind,
        hidden=s.hidden,
        layers=s.layers,
        vocabulary=s.vocabulary,
        prompts=s.prompts,
        generations=s.generations,
        completion_tokens=s.completion_tokens,
        beta=0.05,
        iterations=passes,
        steps=s.steps,
    )


def measure(s: MemorySettings, name: str, kind: str, passes: int) -> MemoryRow:
    """Measure one method."""
    work = workload(s, name, kind, passes)
    plan, found = make_plan(work, "float32", s.threads), alone(work, "float32", s.threads)["ours"]
    return MemoryRow(name, found["peak_mb"], plan.memory.peak / 2**20, found["seconds"], plan.seconds)


def tables(result: MemoryResult) -> drawing.Printed:
    """Yield one row for each method, then the shares."""
    s = result.settings
    table = drawing.new_table("Memory and time", "", "peak, MiB", "planned", "s/step", "planned")
    for row in result.rows:
        table.add_row(
            row.name, f"{row.peak_mb:,.0f}", f"{row.predicted_mb:,.0f}", f"{row.seconds:.2f}", f"{row.predicted_seconds:.2f}"
        )
    yield table
    yield drawing.note(
        f"{s.layers} layers of width {s.hidden}, {s.prompts} × {s.generations} completions of up to {s.completion_tokens} tokens",
        f"float32, {s.threads} threads; every method with a reference; the reward is a function",
    )
    yield Text("RLOO takes less memory: " + ", ".join(f"{share:.0%} {name}" for name, share in result.less.items()))
    yield trials.findings_text(result.findings)


def picture(found: Mapping[str, Any], path: Path) -> Path:
    """Plot memory and seconds, measured and planned."""
    figure, (left, right) = drawing.new_figure(9.5, 3.2, 1, 2)
    names = [row["name"] for row in found["rows"]]
    for axes, keys, title in (
        (left, ("peak_mb", "predicted_mb"), "Peak memory, MiB"),
        (right, ("seconds", "predicted_seconds"), "Seconds per step"),
    ):
        for k, (key, label, colour) in enumerate(zip(keys, ("measured", "planned"), (drawing.BLUE, "#9a9a9a"), strict=True)):
            places = [i + 0.38 * (k - 0.5) for i in range(len(names))]
            axes.bar(places, [row[key] for row in found["rows"]], width=0.36, color=colour, label=label)
        axes.set_xticks(range(len(names)), names)
        drawing.tidy(axes, title, grid="y", legend=axes is left)
    return drawing.save(figure, path)
