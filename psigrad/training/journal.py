"""What a loop tells the world: rows of the run folder, trackers, seconds, and whether it was asked to stop."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from psigrad.errors import UserError
from psigrad.records.run_folder import RunFolder
from psigrad.training.stop import StopSignal
from psigrad.training.trackers import Tracker


class Stopped(UserError):
    """The run was asked to stop (SIGTERM or Ctrl-C); everything is saved. The program exits with 128 + the signal's number."""

    exit_status = 128


class Clock:
    """Seconds spent in named phases of one step."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.phases: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add the seconds spent inside the `with` block to `phase`."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.phases[phase] = self.phases.get(phase, 0.0) + time.perf_counter() - begin


@dataclass(frozen=True)
class Journal:
    """Run folder, trackers and stop signal as one. `metrics` and `rollouts` hold what is reproducible; seconds go to
    `timings`.
    """

    folder: RunFolder
    trackers: Sequence[Tracker] = field(default_factory=tuple)
    signal: StopSignal | None = None

    def metrics(self, step: int, figures: Mapping[str, Any]) -> None:
        """One row of metrics.jsonl, shown to the trackers as well."""
        self.folder.metrics({"step": step, **figures})
        for tracker in self.trackers:
            tracker.log(step, {name: float(value) for name, value in figures.items() if isinstance(value, int | float)})

    def timings(self, step: int, clock: Clock, tokens: int) -> None:
        """One row of timings.jsonl; `tokens` were sampled or trained on in this step."""
        seconds = time.perf_counter() - clock.start
        self.folder.timings(
            {"step": step, "step_time": seconds, **clock.phases, "tokens": tokens, "tokens_per_second": tokens / seconds}
        )

    def rollouts(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Rows of rollouts.jsonl."""
        self.folder.rollouts(rows)

    def stop_requested(self) -> bool:
        """Whether SIGTERM or Ctrl-C came."""
        return self.signal is not None and self.signal.requested

    def stopped(self, step: int) -> None:
        """Leave the loop after a stop was asked for and the state saved."""
        self.folder.event("stopped", step=step)
        stopped = Stopped(f"Stopped as asked after step {step}; everything is saved. The same command goes on from there.")
        stopped.exit_status += self.signal.number if self.signal is not None else 0
        raise stopped
