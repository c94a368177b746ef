"""On-policy control: collect a rollout, compute advantages, and train in passes over the rollout.

The method is a `PolicyGradient`, the same class as for language models.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from psigrad import seeds
from psigrad.control.environments.collector import Collector, Rollout
from psigrad.control.methods.trainer import Trainer
from psigrad.control.networks.actor_critic import ActorCritic, ForwardPass, NetworkOutput
from psigrad.control.settings import ControlConfig
from psigrad.errors import UserError
from psigrad.objective import Batch, PolicyGradient, PolicyOutputs, Prepared, Totals
from psigrad.objective.batch import discounted_sum, td_errors
from psigrad.objective.parts import ratio
from psigrad.objective.parts.advantage import needs_of, whitened
from psigrad.objective.parts.aggregate import fixed_length, sequence_sum, token_mean
from psigrad.objective.parts.surrogate import clip, kl_penalty
from psigrad.objective.slopes import Slopes, has_slopes, slopes
from psigrad.optim import Optimizer


@dataclass(frozen=True, eq=False)
class RolloutTensors:
    """A rollout as tensors: the inputs of the network, and the positions of its M steps in the batch [N, T]."""

    observation: Tensor
    """[M + R, D]: the M steps' observations, then those after the last step of the R bootstrapped rows."""
    action: Tensor
    """[M]"""
    row: Tensor
    """[M]"""
    column: Tensor
    """[M]"""
    bootstrapped: Tensor
    """[R] rows whose episode continues after their last step."""
    shape: tuple[int, int]
    """N, T"""

    @cached_property
    def full(self) -> bool:
        """True if every row has T steps. Then the batch is a reshaped view of the flat steps."""
        return len(self.row) == self.shape[0] * self.shape[1]

    @property
    def steps(self) -> int:
        """The number of steps, M."""
        return len(self.row)

    def wide(self, x_M: Tensor) -> Tensor:
        """Return values [M] of the steps as [N, T], with 0 where there is no step. The gradient passes through."""
        if self.full:
            return x_M.view(self.shape)
        return x_M.new_zeros(math.prod(self.shape)).index_copy(0, self._places, x_M).view(self.shape)

    @cached_property
    def _places(self) -> Tensor:
        """[M] positions of the steps in the flattened batch."""
        return self.row * self.shape[1] + self.column


@dataclass(frozen=True, eq=False)
class ActionEvaluation:
    """The network's outputs for the actions of m steps, with gradient if autograd differentiates the loss."""

    logp: Tensor
    """[m]"""
    entropy: Tensor | None
    """[m]"""
    learned: Tensor | None
    """[C, m] the critics' outputs that are trained: V(s_t) or Q(s_t, a_t) of each."""


Passed = tuple[ForwardPass, ActionEvaluation]


def _whiten(part: Prepared) -> Prepared:
    return replace(part, advantage=whitened(lambda batch: part.advantage)(part.batch))


@dataclass(frozen=True, eq=False)
class Minibatch:
    """The steps to train on, with the network's inputs.

    `seen` is set if the loss needs complete rows. Otherwise each step is a row of its own.
    """

    prepared: Prepared
    observation: Tensor
    action: Tensor
    seen: RolloutTensors | None

    def shuffle(self, rng: np.random.Generator, count: int, whiten: bool = False) -> list[Minibatch]:
        """Split the steps at random into `count` minibatches of nearly equal size.

        With `whiten`, whiten each one's advantages.
        """
        order = torch.from_numpy(rng.permutation(len(self.action)))
        mixed = Minibatch(self.prepared.select(order), self.observation[order], self.action[order], None)
        bounds = np.linspace(0, len(order), count + 1).round().astype(int).tolist()
        cuts = [slice(a, b) for a, b in itertools.pairwise(bounds)]
        parts = [mixed.prepared.select(c) for c in cuts]
        if whiten:
            parts = list(map(_whiten, parts))
        return [Minibatch(part, mixed.observation[c], mixed.action[c], None) for part, c in zip(parts, cuts, strict=True)]


class OnPolicyTrainer(Trainer):
    """A trainer for policy gradients. It converts each rollout to a `Batch`, on which a `PolicyGradient` computes the loss."""

    def __init__(
        self,
        config: ControlConfig,
        algorithm: PolicyGradient,
        network: ActorCritic,
        optimizer: Optimizer,
        collector: Collector,
    ) -> None:
        super().__init__(config, network, optimizer, collector)
        self.algorithm, self.state = algorithm, algorithm.initial_state()
        self._per_step = _per_step(self.algorithm)
        one_critic = self.network.n_critics <= 1 and not self.network.of_actions
        self._differentiable = one_critic and has_slopes(self.algorithm)
        _check(self.config, self.algorithm)

    @property
    def most_steps(self) -> float:
        """The maximum number of steps in a rollout. Complete episodes have no limit."""
        return self.config.n_steps * self.collector.envs.count or math.inf

    def iterate(self, metrics: bool = True) -> dict[str, float]:
        """Collect a rollout and train on it. Return metrics if `metrics` is True."""
        rollout = self._collect()
        self.timesteps += len(rollout.row)
        figures = self._learn(rollout, metrics)
        self.iterations += 1
        return figures

    def _collect(self) -> Rollout:
        act = self.network.actor(self.rng("act"), self.collector.envs.count)
        if self.config.n_steps:
            return self.collector.steps(act, self.config.n_steps)
        fresh = seeds.derive(self.config.run.seed, "episodes", self.iterations)
        return self.collector.episodes(act, self.config.n_episodes, fresh)

    def _learn(self, rollout: Rollout, metrics: bool) -> dict[str, float]:
        seen, algorithm = as_tensors(rollout, self.algorithm.needs_critic), self._schedule()
        minibatches = max(1, round(seen.steps / self.config.batch_size)) if self.config.batch_size else 1
        once, before = self._once(minibatches), self.moves
        # In rows of different lengths, the loss has closed-form slopes only if each step's loss stands alone.
        closed = self._differentiable and (seen.full or self._per_step or not once)
        forward, now = self._pass(seen.observation, seen.action, closed, metrics)
        prepared = self._prepare(algorithm, rollout, seen, forward.output, now, metrics)
        totals = algorithm.totals(prepared)
        full = Minibatch(prepared, seen.observation, seen.action, seen)
        whole = full if once and seen.full else self._parts(prepared, seen)
        if once:  # one forward pass serves both the old log-probs and the gradient
            known = slopes(algorithm, whole.prepared, totals) if closed else None
            terms = self._update(algorithm, whole, totals, (forward, now), metrics, known)
        else:
            terms = self._passes(algorithm, whole, totals, minibatches, metrics)
        if algorithm.adapts and self.moves > before:  # a skipped update says nothing about the penalty
            self.state = algorithm.adapt(whole.prepared, self._log_probs(whole))
        return {**prepared.metrics, **terms, "learning_rate": self.learning_rate} if metrics else {}

    def _log_probs(self, part: Minibatch) -> Tensor:
        """Return the log-probs [N, T] of the actions of these steps under the current weights."""
        _, now = self._pass(part.observation, part.action, self._differentiable, False)
        return now.logp[:, None] if part.seen is None else part.seen.wide(now.logp)

    def _once(self, minibatches: int) -> bool:
        """Return True if the forward pass that computes the old log-probs can also give the gradient.

        It can if there is one update per rollout, and no filter drops steps before it.
        """
        return self.config.n_epochs * minibatches == 1 and not self.algorithm.keep

    def _evaluate(self, output: NetworkOutput, action: Tensor, entropies: bool = True) -> ActionEvaluation:
        """Return the log-probs, entropies and critics' values of the actions, for the first len(action) states of `output`."""
        steps, network = len(action), self.network
        policy = output.policy[:steps]
        logp = network.distribution.log_prob(policy, output.rest, action)
        wanted = entropies and self.algorithm.needs_entropy
        entropy = network.distribution.entropy(policy, output.rest) if wanted else None
        learned = None
        if output.values is not None:
            learned = output.values[:, :steps]
            if network.of_actions:
                learned = learned.gather(2, action[None, :, None].expand(len(learned), -1, 1))[..., 0]
        return ActionEvaluation(logp, entropy, learned)

    def _prepare(
        self,
        algorithm: PolicyGradient,
        rollout: Rollout,
        seen: RolloutTensors,
        output: NetworkOutput,
        now: ActionEvaluation,
        metrics: bool,
    ) -> Prepared:
        """Return the rollout as a `Batch` with advantages, from the network's outputs before the update."""
        n_rows, wide = seen.shape[0], seen.wide
        value = last = action_value = None
        if output.values is not None:
            value_all = self.network.state_value(output).detach()
            value = wide(value_all[: seen.steps])
            last = value_all[seen.steps :]
            if len(last) < n_rows:
                last = last.new_zeros(n_rows).index_put((seen.bootstrapped,), last)
            if self.network.of_actions and now.learned is not None:
                action_value = wide(now.learned.detach().mean(0))
        batch = Batch(
            mask=wide(torch.ones(seen.steps, dtype=torch.bool)),
            reward=wide(torch.from_numpy(rollout.reward)),
            logp_old=wide(now.logp.detach()),
            # All episodes start from the same distribution of states, so they form one group.
            group=torch.zeros(n_rows, dtype=torch.int64),
            value=value,
            action_value=action_value,
            last_value=last,
            truncated=torch.from_numpy(rollout.truncated),
        )
        prepared = algorithm.prepare(batch, self.state, metrics=metrics)
        self.state = prepared.state
        if action_value is not None and value is not None:
            # The target of Q(s, a) is the λ-return, bootstrapped with V(s) = Σ_a π(a|s)·Q(s, a).
            lam = 1.0 if self.config.gae_lambda is None else self.config.gae_lambda
            ahead = discounted_sum(td_errors(batch, self.config.gamma), batch.mask, self.config.gamma * lam)
            prepared = replace(prepared, returns=ahead + value)
        return prepared

    def _parts(self, prepared: Prepared, seen: RolloutTensors) -> Minibatch:
        """Return the steps to train on: single steps if the loss allows it, otherwise complete rows.

        Steps that a filter drops are removed from single steps.
        """
        observation, action = seen.observation[: seen.steps], seen.action
        if not self._per_step:
            return Minibatch(prepared, observation, action, seen)
        if self.algorithm.keep:
            kept = prepared.keep[seen.row]
            observation, action = observation[kept], action[kept]
        return Minibatch(prepared.steps(), observation, action, None)

    def _passes(
        self, algorithm: PolicyGradient, whole: Minibatch, totals: Totals, minibatches: int, metrics: bool
    ) -> dict[str, float]:
        """Train in passes over the rollout, each in shuffled minibatches. Return the metrics of the last update."""
        config, terms = self.config, {}
        known: Slopes | None = None
        rng = self.rng("minibatch")
        for epoch in range(config.n_epochs):
            whiten = config.normalize_advantage == "minibatch"
            parts = [whole] if minibatches == 1 else whole.shuffle(rng, minibatches, whiten)
            for i, part in enumerate(parts):
                if minibatches > 1:
                    totals = Totals(len(part.action), len(part.action), len(part.action))
                last = epoch == config.n_epochs - 1 and i == len(parts) - 1
                measured = config.target_kl is not None or (last and metrics)
                if self._differentiable and (minibatches > 1 or known is None):
                    known = slopes(algorithm, part.prepared, totals)
                passed = self._pass(part.observation, part.action, known is not None, measured)
                terms = self._update(algorithm, part, totals, passed, measured, known)
                if config.target_kl is not None and self._too_far(terms):
                    return terms
        return terms

    def _too_far(self, terms: Mapping[str, float | Tensor]) -> bool:
        """Return True if the KL of this minibatch is above 1.5 · `target_kl`, so that its update is skipped."""
        limit = self.config.target_kl
        return limit is not None and float(terms.get("policy/approxkl_avg", 0.0)) > 1.5 * limit

    def _pass(self, observation: Tensor, action: Tensor, closed: bool, metrics: bool) -> Passed:
        """Do a forward pass whose gradient will be computed by autograd or, if `closed`, in closed form.

        In closed form, entropies are computed only for `metrics`.
        """
        forward = self.network.record_closed(observation) if closed else self.network.record(observation)
        return forward, self._evaluate(forward.output, action, entropies=metrics or not closed)

    def _update(
        self, algorithm: PolicyGradient, part: Minibatch, totals: Totals, passed: Passed, metrics: bool, known: Slopes | None
    ) -> dict[str, float]:
        """Update the network on one minibatch, and return metrics. `totals` counts its steps for the aggregation.

        The gradient is computed in closed form if `known` has the slopes of the loss, otherwise by autograd.
        """
        forward, now = passed
        critics = now.learned
        mean = None if critics is None else critics.squeeze(0) if len(critics) == 1 else critics.mean(0)
        wide = _column if part.seen is None else part.seen.wide
        evaluation = PolicyOutputs(wide(now.logp), *(None if x is None else wide(x) for x in (now.entropy, mean)))
        terms: dict[str, Tensor] = {}
        if known is not None:
            gradient = _closed_gradient(known, forward, evaluation, part.action)
            if metrics:
                terms = algorithm.loss(part.prepared, evaluation, totals, self.state).terms
        else:
            loss = algorithm.loss(part.prepared, evaluation, totals, self.state, metrics=metrics)
            value, terms = loss.value, loss.terms
            if algorithm.critic is not None and now.learned is not None and len(now.learned) > 1:
                # Σ_k (V_k − R)² / C = (V̄ − R)² + Var_k(V_k): the loss above fits the mean, this term makes each critic fit alone
                value = value + 0.5 * algorithm.critic.coefficient * now.learned.var(0, correction=0).sum() / max(
                    totals.tokens, 1
                )
            gradient = forward.backward(value)
        if self._too_far(terms):
            return {name: float(term) for name, term in terms.items()}
        norm = self.apply_gradient(gradient, self.learning_rate)
        return {**{name: float(term) for name, term in terms.items()}, "grad_norm": norm} if metrics else {}

    def _schedule(self) -> PolicyGradient:
        """Return the method with the current values of its schedules."""
        surrogate = self.algorithm.surrogate
        if self.config.clip_range_schedule == "constant" or not isinstance(surrogate, clip):
            return self.algorithm
        left = 1 - self.progress
        return replace(self.algorithm, surrogate=replace(surrogate, low=surrogate.low * left, high=surrogate.high * left))


def as_tensors(rollout: Rollout, bootstrap: bool) -> RolloutTensors:
    """Return a rollout as tensors. With `bootstrap`, add the observations after the last steps of rows not terminated."""
    alive = np.flatnonzero(~rollout.terminated) if bootstrap else np.zeros(0, np.int64)
    observation = np.concatenate([rollout.observation, rollout.after[alive]]) if len(alive) else rollout.observation
    return RolloutTensors(
        observation=torch.from_numpy(observation),
        action=torch.from_numpy(rollout.action),
        row=torch.from_numpy(rollout.row),
        column=torch.from_numpy(rollout.column),
        bootstrapped=torch.from_numpy(alive),
        shape=(len(rollout.terminated), int(rollout.column.max()) + 1),
    )


def _check(config: ControlConfig, algorithm: PolicyGradient) -> None:
    """Raise `UserError` for settings that do not fit the algorithm or each other."""
    name, reads = algorithm.name or "the algorithm", needs_of(algorithm.psi)
    minibatches = bool(config.batch_size) and config.n_steps * config.n_envs != config.batch_size
    for asks, what in (
        (not algorithm.needs_reward, "learns only from a teacher"),
        (algorithm.needs_reference, "has a KL to a reference policy (set kl to null)"),
        (algorithm.needs_old_entropy, "filters steps by the entropies before the update"),
        (algorithm.correction is not None, "corrects for a sampler apart from the trainer"),
        ("parts" in reads, "reads several reward functions"),
    ):
        if asks:
            raise UserError(f"{name} {what}, which control does not support; choose another method, such as grpo or ppo.")
    if config.n_steps and not reads & {"value", "action_value"}:
        raise UserError(
            f"{name} sums rewards to the end of the episode, but n_steps is {config.n_steps}, which would cut episodes; set "
            "n_steps=0 (whole episodes), or choose a method with a critic."
        )
    if minibatches and (algorithm.aggregate is not token_mean or not _per_step(algorithm)):
        raise UserError(
            f"batch_size is {config.batch_size} and {name} weighs whole episodes; set batch_size=0 (the whole rollout), or "
            "choose a method whose aggregate is token_mean, whose ratio is none or token and whose surrogate reads single steps."
        )
    if config.n_epochs * (1 + minibatches) > 1 and algorithm.ratio is ratio.none:
        raise UserError(
            f"{name} has no ratio, so it can train on a rollout only once; set n_epochs=1 and batch_size=0, or choose ppo."
        )
    if isinstance(algorithm.surrogate, kl_penalty) and config.n_epochs * (1 + minibatches) == 1:
        raise UserError(f"n_epochs is 1, but {name} adapts its penalty to the effect of several updates; set n_epochs above 1.")
    if algorithm.min_group_size > config.n_envs * config.n_episodes:
        raise UserError(f"{name} compares episodes of a rollout; set n_envs or n_episodes above 1.")
    if "action_value" in reads and algorithm.critic is not None and algorithm.critic.clip is not None:
        raise UserError(f"critic.clip is for values of states, but the critic of {name} is for actions; set critic.clip to null.")


def _per_step(algorithm: PolicyGradient) -> bool:
    """Return True if the loss of a step does not depend on the other steps of its row."""
    aggregate = algorithm.aggregate
    fits = aggregate in (token_mean, sequence_sum) or isinstance(aggregate, fixed_length)
    return fits and algorithm.ratio in (ratio.none, ratio.token) and "mask" not in needs_of(algorithm.surrogate)


def _column(x: Tensor) -> Tensor:
    return x[:, None]


def _closed_gradient(known: Slopes, forward: ForwardPass, evaluation: PolicyOutputs, action: Tensor) -> Tensor:
    """Return the gradient of the loss, in closed form from its slopes `known`, with respect to the flat parameter vector."""
    values = None if evaluation.value is None or known.critic is None else known.value(evaluation.value).reshape(1, -1)
    return forward.backward_closed(action, known.logp(evaluation.logp).flatten(), known.entropy, values)
