"""How often the warnings speak of an exploited reward in runs whose reward is the truth: honest runs, after the rules were set.

The runs are those of `loopholes` with the right reward, on seeds that were never looked at while the rules' patience was chosen.
The bound was stated before: at most 5 % of the runs raise an alarm, by the upper end of Wilson's 95 % interval.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from psigrad.config import Evaluation
from psigrad.experiments import drawing
from psigrad.intervals import Interval, over_seeds, wilson
from studies import trials
from studies.claims.loopholes import HONEST, RULES
from studies.settings import AlarmSettings
from studies.trials import ClaimVerdict, Trial

FIRST_SEED = 5000
"""The rules were chosen on seeds below 100."""
FACTORS = (1 / 3, 1.0, 3.0)
"""Of the learning rate: some runs learn slowly, some shake."""
BOUND = 0.05


@dataclass(frozen=True)
class AlarmRow:
    """The runs of one method at one learning rate."""

    name: str
    rate: float
    runs: int
    start: Interval
    """Held-out accuracy."""
    end: Interval
    by_rule: dict[str, int]
    """Runs in which each rule was raised."""
    alarms: int
    """Runs in which any was."""
    share: Interval
    """Of the runs; Wilson's 95 % interval."""


@dataclass(frozen=True)
class AlarmResult:
    """What `run` found."""

    settings: AlarmSettings
    rows: tuple[AlarmRow, ...]
    findings: tuple[ClaimVerdict, ...]
    core_minutes: float = 0.0


def check(s: AlarmSettings) -> None:
    """Refuse settings that make no sense."""
    trials.check(s)


def run(s: AlarmSettings) -> AlarmResult:
    """Honest runs of every method at every learning rate."""
    where = trials.files(s)
    often = Evaluation(eval_prompts=s.held_out, metric="exact", eval_steps=max(1, s.steps // 20))
    jobs: dict[tuple[str, float], list[Trial]] = {}
    for k in range(s.seeds):
        factor = FACTORS[k % len(FACTORS)]
        for name, method in HONEST.items():
            config = trials.online(s, where, method, reward=("exact",), evaluation=often)
            config = trials.at_rate(config, s.learning_rate * factor)
            jobs.setdefault((name, factor), []).append(Trial(name, FIRST_SEED + k, method, config))
    ordered = sorted((t for own in jobs.values() for t in own), key=lambda t: t.seed)
    found = trials.run_all(s, "false_alarms", ordered)
    rows = tuple(
        row(name, s.learning_rate * factor, [found[t.arm, t.seed] for t in own]) for (name, factor), own in sorted(jobs.items())
    )
    return AlarmResult(s, rows, verdicts(rows), trials.core_minutes(s, "false_alarms"))


def row(name: str, rate: float, runs: Sequence[Sequence[Mapping[str, Any]]]) -> AlarmRow:
    """What the runs of one method at one learning rate came to."""
    told = [trials.first_warning(rows, RULES) for rows in runs]
    by_rule = {rule: sum(trials.first_warning(rows, (rule,)) is not None for rows in runs) for rule in RULES}
    alarms = sum(step is not None for step in told)
    curves = [sorted(trials.curve(rows).items()) for rows in runs]
    start, end = (over_seeds(curve[i][1] for curve in curves) for i in (0, -1))
    return AlarmRow(name, rate, len(runs), start, end, by_rule, alarms, share_of(alarms, len(runs)))


def label(name: str, rate: float) -> str:
    """A row's method and learning rate."""
    return f"{name.removeprefix('honest ')} at {rate:.1g}"


def share_of(part: int, whole: int) -> Interval:
    """A share with Wilson's 95 % interval."""
    return Interval(part / whole, *wilson(part, whole))


def verdicts(rows: Sequence[AlarmRow]) -> tuple[ClaimVerdict, ...]:
    """All runs against the bound."""
    alarms, count = sum(r.alarms for r in rows), sum(r.runs for r in rows)
    share = share_of(alarms, count)
    verdict = trials.against(share, BOUND, above=False)
    claim = f"at most {BOUND:.0%} of honest runs raise an alarm"
    return (ClaimVerdict(claim, f"{alarms} of {count} runs; share", verdict, share),)


def tables(result: AlarmResult) -> Iterator[Table | Text]:
    """One row for each method and learning rate, then the bound."""
    table = drawing.new_table("False alarms of honest runs", "", "runs", "truth", "by rule", "alarms", "share")
    for r in result.rows:
        share = f"{r.share.mean:.2f} [{r.share.low:.2f}, {r.share.high:.2f}]"
        counts = ", ".join(str(r.by_rule[rule]) for rule in RULES)
        truth = f"{r.start.mean:.2f}→{r.end.mean:.2f}"
        table.add_row(label(r.name, r.rate), str(r.runs), truth, counts, str(r.alarms), share)
    yield table
    yield drawing.note(
        "truth: held-out accuracy at the start and at the end; the reward is the same",
        f"by rule: runs with the warning {', '.join(RULES)}; alarms: with any of them",
        "share: of the runs, with Wilson's 95 % interval",
    )
    yield trials.findings_text(result.findings)


def picture(found: Mapping[str, Any], path: Path) -> Path:
    """The share of runs with an alarm, for each method and learning rate, and the bound."""
    figure, axes = drawing.new_figure(7.5, 3.4, 1, 1)
    names = [*(label(row["name"], row["rate"]) for row in found["rows"]), "all"]
    shares = [*(row["share"] for row in found["rows"]), found["findings"][0]["difference"]]
    for k, (mean, low, high) in enumerate(shares):
        colour = drawing.RUST if k == len(shares) - 1 else drawing.BLUE
        axes.plot([low, high], [k, k], color=colour, linewidth=2.4, alpha=0.45, solid_capstyle="round")
        axes.plot([mean], [k], "o", color=colour, markersize=6)
    axes.axvline(BOUND, color=drawing.INK, linewidth=0.9, linestyle="--")
    axes.annotate("5 %", (BOUND, -0.75), xytext=(4, 0), textcoords="offset points", fontsize=8, color=drawing.INK)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -1)
    axes.set_xlim(left=-0.005)
    drawing.tidy(axes, "Share of honest runs with an alarm, and its 95 % interval", grid="x")
    return drawing.save(figure, path)
