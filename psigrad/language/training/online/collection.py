"""What a step trains on: completions of its prompts, scored, drawn now or, with a lag, by the weights of some steps ago."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from psigrad import seeds
from psigrad.language.models.fused.activation_cache import ActivationCache
from psigrad.language.rewards import check_unscored
from psigrad.language.rollout.types import Trajectory
from psigrad.language.training.learners import State
from psigrad.language.training.online import ledger
from psigrad.language.training.online.collate import metric_of, scored_groups
from psigrad.language.training.online.collected import ELSEWHERE, Collected, Pending
from psigrad.language.training.online.generation import rollout
from psigrad.language.training.online.ledger import prompts_from
from psigrad.language.training.online.online_run import Online
from psigrad.objective import PolicyGradient
from psigrad.processes.parallel.world import ALONE, World

Phase = Callable[[str], AbstractContextManager[Any]]


def upcoming(run: Online, state: State, phase: Phase, cache: ActivationCache | None) -> tuple[Collected, tuple[Pending, ...]]:
    """The collection that step `state.step` trains on, and those that later ones will.

    With `lag` k the completions of step s (from 0) are drawn by the weights after step max(0, s - k), all of them, however long
    any takes: so the staleness is k exactly, no short completion comes before its turn, and a run can be repeated bitwise. The
    collection of step s + k is begun now; `run.collector` works on it while the steps in between train.
    """
    pending = list(state.pending)
    wanted = min(run.config.lag + 1, run.total_steps - state.step)
    sampled = replace(run, sampler=run.sampler.snapshot()) if len(pending) < wanted else run
    central = run.sampler.central
    while len(pending) < wanted:
        last = pending[-1] if pending else None
        if central and run.world.rank:
            pending.append(ELSEWHERE)
        elif run.collector is None:
            pending.append(_after(sampled, last, state, phase, cache, ALONE if central else run.world))
        else:
            pending.append(run.collector.submit(_after, sampled, last, state, _untimed, None, ALONE))
    if not central:
        return pending[0].result(), tuple(pending[1:])
    with phase("time/wait"):
        return run.world.broadcast(pending[0].result()), tuple(pending[1:])


def _untimed(name: str) -> AbstractContextManager[Any]:
    return nullcontext()


def _after(
    run: Online, last: Pending | None, state: State, phase: Phase, cache: ActivationCache | None, world: World
) -> Collected:
    """The collection that begins where the one before it ended."""
    cursor = state.cursor if last is None else last.result().cursor
    return collect(run, cursor, state.step, phase, cache, world)


def collect(
    run: Online, cursor: int, version: int, phase: Phase, cache: ActivationCache | None = None, world: World = ALONE
) -> Collected:
    """Completions of `prompts_per_step` prompts from the place `cursor` on, scored. With dynamic sampling, groups without signal
    are replaced by new prompts (DAPO, Yu et al. 2025), at most `max_refills` times.
    """
    config = run.config
    trajectories: list[Trajectory] = []
    groups: list[list[Trajectory]] = []
    entries: Counter[str] = Counter()
    refills = isinstance(run.algorithm, PolicyGradient) and run.algorithm.dynamic_sampling
    for _ in range(1 + (config.max_refills if refills else 0)):
        wanted = prompts_from(run.prompts, config.run.seed, cursor, config.prompts_per_step - len(groups))
        fresh = rollout(
            run.sampler,
            run.scorer,
            wanted,
            run.params,
            num_generations=config.num_generations,
            seed_of=partial(seed_at, config.run.seed, cursor),
            model=run.model,
            version=version,
            episodes=run.episodes,
            missing_eos_penalty=config.missing_eos_penalty,
            cache=cache,
            phase=phase,
            world=world,
        )
        cursor += len(wanted)
        trajectories += fresh
        check_unscored([t.reason if t.status == "unscored" else None for t in trajectories], config.max_unscored)
        found = list(scored_groups(fresh, config.num_generations, run.algorithm.min_group_size))
        useful = [g for g in found if not refills or len({metric_of(t, config.filter_metric) for t in g}) > 1]
        groups += useful
        entries += Counter(
            {
                ledger.ISSUED: len(wanted),
                ledger.TRAINED: len(useful),
                ledger.UNSCORED: len(wanted) - len(found),
                ledger.NO_SIGNAL: len(found) - len(useful),
            }
        )
        if len(groups) == config.prompts_per_step:
            break
    return Collected(trajectories, groups, cursor, dict(entries))


def seed_at(seed: int, cursor: int, i: int, k: int) -> int:
    """The seed of completion k of a step's i-th prompt, whose place in the endless sequence of prompts names the step too."""
    return seeds.derive(seed, "sample", cursor + i, k)
