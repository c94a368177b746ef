"""Online reinforcement learning in one file: sample, score, advantage, loss, optimiser step.

Read this file first, then the files that it calls in the order of a step. One step, from top to bottom:

    state ──▶ next_collection ──▶ Collected ──▶ learn ─────────────────────────────▶ Outcome ──▶ cycle records it
              collect.py            │           to_batch          batching.py                     runs/cycle.py
              │        ▲            │           annotators        annotators/   logp_old, logp_ref, value
              ▼        │            │           prepare           objective/    advantages, filters
              sampler ─▶ rewards    │           losses ─▶ step    optim/        once per minibatch
              (others sample while  │
              a group is scored)    └─▶ metrics and rows of rollouts.jsonl      figures.py

With `lag` > 0, threads collect for later steps while a step trains.

`grpo` differs from the GRPO of Shao et al. 2024 (arXiv:2402.03300) in five points:

1. With a single optimiser step per collection, the ratio is exactly 1.
2. Rows whose gradient is 0 skip the forward pass.
3. Unscored completions are removed. A group that is then too small is dropped.
4. If the trainer's log-probs differ from the sampler's by more than rounding, the run ends with an error.
5. Losses are divided by counts over the whole optimiser step, so that micro-batches of any size give the same gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from psigrad.language.rollout.types import State, Trajectory
from psigrad.language.training.loss_sums import LossSums, within_memory
from psigrad.language.training.online.annotators.old_log_probs import compute_log_probs
from psigrad.language.training.online.batching import (
    MicroBatch,
    assign_micro_batches,
    inputs_of,
    minibatches,
    outputs_by_row,
    rows_of,
    to_batch,
    to_rows,
)
from psigrad.language.training.online.collect import ISSUED, check_rewards, next_collection, update_ledger
from psigrad.language.training.online.figures import (
    WITHIN_GROUPS,
    TokenFigures,
    UpdateResult,
    collection_metrics,
    rollout_rows,
    staleness,
)
from psigrad.language.training.online.online_preferences import learn_preferences
from psigrad.language.training.online.online_run import OnlineRun, ValueModel
from psigrad.objective import PolicyGradient, PolicyOutputs, Prepared, Totals
from psigrad.optim import learning_rate, step_together
from psigrad.step import Clock, Outcome

if TYPE_CHECKING:
    from psigrad.language.models.fused.caches import ActivationCache


def step(run: OnlineRun, state: State) -> Outcome[State]:
    """Take one training step from `state`, and return its outcome. Weights and optimisers change in place; no file is written."""
    number, clock, config = state.step + 1, Clock(run.watch), run.config
    lr = 0.0 if is_critic_warmup(run, state) else learning_rate(config.optim, state.step, run.total_steps)
    cache = activation_cache(run)
    collected, pending = next_collection(run, state, clock, cache)
    unscored = check_rewards(run, collected.trajectories, state.unscored)
    notes = note_overflow(run, cache, collected.trajectories)
    learned, changes = UpdateResult({}, state.algorithm), state.changes
    if collected.groups:
        with clock("time/update"):
            learned, changes, halved = within_memory(
                run, run.optimizers, lambda run: learn(run, collected.groups, state, lr, cache), changes
            )
            notes |= halved
    for annotator in run.annotators:
        annotator.after_step(run, number)
    trajectories = collected.trajectories
    tokens = state.tokens + sum(len(t.prompt_ids) + len(t.completion.ids) for t in trajectories)
    metrics = {
        **collection_metrics(trajectories, config.num_generations),
        **learned.metrics,
        "learning_rate": lr,
        "num_tokens": tokens,
        "groups": len(collected.groups),
        **staleness(trajectories, state.step, config.lag),
        "prompts": collected.entries[ISSUED],
    }
    if config.num_generations == 1 or (isinstance(run.algorithm, PolicyGradient) and not run.algorithm.needs_reward):
        for name in WITHIN_GROUPS:  # the method does not compare rewards within a group, so equal ones are no problem
            metrics.pop(name, None)
    after = replace(
        state,
        step=number,
        cursor=collected.cursor,
        tokens=tokens,
        nonfinite=run.optimizer.nonfinite,
        algorithm=learned.algorithm,
        ledger=update_ledger(state.ledger, state.cursor, collected),
        pending=pending,
        unscored=unscored,
        changes=changes,
    )
    return Outcome(
        state=after,
        metrics=metrics,
        rows=rollout_rows(run.world, run.prompts, collected, learned, number, config.record_tokens, config.record_prompts),
        timings=clock.read(),
        tokens=sum(len(t.completion.ids) for t in trajectories),
        notes=notes,
        summary=f"reward {metrics.get('reward', float('nan')):.3f}  length {metrics['completions/mean_length']:.1f}",
    )


def is_critic_warmup(run: OnlineRun, state: State) -> bool:
    """Return True if the next step belongs to the critic's warm-up, during which only the critic is trained."""
    return state.step < run.config.critic_warmup_steps


def activation_cache(run: OnlineRun) -> ActivationCache | None:
    """Return an empty cache, in which sampling stores activations for training to reuse; None if training cannot reuse any."""
    # No cache if an episode is sampled turn by turn, or if another process or a later step can train on the completions.
    if run.config.model.gradient_checkpointing or run.rollout.collector.plays or run.world.size > 1 or run.config.lag:
        return None
    limit = cache_limit(run)
    return run.model.new_cache(limit) if limit else None


def cache_limit(run: OnlineRun) -> float:
    """Return the maximum size of the activation cache in bytes: `keep_activations_gb` · 1e9, or 1e9 if the setting is None."""
    limit = run.config.keep_activations_gb
    return 1e9 if limit is None else limit * 1e9


def note_overflow(run: OnlineRun, cache: ActivationCache | None, sampled: Sequence[Trajectory]) -> dict[str, str]:
    """Return {"forward_again": message} if activations exceed the cache's limit and are recomputed in training; otherwise {}."""
    limit, decoder = cache_limit(run), run.model.decoder
    if cache is None or decoder is None or cache.bytes <= limit:
        return {}
    tokens = sum(map(len, {t.prompt_ids for t in sampled})) + sum(len(t.completion.ids) for t in sampled)
    needed = math.ceil(tokens * decoder.row_layout.row_bytes / 1e8) / 10
    text = (
        f"Training recomputes activations, which takes about 17 % of a step, since activations of {tokens:,} tokens "
        f"take {needed:g} GB and keep_activations_gb is {limit / 1e9:g}. --keep-activations-gb {needed:g} keeps them."
    )
    return {"forward_again": text}


def learn(
    run: OnlineRun, groups: Sequence[Sequence[Trajectory]], state: State, lr: float, cache: ActivationCache | None = None
) -> UpdateResult:
    """Take all optimiser steps on the completions `groups`. `lr` is the learning rate of the policy."""
    config, algorithm = run.config, run.algorithm
    if not isinstance(algorithm, PolicyGradient):
        return learn_preferences(run, algorithm.loss, groups, state, lr, cache)
    run.check_reference()
    # On the host: what is computed from rewards and lengths is small, and reading it from a GPU would stall the GPU.
    batch = to_batch(groups, config.filter_metric, run.reward_weights)
    cache = run.model.usable(cache)
    for annotator in run.annotators:
        batch = annotator.columns(run, batch, state.step, cache)
    prepared = algorithm.prepare(batch, state.algorithm)  # computes the advantages
    optimizers = [(run.optimizer, lr)]
    if run.critic is not None:  # the critic follows the same schedule with its own peak
        schedule = replace(config.optim, learning_rate=run.critic.learning_rate)
        optimizers.append((run.critic.optimizer, learning_rate(schedule, state.step, run.total_steps)))
    token_figures = run.token_figures(sum(map(len, groups[: config.record_tokens])), prepared)
    passes = Passes(run, algorithm, prepared, LossSums(run.world), token_figures, cache, is_critic_warmup(run, state))
    ids = torch.unique(batch.group)
    for iteration in range(config.num_iterations):
        for number, share in enumerate(minibatches(len(ids), config.num_minibatches, config.run.seed, state.step, iteration)):
            for model in (run.model, *(() if run.critic is None else (run.critic.model,))):
                if model.dropout_masks.used:
                    model.dropout_masks.draw(config.run.seed, state.step, iteration, number)
            part = torch.isin(batch.group, ids[share])
            wanted = prepared.needs_gradient & part
            totals = algorithm.totals(prepared, part.nonzero()[:, 0])
            if not (has_signal := bool(wanted.any())):
                wanted = part & (part.cumsum(0) == 1)  # one row is enough for a gradient of 0; AdamW's momentum moves the weights
            micros = assign_micro_batches(run.world, batch, wanted, config.micro_batch_tokens)
            micros = [(micro, weight * has_signal) for micro, weight in micros]
            passes.sums.end_step(step_together(optimizers, passes.losses(micros, totals), passes.sums.read))
    figures = {name: value for name, value in prepared.metrics.items() if not name.startswith("sampling/")}
    for annotator in run.annotators:
        figures |= annotator.figures(run, state.step)
    figures |= passes.sums.figures()
    if passes.warms_up:  # the policy had no gradient
        figures.pop("grad_norm", None)
    after = prepared.state
    if algorithm.adapts and passes.sums.norms and not passes.warms_up:  # otherwise the policy is unchanged
        now = compute_log_probs(run.model, prepared.batch, config.micro_batch_tokens, run.params.temperature, world=run.world)
        after = algorithm.adapt(prepared, now)
    advantage = (prepared.advantage.sum(1) / batch.mask.sum(1).clamp(min=1)).tolist()
    return UpdateResult(figures, after, advantage, token_figures.gather(run.world).rows())


@dataclass(frozen=True)
class Passes:
    """The forward passes over one prepared batch, and the sums of their losses. The batch is on the CPU."""

    run: OnlineRun
    algorithm: PolicyGradient
    prepared: Prepared
    sums: LossSums
    token_figures: TokenFigures
    cache: ActivationCache | None
    warms_up: bool
    """True if only the critic learns."""

    def losses(self, micros: Sequence[tuple[MicroBatch, float]], totals: Totals) -> Iterator[Callable[[], Tensor]]:
        """Yield one loss function per forward pass of an optimiser step: first those of the policy, then of a separate critic.

        `micros` are pairs (micro-batch, weight). A pass of weight 0 gives gradients of 0.
        """
        balance, passes = self.run.model.load_balancing, 1.0
        if balance is not None:
            passes = float(self.run.world.all_reduce(torch.tensor(sum(weight for _, weight in micros))))
        for micro, weight in () if self.warms_up else micros:
            yield partial(self._policy, micro, weight, totals, passes)
        if self.run.critic is not None:
            if self.cache is not None:
                self.cache.clear()  # the policy no longer needs it
            for micro, weight in micros:
                yield partial(self._value, micro, weight, totals, self.run.critic)

    def _policy(self, micro: MicroBatch, weight: float, totals: Totals, passes: float) -> Tensor:
        run, batch = self.run, self.prepared.batch
        rows = rows_of(micro)
        divergences = (one.divergence(run, batch, micro) for one in run.annotators)
        outputs = run.model.evaluate(
            inputs_of(batch, micro),
            temperature=run.params.temperature,
            entropy=self.algorithm.needs_entropy,
            kl_to=next((one for one in divergences if one is not None), None),
            value=self.algorithm.needs_critic and run.critic is None,
            cache=self.cache,
        )
        part, outputs = self.prepared.select(rows).to(run.model.device), outputs_by_row(outputs, batch, micro)
        if not weight:
            return zero_loss(outputs)
        self.token_figures.store(rows, outputs, self.sums)
        for annotator in run.annotators:
            part, outputs = annotator.add_terms(run, part, outputs, rows, self.sums)
        share = self.algorithm.loss if run.critic is None else self.algorithm.policy_loss
        loss = share(part, outputs, totals, self.prepared.state)
        return self.sums.add(loss if run.model.load_balancing is None else run.model.load_balancing.add_to(loss, passes))

    def _value(self, micro: MicroBatch, weight: float, totals: Totals, critic: ValueModel) -> Tensor:
        batch = self.prepared.batch
        part = self.prepared.select(rows_of(micro)).to(critic.model.device)
        values = to_rows(critic.model.values(inputs_of(batch, micro)), batch, micro)
        return self.sums.add(self.algorithm.critic_loss(part, values, totals)) if weight else 0.0 * values.sum()


def zero_loss(outputs: PolicyOutputs) -> Tensor:
    """Return a loss of 0 that depends on every output, so that its backward pass gives every weight a gradient of 0."""
    parts = [x for x in vars(outputs).values() if isinstance(x, Tensor) and x.requires_grad]
    return torch.stack([0.0 * part.sum() for part in parts]).sum()
