"""The cycle that every loop turns: step, evaluate when due, save when due, leave when asked."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch

from psigrad.config import Run
from psigrad.errors import UserError
from psigrad.runs.callbacks import CallbackError, RunState
from psigrad.runs.journal import Journal
from psigrad.runs.progress import bar
from psigrad.runs.survival import Stopped

S = TypeVar("S", bound=RunState)
# Seconds that processes which hold a model in shards give a save beside the steps once one has failed: another may be gone.
LEFT = 20.0


def cycle(
    name: str,
    state: S,
    total: int,
    step: Callable[[S], tuple[S, str]],
    evaluate: Callable[[S], None],
    save: Callable[[S], None],
    settings: Run,
    eval_steps: int,
    journal: Journal,
    updates: Callable[[], int],
    less_memory: str = "",
    wait: Callable[[float | None], None] = lambda seconds: None,
) -> S:
    """From `state` to step `total`. `step` returns the next state and a note for the progress bar; `updates` counts the updates
    of the weights, and of whatever else a state does not hold. `eval_steps` and `save_steps` count turns of the cycle.
    `less_memory` says what to do about a step that ran out of it; `wait` ends when what `save` does beside the steps is done, or
    after so many seconds.

    The journal's callbacks are told, and what they ask for is done. Everything of step s is in the run folder before checkpoint
    s is, so a resumed run repeats nothing and lacks nothing. A stop that was asked for is served between steps: the state is
    saved, then `Stopped` raised. If a step fails before it has moved a weight, the state before it is saved, then the error goes
    on. The run stops while a checkpoint still fits on the disk.
    """
    hooks, shown = journal.callbacks, settings.progress and journal.world.rank == 0
    state = hooks.begin(state, total)
    if state.step == 0 and not state.evaluated:
        evaluate(state)
        state = hooks.after_evaluation(replace(state, evaluated=True))
    saves = _Saves(state, save, settings, journal, updates, less_memory)
    with bar(name, total, shown=shown, done=state.step, every=settings.logging_steps) as advance, saves.rescue(wait):
        while state.step < total and not state.ended:
            if journal.stop_requested():
                saves.keep(state)
                journal.stopped(state.step)
            state = hooks.step_begin(state)
            before = state.step
            state, note = saves.step(step, state)
            advance(state.step - before, note)
            every = _now(state, "eval_steps", eval_steps)
            state = hooks.step_end(state, bool(every) and state.turns % every == 0, saves.due(state))
            if state.step >= total or state.ended or hooks.control.should_evaluate:
                evaluate(state)
                state = hooks.after_evaluation(state)
            state = saves.after(state, last=state.step >= total or state.ended)
    return hooks.end(state)


class _Saves(Generic[S]):
    """When a run is saved, and what is saved where it fails."""

    def __init__(
        self, state: S, save: Callable[[S], None], settings: Run, journal: Journal, updates: Callable[[], int], less_memory: str
    ) -> None:
        self.save, self.settings, self.journal, self.updates, self.less_memory = save, settings, journal, updates, less_memory
        self.good, self.moved, self.saved, self.saved_at = state, updates(), state.step, time.monotonic()

    def due(self, state: S) -> bool:
        """Whether the settings want a checkpoint now. A step without a finite gradient changed nothing and must push no older one
        out.
        """
        minutes = _now(state, "save_minutes", self.settings.save_minutes)
        every = _now(state, "save_steps", self.settings.save_steps)
        spent = self.journal.world.broadcast(time.monotonic() - self.saved_at) if minutes else 0.0
        return not state.nonfinite and bool((minutes and spent >= 60 * minutes) or (every and state.turns % every == 0))

    def keep(self, state: S) -> S:
        """Save the state, and tell the callbacks."""
        self.save(self.journal.callbacks.collect_memory(state))
        self.saved, self.saved_at = state.step, time.monotonic()
        return self.journal.callbacks.after_save(state, self.journal.folder.checkpoints / f"step-{state.step:08d}")

    def after(self, state: S, last: bool) -> S:
        """Save behind a step where that is due, by a callback's wish too, or the disk gets full."""
        if not state.nonfinite:
            self.good = state
        if self.journal.callbacks.control.should_save or (last and self.good.step > self.saved):
            return self.keep(state)
        if not state.nonfinite and (reason := self.journal.disk_low()):
            self.keep(state)
            raise UserError(f"{reason} The run is saved at step {state.step}: make room, and the same command goes on.")
        return state

    def step(self, step: Callable[[S], tuple[S, str]], state: S) -> tuple[S, str]:
        """One step. If it fails before it has moved a weight, the state before it is saved."""
        try:
            after, note = step(state)
        except Exception as error:
            rescued = self.updates() == self.moved
            if rescued and not self.journal.world.lockstep:  # all would have to write, and one has failed
                self._rescue()
            if _out_of_memory(error):
                at = self.good.step if rescued else self.saved
                raise UserError(
                    f"Step {state.step + 1} ran out of memory; the run is saved at step {at}. {self.less_memory}"
                ) from error
            raise
        if after.nonfinite == 0:
            self.good, self.moved = after, self.updates()
        return after, note

    @contextlib.contextmanager
    def rescue(self, wait: Callable[[float | None], None]) -> Iterator[None]:
        """A block for the whole loop. A callback that fails fails on all ranks and has moved no weight."""
        try:
            yield
            wait(None)
        except BaseException as error:
            if isinstance(error, CallbackError):
                self._rescue()
            stopped = isinstance(error, Stopped)  # such a state is saved
            with contextlib.suppress(*(() if stopped else (Exception,))):
                wait(None if stopped or not self.journal.world.lockstep else LEFT)
            raise

    def _rescue(self) -> None:
        if self.good.step > self.saved:
            with contextlib.suppress(UserError):  # a full disk must not hide the reason
                self.save(self.journal.callbacks.collect_memory(self.good))


def _now(state: RunState, setting: str, given: Any) -> Any:
    """A setting as the run has it, or as a callback has changed it."""
    return next((value for name, value in state.changes.items() if name.rpartition(".")[2] == setting), given)


def _out_of_memory(error: BaseException) -> bool:
    """PyTorch's CPU allocator has no exception of its own."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
