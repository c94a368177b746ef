"""Online reinforcement learning, whole: sample -> score -> advantage -> loss -> optimiser step -> record.

Read this file first. The mathematics is that of `algorithm`, a `PolicyGradient`: `prepare` makes the advantages, `loss` the loss.
Who samples is the `Sampler`, who judges the `Scorer`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from psigrad.errors import UserError
from psigrad.language.models.fused.activation_cache import ActivationCache
from psigrad.language.rollout.types import Trajectory
from psigrad.language.training.learners import LESS_MEMORY, State, apply_changes, with_changes
from psigrad.language.training.online import ledger
from psigrad.language.training.online.best_and_worst import learn_preferences
from psigrad.language.training.online.collate import MicroBatch, micro_batches, minibatches, to_batch
from psigrad.language.training.online.collected import Collected
from psigrad.language.training.online.collection import upcoming
from psigrad.language.training.online.forward import entropies, log_probs, values, wide, widened
from psigrad.language.training.online.metrics import collection_metrics
from psigrad.language.training.online.online_run import Online, ValueModel
from psigrad.language.training.online.reference import divergence, follow, reference_log_probs
from psigrad.language.training.online.tally import Outcome, Tally
from psigrad.language.training.online.token_figures import TokenFigures, log_probs_of
from psigrad.language.training.update import learning_rate, step_together
from psigrad.objective import Batch, PolicyGradient, PolicyOutputs, Prepared, Totals
from psigrad.objective.parts.surrogate import adapt, kl_penalty, measure_kl
from psigrad.objective.preferences.online_preference import OnlinePreference
from psigrad.processes.parallel.world import shard
from psigrad.records.rows import rollout_row
from psigrad.runs.cycle import cycle

# Where training reuses what sampling computed, in every so many steps one completion of so many runs forward again.
COMPARE_EVERY, COMPARED = 4, 20


def train(run: Online, state: State, save: Callable[[State], None]) -> State:
    """Run to `total_steps`, evaluating and saving through `save` as often as the configuration says."""

    def evaluate(state: State) -> None:
        if run.evaluator is not None:
            for pending in state.pending:  # the sampler and the scorer serve one at a time
                pending.result()
            run.evaluator.record(run.model, run.sampler, state.step, run.journal)

    often = run.config.evaluation.eval_steps
    name = run.algorithm.name or "policy gradient"
    run.journal.callbacks.trial = partial(with_changes, run)
    turn = lambda state: step(apply_changes(run, state.changes), state)  # noqa: E731
    return cycle(name, state, run.total_steps, turn, evaluate, save, run.config.run, often, run.journal, run.updates, LESS_MEMORY)


def step(run: Online, state: State) -> tuple[State, str]:
    """One step: from `state` to the next, with what the progress bar shows."""
    number, clock, config = state.step + 1, run.journal.clock(), run.config
    warms_up = state.step < config.critic_warmup_steps  # then only the critic learns
    lr = 0.0 if warms_up else learning_rate(config.optim, state.step, run.total_steps)
    cache = activation_cache(run)
    collected, pending = upcoming(run, state, clock, cache)
    outcome = Outcome({}, state.algorithm)
    if collected.groups:
        with clock("time/update"):
            outcome = learn(run, collected.groups, state, lr, cache)
    if run.reference is not None and config.ref_model_sync_steps and number % config.ref_model_sync_steps == 0:
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
        "prompts": collected.entries[ledger.ISSUED],
    }
    record(run, collected, outcome, number)
    run.journal.metrics(number, metrics)
    run.journal.timings(number, clock, sum(len(t.completion.ids) for t in trajectories))
    run.optimizer.check(number)
    cursor = collected.cursor
    entries = ledger.entered(ledger.opened(state.ledger, state.cursor), collected.entries)
    ledger.check_balance(entries, cursor)
    after = replace(
        state,
        step=number,
        cursor=cursor,
        tokens=tokens,
        nonfinite=run.optimizer.nonfinite,
        algorithm=outcome.algorithm,
        ledger=entries,
        pending=pending,
    )
    return after, f"reward {metrics.get('reward', float('nan')):.3f}  length {metrics['completions/mean_length']:.1f}"


def staleness(trajectories: Sequence[Trajectory], step: int, lag: int) -> dict[str, float]:
    """How many steps ago, in the mean, the weights that drew the completions were those of the trainer. Raises `RuntimeError`
    where that is not the lag: older weights have then been sampled from, which is a fault of ours.
    """
    if not lag or not trajectories:
        return {}
    versions = {t.version for t in trajectories}
    if versions != {max(0, step - lag)}:
        raise RuntimeError(
            f"Step {step + 1} with lag {lag} was given completions of the versions {versions}; please report this."
        )
    return {"sampling/staleness": float(step - max(0, step - lag))}


def activation_cache(run: Online) -> ActivationCache | None:
    """For what sampling computes under the weights that train, so that training need not compute it again."""
    # an episode is sampled turn by turn; another process, or a later step, may train on what is sampled here
    if run.config.model.gradient_checkpointing or run.episodes is not None or run.world.size > 1 or run.config.lag:
        return None
    return ActivationCache(run.config.keep_activations_gb * 1e9) if run.config.keep_activations_gb else None


def learn(
    run: Online, groups: Sequence[Sequence[Trajectory]], state: State, lr: float, cache: ActivationCache | None = None
) -> Outcome:
    """All optimiser steps on one collection. Rows without gradient skip the forward pass; without any, no weight moves."""
    if isinstance(run.algorithm, OnlinePreference):
        loss = run.algorithm.loss
        return learn_preferences(run.config, loss, run.model, run.reference, run.optimizer, groups, state, lr, cache, run.world)
    config, algorithm = run.config, run.algorithm
    batch = to_batch(groups, config.filter_metric, run.reward_weights).to(run.model.device)
    cache = run.model.usable(cache)
    tally = Tally(world=run.world)
    batch = with_old_values(run, algorithm, batch, state.step, tally, cache)
    prepared = algorithm.prepare(batch, state.algorithm)  # the advantages
    warms_up = state.step < config.critic_warmup_steps
    optimizers = [(run.optimizer, lr)]
    if run.critic is not None:  # it follows the same schedule from a peak of its own
        own = replace(config.optim, learning_rate=run.critic.learning_rate)
        optimizers.append((run.critic.optimizer, learning_rate(own, state.step, run.total_steps)))
    seen = TokenFigures(sum(map(len, groups[: config.record_tokens])), prepared)
    ids = torch.unique(batch.group).cpu()
    for iteration in range(config.num_iterations):
        for share in minibatches(len(ids), config.num_minibatches, config.run.seed, state.step, iteration):
            part = torch.isin(batch.group.cpu(), ids[share])
            wanted = prepared.needs_gradient.cpu() & part
            if not bool(wanted.any()):
                continue
            tally.steps += 1
            totals = algorithm.totals(prepared, part.nonzero()[:, 0].to(batch.mask.device))
            micros = shard(run.world, micro_batches(batch, wanted, config.micro_batch_tokens, run.world.size))
            made = losses(run, algorithm, prepared, micros, totals, tally, seen, cache, warms_up)
            tally.stepped(step_together(optimizers, made))
    check_gap(run, tally.joined().mean_gap, state.step + 1)
    advantage = (prepared.advantage.sum(1) / batch.mask.sum(1).clamp(min=1)).tolist()
    figures = {name: value for name, value in prepared.metrics.items() if not name.startswith("sampling/")}
    figures |= tally.result()
    if warms_up:  # no gradient of the policy was taken
        figures.pop("grad_norm", None)
    after = prepared.state
    if isinstance(algorithm.surrogate, kl_penalty) and algorithm.surrogate.target is not None and tally.steps:
        now = log_probs(run.model, prepared.batch, config.micro_batch_tokens, run.params.temperature, world=run.world)
        kept = prepared.batch.mask & prepared.keep[:, None]
        after = adapt(algorithm.surrogate, after, measure_kl(now, prepared.batch.logp_old, kept))
    return Outcome(figures, after, advantage, seen.joined(run.world).rows())


def with_old_values(
    run: Online, algorithm: PolicyGradient, batch: Batch, step: int, tally: Tally, cache: ActivationCache | None
) -> Batch:
    """The batch with what is computed before the first optimiser step: log-probs of the reference and, where the sampler's will
    not do, of the policy; values of the critic.
    """
    model, budget, temperature, world = run.model, run.config.micro_batch_tokens, run.params.temperature, run.world
    if algorithm.needs_reference and not algorithm.needs_exact_kl:
        if run.reference is None:
            raise UserError("This algorithm's KL term needs a reference model; none was loaded.")
        batch = replace(batch, logp_ref=reference_log_probs(run.reference, batch, budget, temperature, world))
    reuses = cache is not None and bool(cache.slabs)  # then the log-probs that are trained on are the sampler's own
    stale = any(t.version != step for t in batch.inputs)
    enough = (run.exact_sampling or single_pass(run)) and not stale
    tally.compares = enough and not reuses
    if reuses and step % COMPARE_EVERY == 0 and len(present := batch.present.cpu().nonzero()[:, 0]):
        # other completions each time, run forward without the cache
        size, count = math.ceil(len(present) / COMPARED), step // COMPARE_EVERY
        some = torch.zeros(len(batch.mask), dtype=torch.bool)
        some[present[(torch.arange(size) + count * size) % len(present)]] = True
        rows = some.to(batch.mask.device)
        tally.gap(log_probs(model, batch, budget, temperature, wanted=some, world=world)[rows], batch.select(rows))
    if not enough:
        again = log_probs(model, batch, budget, temperature, cache=cache, world=world)
        if not reuses and not stale:  # older weights gave other log-probs
            tally.gap(again, batch)
        batch = replace(batch, logp_old=again)
    if algorithm.needs_old_entropy:
        batch = replace(batch, entropy=entropies(model, batch, budget, temperature, world))
    if algorithm.needs_critic:
        batch = replace(batch, value=values(model if run.critic is None else run.critic.model, batch, budget, cache, world))
    return batch


def single_pass(run: Online) -> bool:
    """Whether each collection is trained on in a single optimiser step."""
    return run.config.num_iterations * run.config.num_minibatches == 1


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
    device, width = prepared.batch.mask.device, prepared.batch.mask.shape[1]

    def policy(micro: MicroBatch, weight: float) -> Tensor:
        rows = micro.rows.to(device)
        evaluation = run.model.evaluate(
            micro.inputs,
            temperature=run.params.temperature,
            entropy=algorithm.needs_entropy,
            kl_to=divergence(algorithm, run.reference, micro),
            value=algorithm.needs_critic and run.critic is None,
            cache=cache,
        )
        part, evaluation = prepared.select(rows), widened(evaluation, width)
        if not weight:
            return idle(evaluation)
        seen.see(rows, evaluation)
        if tally.steps == 1 and tally.compares:
            tally.gap(evaluation.logp.detach(), part.batch)
        if single_pass(run):
            # the policy that is trained is the policy that sampled: its ratio is 1 by definition, whatever the sampler's rounding
            part = replace(part, batch=replace(part.batch, logp_old=evaluation.logp.detach()))
        share = algorithm.loss if run.critic is None else algorithm.policy_loss
        return tally.add(share(part, evaluation, totals, prepared.state))

    def value(micro: MicroBatch, weight: float, critic: ValueModel) -> Tensor:
        part, found = prepared.select(micro.rows.to(device)), wide(critic.model.values(micro.inputs), width)
        return tally.add(algorithm.critic_loss(part, found, totals)) if weight else 0.0 * found.sum()

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


def check_gap(run: Online, gap: float, number: int) -> None:
    """Stop where the completions cannot have come from the policy that is trained."""
    half = run.model.network.dtype in (torch.bfloat16, torch.float16)
    bound = run.config.max_logp_difference or (0.1 if half else 1e-3)
    if not gap <= bound:
        raise UserError(
            f"At step {number} sampler and trainer disagree by {gap:.2g} in mean log-probability, above the bound {bound:.2g}: "
            "the completions did not come from the policy that is trained. Look at the sampler, or raise max_logp_difference."
        )


def record(run: Online, collected: Collected, outcome: Outcome, number: int) -> None:
    """rollouts.jsonl gets every completion of the step; those that were trained on with their advantage, and the first groups
    token by token.
    """
    rows: dict[int, Any] = {p.index: p.row for p in run.prompts}
    used = [t for group in collected.groups for t in group]
    advantage = {id(t): a for t, a in zip(used, outcome.advantages, strict=False)}
    shown = {id(t) for group in collected.groups[: run.config.record_tokens] for t in group}
    tokens: dict[int, dict[str, Any]] = {id(t): own for t, own in zip(used, outcome.tokens, strict=False)}
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
