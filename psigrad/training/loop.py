"""Online reinforcement learning, whole: collect -> score -> advantage -> update -> record -> (evaluate) -> (save).

Read this file first. The mathematics is the `PolicyGradient`'s; who samples is the `Sampler`'s; who judges is the `Scorer`'s.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from psigrad import seeds
from psigrad.models.fused.activation_cache import ActivationCache
from psigrad.objective import PolicyGradient
from psigrad.objective.online_preference import OnlinePreference
from psigrad.records.rows import rollout_row
from psigrad.rewards import check_unscored
from psigrad.rollout.types import Trajectory
from psigrad.training import learn, prefer
from psigrad.training.collect import prompts_from, rollout, scored_groups, to_batch
from psigrad.training.cycle import cycle
from psigrad.training.journal import Clock
from psigrad.training.learn import Update
from psigrad.training.metrics import collection_metrics
from psigrad.training.online import Online
from psigrad.training.state import State
from psigrad.training.token_figures import log_probs_of
from psigrad.training.update import learning_rate


@dataclass(frozen=True)
class Collected:
    """Scored completions of one step: all of them, and the groups that go into the batch."""

    trajectories: list[Trajectory]
    groups: list[list[Trajectory]]
    cursor: int
    prompts: int


def train(run: Online, state: State, save: Callable[[State], None]) -> State:
    """Run to `total_steps`, evaluating and saving through `save` as often as the configuration says."""
    return cycle(
        run.algorithm.name or "policy gradient",
        state,
        run.total_steps,
        lambda s: step(run, s),
        lambda s: _evaluate(run, s),
        save,
        settings=run.config.run,
        eval_steps=run.config.evaluation.eval_steps,
        journal=run.journal,
    )


def step(run: Online, state: State) -> tuple[State, str]:
    """One step of the loop: from `state` to the next, with what it has to show."""
    number, clock = state.step + 1, Clock()
    lr = learning_rate(run.config.optim, state.step, run.total_steps)
    update = Update(metrics={}, algorithm=state.algorithm, advantages=[])
    with _keeping(run):
        collected = collect(run, state, clock)
        if collected.groups:
            with clock("time/update"):
                update = _learned(run, collected.groups, state, lr)
    tokens = state.tokens + sum(len(t.prompt_ids) + len(t.completion.ids) for t in collected.trajectories)
    metrics = {
        **collection_metrics(collected.trajectories, run.config.num_generations),
        **update.metrics,
        "learning_rate": lr,
        "num_tokens": tokens,
        "groups": len(collected.groups),
        "prompts": collected.prompts,
    }
    _record(run, collected, update, number)
    run.journal.metrics(number, metrics)
    run.journal.timings(number, clock, sum(len(t.completion.ids) for t in collected.trajectories))
    run.optimizer.check(number)
    after = replace(
        state,
        step=number,
        cursor=collected.cursor,
        tokens=tokens,
        nonfinite=run.optimizer.nonfinite,
        algorithm=update.algorithm,
    )
    return after, f"reward {metrics.get('reward', float('nan')):.3f}  length {metrics['completions/mean_length']:.1f}"


@contextlib.contextmanager
def _keeping(run: Online) -> Iterator[None]:
    """What sampling computes is kept for the update."""
    limit = 0.0 if run.config.model.gradient_checkpointing else run.config.keep_activations_gb * 1e9
    if limit and run.episodes is None:  # an episode's tokens are sampled turn by turn
        run.model.kept = ActivationCache(limit)
    try:
        yield
    finally:
        run.model.kept = None


def collect(run: Online, state: State, clock: Clock) -> Collected:
    """Completions of `prompts_per_step` prompts, scored. With dynamic sampling, groups without signal are replaced by new prompts
    (DAPO, Yu et al. 2025), at most `max_refills` times.
    """
    config, cursor, prompts = run.config, state.cursor, 0
    trajectories: list[Trajectory] = []
    groups: list[list[Trajectory]] = []
    refills = isinstance(run.algorithm, PolicyGradient) and run.algorithm.dynamic_sampling
    for _ in range(1 + (config.max_refills if refills else 0)):
        wanted = prompts_from(run.prompts, config.run.seed, cursor, config.prompts_per_step - len(groups))
        fresh = rollout(
            run.sampler,
            run.scorer,
            wanted,
            run.params,
            num_generations=config.num_generations,
            # the place in the endless sequence of prompts names step and prompt at once
            seed_of=lambda i, k, cursor=cursor: seeds.derive(config.run.seed, "sample", cursor + i, k),
            model=run.model,
            version=state.step,
            episodes=run.episodes,
            missing_eos_penalty=config.missing_eos_penalty,
            phase=clock,
        )
        cursor, prompts = cursor + len(wanted), prompts + len(wanted)
        trajectories += fresh
        check_unscored([t.reason if t.status == "unscored" else None for t in trajectories], config.max_unscored)
        found = scored_groups(fresh, config.num_generations, run.algorithm.min_group_size)
        groups += [g for g in found if not refills or len({t.reward for t in g}) > 1]
        if len(groups) == config.prompts_per_step:
            break
    return Collected(trajectories, groups, cursor, prompts)


def _learned(run: Online, groups: list[list[Trajectory]], state: State, lr: float) -> Update:
    """The half of the step that needs gradients, by the kind of method."""
    match run.algorithm:
        case OnlinePreference(loss=loss):
            return prefer.update(run, loss, groups, state, lr)
        case algorithm:
            return learn.update(run, algorithm, to_batch(groups), groups, state, lr)


def _evaluate(run: Online, state: State) -> None:
    if run.evaluator is not None:
        run.evaluator.record(run.model, run.sampler, state.step, run.journal)


def _record(run: Online, collected: Collected, update: Update, number: int) -> None:
    """rollouts.jsonl gets every completion of the step; those that were trained on with their advantage, and the first groups
    token by token.
    """
    rows: dict[int, Any] = {p.index: p.row for p in run.prompts}
    used = [t for group in collected.groups for t in group]
    advantage = {id(t): a for t, a in zip(used, update.advantages, strict=False)}
    shown = {id(t) for group in collected.groups[: run.config.record_tokens] for t in group}
    tokens: dict[int, dict[str, Any]] = {id(t): own for t, own in zip(used, update.tokens, strict=False)}
    run.journal.rollouts(
        [
            {
                **rollout_row(t, number, "train", rows[t.row].prompt, advantage.get(id(t))),
                **(log_probs_of(t.completion) if id(t) in shown else {}),
                **tokens.get(id(t), {}),
            }
            for t in collected.trajectories
        ]
    )
