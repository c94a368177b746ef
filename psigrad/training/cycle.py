"""The cycle that every loop turns: step, evaluate when due, save when due, leave when asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from psigrad.config import Run
from psigrad.training.journal import Journal
from psigrad.training.progress import bar
from psigrad.training.state import State


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
    stop that was asked for is served between steps: the state is saved, then `Stopped` raised.
    """
    if state.step == 0 and not state.evaluated:
        evaluate(state)
        state = replace(state, evaluated=True)
    with bar(name, total, shown=settings.progress, done=state.step) as advance:
        while state.step < total:
            if journal.stop_requested():
                save(state)
                journal.stopped(state.step)
            state, note = step(state)
            advance(note=note)
            last = state.step == total
            if last or (eval_steps and state.step % eval_steps == 0):
                evaluate(state)
            # a step without a finite gradient changed nothing and must push no older checkpoint out
            if state.nonfinite == 0 and (last or (settings.save_steps and state.step % settings.save_steps == 0)):
                save(state)
    return state
