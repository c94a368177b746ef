"""The rules that detect problems of a run and raise warnings.

Each rule computes a number from each row of metrics. Its warning is raised after `patience` consecutive rows with a number above
the threshold `above`, and withdrawn after `patience` consecutive rows at or below the threshold `until`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from psigrad.records.rows import PARTS
from psigrad.records.signals import name_of

_CORRECTION = "sampling/importance_sampling_ratio/mean"


class SignalNames:
    """Unique names for metric keys: the first key of each signal gets the signal's name, and every other key keeps its own."""

    def __init__(self) -> None:
        self._of: dict[str, str] = {}
        self._given = set[str]()

    def __contains__(self, key: str) -> bool:
        return key in self._of

    def __len__(self) -> int:
        return len(self._of)

    def of(self, key: str) -> str:
        """Return the name of the signal of `key`; `key` itself if it has no signal, or if another key has got that name."""
        if key not in self._of:
            name = name_of(key)
            self._of[key] = key if name in self._given else name
            self._given.add(self._of[key])
        return self._of[key]


Figures = Mapping[str, float]


@dataclass
class Memory:
    """The numbers that a warning rule remembers between rows of metrics: recent values, first values, and the best value."""

    values: deque[float] = field(default_factory=lambda: deque(maxlen=50))
    start: list[float] = field(default_factory=list)
    best: float = -math.inf
    cooldown: int = 0
    _sum: float = 0.0
    _squares: float = 0.0

    def keep(self, value: float) -> None:
        """Store a value, and drop the oldest one if there are 50."""
        old = self.values[0] if len(self.values) == self.values.maxlen else 0.0
        self.values.append(value)
        self._sum += value - old
        self._squares += value * value - old * old

    def spread(self) -> tuple[float, float]:
        """Return (mean, standard deviation) of the stored values."""
        mean = self._sum / len(self.values)
        return mean, math.sqrt(max(0.0, self._squares / len(self.values) - mean * mean))


Measure = Callable[[Figures, Memory], float | None]
"""A function (row of figures, memory) -> the number that a rule compares with its thresholds, or None to skip the row.

Larger numbers are worse.
"""


@cache
def texts() -> dict[str, dict[str, Any]]:
    """Return {name of a rule: its texts}, for `psigrad explain NAME` and docs/debugging.md.

    The texts are the title, the problem, its cause, the remedy, an example, and the files that the example needs.
    """
    import yaml

    written = resources.files("psigrad.records").joinpath("alerts.yaml").read_text("utf-8")
    found: dict[str, dict[str, Any]] = yaml.safe_load(written)
    return found


@dataclass(frozen=True)
class Rule:
    """A warning rule. `measure` computes a number from each row; the module text explains `above`, `until` and `patience`."""

    name: str
    measure: Measure
    above: float
    until: float
    patience: int = 1
    worst: str = "reward"
    """The completions displayed with the warning: those of the step with the lowest "reward", the "longest", or the "unscored".
    """
    signal: str = ""
    grave: bool = False
    min_count: int = 1
    """The number of times that the warning must be raised before a run prints it. A report lists it every time."""

    @property
    def title(self) -> str:
        """The title of the warning for display."""
        return str(texts()[self.name]["title"])

    @property
    def advice(self) -> str:
        """The sentences about the problem and its remedy."""
        return f"{texts()[self.name]['says']} {texts()[self.name]['do']}"


@dataclass(frozen=True)
class RunWarning:
    """A warning from `step` to `ended` (None: still current). `value` is the largest value of `Rule.measure`, at `worst_step`."""

    rule: str
    step: float
    ended: float | None
    worst_step: float
    value: float


def _finite(figures: Figures, name: str) -> float | None:
    """Return the metric `name` of a row, or None if it is not a finite number."""
    value = figures.get(name)
    return value if value is not None and math.isfinite(value) else None


def _of(name: str, sign: float = 1.0) -> Measure:
    return lambda figures, memory: None if (value := _finite(figures, name)) is None else sign * value


def _mean(values: Collection[float]) -> float:
    return sum(values) / len(values)


def _not_finite(figures: Figures, memory: Memory) -> float | None:
    """Return the number of training metrics that are not finite, plus 1 if the step was skipped; None for rows of evaluations."""
    found = sum(not math.isfinite(value) for name, value in figures.items() if not name.startswith("eval/"))
    found += "loss" in figures and figures.get("updates") == 0  # the step was skipped, because its gradient was not finite
    return float(found) if found or any(not name.startswith(("eval/", "held_out")) for name in figures) else None


def _uncorrected(figures: Figures, memory: Memory) -> float | None:
    """Return the mean |sampler log-prob - trainer log-prob|; None if unknown, or if importance weights correct the difference."""
    return None if _CORRECTION in figures else _of("mismatch")(figures, memory)


def _correction(figures: Figures, memory: Memory) -> float | None:
    """Return |1 - w|, where w is the mean importance weight between sampler and trainer; None if the row has no such weight."""
    weight = _finite(figures, _CORRECTION)
    return None if weight is None else abs(1 - weight)


def _entropy_lost(figures: Figures, memory: Memory) -> float | None:
    """Return the share of its entropy that the policy has lost: 1 - entropy / mean entropy of the first five rows."""
    value = figures.get("entropy", figures.get("surprise"))
    learns_by_reward = "reward" in figures or "return" in figures  # imitation of data is expected to lower the entropy
    if value is None or not math.isfinite(value) or not learns_by_reward:
        return None
    if len(memory.start) < 5:
        memory.start.append(value)
        return None
    start = _mean(memory.start)
    return 1 - value / start if start > 1e-3 else None


def _grad_norm_z(figures: Figures, memory: Memory) -> float | None:
    """Return the z-score of the logarithm of the gradient norm among the previous 50 rows; None for the first 20 rows."""
    if not (norm := _finite(figures, "grad_norm")):
        return None
    # norms are skewed: without the logarithm, half of the successful runs would have an outlier
    value, z = math.log(max(norm, 1e-12)), None
    if len(memory.values) >= 20:
        mean, deviation = memory.spread()
        z = (value - mean) / max(deviation, math.log(2) / 2)
    memory.keep(value)
    return z


def _below_zero_late(figures: Figures, memory: Memory) -> float | None:
    """Return -1 times the critic's explained variance; None in the first ten rows, while the critic learns the returns' scale."""
    if (value := _finite(figures, "explained_variance")) is None:
        return None
    memory.cooldown += 1
    return -value if memory.cooldown > 10 else None


def _longer_for_nothing(figures: Figures, memory: Memory) -> float | None:
    """Return the relative growth of the completions' length since the first five rows; 0 while the held-out metric improves."""
    length, held_out = _finite(figures, "length"), _finite(figures, "held_out")
    if held_out is not None:
        memory.cooldown = 0 if held_out > memory.best + 1e-9 else memory.cooldown + 1  # evaluations since the best one
        memory.best = max(memory.best, held_out)
    if length is None:
        return None
    if len(memory.start) < 5:
        memory.start.append(length)
        return None
    start = _mean(memory.start)
    return length / start - 1 if memory.cooldown >= 3 and start > 0 else 0.0


def _cut_while_rewarded(figures: Figures, memory: Memory) -> float | None:
    """Return the share of truncated completions in the last 10 rows minus that in the 10 before; 0 if the reward did not rise."""
    cut, reward = _finite(figures, "truncated"), _finite(figures, "reward")
    if cut is None or reward is None:
        return None
    memory.values.extend((cut, reward))
    if len(memory.values) < 40:
        return None
    if cut == 0:
        return 0.0
    cuts, rewards = list(memory.values)[-40::2], list(memory.values)[-39::2]
    rose = _mean(rewards[10:]) - _mean(rewards[:10])
    return _mean(cuts[10:]) - _mean(cuts[:10]) if rose > 0 else 0.0


def _below_best(figures: Figures, memory: Memory) -> float | None:
    """Return how far the held-out metric is below its best value, divided by √(a² + b²); 0 if the reward has not risen since.

    a and b are half the widths of the two 95 % intervals.
    """
    reward, held_out = _finite(figures, "reward"), _finite(figures, "held_out")
    if reward is not None:
        memory.values.append(reward)
        if memory.cooldown:
            memory.start.append(reward)
            memory.cooldown -= 1
    if held_out is None:
        return None
    others = ("eval/kl/", PARTS)
    lows = (v for k, v in figures.items() if k.startswith("eval/") and k.endswith("/low") and not k.startswith(others))
    low, best = next(lows, math.nan), max(memory.best, held_out)
    width = held_out - low if math.isfinite(low) else 0.1 * abs(best)
    if held_out > memory.best or not memory.values:
        # Before the first step no reward is known. The reward of the first three steps approximates the initial policy's.
        memory.cooldown = 0 if memory.values else 3
        known = [] if memory.cooldown else [_mean(list(memory.values)[-10:])]
        memory.best, memory.start = held_out, [width, *known]
        return 0.0
    # An unstable run loses reward and held-out metric together. A mean over more rows would hide that its reward has fallen too.
    recent, spread = _mean(list(memory.values)[-3:]), math.hypot(width, memory.start[0])
    return (memory.best - held_out) / spread if spread > 0 and recent > _mean(memory.start[1:]) else 0.0


def _unscored_share(figures: Figures, memory: Memory) -> float | None:
    unscored, samples = figures.get("unscored"), figures.get("samples")
    return unscored / samples if unscored is not None and samples and math.isfinite(unscored + samples) else None


RULES = (
    Rule("not_finite", _not_finite, above=0.5, until=0.5, grave=True),
    Rule("flat_reward", _of("reward_std", -1.0), above=-1e-6, until=-1e-3, patience=5, signal="reward_std"),
    Rule("dead_groups", _of("dead_groups"), above=0.8, until=0.6, patience=5, signal="dead_groups"),
    Rule("truncated", _of("truncated"), above=0.2, until=0.15, patience=3, worst="longest", signal="truncated"),
    Rule("cut_and_rewarded", _cut_while_rewarded, above=0.1, until=0.05, patience=2, worst="longest", signal="truncated"),
    Rule("mismatch", _uncorrected, above=0.01, until=0.005, patience=2, signal="mismatch", grave=True),
    Rule("corrected", _correction, above=0.1, until=0.05, patience=2, signal="mismatch"),
    Rule("entropy", _entropy_lost, above=0.9, until=0.85, patience=3, signal="entropy"),
    Rule("clipped", _of("clipped"), above=0.3, until=0.2, patience=3, signal="clipped"),
    Rule("critic", _below_zero_late, above=0.0, until=-0.1, patience=5, signal="explained_variance"),
    Rule("grad_norm", _grad_norm_z, above=4.0, until=2.0, signal="grad_norm", min_count=4),
    Rule("longer", _longer_for_nothing, above=0.5, until=0.3, patience=3, worst="longest", signal="length"),
    Rule("apart", _below_best, above=1.5, until=1.0, patience=3, signal="held_out"),
    Rule("cut", _of("eval/episodes/cut"), above=0.0, until=0.0),
    Rule("unscored", _unscored_share, above=0.05, until=0.02, worst="unscored", signal="unscored"),
    Rule("silent", lambda figures, memory: None, above=0.0, until=0.0, grave=True),
)
BY_NAME = {rule.name: rule for rule in RULES}
CALM = frozenset({"entropy", "dead_groups", "flat_reward", "grad_norm"})
"""The warnings that are normal once a task is solved and there is nothing left to learn."""
_SCORES = ("held_out", "reward", "accuracy")


@dataclass
class _RuleState:
    """The state of a warning rule. `over` counts consecutive rows above `Rule.above`, `under` those at or below `Rule.until`."""

    memory: Memory = field(default_factory=Memory)
    over: int = 0
    under: int = 0
    alert: RunWarning | None = None
    pending: RunWarning | None = None


class Watch:
    """Applies all warning rules to the rows of metrics of a run, one row at a time and in order."""

    MOST = 200

    def __init__(self) -> None:
        self._standing = {rule.name: _RuleState() for rule in RULES}
        self._past: deque[RunWarning] = deque(maxlen=self.MOST)
        self._scores = {name: deque[float](maxlen=3) for name in _SCORES}
        self._first: dict[str, float] = {}

    def update(self, step: float, figures: Figures) -> None:
        """Apply all rules to a row of metrics. Raise and withdraw warnings."""
        for rule in RULES:
            standing = self._standing[rule.name]
            value = rule.measure(figures, standing.memory)
            if value is not None:
                self._judge(rule, standing, step, value)
        for name, last in self._scores.items():
            if (score := _finite(figures, name)) is not None:
                last.append(score if score <= 1 else -math.inf)
                self._first.setdefault(name, score)

    @property
    def score(self) -> float | None:
        """The score of the task if it is solved, otherwise None.

        The score is the mean of the last three values of the held-out metric, or else the reward, or else the accuracy. The task
        is solved if the score is at least 0.9, none of the values is above 1, and the metric began below 0.9.
        """
        name = next((name for name, last in self._scores.items() if last), "")
        score = _mean(self._scores[name]) if name and self._first[name] < 0.9 else 0.0
        return score if score >= 0.9 else None

    def explains(self, rule: str) -> bool:
        """Return True if the task is solved and the rule is in `CALM`, the warnings that are normal for a solved task."""
        return rule in CALM and self.score is not None

    def advice(self, rule: str) -> str:
        """Return the rule's `advice`, or if `explains(rule)` is True, a sentence that says that nothing has to be done."""
        if not self.explains(rule):
            return BY_NAME[rule].advice
        return f"Nothing to do: the task is solved ({self.score:.2g} of 1), and there is little left to learn from."

    def _judge(self, rule: Rule, standing: _RuleState, step: float, value: float) -> None:
        standing.over = standing.over + 1 if value > rule.above else 0
        standing.under = standing.under + 1 if value <= rule.until else 0
        if standing.alert is not None:
            standing.alert = _worse(standing.alert, step, value)
            if standing.under >= rule.patience:
                past = standing.alert
                self._past.append(RunWarning(past.rule, past.step, step, past.worst_step, past.value))
                standing.alert = standing.pending = None
        elif standing.over:
            begun = standing.pending or RunWarning(rule.name, step, None, step, value)
            standing.pending = _worse(begun, step, value)
            if standing.over >= rule.patience:
                standing.alert, standing.pending = standing.pending, None
        else:
            standing.pending = None

    def alerts(self) -> list[RunWarning]:
        """Return the current warnings, newest first, and then the withdrawn ones, also newest first."""
        standing = [s.alert for s in self._standing.values() if s.alert is not None]
        return [*sorted(standing, key=lambda a: -a.step), *reversed(self._past)]


def _worse(alert: RunWarning, step: float, value: float) -> RunWarning:
    return alert if value <= alert.value else RunWarning(alert.rule, alert.step, alert.ended, step, value)
