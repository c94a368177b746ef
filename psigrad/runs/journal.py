"""The record of a loop: rows of the run folder, trackers, seconds of its phases, and warnings."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from psigrad import redaction
from psigrad.processes.parallel.world import ALONE, World
from psigrad.records import rows
from psigrad.records.row_lines import read_steps
from psigrad.records.run_folder import RunFolder
from psigrad.records.warnings import BY_NAME, Alert, SignalNames, Watch
from psigrad.runs.callbacks import Callbacks
from psigrad.runs.survival import Stopped, StopSignal, Trimmer, Watchdog


class Tracker(Protocol):
    """Where figures go besides the run folder: psigrad_extras/connect/trackers.py."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """The figures of one step."""
        ...

    def completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Rows of rollouts.jsonl of one step."""
        ...

    def close(self) -> None:
        """No more will come."""
        ...


class Clock:
    """Seconds spent in named phases of one step, which the run's watchdog is told of."""

    def __init__(self, watchdog: Watchdog | None = None) -> None:
        self.start = time.perf_counter()
        self.phases: dict[str, float] = {}
        self._watchdog = watchdog

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add the seconds spent inside the `with` block to `phase`."""
        begin = time.perf_counter()
        try:
            with contextlib.nullcontext() if self._watchdog is None else self._watchdog.phase(phase.removeprefix("time/")):
                yield
        finally:
            self.phases[phase] = self.phases.get(phase, 0.0) + time.perf_counter() - begin


class Announcer:
    """Tells once of each rule of `psigrad.records.warnings` that a run's figures raise: on stderr and as an event. What a solved
    task explains is not told while it is solved, and what happens once in a sound run not before it happens again.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder, self._names, self._watch = folder, SignalNames(), Watch()
        self._told: set[str] = set()
        self._begun = False

    def see(self, step: int, row: Mapping[str, Any]) -> None:
        """Take in one row of metrics. Before the first, those of the run so far are taken in without a word."""
        if not self._begun:
            self._begun = True
            for before in read_steps(self._folder.path / "metrics.jsonl"):
                self._judge(before["step"], before)
        for alert in self._judge(step, row):
            rule = BY_NAME[alert.rule]
            self._folder.event("warning", rule=rule.name, step=alert.step, value=alert.value, says=f"{rule.title}. {rule.advice}")
            more = f"More: psigrad explain {rule.name}."
            redaction.say(f"warning from step {alert.step:g} on: {rule.title}. {rule.advice} {more}")

    def _judge(self, step: float, row: Mapping[str, Any]) -> list[Alert]:
        self._watch.see(step, {self._names.of(key): value for key, value in rows.figures(row).items()})
        found = self._watch.alerts()
        times = Counter(alert.rule for alert in found)
        standing = [a for a in found if a.ended is None and times[a.rule] >= BY_NAME[a.rule].told_from]
        new = [a for a in standing if a.rule not in self._told and not self._watch.explains(a.rule)]
        self._told |= {alert.rule for alert in new}
        return new


@dataclass(frozen=True)
class Journal:
    """Run folder, trackers, warnings and stop signal as one. `metrics` and `rollouts` hold what is reproducible; seconds go to
    `timings`.
    """

    folder: RunFolder
    trackers: Sequence[Tracker] = field(default_factory=tuple)
    signal: StopSignal | None = None
    announcer: Announcer | None = None
    watchdog: Watchdog | None = None
    world: World = ALONE
    """The processes of the run; only rank 0 writes and prints."""
    callbacks: Callbacks = field(default_factory=Callbacks)
    trim: Callable[[], dict[str, int]] = field(default_factory=Trimmer)
    told: set[str] = field(default_factory=set)
    """The kinds of what `tell_once` has told."""

    def clock(self) -> Clock:
        """A clock for one step or evaluation."""
        return Clock(self.watchdog)

    def tell(self, kind: str, text: str, **fields: Any) -> None:
        """An event, and a line for people on stderr."""
        self.folder.event(kind, **fields)
        if self.world.rank == 0:
            redaction.say(text)

    def tell_once(self, kind: str, text: str) -> None:
        """As `tell`, the first time that this process has something of this kind to tell; the event's `why` is the text."""
        if kind not in self.told:
            self.told.add(kind)
            self.tell(kind, text, why=text)

    def disk_low(self) -> str:
        """Why another checkpoint may not fit on the disk; empty if one does."""
        return self.world.broadcast(self.folder.disk_low())

    def metrics(self, step: int, figures: Mapping[str, Any]) -> None:
        """One row of metrics.jsonl, shown to the trackers as well; the run is warned of what it shows."""
        if self.announcer is not None:
            self.announcer.see(step, figures)
        self.folder.metrics({"step": step, **figures})
        self.callbacks.see({"step": step, **figures})
        for tracker in self.trackers:
            tracker.log(step, {name: float(value) for name, value in figures.items() if isinstance(value, int | float)})

    def timings(self, step: int, clock: Clock, tokens: int) -> None:
        """One row of timings.jsonl; `tokens` were sampled or trained on in this step."""
        seconds = time.perf_counter() - clock.start
        self.folder.timings(
            {
                "step": step,
                "step_time": seconds,
                **clock.phases,
                "tokens": tokens,
                "tokens_per_second": tokens / seconds,
                **self.trim(),
            }
        )

    def rollouts(self, completions: Sequence[Mapping[str, Any]]) -> None:
        """Rows of rollouts.jsonl, of which trackers are shown some."""
        self.folder.rollouts(completions)
        shown = [row for row in completions if "completion" in row]  # in control rows are episodes
        for tracker in self.trackers if shown else ():
            tracker.completions(int(shown[0]["step"]), shown)

    def stop_requested(self) -> bool:
        """Whether SIGTERM or Ctrl-C came, to any process."""
        return any(self.world.all_gather(self.signal is not None and self.signal.requested))

    def stopped(self, step: int) -> None:
        """Leave the loop after a stop was asked for and the state saved."""
        self.folder.event("stopped", step=step)
        stopped = Stopped(f"Stopped as asked after step {step}; everything is saved. The same command goes on from there.")
        stopped.exit_status += max(self.world.all_gather(self.signal.number if self.signal is not None else 0))
        raise stopped
