"""What psigrad set out to reach on two cores beside TRL, and whether a line of figures shows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Goal:
    """`faster`: TRL's seconds over ours, by precision; `smaller`: TRL's peak memory over ours; `mb` the most MiB that ours may
    take; `first_step` the most seconds from process start to the end of the first step.
    """

    faster: dict[str, float] = field(default_factory=dict)
    smaller: float | None = None
    mb: float | None = None
    first_step: float | None = None


GOALS = {
    "W0": Goal({"float32": 3.0, "bfloat16": 5.0}, first_step=4.0),
    "W1": Goal({"float32": 2.0, "bfloat16": 5.0}, mb=1500.0, first_step=4.0),
    "W2": Goal({"float32": 4.0}),
    "W3": Goal({"float32": 1.5}, smaller=4.0),
    "W3F": Goal({"float32": 1.5}),
    "W4": Goal({"float32": 3.0}),
    "DPO": Goal({"float32": 2.0}),
    "RM": Goal({"float32": 2.0}),
    "SFT": Goal({"float32": 2.0}),
}


@dataclass(frozen=True)
class Verdict:
    """A goal and what was measured."""

    workload: str
    what: str
    measured: str
    goal: str
    holds: bool


def verdicts(result: dict[str, Any]) -> list[Verdict]:
    """The goals of a line's workload; none where TRL was not beside it, since every goal is one of a comparison."""
    name, dtype = result["workload"], result["dtype"]
    goal = GOALS.get(name)
    if goal is None or "trl" not in result:
        return []
    found = []
    if dtype in goal.faster:
        low, high, median = (result["ratio"][key] for key in ("low", "high", "median"))
        held = median >= goal.faster[dtype]
        found.append(
            Verdict(name, f"times as fast, {dtype}", f"{median:.2f} [{low:.2f}, {high:.2f}]", f">= {goal.faster[dtype]:g}", held)
        )
    if goal.smaller:
        found.append(_most(name, "share of TRL's memory", 1 / result["memory_ratio"], 1 / goal.smaller, ".3f"))
    if goal.mb:
        found.append(_most(name, "peak memory, MiB", result["ours"]["peak_mb"], goal.mb, ".0f"))
    if goal.first_step:
        measured = result["to_first_step"]
        verdict = _most(name, "first step, s", measured["ours"], goal.first_step, ".1f")
        found.append(Verdict(name, verdict.what, f"{verdict.measured} (TRL {measured['trl']:.1f})", verdict.goal, verdict.holds))
    return found


def _most(name: str, what: str, measured: float, goal: float, digits: str) -> Verdict:
    return Verdict(name, what, format(measured, digits), f"<= {goal:g}", measured <= goal)


def table(found: list[Verdict]) -> str:
    """For people."""
    lines = [("workload", "goal", "measured", "", "")]
    lines += [(v.workload, v.what, v.measured, v.goal, "holds" if v.holds else "missed") for v in found]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)
