"""Collections in advance: with a lag of k, step s trains on completions of the weights after step max(0, s - k).

All completions of a step have the same lag, regardless of their length. So short completions are not preferred, and a run can be
repeated bitwise.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from psigrad.language.rollout.spread import spread_collected
from psigrad.language.rollout.types import ELSEWHERE, Collected, Pending
from psigrad.language.training.online.collect import collect
from psigrad.language.training.online.online_run import Online
from psigrad.language.training.state import State
from psigrad.step import Clock

if TYPE_CHECKING:
    from psigrad.language.models.fused.caches import ActivationCache


def next_collection(
    run: Online, state: State, clock: Clock, cache: ActivationCache | None
) -> tuple[Collected, tuple[Pending, ...]]:
    """Return the collection of step `state.step`, and those of later steps that are under way.

    The collection of step s + lag starts now. `run.executor` works on all of them while the steps in between train.
    """
    pending = list(state.pending)
    wanted = begun_by(state.step, run.config.lag, run.total_steps) - state.step
    if run.executor is not None and not run.sampler.central and pending and len(pending) < wanted:
        with clock("time/wait"):  # the engine has one version of the weights, that of the requests in progress
            pending[-1].result()
    with clock("time/sample"):  # transferring weights may take long
        current = replace(run, rollout=run.rollout.snapshot()) if len(pending) < wanted else run
    central = run.sampler.central
    while len(pending) < wanted:
        previous = pending[-1] if pending else None
        if central and run.world.rank:
            pending.append(ELSEWHERE)
        elif run.executor is None:
            pending.append(_collect_after(current, previous, state, clock, cache))
        else:
            future = run.executor.submit(_collect_after, current, previous, state, Clock(), None)
            pending.append(InFlight(future, None if run.refills else _end_of(previous, state) + run.config.prompts_per_step))
    if not central:
        return pending[0].result(), tuple(pending[1:])
    with clock("time/wait"):
        found = pending[0].result()
        return found if run.world.size == 1 else spread_collected(run.world, found), tuple(pending[1:])


def begun_by(step: int, lag: int, total: int) -> int:
    """Return the number of a run's `total` collections that have started after `step` steps: `lag` beyond the next one."""
    return min(step + lag + 1, total)


@dataclass(frozen=True)
class InFlight:
    """A collection under way in a thread, and the place at which the next one starts, if that is known in advance."""

    found: Future[Collected]
    end: int | None

    def result(self) -> Collected:
        """See `Pending`."""
        return self.found.result()


def _end_of(previous: Pending | None, state: State) -> int:
    """Return the place of the first prompt after a collection."""
    if previous is None:
        return state.cursor
    return previous.end if isinstance(previous, InFlight) and previous.end is not None else previous.result().cursor


def _collect_after(run: Online, previous: Pending | None, state: State, clock: Clock, cache: ActivationCache | None) -> Collected:
    return collect(run, _end_of(previous, state), state.step, clock, cache)
