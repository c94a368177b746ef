"""Collect the completions that a step trains on, and count the outcomes of all prompts in a ledger.

With a lag of k, step s (the first is 0) trains on completions that were sampled after max(0, s - k) steps. This does not depend
on their length, so there is no bias towards short completions.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from psigrad import seeds
from psigrad.language.models.packing import order
from psigrad.language.rollout.exchange import broadcast_collected
from psigrad.language.rollout.scoring import check_unscored
from psigrad.language.rollout.types import ELSEWHERE, Collected, Pending, Prompt, State, Trajectory
from psigrad.language.training.online.batching import metric_of
from psigrad.language.training.online.online_run import OnlineRun
from psigrad.step import Clock

if TYPE_CHECKING:
    from psigrad.language.models.fused.caches import ActivationCache


ISSUED, TRAINED, PENDING = "issued", "trained", "pending"
UNSCORED, NO_SIGNAL, EARLIER = "dropped: unscored", "dropped: equal rewards", "dropped: before there was a ledger"


def next_collection(
    run: OnlineRun, state: State, clock: Clock, cache: ActivationCache | None
) -> tuple[Collected, tuple[Pending, ...]]:
    """Return (this step's `Collected`, the next `config.lag` steps' `Pending`). Start them if needed."""
    pending = list(state.pending)
    wanted = num_started(state.step, run.config.lag, run.total_steps) - state.step
    if run.executor is not None and not run.sampler.central and pending and len(pending) < wanted:
        with clock("time/wait"):  # the engine holds one version of the weights, which pending collections still use
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
        return found if run.world.size == 1 else broadcast_collected(run.world, found), tuple(pending[1:])


def num_started(step: int, lag: int, total: int) -> int:
    """Return the number of steps whose sampling has started when `step` steps are complete: step + 1 + `lag`, at most `total`."""
    return min(step + lag + 1, total)


@dataclass(frozen=True)
class InFlight:
    """A `Collected` that a thread is still making. `end` is the index of the next step's first prompt; None if not yet known."""

    found: Future[Collected]
    end: int | None

    def result(self) -> Collected:
        """Wait for the thread, and return its `Collected`."""
        return self.found.result()


def _end_of(previous: Pending | None, state: State) -> int:
    """Return the index of the prompt that follows the last one of `previous`; `state.cursor` if `previous` is None."""
    if previous is None:
        return state.cursor
    return previous.end if isinstance(previous, InFlight) and previous.end is not None else previous.result().cursor


def _collect_after(
    run: OnlineRun, previous: Pending | None, state: State, clock: Clock, cache: ActivationCache | None
) -> Collected:
    return collect(run, _end_of(previous, state), state.step, clock, cache)


def collect(run: OnlineRun, cursor: int, version: int, clock: Clock, cache: ActivationCache | None = None) -> Collected:
    """Sample and score completions of `prompts_per_step` prompts, starting with prompt number `cursor` of the run.

    `version` is the number of training steps so far. Dynamic sampling (DAPO, Yu et al. 2025) replaces prompts whose completions
    all have the same metric.
    """
    config, compared = run.config, (run.config.filter_metric, run.reward_weights)
    trajectories: list[Trajectory] = []
    groups: list[list[Trajectory]] = []
    entries: Counter[str] = Counter()
    for _ in range(1 + (config.max_refills if run.refills else 0)):
        wanted = pick_prompts(run.prompts, config.run.seed, cursor, config.prompts_per_step - entries[TRAINED])
        seed_of = partial(completion_seed, config.run.seed, cursor)
        fresh = run.rollout(wanted, run.params, config.num_generations, seed_of, version, clock, cache)
        if config.missing_eos_penalty:
            fresh = [penalise_truncated(t, config.missing_eos_penalty) for t in fresh]
        cursor += len(wanted)
        trajectories += fresh
        check_rewards(run, trajectories)
        scored = list(group_scored(fresh, config.num_generations, run.algorithm.min_group_size))
        useful = [g for g in scored if not run.refills or len({metric_of(t, *compared) for t in g}) > 1]
        groups += useful
        place = {id(t): n * len(wanted) // len(fresh) for n, t in enumerate(fresh)}  # a prompt has a group for each seat
        judged, trained = ({place[id(group[0])] for group in found} for found in (scored, useful))
        dropped = {UNSCORED: len(wanted) - len(judged), NO_SIGNAL: len(judged) - len(trained)}
        entries += Counter({ISSUED: len(wanted), TRAINED: len(trained), **dropped})
        if entries[TRAINED] == config.prompts_per_step:
            break
    return Collected(trajectories, groups, cursor, dict(entries))


def check_rewards(run: OnlineRun, trajectories: Sequence[Trajectory], before: Sequence[Sequence[int]] = ()) -> list[list[int]]:
    """Raise `RewardError` if scoring failed for too many completions; see `check_unscored`."""
    reasons = [t.reason if t.status == "unscored" else None for t in trajectories]
    place = lambda row: bisect.bisect_left(run.prompts, row, key=lambda prompt: prompt.index)  # noqa: E731
    sources = [run.prompts[place(t.row)].row.source for t in trajectories] if any(reasons) else []
    return check_unscored(reasons, run.config.max_unscored, sources, before)


def pick_prompts(prompts: Sequence[Prompt], seed: int, cursor: int, count: int) -> list[Prompt]:
    """Return prompts number `cursor` … `cursor + count - 1` of an endless sequence of epochs, each shuffled by `seed`."""
    n, places, picked = len(prompts), {}, []
    for place in range(cursor, cursor + count):
        epoch, offset = divmod(place, n)
        if epoch not in places:
            places[epoch] = order(n, seed, epoch)
        picked.append(prompts[places[epoch][offset]])
    return picked


def completion_seed(seed: int, cursor: int, i: int, k: int) -> int:
    """Return the seed of completion k of prompt number `cursor` + i of the run. `seed` is the run's seed."""
    return seeds.derive(seed, "sample", cursor + i, k)


def penalise_truncated(trajectory: Trajectory, penalty: float) -> Trajectory:
    """Return the trajectory, with `penalty` subtracted from its reward if the length limit ended it."""
    if trajectory.reward is None:
        return trajectory
    lost = penalty if trajectory.completion.finish_reason == "length" else 0.0
    # Methods that compare each part by itself must also see the penalty.
    return replace(trajectory, reward=trajectory.reward - lost, parts={**trajectory.parts, "missing_eos": 0.0 - lost})


def group_scored(trajectories: list[Trajectory], group_size: int, smallest: int) -> Iterator[list[Trajectory]]:
    """Split into groups of `group_size`, then drop unscored and empty completions. Yield groups with at least `smallest` left."""
    for start in range(0, len(trajectories), group_size):
        group = [t for t in trajectories[start : start + group_size] if t.reward is not None and t.completion.ids]
        if len(group) >= smallest:
            yield group


def update_ledger(ledger: Mapping[str, int], cursor: int, collected: Collected) -> dict[str, int]:
    """Return `ledger` (see `open_ledger`) plus the prompts of `collected`, and check the result with `check_balance`."""
    entries = add_entries(open_ledger(ledger, cursor), collected.entries)
    check_balance(entries, collected.cursor)
    return entries


def open_ledger(ledger: Mapping[str, int], cursor: int) -> dict[str, int]:
    """Return the ledger, {outcome: count}. If an old checkpoint has none, give all its prompts the outcome `EARLIER`."""
    if ledger or not cursor:
        return dict(ledger)
    return {ISSUED: cursor, EARLIER: cursor}


def add_entries(ledger: Mapping[str, int], entries: Mapping[str, int]) -> dict[str, int]:
    """Return the ledger, {outcome: number of prompts}, with the numbers of `entries` added. Outcomes with 0 are omitted."""
    return dict(Counter(ledger) + Counter(entries))


def check_balance(ledger: Mapping[str, int], cursor: int) -> None:
    """Raise `RuntimeError` unless the ledger accounts for each of the `cursor` prompts drawn so far exactly once."""
    issued, rest = ledger.get(ISSUED, 0), sum(count for name, count in ledger.items() if name != ISSUED)
    if not issued == rest == cursor:
        raise RuntimeError(f"The ledger of prompts is wrong: it has {dict(ledger)}, but {cursor} were drawn; please report this.")
