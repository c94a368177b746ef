"""DAPO with and without its dynamic sampling: fresh prompts replace groups whose answers are all correct or all wrong.

The claim is that of Yu et al. 2025, DAPO (arXiv:2503.14476, section 3.2): the same number of updates reaches a higher accuracy.
This study also counts the cost in samples.
"""

from __future__ import annotations

from typing import Any

from studies import trials
from studies.settings import TrialSettings
from studies.trials import TrialResult

ARMS = {"all groups": ["not_truncated"], "with signal": ["has_signal", "not_truncated"]}

check = trials.check


def run(s: TrialSettings) -> TrialResult:
    """Run with and without the filter."""
    where = trials.files(s)
    configs = {
        name: ("dapo", trials.online(s, where, {"preset": "dapo", "keep": keep}, reward=("exact",)))
        for name, keep in ARMS.items()
    }
    figures = {
        "area": trials.area,
        "at the end": trials.last,
        "samples": lambda run: sum(row.get("samples", 0) for row in run),
        "no signal": lambda run: trials.mean_of(run, "frac_reward_zero_std"),
        "by samples": by_samples,
    }
    arms = trials.run_arms(s, "dynamic_sampling", configs, figures)
    every, signal = arms.values()
    findings = (
        trials.compare("as many updates learn more", signal, every, "area"),
        trials.compare("it draws more samples", signal, every, "samples"),
        trials.compare("as many samples learn more", signal, every, "by samples"),
    )
    return TrialResult(s, tuple(arms.values()), findings)


def by_samples(rows: Any) -> float:
    """Return the mean accuracy over drawn samples, up to the number that a run without dynamic sampling draws."""
    drawn, points, per_step = 0, [], 0
    for row in rows:
        drawn += row.get("samples", 0)
        per_step = per_step or row.get("groups", 0) * row.get("samples", 0) // max(1, row.get("prompts", 1))
        if "eval/exact/mean" in row and row["step"]:
            points.append((drawn, row["eval/exact/mean"]))
    budget = per_step * max(row["step"] for row in rows)
    area, before = 0.0, 0
    for until, accuracy in points:
        area += accuracy * max(0, min(until, budget) - before)
        before = min(until, budget)
    return area / budget if budget else 0.0


tables = trials.shown(
    "Dynamic sampling",
    "area: mean held-out accuracy over the updates",
    "by samples: the same, over the samples that the arm with all groups draws",
    "no signal: share of the groups whose rewards are all equal",
)
picture = trials.curves(
    ("Held-out accuracy over updates", tuple(ARMS)),
    beside=[("Mean accuracy, by updates and by samples", ("area", "by samples"))],
)
