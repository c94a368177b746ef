"""The verdict on a run's learning: one line for the top of the report and the end of a run in the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from psigrad.errors import several
from psigrad.intervals import LEAST_ROWS, Interval, difference, paired_difference
from psigrad.records.read import RunData, brief, kind_of, show_interval, show_number
from psigrad.records.rows import PARTS, figures, number
from psigrad.records.warnings import BY_NAME, SignalNames, Watch

Mood = Literal["good", "bad", "plain"]
_ENDS = ("finished", "stopped", "failed")
_PAIRS = {"eval/accuracy": "accuracy", "eval/rewards/accuracies": "accuracy"}
"""The display names of the accuracies on held-out pairs, by their keys in reward models and in preference losses."""

_MARKS = {"0": 0.0, "h": 0.5, "1": 1.0}
_UNMOVED = 0.9
"""If at least this share of the held-out completions is unchanged, the policy has hardly changed."""
_LEAST_KL = 0.01
"""Below this KL to the initial model, in nats per completion, the policy has hardly changed.

By Pinsker's inequality, no success rate then changes by more than 0.07.
"""


@dataclass(frozen=True)
class Verdict:
    """The verdict on a run: a `judgement` such as "Learned", and the `evidence`, a text with the numbers behind it."""

    judgement: str
    evidence: str
    mood: Mood = "plain"

    def __str__(self) -> str:
        return f"{self.judgement}: {self.evidence}" if self.evidence else f"{self.judgement}."


def verdict(run: RunData) -> Verdict:
    """Return the verdict on a run: whether it learned, and the numbers that show it.

    The judgement is "Learned" if the 95 % interval of the change of the held-out metric is above 0, "Got worse" if it is below 0,
    and "No clear change" if it contains 0. With fewer than `LEAST_ROWS` rows, learning is not judged.
    """
    word, mood, figures_said = _judge(run)
    end = run.last_event(*_ENDS)
    parts = [*figures_said, *_divergence(run), *_warnings(apply_rules(run))]
    if end.get("kind") == "failed":
        word, mood = "Failed", "bad"
        parts.insert(0, " ".join(str(end.get("reason") or "no reason was noted").split()))
    elif end.get("kind") == "stopped":
        parts.append(f"stopped at step {show_number(end.get('step'))}, before its end")
    return Verdict(word, "; ".join(filter(None, parts)), mood)


def _judge(run: RunData) -> tuple[str, Mood, list[str]]:
    """Return (judgement, mood, parts of the evidence) of a `Verdict` from a run's metrics."""
    metric, rows = run.held_out_metric, run.evaluations
    for stem, key in ((metric, f"{metric}/mean"), *((share, share) for share in _PAIRS)):
        judged = [row for row in rows if stem and key in row and (stem == metric or f"{stem}/low" in row)]
        if len(judged) > 1:
            first, last = (Interval(number(row[key]), *_interval(row, stem)) for row in (judged[0], judged[-1]))
            name = _PAIRS.get(stem, stem.removeprefix("eval/"))
            if stem == metric:
                pairs, unit = _pairs(run, judged[0]["step"], judged[-1]["step"], first.mean, last.mean), "prompts"
            else:
                marks = f"{stem.replace('eval/', 'held_out/')}/pairs"
                pairs, unit = _ranked(judged[0].get(marks), judged[-1].get(marks)), "pairs"
            rows_judged = len(pairs) or _least_rows(run, judged[-1])
            change = paired_difference(*zip(*pairs, strict=True)) if pairs else _unpaired(first, last)
            word, mood, said = _change(name, first, last, change, rows_judged)
            paired = [f"change {_signed(change)} over {len(pairs):,} {unit}"] if pairs and math.isfinite(change.low) else []
            moved = [] if mood in ("good", "bad") else _describe_small_change(run)
            return word, mood, [*said, *paired, *moved, *_parts(judged[0], judged[-1])]
    if len(losses := [number(row["eval/loss"]) for row in run.evaluations if "eval/loss" in row]) > 1:
        return "Trained", "plain", [f"held-out loss {brief(losses[0])} → {brief(losses[-1])}", *_describe_small_change(run)]
    once = [
        f"held-out {metric.removeprefix('eval/')} {show_interval(number(row[f'{metric}/mean']), *_interval(row, metric), brief)}"
        for row in rows
        if metric and f"{metric}/mean" in row
    ]
    for key, name in (("reward", "reward"), ("rollout/ep_rew_mean", "return"), ("loss", "loss")):
        values = run.series(key)[1]
        if len(values) > 1:
            tenth = max(1, len(values) // 10)
            ends = [sum(part) / tenth for part in (values[:tenth], values[-tenth:])]
            said = [f"{name} of training {brief(ends[0])} → {brief(ends[1])}"]
            word = "Evaluated once" if once else "Not evaluated"
            return word, "plain", [*once, *said] if once else [*said, "no held-out rows"]
    return ("Evaluated once", "plain", once) if once else ("Nothing to judge yet", "plain", [])


def _pairs(run: RunData, before: int, after: int, *means: float) -> list[tuple[float, float]]:
    """Return (metric before, metric after) for each prompt that the evaluations at the steps `before` and `after` both scored.

    `means` are the evaluations' means in metrics.jsonl. Return [] if they show that rows are missing.
    """
    ends = [run.held_out.get(step, {}) for step in (before, after)]
    for rows, mean in zip(ends, means, strict=True):
        if not rows or abs(math.fsum(rows.values()) / len(rows) - mean) > 1e-6 * max(1.0, abs(mean)):
            return []
    return [(ends[0][row], ends[1][row]) for row in ends[0] if row in ends[1]]


def _ranked(*marks: Any) -> list[tuple[float, float]]:
    """Return (before training, after training) for each pair of answers: 1 if it was ranked right, 0 if wrong, ½ for a tie.

    `marks` are two strings from `marks_of`. Return [] if they cannot be compared.
    """
    before, after = ([_MARKS[mark] for mark in text] if isinstance(text, str) and {*text} <= {*_MARKS} else [] for text in marks)
    return [*zip(before, after, strict=True)] if len(before) == len(after) else []


def _unpaired(first: Interval, last: Interval) -> Interval:
    """Return the change between independent evaluations. If only one has an interval, the other one gets the same width.

    If neither has one, the limits of the change are NaN.
    """
    ends = [one if one.low < one.high else None for one in (first, last)]
    known = ends[0] or ends[1]
    if known is None:
        return Interval(last.mean - first.mean, math.nan, math.nan)
    moved = (Interval(one.mean, one.mean + known.low - known.mean, one.mean + known.high - known.mean) for one in (first, last))
    return difference(*(end or other for end, other in zip(ends, moved, strict=True)))


def _change(name: str, first: Interval, last: Interval, change: Interval, rows: float) -> tuple[str, Mood, list[str]]:
    """Return (judgement, mood, texts), as `_judge` does, for the `change` of the metric `name` from `first` to `last`.

    `rows` is the number of held-out rows, pairs or episodes that were scored.
    """
    said = [f"held-out {name} {show_interval(*first, brief)} → {show_interval(*last, brief)}"]
    if not math.isfinite(change.mean):
        return "Unknown", "bad", said
    if rows < LEAST_ROWS:
        few = f"only {show_number(int(rows))} held-out rows, and a verdict needs {LEAST_ROWS}"
        return "Too few to judge", "plain", [*said, few]
    if math.isnan(change.low):
        same = "all rows of an evaluation have the same value"
        return ("Trained", "plain", said) if math.isnan(first.low + last.low) else ("No verdict", "plain", [*said, same])
    if change.low <= 0 <= change.high:
        return "No clear change", "plain", said
    return ("Learned", "good", said) if change.mean > 0 else ("Got worse", "bad", said)


def _describe_small_change(run: RunData) -> list[str]:
    """Return [a sentence] if the completions, the KL or the loss show that training hardly changed the policy; otherwise []."""
    advice = "raise the learning rate or train for more steps"
    ends = [(row[min(row)].completion, row[max(row)].completion) for row in run.compared if len(row) > 1]
    same = sum(before == after for before, after in ends)
    if len(ends) >= LEAST_ROWS and same >= _UNMOVED * len(ends):
        return [f"the policy hardly moved: {same:,} of {len(ends):,} held-out completions are unchanged; {advice}"]
    kl = number((run.evaluations or [{}])[-1].get("eval/kl"))
    if kl < _LEAST_KL:
        most = brief(math.sqrt(max(0.0, kl) / 2))
        return [f"the policy hardly moved: at this KL no accuracy can change by more than {most}; {advice}"]
    losses = [brief(number(row["eval/loss"])) for row in run.evaluations if "eval/loss" in row]
    return [f"the model hardly moved: the held-out loss is the same; {advice}"] if losses and losses[0] == losses[-1] else []


def _least_rows(run: RunData, row: Mapping[str, Any]) -> float:
    """Return a lower bound on the number of rows or episodes scored in the evaluation `row`; infinity if unknown."""
    if "eval/prompts" in row:
        size = max(1.0, number(run.settings.get("evaluation.num_generations_eval", 1)))
        return number(row["eval/prompts"]) - number(row.get("eval/unscored", 0)) // size
    noted = [event["eval_rows"] for event in run.starts if "eval_rows" in event]
    known = number(noted[-1] if noted else run.settings.get("eval_episodes"))
    return math.inf if math.isnan(known) else known


def _parts(first: Mapping[str, Any], last: Mapping[str, Any]) -> list[str]:
    """Return [a text with each reward function's mean before and after training], or [] if the metrics have no such means."""
    keys = [key for key in last if key.startswith(PARTS) and key.endswith("/mean")]
    said = [f"{key[len(PARTS) : -5]} {brief(number(first.get(key)))} → {brief(number(last[key]))}" for key in keys]
    return [", ".join(said)] if said else []


def _interval(row: Mapping[str, Any], metric: str) -> tuple[float, float]:
    return number(row.get(f"{metric}/low")), number(row.get(f"{metric}/high"))


def _signed(change: Interval) -> str:
    """Return a change and its interval as text, with plus and minus signs."""
    mean, low, high = (f"{'+' * (end > 0)}{brief(end)}" for end in change)
    return f"{mean} [{low}, {high}]"


def _divergence(run: RunData) -> list[str]:
    kl = number((run.evaluations or [{}])[-1].get("eval/kl"))
    return [f"KL to the start {brief(kl)} nats per completion"] if kind_of(run.config) == "online" and math.isfinite(kl) else []


def apply_rules(run: RunData) -> Watch:
    """Return a `Watch` that has applied the rules of `psigrad.records.warnings` to all rows of a run."""
    watch, names = Watch(), SignalNames()
    for row in run.metrics:
        watch.update(row["step"], {names.of(key): value for key, value in figures(row).items()})
    return watch


def _warnings(watch: Watch) -> list[str]:
    """Return three texts: on current warnings, on earlier ones, and on those that are normal once the task is solved."""
    found = watch.alerts()
    standing = dict.fromkeys(alert.rule for alert in found if alert.ended is None)
    calm, loud = ([BY_NAME[r].title for r in standing if watch.explains(r) is solved] for solved in (True, False))
    passed = len({alert.rule for alert in found} - set(standing))
    return [
        f"{several(len(loud), 'warning')}: {', '.join(loud)}" if loud else "" if passed else "no warnings",
        f"{several(passed, 'earlier warning')}" if passed else "",
        f"the task is solved, which explains: {', '.join(calm)}" if calm else "",
    ]
