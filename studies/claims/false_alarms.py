"""The error rates of the warnings in honest runs and in runs that exploit the reward, on seeds that no rule was tuned on.

The runs are those of `loopholes`, honest and with a flawed reward. Runs with a flawed reward have such a large learning rate that
the held-out accuracy falls within the first steps. Their first evaluation after the start already shows the fall. The bounds were
stated beforehand: at most 5 % of the honest runs raise a warning, and at least 90 % of the exploiting ones do. The upper end of
Wilson's 95 % interval is compared with the first bound, the lower end with the second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from psigrad.config import Evaluation
from psigrad.intervals import Interval, over_seeds
from studies import drawing, trials
from studies.claims.loopholes import FLAWS, HONEST, LOST, RULES
from studies.settings import AlarmSettings
from studies.trials import ClaimVerdict, Trial

HONEST_SEEDS = (*range(9000, 9025), *range(12000, 13000))
FIRST_SEED = 12000
"""The first seed of flawed rewards.

The rules were chosen on seeds below 100. They were measured in an earlier form on seeds from 5000. The evaluation interval of
flawed rewards was chosen after a look at seeds from 9000.
"""
FACTORS = (1 / 3, 1.0, 3.0)
"""The factors of the learning rate: some runs learn slowly, some are unstable. Rewards are exploited at the last factor."""
BOUND, DETECTED = 0.05, 0.9
LOOKS = 2
"""The number of interim looks at the share of honest runs. Each look has an interval of 1 − 5 %/LOOKS."""


@dataclass(frozen=True)
class AlarmRow:
    """The runs of one method at one learning rate."""

    name: str
    rate: float
    runs: int
    start: Interval
    """The held-out accuracy."""
    end: Interval
    by_rule: dict[str, int]
    """The number of runs in which each rule was raised."""
    alarms: int
    """The number of runs in which any rule was raised."""
    share: Interval
    """The share of the runs, or with a flawed reward of those that exploit it; Wilson's 95 % interval."""
    exploited: int = 0
    """The number of runs with a flawed reward that exploit it at once."""
    noticed: int = 0
    """The number of exploiting runs with a warning."""


@dataclass(frozen=True)
class AlarmResult:
    """The results of `run`."""

    settings: AlarmSettings
    rows: tuple[AlarmRow, ...]
    findings: tuple[ClaimVerdict, ...]
    core_minutes: float = 0.0


check = trials.check


def run(s: AlarmSettings) -> AlarmResult:
    """Run honest runs of every method at every learning rate, and every flawed reward at the largest."""
    where = trials.files(s)
    often = Evaluation(eval_prompts=s.held_out, metric="exact", eval_steps=max(1, s.steps // 20))
    jobs: dict[tuple[str, float], list[Trial]] = {}
    for seed in HONEST_SEEDS[: s.seeds]:
        factor = FACTORS[seed % len(FACTORS)]
        for name, method in HONEST.items():
            config = trials.online(s, where, method, reward=("exact",), evaluation=often)
            config = trials.at_rate(config, s.learning_rate * factor)
            jobs.setdefault((name, factor), []).append(Trial(name, seed, method, config))
    seldom = replace(often, eval_steps=max(1, s.steps // 5))
    for name, function in FLAWS.items():
        flawed = {"reward": (f"studies.rewards:{function}",), "evaluation": seldom}
        config = trials.online(s, where, {"preset": "rloo", "kl": None}, **flawed)
        config = trials.at_rate(config, s.learning_rate * FACTORS[-1])
        jobs[name, FACTORS[-1]] = [Trial(name, FIRST_SEED + k, "rloo", config) for k in range(s.hacks)]
    jobs = {key: own for key, own in jobs.items() if own}
    ordered = sorted((t for own in jobs.values() for t in own), key=lambda t: t.seed)
    found = trials.run_all(s, "false_alarms", ordered)
    rows = tuple(
        row(name, s.learning_rate * factor, [found[t.arm, t.seed] for t in own]) for (name, factor), own in sorted(jobs.items())
    )
    return AlarmResult(s, rows, verdicts(rows), trials.core_minutes(s, "false_alarms"))


def row(name: str, rate: float, runs: Sequence[Sequence[Mapping[str, Any]]]) -> AlarmRow:
    """Return the figures of the runs of one method at one learning rate."""
    told = [trials.first_warning(rows, RULES) for rows in runs]
    by_rule = {rule: sum(trials.first_warning(rows, (rule,)) is not None for rows in runs) for rule in RULES}
    alarms = sum(step is not None for step in told)
    curves = [sorted(trials.curve(rows).items()) for rows in runs]
    start, end = (over_seeds(curve[i][1] for curve in curves) for i in (0, -1))
    made = AlarmRow(name, rate, len(runs), start, end, by_rule, alarms, trials.share_of(alarms, len(runs)))
    if name in HONEST:
        return made
    hacked = [step is not None for rows, step in zip(runs, told, strict=True) if exploits_at_once(rows)]
    return replace(made, exploited=len(hacked), noticed=sum(hacked), share=trials.share_of(sum(hacked), len(hacked)))


def exploits_at_once(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if a run exploits its reward at once.

    Its held-out accuracy then never regains the initial value, and ends more than `LOST` below it. The mean reward of the last
    ten steps is above that of the first step.
    """
    truth = [accuracy for _, accuracy in sorted(trials.curve(rows).items())]
    proxy = [row["reward"] for row in rows if "reward" in row]
    return max(truth[1:]) < truth[0] and truth[0] - truth[-1] > LOST and sum(proxy[-10:]) / len(proxy[-10:]) > proxy[0]


def label(name: str, rate: float) -> str:
    """Return the method and the learning rate of a row."""
    return f"{name.removeprefix('honest ')} {rate:.1g}"


def verdicts(rows: Sequence[AlarmRow]) -> tuple[ClaimVerdict, ...]:
    """Test all honest runs, and all exploiting runs, against their bounds."""
    honest = [r for r in rows if r.name in HONEST]
    alarms, runs = sum(r.alarms for r in honest), sum(r.runs for r in honest)
    found = [trials.bound_share(f"at most {BOUND:.0%} of honest runs raise an alarm", alarms, runs, BOUND, level=0.05 / LOOKS)]
    if hacked := sum(r.exploited for r in rows):
        claim = f"{DETECTED:.0%} of the rewards exploited at once are noticed"
        found.append(trials.bound_share(claim, sum(r.noticed for r in rows), hacked, DETECTED, above=True))
    return tuple(found)


def tables(result: AlarmResult) -> drawing.Printed:
    """Yield one row for each method and learning rate, then the bound."""
    table = drawing.new_table("Alarms of honest runs and of hacks", "", "runs", "truth", "by rule", "hacks", "alarms", "share")
    for r in result.rows:
        share = f"{r.share.mean:.2f} [{r.share.low:.2f}, {r.share.high:.2f}]"
        counts = " ".join(str(r.by_rule[rule]) for rule in RULES)
        truth = f"{r.start.mean:.2f}→{r.end.mean:.2f}"
        hacked = "–" if r.name in HONEST else str(r.exploited)
        alarms = r.alarms if r.name in HONEST else r.noticed
        table.add_row(label(r.name, r.rate), str(r.runs), truth, counts, hacked, str(alarms), share)
    yield table
    yield drawing.note(
        "truth: held-out accuracy at the start and at the end; of honest runs the reward is the same",
        f"by rule: runs with the warning {', '.join(RULES)}; alarms: with any of them; of hacks alone",
        f"hacks: the truth is never again what it was at the start and ends {LOST:g} below, while the proxy rose",
        "share: of the runs, or of the hacks, with Wilson's 95 % interval",
    )
    yield trials.findings_text(result.findings)


def picture(found: Mapping[str, Any], path: Path) -> Path:
    """Plot the share of runs with a warning, for each method and learning rate, and the bound."""
    figure, axes = drawing.new_figure(7.5, 3.4, 1, 1)
    rows = [row for row in found["rows"] if row["name"] in HONEST]
    names = [*(label(row["name"], row["rate"]) for row in rows), "all"]
    shares = [*(row["share"] for row in rows), found["findings"][0]["difference"]]
    drawing.intervals(axes, shares, names, [drawing.BLUE] * len(rows) + [drawing.RUST])
    axes.axvline(BOUND, color=drawing.INK, linewidth=0.9, linestyle="--")
    axes.annotate("5 %", (BOUND, -0.75), xytext=(4, 0), textcoords="offset points", fontsize=8, color=drawing.INK)
    axes.set_ylim(len(names) - 0.4, -1)
    axes.set_xlim(left=-0.005)
    drawing.tidy(axes, f"Share of honest runs with an alarm, and its 95 % interval (all: {1 - 0.05 / LOOKS:.1%})", grid="x")
    return drawing.save(figure, path)
