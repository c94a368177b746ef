"""What a step trains on: completions of its prompts with their rewards, drawn now or, with a lag, by weights of some steps ago.

`next_collection` says which collection a step gets, `collect` makes one, `rollout` samples and scores (an evaluation's too). The
ledger says what became of each prompt.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from psigrad import seeds
from psigrad.language.data.templates import completion_for_reward, decode, opened_thought, prompt_for_reward
from psigrad.language.models.fused.caches import ActivationCache
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.models.packing import order
from psigrad.language.rewards import Failed, Result, Samples, Scored, Scorer, Unscored, check_unscored
from psigrad.language.rewards.outcomes import turns_of
from psigrad.language.rollout.episodes.episodes import Player, returns
from psigrad.language.rollout.spread import spread, spread_collected
from psigrad.language.rollout.types import ELSEWHERE, Collected, Pending, Prompt, Request, Sampler, SamplingParams, Trajectory
from psigrad.language.training.learners import State
from psigrad.language.training.online.online_run import Online, metric_of
from psigrad.objective import PolicyGradient
from psigrad.processes.parallel.world import ALONE, World

Phase = Callable[[str], AbstractContextManager[Any]]
ISSUED, TRAINED, PENDING = "issued", "trained", "pending"
UNSCORED, NO_SIGNAL, EARLIER = "dropped: unscored", "dropped: equal rewards", "dropped: before there was a ledger"


def next_collection(
    run: Online, state: State, phase: Phase, cache: ActivationCache | None
) -> tuple[Collected, tuple[Pending, ...]]:
    """The collection that step `state.step` trains on, and those that later ones will.

    With `lag` k the completions of step s (from 0) are drawn by the weights after step max(0, s - k), all of them, however long
    any takes: so the staleness is k exactly, no short completion comes before its turn, and a run can be repeated bitwise. The
    collection of step s + k is begun now; `run.collector` works on all of them at once while the steps in between train.
    """
    pending = list(state.pending)
    wanted = begun_by(state.step, run.config.lag, run.total_steps) - state.step
    with phase("time/sample"):  # it may take long to hand over weights
        sampled = replace(run, sampler=run.sampler.snapshot()) if len(pending) < wanted else run
    central = run.sampler.central
    while len(pending) < wanted:
        last = pending[-1] if pending else None
        if central and run.world.rank:
            pending.append(ELSEWHERE)
        elif run.collector is None:
            pending.append(_collect_after(sampled, last, state, phase, cache, ALONE if central else run.world))
        else:
            made = run.collector.submit(_collect_after, sampled, last, state, _no_phase, None, ALONE)
            pending.append(InFlight(made, None if _refills(run) else _start_after(last, state) + run.config.prompts_per_step))
    if not central:
        return pending[0].result(), tuple(pending[1:])
    with phase("time/wait"):
        found = pending[0].result()
        return found if run.world.size == 1 else spread_collected(run.world, found), tuple(pending[1:])


def begun_by(step: int, lag: int, total: int) -> int:
    """How many of a run's `total` collections have been begun when `step` steps are done: `lag` beyond the one that is next."""
    return min(step + lag + 1, total)


@dataclass(frozen=True)
class InFlight:
    """A collection that a thread is at work on, and the place where the next one begins, if that does not depend on it."""

    found: Future[Collected]
    end: int | None

    def result(self) -> Collected:
        """See `Pending`."""
        return self.found.result()


def _start_after(last: Pending | None, state: State) -> int:
    if last is None:
        return state.cursor
    return last.end if isinstance(last, InFlight) and last.end is not None else last.result().cursor


def _refills(run: Online) -> bool:
    return isinstance(run.algorithm, PolicyGradient) and run.algorithm.dynamic_sampling


def _no_phase(name: str) -> AbstractContextManager[Any]:
    return nullcontext()


def _collect_after(
    run: Online, last: Pending | None, state: State, phase: Phase, cache: ActivationCache | None, world: World
) -> Collected:
    """The collection that begins where the one before it ended."""
    return collect(run, _start_after(last, state), state.step, phase, cache, world)


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
    refills = _refills(run)
    for _ in range(1 + (config.max_refills if refills else 0)):
        wanted = pick_prompts(run.prompts, config.run.seed, cursor, config.prompts_per_step - len(groups))
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
            whole=config.lag > 0,  # a checkpoint has what is not trained on yet
        )
        fresh = fresh if run.recorded is None else run.recorded(fresh)
        cursor += len(wanted)
        trajectories += fresh
        check_rewards(run, trajectories)
        scored = list(group_scored(fresh, config.num_generations, run.algorithm.min_group_size))
        useful = [g for g in scored if not refills or len({metric_of(t, config.filter_metric) for t in g}) > 1]
        groups += useful
        dropped = {UNSCORED: len(wanted) - len(scored), NO_SIGNAL: len(scored) - len(useful)}
        entries += Counter({ISSUED: len(wanted), TRAINED: len(useful), **dropped})
        if len(groups) == config.prompts_per_step:
            break
    return Collected(trajectories, groups, cursor, dict(entries))


def check_rewards(run: Online, trajectories: Sequence[Trajectory], before: Sequence[Sequence[int]] = ()) -> list[list[int]]:
    """Raise `RewardError` if the rewards do not work, with the rows' places; else return what the next step is judged with."""
    reasons = [t.reason if t.status == "unscored" else None for t in trajectories]
    failed = any(reasons)
    sources = (
        [run.prompts[bisect.bisect_left(run.prompts, t.row, key=lambda p: p.index)].row.source for t in trajectories]
        if (failed)
        else []
    )
    return check_unscored(reasons, run.config.max_unscored, sources, before)


def seed_at(seed: int, cursor: int, i: int, k: int) -> int:
    """The seed of completion k of a step's i-th prompt, whose place in the endless sequence of prompts names the step too."""
    return seeds.derive(seed, "sample", cursor + i, k)


def group_scored(trajectories: list[Trajectory], group_size: int, smallest: int) -> Iterator[list[Trajectory]]:
    """Groups of consecutive completions without their unscored members; a group left with fewer than `smallest` is dropped."""
    for start in range(0, len(trajectories), group_size):
        group = [t for t in trajectories[start : start + group_size] if t.reward is not None and t.completion.ids]
        if len(group) >= smallest:
            yield group


def rollout(
    sampler: Sampler,
    scorer: Scorer | None,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    num_generations: int,
    seed_of: Callable[[int, int], int],
    model: LanguageModel,
    version: int,
    episodes: Player | None = None,
    missing_eos_penalty: float = 0.0,
    cache: ActivationCache | None = None,
    phase: Callable[[str], AbstractContextManager[Any]] = lambda name: nullcontext(),
    world: World = ALONE,
    whole: bool = False,
) -> list[Trajectory]:
    """`num_generations` completions of each prompt, or episodes from it, with their rewards; `seed_of(i, k)` seeds the k-th of
    the i-th prompt.

    A group goes to the scorer as soon as its last completion has ended, while others are still being written. `cache` is for what
    sampling computes. `phase` times "time/sample" and "time/score", the wait for what is not scored by then. Each process of the
    world does its share of the prompts; of the others' all get what `spread.apart` leaves or, if `whole`, all there is.
    """
    own = range(world.rank, len(prompts), 1 if sampler.central else world.size)
    if sampler.central and world.rank:
        own = range(0)
    trajectories: list[Trajectory] = []
    if own:
        own_prompts = [prompts[i] for i in own]
        rewards = _Rewards(scorer, {p.index: p.row for p in own_prompts}, episodes is not None, model.tokenizer)
        with phase("time/sample"):
            if episodes is None:
                requests = [Request(prompts[i].ids, tuple(seed_of(i, k) for k in range(num_generations))) for i in own]
                trajectories = _sample(sampler, own_prompts, requests, params, model, version, cache, rewards)
            else:
                trajectories = episodes.play(
                    sampler,
                    [(p.index, p.ids, p.row) for p in own_prompts],
                    params,
                    num_generations=num_generations,
                    seed_of=lambda place, k: seed_of(own[place], k),
                    model=model,
                    version=version,
                    needs_reward=scorer is None,
                )
                rewards.add_all(trajectories)
        with phase("time/score"):
            trajectories = rewards.give_to(trajectories, missing_eos_penalty)
    if world is ALONE:
        return trajectories
    with phase("time/gather"):
        each = spread(world, trajectories, whole=whole)
    if sampler.central:
        return each[0]
    parts = [(each[i % world.size], i // world.size * num_generations) for i in range(len(prompts))]
    return [t for made, at in parts for t in made[at : at + num_generations]]


def _sample(
    sampler: Sampler,
    prompts: Sequence[Prompt],
    requests: list[Request],
    params: SamplingParams,
    model: LanguageModel,
    version: int,
    cache: ActivationCache | None,
    rewards: _Rewards,
) -> list[Trajectory]:
    """Completions of one turn each; `rewards` gets each group when its last one has ended."""
    groups: dict[int, list[Trajectory]] = {}
    for completed in sampler.steps(requests, params, cache):
        for place, completions in completed:
            prompt, texts = prompts[place], [decode(model.tokenizer, c.ids) for c in completions]
            groups[place] = [
                Trajectory(prompt.index, k, prompt.ids, c, version, text=text, teacher_prompt_ids=prompt.teacher_ids)
                for k, (c, text) in enumerate(zip(completions, texts, strict=True))
            ]
            rewards.add(groups[place])
        rewards.poll()
    return [t for place in range(len(requests)) for t in groups[place]]


def score(scorer: Scorer | None, trajectories: list[Trajectory], rows: Mapping[int, Any]) -> list[Trajectory]:
    """The trajectories with their rewards; `rows[index]` is the dataset row, whose columns the rewards receive."""
    rewards = _Rewards(scorer, {t.row: rows[t.row] for t in trajectories}, any(t.mask for t in trajectories))
    rewards.add_all(trajectories)
    return rewards.give_to(trajectories)


class _Rewards:
    """Trajectories on their way to their rewards; the columns of all `rows`, by index, are shown for each of them.

    Rewards of the environment and of steps are added to the scorer's; without a scorer they are all there is.
    """

    def __init__(self, scorer: Scorer | None, rows: Mapping[int, Any], episodes: bool = False, tokenizer: Any = None) -> None:
        self._scoring, self._rows, self._tokenizer = None if scorer is None else scorer.begin(), rows, tokenizer
        self._names = sorted({name for row in rows.values() for name in row.columns})
        self._places: dict[int, int] = {}
        self._episodes = episodes

    def add_all(self, trajectories: list[Trajectory]) -> None:
        """Group by group; a row may be drawn twice in a step: its two groups are not one."""
        starts = [i for i, t in enumerate(trajectories) if t.k == 0 or i == 0]
        for start, end in itertools.pairwise([*starts, len(trajectories)]):
            self.add(trajectories[start:end])

    def add(self, group: list[Trajectory]) -> None:
        """An episode is shown whole: as its messages, or as its text where the prompt is plain."""
        self._places |= {id(t): len(self._places) + i for i, t in enumerate(group)}
        if self._scoring is None:
            return
        sources = [self._rows[t.row] for t in group]
        texts = [t.text if t.answer is None else t.answer for t in group]
        shown = [list(t.messages) or completion_for_reward(row, text) for row, t, text in zip(sources, group, texts, strict=True)]
        turns = [list(t.policy_turns) or turns_of(completion) for t, completion in zip(group, shown, strict=True)]
        opened = functools.cache(lambda ids: opened_thought(self._tokenizer, ids))  # a group has one prompt
        samples = Samples(
            prompts=[prompt_for_reward(row) for row in sources],
            completions=shown,
            completion_ids=[list(t.completion.ids) for t in group],
            columns={name: [row.columns.get(name) for row in sources] for name in self._names},
            prompt_ids=[t.prompt_ids for t in group],
            policy_turns=turns if self._episodes else None,
            policy_ids=[list(t.policy_ids) for t in group] if self._episodes else None,
            opened_thoughts=None if self._tokenizer is None else [opened(t.prompt_ids) for t in group],
        )
        self._scoring.add(samples)

    def poll(self) -> None:
        """Let the scorer go on."""
        if self._scoring is not None:
            self._scoring.poll()

    def give_to(self, trajectories: list[Trajectory], missing_eos_penalty: float = 0.0) -> list[Trajectory]:
        """The same trajectories with their rewards. `missing_eos_penalty` is taken from the reward of completions that the
        length limit cut.
        """
        results: Sequence[Result] = [Scored(0.0)] * len(trajectories) if self._scoring is None else self._scoring.results()
        scored = [_add_reward(t, results[self._places[id(t)]]) for t in trajectories]
        return [_penalise_cut(t, missing_eos_penalty) for t in scored] if missing_eos_penalty else scored


def _penalise_cut(trajectory: Trajectory, penalty: float) -> Trajectory:
    """A cut completion with `penalty` taken from its reward, and the others as they are."""
    if trajectory.reward is None or trajectory.completion.finish_reason != "length":
        return trajectory
    parts = {**trajectory.parts, "missing_eos": -penalty}
    return replace(trajectory, reward=trajectory.reward - penalty, parts=parts)


def _add_reward(trajectory: Trajectory, result: Result) -> Trajectory:
    """The trajectory with its reward: the scorer's value and what was earned on the way."""
    if trajectory.reason:  # the environment or the agent broke
        return replace(trajectory, status="unscored")
    if isinstance(result, Unscored):
        return replace(trajectory, status="unscored", reason=result.reason)
    steps = (*trajectory.step_rewards, *getattr(result, "steps", ()))
    parts = dict(result.parts)
    if trajectory.step_rewards:
        parts["environment" if trajectory.answer is None else "agent"] = returns(trajectory)
    total = float(result.value) + math.fsum(reward for _, reward in steps)
    failed = isinstance(result, Failed)
    return replace(
        trajectory,
        reward=total,
        status="failed" if failed else "scored",
        reason=result.reason if isinstance(result, Failed) else "",
        parts=parts,
        step_rewards=steps,
    )


def pick_prompts(prompts: Sequence[Prompt], seed: int, cursor: int, count: int) -> list[Prompt]:
    """Places `cursor` … `cursor + count` of the endless sequence of shuffled epochs: a pure function of its arguments."""
    n, places, picked = len(prompts), {}, []
    for place in range(cursor, cursor + count):
        epoch, offset = divmod(place, n)
        if epoch not in places:
            places[epoch] = order(n, seed, epoch)
        picked.append(prompts[places[epoch][offset]])
    return picked


def open_ledger(ledger: Mapping[str, int], cursor: int) -> dict[str, int]:
    """The ledger to go on with. Of `cursor` prompts that were issued before there was one, nothing is known."""
    if ledger or not cursor:
        return dict(ledger)
    return {ISSUED: cursor, EARLIER: cursor}


def enter(ledger: Mapping[str, int], entries: Mapping[str, int]) -> dict[str, int]:
    """The ledger with one step's prompts added to each entry; entries of 0 are left out."""
    return dict(Counter(ledger) + Counter(entries))


def update_ledger(ledger: Mapping[str, int], cursor: int, collected: Collected) -> dict[str, int]:
    """The ledger, which stood at `cursor` prompts, after a collection; it balances."""
    entries = enter(open_ledger(ledger, cursor), collected.entries)
    check_balance(entries, collected.cursor)
    return entries


def check_balance(ledger: Mapping[str, int], cursor: int) -> None:
    """Every prompt that was issued has been trained on, dropped for a reason, or is pending.

    Raises `RuntimeError` where that is not so: a prompt was lost or counted twice, which is a fault of ours.
    """
    issued, rest = ledger.get(ISSUED, 0), sum(count for name, count in ledger.items() if name != ISSUED)
    if not issued == rest == cursor:
        raise RuntimeError(f"The ledger of prompts does not balance: {cursor} were drawn, {dict(ledger)}; please report this.")
