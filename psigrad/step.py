"""The types of one training step: it takes a `RunState` and returns an `Outcome`. The training loop records the outcome."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar


@dataclass(frozen=True)
class RunState:
    """The state of a run besides its weights and optimisers, stored in checkpoints. Each kind of training adds fields."""

    step: int = 0
    """The number of completed steps, which numbers rows and checkpoints."""
    tokens: int = 0
    """The number of tokens sampled or trained on; 0 if a run has none."""
    nonfinite: int = 0
    """The number of consecutive steps, up to this one, whose gradient was not finite."""
    evaluated: bool = False
    """True if the evaluation that is due at this step, or before the first step, is complete."""
    changes: dict[str, Any] = field(default_factory=dict)
    """The settings that callbacks have changed, by dotted name."""
    callbacks: dict[str, Any] = field(default_factory=dict)
    """The stored state of callbacks, by their names."""
    ended: bool = False
    """True if a callback has ended the run."""

    @property
    def turns(self) -> int:
        """The number that save_steps and eval_steps count; here the number of steps."""
        return self.step


S = TypeVar("S", bound=RunState)


@dataclass(frozen=True)
class Outcome(Generic[S]):
    """The result of one step. A step itself writes and prints nothing; the training loop records its outcome."""

    state: S
    metrics: Mapping[str, Any]
    """One row of metrics.jsonl, with reproducible numbers only."""
    rows: Sequence[Mapping[str, Any]] = ()
    """The rows of rollouts.jsonl."""
    timings: Mapping[str, float] = field(default_factory=dict)
    """Seconds by phase, with the total as "step_time"."""
    tokens: int = 0
    """The number of tokens sampled or trained on in this step."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """Messages for the user, by kind. The first of each kind in a run is printed and stored among its events."""
    summary: str = ""
    """A few figures for the progress bar."""


Observe = Callable[[str], AbstractContextManager[Any]]
"""A function (name) -> context manager that observes a phase while its block runs, such as a watchdog's `phase`."""


class Clock:
    """A stopwatch for the named phases of one step."""

    def __init__(self, watch: Observe = contextlib.nullcontext) -> None:
        self._start, self._watch = time.perf_counter(), watch
        self.phases: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add the seconds spent inside the `with` block to `phase`."""
        begin = time.perf_counter()
        try:
            with self._watch(phase.removeprefix("time/")):
                yield
        finally:
            self.phases[phase] = self.phases.get(phase, 0.0) + time.perf_counter() - begin

    def read(self) -> dict[str, float]:
        """Return {phase: seconds}, with "step_time" for the seconds since the clock was created."""
        return {"step_time": time.perf_counter() - self._start, **self.phases}
