"""Online reinforcement learning, whole: sample -> score -> advantage -> loss -> optimiser step -> record.

Read this file first, then those that it calls, in the order of a step: `collect.py` (sample, score), `online_run.py` (the batch),
`psigrad/objective/policy_gradient.py` (advantage, loss), `../update.py` (gradient, AdamW), `figures.py` (what is recorded).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from psigrad.language.models.fused.caches import ActivationCache
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.rollout.types import Trajectory
from psigrad.language.training.learners import LESS_MEMORY, Keeper, State, apply_changes, with_changes
from psigrad.language.training.offline.preference_task import learn_preferences
from psigrad.language.training.online.collect import ISSUED, check_rewards, next_collection, update_ledger
from psigrad.language.training.online.figures import (
    WITHIN_GROUPS,
    Outcome,
    Tally,
    TokenFigures,
    collection_metrics,
    rollout_rows,
    staleness,
)
from psigrad.language.training.online.online_run import (
    MicroBatch,
    Online,
    ValueModel,
    add_old_values,
    add_teacher_kl,
    by_row,
    divergence,
    follow,
    inputs_of,
    log_probs,
    minibatches,
    outputs_by_row,
    rows_of,
    share_of,
    teacher_inputs_of,
    to_batch,
)
from psigrad.language.training.update import learning_rate, step_together
from psigrad.objective import PolicyGradient, PolicyOutputs, Prepared, Totals
from psigrad.runs.cycle import cycle


def train(run: Online, state: State, save: Keeper) -> State:
    """Run to `total_steps`, evaluating and saving through `save` as often as the configuration says."""

    def evaluate(state: State) -> None:
        if run.evaluate is not None:
            for pending in state.pending if run.episodes is not None else ():  # environments play for one at a time
                pending.result()
            run.evaluate(state.step)

    often = run.config.evaluation.eval_steps
    name = run.algorithm.name or "policy gradient"
    run.journal.callbacks.trial = partial(with_changes, run)
    turn = lambda state: step(apply_changes(run, state.changes), state)  # noqa: E731
    given = (run.config.run, often, run.journal, run.updates, LESS_MEMORY, save.wait)
    return cycle(name, state, run.total_steps, turn, evaluate, save, *given)


def step(run: Online, state: State) -> tuple[State, str]:
    """One step: from `state` to the next, with what the progress bar shows."""
    number, clock, config = state.step + 1, run.journal.clock(), run.config
    warms_up = state.step < config.critic_warmup_steps  # then only the critic learns
    lr = 0.0 if warms_up else learning_rate(config.optim, state.step, run.total_steps)
    cache = activation_cache(run)
    collected, pending = next_collection(run, state, clock, cache)
    unscored = check_rewards(run, collected.trajectories, state.unscored)
    tell_overflow(run, cache, collected.trajectories)
    outcome = Outcome({}, state.algorithm)
    if collected.groups:
        with clock("time/update"):
            outcome = learn(run, collected.groups, state, lr, cache)
    if isinstance(run.reference, LanguageModel) and config.ref_model_sync_steps and number % config.ref_model_sync_steps == 0:
        follow(run.reference, run.model, config.ref_model_mixup_alpha)
    trajectories = collected.trajectories
    tokens = state.tokens + sum(len(t.prompt_ids) + len(t.completion.ids) for t in trajectories)
    metrics = {
        **collection_metrics(trajectories, config.num_generations),
        **outcome.metrics,
        "learning_rate": lr,
        "num_tokens": tokens,
        "groups": len(collected.groups),
        **staleness(trajectories, state.step, config.lag),
        "prompts": collected.entries[ISSUED],
    }
    if config.num_generations == 1 or (isinstance(run.algorithm, PolicyGradient) and not run.algorithm.needs_reward):
        for name in WITHIN_GROUPS:  # nothing is compared within a group, so that equal rewards are no fault
            metrics.pop(name, None)
    rows = rollout_rows(run.world, run.prompts, collected, outcome, number, config.record_tokens, config.record_prompts)
    if run.world.rank == 0:
        run.journal.rollouts(rows)
    run.journal.metrics(number, metrics)
    run.journal.timings(number, clock, sum(len(t.completion.ids) for t in trajectories))
    run.optimizer.check(number)
    after = replace(
        state,
        step=number,
        cursor=collected.cursor,
        tokens=tokens,
        nonfinite=run.optimizer.nonfinite,
        algorithm=outcome.algorithm,
        ledger=update_ledger(state.ledger, state.cursor, collected),
        pending=pending,
        unscored=unscored,
    )
    return after, f"reward {metrics.get('reward', float('nan')):.3f}  length {metrics['completions/mean_length']:.1f}"


def activation_cache(run: Online) -> ActivationCache | None:
    """For what sampling computes under the weights that train, so that training need not compute it again."""
    # an episode is sampled turn by turn; another process, or a later step, may train on what is sampled here
    if run.config.model.gradient_checkpointing or run.episodes is not None or run.world.size > 1 or run.config.lag:
        return None
    return ActivationCache(run.config.keep_activations_gb * 1e9) if run.config.keep_activations_gb else None


def tell_overflow(run: Online, cache: ActivationCache | None, sampled: Sequence[Trajectory]) -> None:
    """Tell once that sampling computed more than is kept, and what would keep it."""
    limit, decoder = run.config.keep_activations_gb, run.model.decoder
    if cache is None or decoder is None or cache.bytes <= limit * 1e9:
        return
    tokens = sum(map(len, {t.prompt_ids for t in sampled})) + sum(len(t.completion.ids) for t in sampled)
    needed = math.ceil(tokens * decoder.parts.row_bytes / 1e8) / 10
    run.journal.tell_once(
        "forward_again",
        f"Training computes again what sampling has computed, which takes about a sixth of a step: activations of {tokens:,} "
        f"tokens take {needed:g} GB and keep_activations_gb is {limit:g}. --keep-activations-gb {needed:g} keeps them.",
    )


def learn(
    run: Online, groups: Sequence[Sequence[Trajectory]], state: State, lr: float, cache: ActivationCache | None = None
) -> Outcome:
    """All optimiser steps on one collection. Rows without gradient skip the forward pass; without any, no weight moves."""
    config, algorithm = run.config, run.algorithm
    if not isinstance(algorithm, PolicyGradient):
        return learn_preferences(run, algorithm.loss, groups, state, lr, cache)
    batch = to_batch(groups, config.filter_metric, run.reward_weights).to(run.model.device)
    cache = run.model.usable(cache)
    tally = Tally(world=run.world)
    batch = add_old_values(run, algorithm, batch, state.step, tally, cache)
    prepared = algorithm.prepare(batch, state.algorithm)  # the advantages
    warms_up = state.step < config.critic_warmup_steps
    optimizers = [(run.optimizer, lr)]
    if run.critic is not None:  # it follows the same schedule from a peak of its own
        own = replace(config.optim, learning_rate=run.critic.learning_rate)
        optimizers.append((run.critic.optimizer, learning_rate(own, state.step, run.total_steps)))
    seen = run.token_figures(sum(map(len, groups[: config.record_tokens])), prepared)
    ids = torch.unique(batch.group).cpu()
    for iteration in range(config.num_iterations):
        for share in minibatches(len(ids), config.num_minibatches, config.run.seed, state.step, iteration):
            part = torch.isin(batch.group.cpu(), ids[share])
            wanted = prepared.needs_gradient.cpu() & part
            if not bool(wanted.any()):
                continue
            tally.steps += 1
            totals = algorithm.totals(prepared, part.nonzero()[:, 0].to(batch.mask.device))
            micros = share_of(run.world, batch, wanted, config.micro_batch_tokens)
            parts = losses(run, algorithm, prepared, micros, totals, tally, seen, cache, warms_up)
            tally.end_step(step_together(optimizers, parts))
    tally.gather().check_gap(state.step + 1, run.max_gap)
    advantage = (prepared.advantage.sum(1) / batch.mask.sum(1).clamp(min=1)).tolist()
    figures = {name: value for name, value in prepared.metrics.items() if not name.startswith("sampling/")}
    figures |= tally.result()
    if warms_up:  # no gradient of the policy was taken
        figures.pop("grad_norm", None)
    after = prepared.state
    if algorithm.adapts and tally.norms and not warms_up:  # else the policy has not moved, which says nothing of its penalty
        now = log_probs(run.model, prepared.batch, config.micro_batch_tokens, run.params.temperature, world=run.world)
        after = algorithm.adapt(prepared, now)
    return Outcome(figures, after, advantage, seen.gather(run.world).rows())


def losses(
    run: Online,
    algorithm: PolicyGradient,
    prepared: Prepared,
    micros: Sequence[tuple[MicroBatch, float]],
    totals: Totals,
    tally: Tally,
    seen: TokenFigures,
    cache: ActivationCache | None,
    warms_up: bool = False,
) -> Iterator[Callable[[], Tensor]]:
    """The losses of one optimiser step, a function per pass: those of the policy, unless only the critic `warms_up`; then,
    without its activations beside them, a critic's of its own. A pass with weight 0 is only made because others make one.
    """
    device, passes = prepared.batch.mask.device, 1.0
    if run.model.balance is not None:
        passes = float(run.world.all_reduce(torch.tensor(sum(weight for _, weight in micros))))

    def policy(micro: MicroBatch, weight: float) -> Tensor:
        rows, own = rows_of(micro).to(device), teacher_inputs_of(prepared.batch, micro)
        evaluation = run.model.evaluate(
            inputs_of(prepared.batch, micro),
            temperature=run.params.temperature,
            entropy=algorithm.needs_entropy,
            kl_to=divergence(algorithm, run.reference, own, run.params.temperature),
            value=algorithm.needs_critic and run.critic is None,
            cache=cache,
        )
        part, evaluation = prepared.select(rows), outputs_by_row(evaluation, prepared.batch, micro)
        evaluation = add_teacher_kl(evaluation, run.reference, rows)
        if not weight:
            return idle(evaluation)
        seen.see(rows, evaluation)
        if tally.steps == 1 and tally.compares:
            tally.compare(evaluation.logp.detach(), part.batch)
        if run.single_pass:
            # the policy that is trained is the policy that sampled: its ratio is 1 by definition, whatever the sampler's rounding
            part = replace(part, batch=replace(part.batch, logp_old=evaluation.logp.detach()))
        share = algorithm.loss if run.critic is None else algorithm.policy_loss
        loss = share(part, evaluation, totals, prepared.state)
        return tally.add(loss if run.model.balance is None else run.model.balance.add_to(loss, passes))

    def value(micro: MicroBatch, weight: float, critic: ValueModel) -> Tensor:
        part = prepared.select(rows_of(micro).to(device))
        values = by_row(critic.model.values(inputs_of(prepared.batch, micro)), prepared.batch, micro)
        return tally.add(algorithm.critic_loss(part, values, totals)) if weight else 0.0 * values.sum()

    for micro, weight in () if warms_up else micros:
        yield partial(policy, micro, weight)
    if run.critic is not None:
        if cache is not None:
            cache.clear()  # the policy has learnt from it
        for micro, weight in micros:
            yield partial(value, micro, weight, run.critic)


def idle(evaluation: PolicyOutputs) -> Tensor:
    """A loss of 0 through every output, for a backward pass like any other."""
    parts = [x for x in vars(evaluation).values() if isinstance(x, Tensor) and x.requires_grad]
    return torch.stack([0.0 * part.sum() for part in parts]).sum()
