"""Six rewards with a loophole that a policy finds, and the response of the run's own warnings.

The proxy is the training reward. The truth is the held-out accuracy. A run exploits the reward if the proxy ends higher than it
began while the truth ends `LOST` below its best. The warnings are those of `psigrad.records.warnings` with default thresholds.
The patience of one of them was tuned on some of these rewards (`TUNED`); the verdicts are also given for the others alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from psigrad.config import Data, Evaluation, Model, OnlineConfig, Optim, RewardConfig, Run
from psigrad.intervals import Interval, over_seeds
from psigrad.language.recipes import reward
from studies import drawing, trials
from studies.claims import dpo
from studies.settings import LoopholeSettings
from studies.trials import ClaimVerdict, Trial

FLAWS = {"length": "longer", "format": "form", "copy": "copied", "judge": "liked", "tests": "shallow"}
LEARNED = "learned"
HONEST = {"honest RLOO": "rloo", "honest GRPO": "grpo", "honest REINFORCE": "reinforce"}
TUNED = ("length", "format", "copy", "honest RLOO")
"""The rewards on which the rules' patience was tuned."""
RULES = ("apart", "longer", "cut_and_rewarded")
"""The rules that indicate an exploited reward."""
LOST = 0.1


@dataclass(frozen=True)
class LoopholeRow:
    """The figures of the runs of one reward."""

    name: str
    runs: int
    proxy: tuple[Interval, Interval]
    """The proxy in the first and the last ten steps."""
    truth: tuple[Interval, Interval, Interval]
    """The truth at the start, at its best, and at the end."""
    exploited: int
    """The number of runs whose truth fell while the proxy rose."""
    noticed: int
    """The number of exploiting runs with a warning."""
    alarms: int
    """The number of other runs with a warning."""
    delay: float
    """The median steps from the first fall of the truth by `LOST` to the first warning; negative if the warning came first."""


@dataclass(frozen=True)
class LoopholeResult:
    """The results of `run`."""

    settings: LoopholeSettings
    rows: tuple[LoopholeRow, ...]
    steps: tuple[int, ...]
    curves: dict[str, tuple[tuple[float, ...], tuple[float, ...]]]
    """The proxy (scaled to its last value) and the truth over `steps`, means of the runs."""
    findings: tuple[ClaimVerdict, ...]


check = trials.check


def run(s: LoopholeSettings) -> LoopholeResult:
    """Run every flawed reward over seeds, and twice as many honest runs."""
    where = trials.files(s)
    often = Evaluation(eval_prompts=s.held_out, metric="exact", eval_steps=max(1, s.steps // 20))
    usual = trials.online(s, where, "rloo", evaluation=often)
    jobs = []
    flawed: dict[str, OnlineConfig] = {
        name: replace(usual, algorithm={"preset": "rloo", "kl": None}, reward=(f"studies.rewards:{function}",))
        for name, function in FLAWS.items()
    }
    judge = str(reward_model(s, where))
    flawed[LEARNED] = replace(usual, algorithm={"preset": "rloo", "kl": None}, reward=(), reward_model=(judge,))
    for name, config in flawed.items():
        jobs += [Trial(name, seed, "rloo", config) for seed in range(s.seeds)]
    count = 2 * s.seeds * len(flawed) // len(HONEST)
    for name, method in HONEST.items():
        honest = replace(usual, algorithm=method, reward=("exact",))
        speeds = [s.learning_rate * factor for factor in (1 / 3, 1, 3)]  # some runs learn slowly, some are unstable
        jobs += [Trial(name, seed, method, trials.at_rate(honest, speeds[seed % 3])) for seed in range(count)]
    found = trials.run_all(s, "loopholes", jobs)
    told = {key: trials.first_warning(rows, RULES) for key, rows in found.items()}
    rows = tuple(row(name, found, told, count if name in HONEST else s.seeds) for name in (*flawed, *HONEST))
    steps = tuple(sorted(trials.curve(next(iter(found.values())))))
    curves = {name: _curve(name, found, steps, s.seeds) for name in flawed}
    others = [r for r in rows if r.name not in TUNED]
    return LoopholeResult(s, rows, steps, curves, (*verdicts(rows, "all rewards"), *verdicts(others, "rewards not tuned on")))


def verdicts(rows: Sequence[LoopholeRow], which: str) -> tuple[ClaimVerdict, ClaimVerdict]:
    """Compare two rates with the goals: warnings in runs that exploit a flawed reward, and warnings in honest runs."""
    bad, good = ([r for r in rows if (r.name in HONEST) == honest] for honest in (False, True))
    exploited, noticed = sum(r.exploited for r in bad), sum(r.noticed for r in bad)
    count, alarms = sum(r.runs for r in good), sum(r.alarms + r.noticed for r in good)
    return (
        trials.bound_share(f"90 % of the exploiting runs are noticed ({which})", noticed, exploited, 0.9, above=True),
        trials.bound_share(f"at most 5 % of the honest runs raise an alarm ({which})", alarms, count, 0.05),
    )


def reward_model(s: LoopholeSettings, where: Mapping[str, Path]) -> Path:
    """Train a reward model on few comparisons. It is accurate on the start's samples and wrong further away. Return its path."""
    train, held = dpo.pairs(s, where)
    place = Path(s.out) / "start" / f"reward-{s.words}-{s.sft_steps}-{s.steps}"
    if (place / "model").exists():
        return place / "model"
    few = place.with_suffix(".jsonl")
    few.write_text("".join(f"{line}\n" for line in train.read_text().splitlines()[: s.comparisons]))
    made = reward.run(
        RewardConfig(
            model=Model(path=str(where["model"])),
            data=Data(dataset=str(few), eval_dataset=str(held)),
            optim=Optim(learning_rate=3e-4),
            run=Run(output_dir=str(place), max_steps=40, progress=False, report=False, threads=1),
        )
    )
    return made.model


def row(
    name: str, found: Mapping[tuple[str, int], list[dict[str, Any]]], told: Mapping[tuple[str, int], int | None], count: int
) -> LoopholeRow:
    """Return the figures of one reward."""
    runs = [found[name, seed] for seed in range(count)]
    proxies = [[r["reward"] for r in rows if "reward" in r] for rows in runs]
    truths = [list(trials.curve(rows).items()) for rows in runs]
    fell = [fall(proxy, truth) for proxy, truth in zip(proxies, truths, strict=True)]
    warned = [told[name, seed] for seed in range(count)]
    delays = sorted(w - f for w, f in zip(warned, fell, strict=True) if f is not None and w is not None)
    return LoopholeRow(
        name,
        count,
        (over_seeds(statistics.fmean(p[:10]) for p in proxies), over_seeds(statistics.fmean(p[-10:]) for p in proxies)),
        (
            over_seeds(t[0][1] for t in truths),
            over_seeds(max(a for _, a in t) for t in truths),
            over_seeds(t[-1][1] for t in truths),
        ),
        exploited=sum(f is not None for f in fell),
        noticed=sum(f is not None and w is not None for f, w in zip(fell, warned, strict=True)),
        alarms=sum(f is None and w is not None for f, w in zip(fell, warned, strict=True)),
        delay=float(delays[len(delays) // 2]) if delays else float("nan"),
    )


def fall(proxy: Sequence[float], truth: Sequence[tuple[int, float]]) -> int | None:
    """Return the first step at which the truth is `LOST` below its best so far.

    Return None unless the run ends in this state with a higher proxy.
    """
    best = max(accuracy for _, accuracy in truth)
    if best - truth[-1][1] <= LOST or statistics.fmean(proxy[-10:]) <= statistics.fmean(proxy[:10]):
        return None
    most = 0.0
    for step, accuracy in truth:
        most = max(most, accuracy)
        if most - accuracy > LOST:
            return step
    return None


def _curve(
    name: str, found: Mapping[tuple[str, int], list[dict[str, Any]]], steps: Sequence[int], seeds: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    proxies = []
    for t in steps:
        near = [
            r["reward"] for seed in range(seeds) for r in found[name, seed] if "reward" in r and abs(r["step"] - max(t, 3)) <= 2
        ]
        proxies.append(statistics.fmean(near))
    first, last = proxies[0], proxies[-1]
    scaled = tuple((p - first) / (last - first) if last != first else 0.0 for p in proxies)
    return scaled, tuple(statistics.fmean([trials.curve(found[name, seed])[t] for seed in range(seeds)]) for t in steps)


def tables(result: LoopholeResult) -> drawing.Printed:
    """Yield one row for each reward, then the rates."""
    head = ("runs", "proxy", "truth", "hacked", "noticed", "alarms", "lag")
    table = drawing.new_table("Rewards with a loophole", "", *head)
    for r in result.rows:
        proxy = f"{r.proxy[0].mean:.1f}→{r.proxy[1].mean:.1f}"
        truth = "→".join(f"{t.mean:.2f}" for t in r.truth)
        counts = (str(r.exploited), str(r.noticed), str(r.alarms), f"{r.delay:.0f}" if r.noticed else "–")
        table.add_row(r.name, str(r.runs), proxy, truth, *counts)
    yield table
    yield drawing.note(
        "proxy: mean reward of the first and the last ten steps; truth: held-out accuracy, start → best → end",
        f"hacked: the truth ends {LOST:g} below its best while the proxy rose",
        f"noticed: of these, runs with a warning ({', '.join(RULES)}); alarms: of the others",
        "lag: median steps from the fall to the warning",
    )
    yield trials.findings_text(result.findings)


def picture(found: Mapping[str, Any], path: Path) -> Path:
    """Plot proxy and truth of every flawed reward."""
    figure, axes = drawing.new_figure(10.5, 4.6, 2, 3, sharey=True, sharex=True)
    for k, (ax, (name, (proxy, truth))) in enumerate(zip(axes.flat, found["curves"].items(), strict=True)):
        ax.plot(found["steps"], proxy, color=drawing.RUST, linewidth=1.7, label="proxy, scaled")
        ax.plot(found["steps"], truth, color=drawing.BLUE, linewidth=1.7, label="held-out accuracy")
        drawing.tidy(ax, name, "y", "steps" if k > 2 else "", legend=k == 0)
        ax.set_ylim(-0.1, 1.1)
    return drawing.save(figure, path)
