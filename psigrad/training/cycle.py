"""The cycle that every loop turns: step, evaluate when due, save when due, leave when asked."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from psigrad.config import Run
from psigrad.rewards import RewardError
from psigrad.training.journal import Journal
from psigrad.training.progress import bar
from psigrad.training.state import State
from psigrad.training.update import NonFiniteError


def cycle(
    name: str,
    state: State,
    total: int,
    step: Callable[[State], tuple[State, str]],
    evaluate: Callable[[State], None],
    save: Callable[[State], None],
    settings: Run,
    eval_steps: int,
    journal: Journal,
) -> State:
    """From `state` to step `total`. `step` returns the next state and a note for the progress bar.

    Everything of step s is in the run folder before checkpoint s is, so a resumed run repeats nothing and lacks nothing. A
    stop that was asked for is served between steps: the state is saved, then `Stopped` raised. Where rewards fail or the
    gradient stays non-finite, which leaves the weights as they were, the last good state is saved before the error goes on.
    """
    if state.step == 0 and not state.evaluated:
        evaluate(state)
        state = replace(state, evaluated=True)
    good, saved, saved_at = state, state.step, time.monotonic()
    with bar(name, total, shown=settings.progress, done=state.step, every=settings.logging_steps) as advance:
        while state.step < total:
            if journal.stop_requested():
                save(state)
                journal.stopped(state.step)
            try:
                state, note = step(state)
            except (RewardError, NonFiniteError):
                if good.step > saved:
                    save(good)
                raise
            advance(note=note)
            last = state.step == total
            if last or (eval_steps and state.step % eval_steps == 0):
                evaluate(state)
            # a step without a finite gradient changed nothing and must push no older checkpoint out
            if state.nonfinite == 0:
                good, spent = state, time.monotonic() - saved_at
                by_time = bool(settings.save_minutes) and spent >= 60 * settings.save_minutes
                if last or by_time or (settings.save_steps and state.step % settings.save_steps == 0):
                    save(state)
                    saved, saved_at = state.step, time.monotonic()
    return state
