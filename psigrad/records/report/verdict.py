"""The verdict on a run's learning: one line for the top of the report and the end of a run in the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from psigrad.errors import several
from psigrad.intervals import LEAST_ROWS
from psigrad.records.read import RunData, kind_of, show_number
from psigrad.records.rows import PARTS, figures, number
from psigrad.records.warnings import BY_NAME, SignalNames, Watch

Mood = Literal["good", "bad", "plain"]
_ENDS = ("finished", "stopped", "failed")
_PAIRS = {"eval/accuracy": "accuracy", "eval/rewards/accuracies": "accuracy"}
"""Shares of held-out pairs in the right order, of a reward model and of a preference loss, and their display names."""


@dataclass(frozen=True)
class Verdict:
    """The judgement `word`, and `said`, the figures behind it."""

    word: str
    said: str
    mood: Mood = "plain"

    def __str__(self) -> str:
        return f"{self.word}: {self.said}" if self.said else f"{self.word}."


def verdict(run: RunData) -> Verdict:
    """Return the verdict on a run.

    It gives the end of the run if it was a bad one, its held-out metric (for pairs: the accuracy) before and after with 95 %
    intervals, the KL to the start, and the warnings.

    The run learned if the metric rose by more than chance explains: the rise is above the half widths of both intervals, added as
    for independent samples, sqrt(w1^2 + w2^2). Both use the same prompts, so this criterion is stricter than necessary. There is
    no judgement with fewer than `LEAST_ROWS` rows, or if neither interval has a width.
    """
    word, mood, figures_said = _judge(run)
    end: Mapping[str, Any] = next((event for event in reversed(run.events) if event.get("kind") in _ENDS), {})
    parts = [*figures_said, *_divergence(run), *_warnings(watched(run))]
    if end.get("kind") == "failed":
        word, mood = "Failed", "bad"
        parts.insert(0, " ".join(str(end.get("reason") or "no reason was noted").split()))
    elif end.get("kind") == "stopped":
        parts.append(f"stopped at step {show_number(end.get('step'))}, before its end")
    return Verdict(word, "; ".join(filter(None, parts)), mood)


def _judge(run: RunData) -> tuple[str, Mood, list[str]]:
    """Return the word, its mood, and the figures."""
    metric, rows = run.held_out_metric, run.evaluations
    for stem, key in ((metric, f"{metric}/mean"), *((share, share) for share in _PAIRS)):
        judged = [row for row in rows if stem and key in row and (stem == metric or f"{stem}/low" in row)]
        if len(judged) > 1:
            first, last = ((number(row[key]), *_interval(row, stem)) for row in (judged[0], judged[-1]))
            name = _PAIRS.get(stem, stem.removeprefix("eval/"))
            word, mood, said = _change(name, first, last, _rows_judged(run, judged[-1]))
            return word, mood, [*said, *_parts(judged[0], judged[-1])]
    if len(losses := [number(row["eval/loss"]) for row in run.evaluations if "eval/loss" in row]) > 1:
        return "Trained", "plain", [f"held-out loss {_short(losses[0])} → {_short(losses[-1])}"]
    once = [
        f"held-out {metric.removeprefix('eval/')} {_with(number(row[f'{metric}/mean']), *_interval(row, metric))}"
        for row in rows
        if metric and f"{metric}/mean" in row
    ]
    for key, name in (("reward", "reward"), ("rollout/ep_rew_mean", "return"), ("loss", "loss")):
        values = run.series(key)[1]
        if len(values) > 1:
            tenth = max(1, len(values) // 10)
            ends = [sum(part) / tenth for part in (values[:tenth], values[-tenth:])]
            said = [f"{name} of training {_short(ends[0])} → {_short(ends[1])}"]
            word = "Evaluated once" if once else "Not evaluated"
            return word, "plain", [*once, *said] if once else [*said, "no held-out rows"]
    return ("Evaluated once", "plain", once) if once else ("Nothing to judge yet", "plain", [])


def _change(
    name: str, first: tuple[float, float, float], last: tuple[float, float, float], rows: float
) -> tuple[str, Mood, list[str]]:
    """Return the word, its mood, and the figures for two (mean, low, high) of so many rows."""
    ties = name in _PAIRS.values() and first[1] == first[2]  # before its first step a preference loss orders nothing
    before = f"{_short(first[0])} (all ties)" if ties else _with(*first)
    said = [f"held-out {name} {before} → {_with(*last)}"]
    halves = [(high - low) / 2 for _, low, high in (first, last)]
    change = last[0] - first[0]
    if not math.isfinite(change):
        return "Unknown", "bad", said
    if any(map(math.isnan, halves)):
        return "Trained", "plain", said
    if rows < LEAST_ROWS:
        few = f"of {show_number(int(rows))} held-out rows, and a verdict takes {LEAST_ROWS}"
        return "Too few to judge", "plain", [*said, few]
    if not any(halves):
        return "No verdict", "plain", [*said, "within each evaluation all rows have the same figure"]
    # An interval without a width, as for ties alone, counts as uncertain as the other: a coin's would have one.
    chance = math.hypot(*(half or max(halves) for half in halves))
    if abs(change) <= chance:
        return "No clear change", "plain", said
    return ("Learned", "good", said) if change > 0 else ("Got worse", "bad", said)


def _rows_judged(run: RunData, row: Mapping[str, Any]) -> float:
    """Return the least number of rows, or episodes, behind an evaluation's figures; infinite if the run does not record it."""
    if "eval/prompts" in row:
        size = max(1.0, number(run.settings.get("evaluation.num_generations_eval", 1)))
        return number(row["eval/prompts"]) - number(row.get("eval/unscored", 0)) // size
    noted = [event["eval_rows"] for event in run.events if event.get("kind") in ("started", "resumed") and "eval_rows" in event]
    known = number(noted[-1] if noted else run.settings.get("eval_episodes"))
    return math.inf if math.isnan(known) else known


def _parts(first: Mapping[str, Any], last: Mapping[str, Any]) -> list[str]:
    """Return the figures of each reward function, if there are several."""
    keys = [key for key in last if key.startswith(PARTS) and key.endswith("/mean")]
    said = [f"{key[len(PARTS) : -5]} {_short(number(first.get(key)))} → {_short(number(last[key]))}" for key in keys]
    return [", ".join(said)] if said else []


def _interval(row: Mapping[str, Any], metric: str) -> tuple[float, float]:
    return number(row.get(f"{metric}/low")), number(row.get(f"{metric}/high"))


def _with(mean: float, low: float, high: float) -> str:
    """Return a mean and its interval as text."""
    return _short(mean) + (f" [{_short(low)}, {_short(high)}]" if math.isfinite(low + high) else "")


def _short(value: float) -> str:
    """Return three significant digits: an interval is no more precise."""
    return show_number(value if abs(value) >= 1000 or not math.isfinite(value) else float(f"{value:.3g}"))


def _divergence(run: RunData) -> list[str]:
    kl = number((run.evaluations or [{}])[-1].get("eval/kl"))
    return [f"KL to the start {_short(kl)} nats per completion"] if kind_of(run.config) == "online" and math.isfinite(kl) else []


def watched(run: RunData) -> Watch:
    """Apply the rules of `psigrad.records.warnings` to all of a run's figures."""
    watch, names = Watch(), SignalNames()
    for row in run.metrics:
        watch.see(row["step"], {names.of(key): value for key, value in figures(row).items()})
    return watch


def _warnings(watch: Watch) -> list[str]:
    """Return the current warnings, the number that passed, and those that need no action."""
    found = watch.alerts()
    standing = dict.fromkeys(alert.rule for alert in found if alert.ended is None)
    calm, loud = ([BY_NAME[r].title for r in standing if watch.explains(r) is solved] for solved in (True, False))
    passed = len({alert.rule for alert in found} - set(standing))
    return [
        f"{several(len(loud), 'warning')}: {', '.join(loud)}" if loud else "" if passed else "no warnings",
        f"{several(passed, 'warning')} that passed" if passed else "",
        f"the task is solved, which explains: {', '.join(calm)}" if calm else "",
    ]
