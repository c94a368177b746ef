"""GRPO's difficulty bias: the weight of a prompt by its probability of a correct answer, exact, then over training.

The claim is that of Liu et al. 2025, Understanding R1-Zero-Like Training (arXiv:2503.20783, section 3.1). GRPO divides by the
standard deviation of a group's rewards. Prompts that are nearly always or nearly never solved therefore weigh more than in the
gradient of the expected reward. Dr. GRPO does not divide.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from psigrad.intervals import Interval, over_seeds
from studies import drawing, groups, trials
from studies.settings import DifficultySettings
from studies.trials import Arm, ClaimVerdict

CHANCES = (0.02, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98)
EXTREME = 0.1
"""The probability of a correct answer in the exact claim, compared with prompts at one half."""
ARMS: dict[str, dict[str, Any]] = {
    "GRPO": {"preset": "grpo", "kl": None},
    "Dr. GRPO": {"preset": "dr_grpo", "aggregate": {"part": "fixed_length", "n": 12}},
}
SLACK = 0.01
ZERO = 1e-9


@dataclass(frozen=True)
class WeightRow:
    """One method: the expected step on one prompt along ∇J, in units of its value at a probability of one half."""

    name: str
    weight: tuple[float, ...]
    """The weight at each of `CHANCES`."""


@dataclass(frozen=True)
class DifficultyResult:
    """The results of `run`."""

    settings: DifficultySettings
    exact: tuple[WeightRow, ...]
    arms: tuple[Arm, ...]
    shares: dict[str, tuple[Interval, ...]]
    """The share of all |advantages| on groups with 1, 2, … correct answers, of each arm."""
    findings: tuple[ClaimVerdict, ...]
    core_minutes: float = 0.0


check = trials.check


def run(s: DifficultySettings) -> DifficultyResult:
    """Enumerate one prompt, then run every arm over seeds."""
    exact = tuple(weigh(name, s.generations) for name in groups.METHODS)
    where = trials.files(s)
    configs = {
        name: (algorithm["preset"], trials.online(s, where, algorithm, reward=("exact",))) for name, algorithm in ARMS.items()
    }
    each: dict[tuple[str, int], list[float]] = {}

    def more(arm: str, seed: int) -> list[dict[str, Any]]:
        each[arm, seed] = own = shares(trials.rollouts(s, "difficulty", arm, seed), s.generations)
        return [{"step": s.steps, "extreme": own[0] + own[-1], "hard": _hard(s, arm, seed)}]

    figures = {
        "area": trials.area,
        "at the end": trials.last,
        "hard words": lambda run: trials.last(run, "hard"),
        "extreme": lambda run: trials.last(run, "extreme"),
    }
    arms = trials.run_arms(s, "difficulty", configs, figures, more=more)
    counts = range(s.generations - 1)
    by_count = {name: tuple(over_seeds(each[name, seed][k] for seed in range(s.seeds)) for k in counts) for name in ARMS}
    return DifficultyResult(s, exact, tuple(arms.values()), by_count, verdicts(exact, arms), trials.core_minutes(s, "difficulty"))


def weigh(name: str, generations: int) -> WeightRow:
    """Return the weights of one method on prompts of one token, correct with each of `CHANCES`.

    The weight is ⟨E ĝ, ∇J⟩ / ‖∇J‖², in units of its value at ½.
    """
    found = []
    for chance in (0.5, *CHANCES):
        theta = groups.logits(1, chance)
        _, slope = groups.accuracy(1, theta)
        found.append(
            float(groups.enumerate_groups(groups.METHODS[name], 1, theta, generations).gradient @ slope / (slope @ slope))
        )
    return WeightRow(name, tuple(value / found[0] for value in found[1:]))


def shares(rollouts: Iterable[Mapping[str, Any]], generations: int) -> list[float]:
    """Return the shares of a run's Σ|advantage| that belong to groups with 1, 2, … correct answers."""
    right: dict[tuple[int, int], int] = {}
    weight: dict[tuple[int, int], float] = {}
    for row in rollouts:
        group = (row["step"], row["row"])
        right[group] = right.get(group, 0) + (row["reward"] == 1)
        weight[group] = weight.get(group, 0.0) + abs(row["advantage"])
    sums = [math.fsum(w for group, w in weight.items() if right[group] == k) for k in range(1, generations)]
    whole = math.fsum(sums)
    return [part / whole if whole else math.nan for part in sums]


def _hard(s: DifficultySettings, arm: str, seed: int) -> float:
    """Return the held-out accuracy on the longest words, mean over the run after its start."""
    found = [row for row in trials.rollouts(s, "difficulty", arm, seed, kind="eval") if row["step"]]
    words = [row["prompt"].rsplit(" ", 1)[-1] for row in found]
    most = max(map(len, words))
    scores = [row["reward"] for row, word in zip(found, words, strict=True) if len(word) == most]
    return math.fsum(scores) / len(scores)


def verdicts(exact: Sequence[WeightRow], arms: Mapping[str, Arm]) -> tuple[ClaimVerdict, ...]:
    """Return the claims, each by the test stated beforehand."""
    at = {row.name: row.weight[CHANCES.index(EXTREME)] for row in exact}
    grpo, dr = arms["GRPO"], arms["Dr. GRPO"]
    chance = f"{EXTREME:.0%} right against 50 %".replace("%", " %", 1)
    test = "weight, that at 50 % is 1, exact"
    return (
        trials.exactly(f"GRPO weighs a prompt more, {chance}", test, at["GRPO"], at["GRPO"] > 1 + ZERO),
        trials.exactly(f"Dr. GRPO weighs them alike, {chance}", test, at["Dr. GRPO"], abs(at["Dr. GRPO"] - 1) < ZERO),
        trials.compare("GRPO puts more of its weight on groups with one right or one wrong answer", grpo, dr, "extreme"),
        trials.compare("Dr. GRPO is at least as accurate as GRPO", dr, grpo, "area", least=-SLACK),
        trials.compare("Dr. GRPO is at least as accurate on the hard words", dr, grpo, "hard words", least=-SLACK),
    )


def tables(result: DifficultyResult) -> drawing.Printed:
    """Yield the tables of one prompt, the runs, then the claims."""
    shown = [i for i, p in enumerate(CHANCES) if p <= 0.5]
    table = drawing.new_table("The weight of a prompt, exact", "", *(f"p = {CHANCES[i]:g}" for i in shown))
    for row in result.exact:
        table.add_row(row.name, *(f"{row.weight[i]:.2f}" for i in shown))
    yield table
    yield drawing.note(
        "p: chance of a right answer; 1 − p weighs as p",
        f"weight: of the expected step along ∇J, at p = 0.5 it is 1; groups of {result.settings.generations}",
    )
    yield trials.arms_table("The difficulty bias over training", result.arms, ".3f")
    yield drawing.note(
        "95 % intervals over seeds (Student's t).",
        "area: mean held-out accuracy over the run; hard words: the same of the longest words",
        "extreme: share of all |advantages| on groups with one right or one wrong answer",
    )
    yield trials.findings_text(result.findings)


def picture(found: Mapping[str, Any], path: Path) -> Path:
    """Plot exact weights, shares of the weight over training, and learning curves."""
    figure, (left, middle, right) = drawing.new_figure(12.5, 3.5, 1, 3)
    colours = dict(zip(groups.METHODS, (drawing.BLUE, drawing.GREEN, drawing.RUST), strict=True))
    styles: dict[str, dict[str, Any]] = {name: {"color": colour, "linewidth": 1.7} for name, colour in colours.items()}
    styles["GRPO without std"]["linestyle"] = (0, (4, 2))
    for row in found["exact"]:
        left.plot(CHANCES, row["weight"], marker="o", markersize=4, label=row["name"], **styles[row["name"]])
    for arm in found["arms"]:
        own, colour = found["shares"][arm["name"]], colours[arm["name"]]
        drawing.band(middle, range(1, len(own) + 1), own, colour, marker="o", markersize=4)
        drawing.band(right, arm["steps"], arm["curve"], colour, label=arm["name"])
    drawing.tidy(left, "Exact: weight of a prompt (1 at ½)", "y", "chance of a right answer", legend=True)
    size = len(found["shares"]["GRPO"]) + 1
    drawing.tidy(middle, "Training: share of the weight", "y", f"right answers in a group of {size}")
    drawing.tidy(right, "Training: held-out accuracy", "y", "steps")
    left.set_ylim(0)
    middle.set_ylim(0)
    return drawing.save(figure, path)
