"""The training loop of every run: take a step, evaluate and save when due, and stop on request."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from psigrad.config import Run
from psigrad.errors import UserError
from psigrad.optim.gradients import is_out_of_memory
from psigrad.optim.optimizer import check_gradients
from psigrad.runs.callbacks import CallbackError
from psigrad.runs.journal import Journal
from psigrad.runs.progress import bar
from psigrad.runs.survival import Interrupted, Stopped
from psigrad.step import Outcome, RunState

S = TypeVar("S", bound=RunState)
# If a run with a sharded model fails, a rank waits at most this many seconds for a background save, since the save can hang.
LEFT = 20.0


@dataclass(frozen=True)
class Loop(Generic[S]):
    """The parts of a training loop that `cycle` needs: the number of steps, and functions that take a step, evaluate and save."""

    name: str
    """The label of the progress bar."""
    total: int
    """The number of the last step."""
    step: Callable[[S], Outcome[S]]
    evaluate: Callable[[S], None]
    save: Callable[[S], None]
    updates: Callable[[], int]
    """Returns the number of changes so far to weights, and to anything else that is not in the state."""
    eval_steps: int = 0
    less_memory: str = ""
    """Advice for the error message when a step runs out of memory."""
    wait: Callable[[float | None], None] = lambda seconds: None
    """Waits until a checkpoint that is written in the background is complete, but at most the given seconds."""


def cycle(loop: Loop[S], state: S, settings: Run, journal: Journal) -> S:
    """Train from `state` to the loop's last step. On the way, evaluate and save as often as the settings say.

    On a signal to stop, finish the current step, save the state and raise `Stopped`.
    """
    hooks, shown = journal.callbacks, settings.progress and journal.world.rank == 0
    state = hooks.begin(state, loop.total)
    saves = _Saves(loop, state, settings, journal)
    if not state.evaluated:  # before the first step, or the evaluation was interrupted
        with saves.rescue():
            state = saves.evaluate(state)
            state = saves.keep(state) if state.step else state
    with bar(loop.name, loop.total, enabled=shown, done=state.step, every=settings.logging_steps) as advance, saves.rescue():
        while state.step < loop.total and not state.ended:
            if journal.stop_requested():
                saves.keep(state)
                journal.stopped(state.step)
            state = hooks.step_begin(state)
            before = state.step
            outcome = saves.step(state)
            state = outcome.state
            advance(state.step - before, outcome.summary)
            every = _now(state, "eval_steps", loop.eval_steps)
            state = hooks.step_end(state, bool(every) and state.turns % every == 0, saves.due(state))
            if state.step >= loop.total or state.ended or hooks.control.should_evaluate:
                state = saves.evaluate(state)
            state = saves.after(state, last=state.step >= loop.total or state.ended)
    return hooks.end(state)


class _Saves(Generic[S]):
    """Decides when a run saves a checkpoint. It keeps the last state whose gradients were finite, to save it if the run fails."""

    def __init__(self, loop: Loop[S], state: S, settings: Run, journal: Journal) -> None:
        self.loop, self.settings, self.journal = loop, settings, journal
        self.last_finite, self.last_updates, self.saved, self.saved_at = state, loop.updates(), state.step, time.monotonic()

    def due(self, state: S) -> bool:
        """Return True if a checkpoint is due; never after a step that changed no weight because of a NaN or infinite gradient."""
        minutes = _now(state, "save_minutes", self.settings.save_minutes)
        every = _now(state, "save_steps", self.settings.save_steps)
        spent = self.journal.world.broadcast(time.monotonic() - self.saved_at) if minutes else 0.0
        return not state.nonfinite and bool((minutes and spent >= 60 * minutes) or (every and state.turns % every == 0))

    def keep(self, state: S) -> S:
        """Save a checkpoint and call the callbacks. Return the state, updated with the settings that callbacks changed."""
        self.loop.save(self.journal.callbacks.collect_memory(state))
        self.saved, self.saved_at = state.step, time.monotonic()
        return self.journal.callbacks.after_save(state, self.journal.folder.checkpoints / f"step-{state.step:08d}")

    def evaluate(self, state: S) -> S:
        """Evaluate and call the callbacks. Return the state, updated with the settings that callbacks changed.

        If a signal to stop interrupts the evaluation, save the state and raise `Stopped`.
        """
        try:
            self.loop.evaluate(state)
        except Interrupted:
            self.keep(replace(state, evaluated=False))  # the resumed run starts with the evaluation
            self.journal.stopped(state.step)
        return self.journal.callbacks.after_evaluation(replace(state, evaluated=True))

    def after(self, state: S, last: bool) -> S:
        """Save if due or requested, and after the `last` step. If the disk is nearly full, save and raise `UserError`."""
        if not state.nonfinite:
            self.last_finite = state
        if self.journal.callbacks.control.should_save or (last and self.last_finite.step > self.saved):
            return self.keep(state)
        if not state.nonfinite and (reason := self.journal.disk_low()):
            self.keep(state)
            raise UserError(f"{reason} The run is saved at step {state.step}; free some space, and repeat the command to resume.")
        return state

    def step(self, state: S) -> Outcome[S]:
        """Take and record one step. If it raises an error before it changes a weight, save the previous state."""
        try:
            outcome = self.loop.step(state)
            self.journal.record(outcome)
            check_gradients(outcome.state.nonfinite, outcome.state.step)
        except Exception as error:
            # With FSDP all processes would have to save together, but perhaps only some have failed.
            if self.loop.updates() == self.last_updates and not self.journal.world.lockstep:
                self._rescue()
            if is_out_of_memory(error):
                at = f"the run is saved at step {self.saved}" if self.saved else "no step is saved"
                raise UserError(f"Step {state.step + 1} ran out of memory; {at}. {self.loop.less_memory}") from error
            raise
        if outcome.state.nonfinite == 0:
            self.last_finite, self.last_updates = outcome.state, self.loop.updates()
        return outcome

    @contextlib.contextmanager
    def rescue(self) -> Iterator[None]:
        """Save the newest state if a callback raises an error in the block. At the end, wait until all saves are complete."""
        try:
            yield
            self.loop.wait(None)
        except BaseException as error:
            if isinstance(error, CallbackError):  # raised by all ranks, so FSDP can save too
                self._rescue()
            stopped = isinstance(error, Stopped)  # its state is saved already
            with contextlib.suppress(*(() if stopped else (Exception,))):
                self.loop.wait(None if stopped or not self.journal.world.lockstep else LEFT)
            raise

    def _rescue(self) -> None:
        if self.last_finite.step > self.saved:
            with contextlib.suppress(UserError):  # a full disk must not hide the reason
                self.loop.save(self.journal.callbacks.collect_memory(self.last_finite))
                self.saved = self.last_finite.step


def _now(state: RunState, setting: str, initial: Any) -> Any:
    """Return a setting's current value: `initial`, unless a callback has changed it."""
    return next((value for name, value in state.changes.items() if name.rpartition(".")[2] == setting), initial)
