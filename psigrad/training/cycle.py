"""The cycle that every loop turns: step, evaluate when due, save when due, leave when asked."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from psigrad.config import Run
from psigrad.errors import UserError
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
    updates: Callable[[], int],
) -> State:
    """From `state` to step `total`. `step` returns the next state and a note for the progress bar; `updates` counts the updates
    of the weights.

    Everything of step s is in the run folder before checkpoint s is, so a resumed run repeats nothing and lacks nothing. A stop
    that was asked for is served between steps: the state is saved, then `Stopped` raised. If a step fails before it has moved a
    weight, the state before it is saved, then the error goes on. The run stops while a checkpoint still fits on the disk.
    """
    if state.step == 0 and not state.evaluated:
        evaluate(state)
        state = replace(state, evaluated=True)
    good, moved, saved, saved_at = state, updates(), state.step, time.monotonic()
    with bar(
        name, total, shown=settings.progress and journal.world.rank == 0, done=state.step, every=settings.logging_steps
    ) as advance:
        while state.step < total:
            if journal.stop_requested():
                save(state)
                journal.stopped(state.step)
            try:
                state, note = step(state)
            except Exception as error:
                rescued = updates() == moved
                if rescued and good.step > saved and not journal.world.lockstep:  # all would have to write, and one has failed
                    with contextlib.suppress(UserError):  # a full disk must not hide the reason
                        save(good)
                if _out_of_memory(error):
                    raise UserError(_memory_advice(state.step + 1, good.step if rescued else saved)) from error
                raise
            advance(note=note)
            last = state.step == total
            if last or (eval_steps and state.step % eval_steps == 0):
                evaluate(state)
            # a step without a finite gradient changed nothing and must push no older checkpoint out
            if state.nonfinite == 0:
                good, moved, spent = state, updates(), time.monotonic() - saved_at
                by_time = bool(settings.save_minutes) and journal.world.same(spent) >= 60 * settings.save_minutes
                if last or by_time or (settings.save_steps and state.step % settings.save_steps == 0):
                    save(state)
                    saved, saved_at = state.step, time.monotonic()
                elif reason := journal.disk_low():
                    save(state)
                    raise UserError(f"{reason} The run is saved at step {state.step}: make room, and the same command goes on.")
    return state


def _out_of_memory(error: BaseException) -> bool:
    """PyTorch's CPU allocator has no exception of its own."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _memory_advice(step: int, saved: int) -> str:
    return (
        f"Step {step} ran out of memory; the run is saved at step {saved}. Go on with a smaller micro_batch_tokens, "
        "keep_activations_gb or sampling.max_decode_batch, or with model.gradient_checkpointing=true: a run may change these. "
        "`psigrad plan` shows where memory goes."
    )
