"""The half of an online step that needs gradients: advantages, minibatches, micro-batches, optimiser steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from psigrad import seeds
from psigrad.data.batches import pack_groups
from psigrad.errors import UserError
from psigrad.models.language_model import LanguageModel
from psigrad.models.packing import Groups
from psigrad.objective import Batch, Evaluation, PolicyGradient, Prepared, Totals
from psigrad.objective.penalty import adapted, kl_penalty
from psigrad.rollout.types import Trajectory
from psigrad.training.online import Critic, Online
from psigrad.training.state import State
from psigrad.training.token_figures import TokenFigures
from psigrad.training.update import Optimizer, learning_rate, step_together

# Where training reuses what sampling computed, in every so many steps one completion of so many runs forward again.
COMPARE_EVERY, COMPARED = 4, 20


@dataclass(frozen=True)
class Update:
    """What came of a collected batch: its metrics, the algorithm's new state, the advantage of each row (mean over its tokens),
    and what the first rows looked like token by token.
    """

    metrics: dict[str, Any]
    algorithm: dict[str, float]
    advantages: list[float]
    tokens: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Micro:
    """Rows of the batch that share one forward pass, in the order in which `inputs` lists them."""

    rows: Tensor
    inputs: Groups


def micro_batches(groups: Sequence[Sequence[Trajectory]], wanted: Tensor, budget: int) -> list[Micro]:
    """Forward passes of at most `budget` tokens over the rows where `wanted` [N] is True; a group's prompt is computed once."""
    numbered, row = [], 0
    for group in groups:
        members = [(row + i, t) for i, t in enumerate(group) if bool(wanted[row + i])]
        row += len(group)
        if members:
            numbered.append(members)
    sizes = [[len(t.completion.ids) for _, t in members] for members in numbered]
    micros = []
    for parts in pack_groups([len(members[0][1].prompt_ids) for members in numbered], sizes, budget):
        picked = [[numbered[g][k] for k in ks] for g, ks in parts]
        inputs = Groups([p[0][1].prompt_ids for p in picked], [[t.completion.ids for _, t in p] for p in picked])
        micros.append(Micro(torch.tensor([i for p in picked for i, _ in p]), inputs))
    return micros


def update(
    run: Online, algorithm: PolicyGradient, batch: Batch, groups: Sequence[Sequence[Trajectory]], state: State, lr: float
) -> Update:
    """All optimiser steps on one collected batch. Rows without gradient skip the forward pass; without any, no weight moves."""
    config = run.config
    single_pass = config.num_iterations * config.num_minibatches == 1
    if algorithm.needs_reference and not algorithm.needs_exact_kl:
        batch = replace(batch, logp_ref=log_probs(run, run.reference, batch, groups, reference=True))
    kept = run.model.keeping
    reuses = kept is not None and bool(kept.slabs)  # then the log-probs that are trained on are the sampler's own
    tally = Tally(compares=(single_pass or run.exact_sampling) and not reuses)
    if reuses and state.step % COMPARE_EVERY == 0:
        _compare_some(run, batch, groups, state.step, tally)
    if not (single_pass or run.exact_sampling):
        again = log_probs(run, run.model, batch, groups)
        if not reuses:
            tally.gap(again, batch)  # here, as below the sampler's are gone
        batch = replace(batch, logp_old=again)
    if algorithm.needs_critic:
        batch = replace(batch, value=values(run, batch, groups))
    prepared = algorithm.prepare(batch, state.algorithm)
    seen = TokenFigures(sum(map(len, groups[: config.record_tokens])), prepared)
    for iteration in range(config.num_iterations):
        for part in _minibatches(run, batch.group, state.step, iteration):
            wanted = prepared.needs_gradient.cpu() & part
            if not bool(wanted.any()):
                continue
            rows = part.nonzero()[:, 0]
            totals = algorithm.totals(prepared, rows.to(batch.mask.device))
            tally.steps += 1
            micros = micro_batches(groups, wanted, config.micro_batch_tokens)
            losses = _losses(run, algorithm, prepared, micros, totals, single_pass, tally, seen)
            tally.stepped(step_together(_optimizers(run, state.step, lr), losses))
    _check_gap(run, tally.mean_gap, state.step + 1)
    advantage = (prepared.advantage.sum(1) / batch.mask.sum(1).clamp(min=1)).tolist()
    own = {name: value for name, value in prepared.metrics.items() if not name.startswith("sampling/")}
    return Update({**own, **tally.result()}, _adapted(algorithm, prepared.state, tally), advantage, seen.rows())


def _optimizers(run: Online, step: int, lr: float) -> list[tuple[Optimizer, float]]:
    """Who steps, and at which rate: the critic's follows the same schedule from a peak of its own."""
    if run.critic is None:
        return [(run.optimizer, lr)]
    own = replace(run.config.optim, learning_rate=run.critic.learning_rate)
    return [(run.optimizer, lr), (run.critic.optimizer, learning_rate(own, step, run.total_steps))]


def _adapted(algorithm: PolicyGradient, state: dict[str, float], tally: Tally) -> dict[str, float]:
    """The state after the update: PPO-penalty's coefficient follows the KL that the last optimiser step found."""
    if isinstance(algorithm.surrogate, kl_penalty) and tally.steps:
        return adapted(algorithm.surrogate, state, tally.last.get("policy/approxkl_avg", 0.0))
    return state


def _minibatches(run: Online, group: Tensor, step: int, iteration: int) -> list[Tensor]:
    """Row masks [N] of the optimiser steps of one pass: shuffled groups in `num_minibatches` nearly equal shares."""
    ids = torch.unique(group).cpu()
    shuffled = ids[torch.from_numpy(seeds.permutation(len(ids), run.config.run.seed, "minibatch", step, iteration))]
    return [torch.isin(group.cpu(), share) for share in shuffled.tensor_split(run.config.num_minibatches) if len(share)]


def _losses(
    run: Online,
    algorithm: PolicyGradient,
    prepared: Prepared,
    micros: Sequence[Micro],
    totals: Totals,
    single_pass: bool,
    tally: Tally,
    seen: TokenFigures,
) -> Iterator[Callable[[], Tensor]]:
    """The losses of one optimiser step: those of the policy, then, without its activations beside them, a critic's of its own."""
    for micro in micros:
        yield partial(_loss, run, algorithm, prepared, micro, totals, single_pass, tally, seen)
    if run.critic is None:
        return
    if run.model.kept is not None:
        run.model.kept.clear()  # the policy has learnt from it
    for micro in micros:
        yield partial(_critic_loss, run.critic, algorithm, prepared, micro, totals, tally)


def _loss(
    run: Online,
    algorithm: PolicyGradient,
    prepared: Prepared,
    micro: Micro,
    totals: Totals,
    single_pass: bool,
    tally: Tally,
    seen: TokenFigures,
) -> Tensor:
    """One micro-batch's share of the loss of an optimiser step, without that of a critic of its own."""
    rows = micro.rows.to(prepared.batch.mask.device)
    evaluation = run.model.evaluate(
        micro.inputs,
        temperature=run.params.temperature,
        entropy=algorithm.needs_entropy,
        kl_to=run.reference if algorithm.needs_exact_kl else None,
        value=algorithm.needs_critic and run.critic is None,
    )
    part = prepared.select(rows)
    evaluation = _widened(evaluation, part.batch.mask.shape[1])
    seen.see(rows, evaluation)
    if tally.steps == 1 and tally.compares:
        tally.gap(evaluation.logp.detach(), part.batch)
    if single_pass:
        # the policy that is trained is the policy that sampled: its ratio is 1 by definition, whatever the sampler's rounding
        part = replace(part, batch=replace(part.batch, logp_old=evaluation.logp.detach()))
    share = algorithm.loss if run.critic is None else algorithm.policy_loss
    loss = share(part, evaluation, totals, prepared.state)
    tally.add(loss.value, loss.terms)
    return loss.value


def _critic_loss(
    critic: Critic, algorithm: PolicyGradient, prepared: Prepared, micro: Micro, totals: Totals, tally: Tally
) -> Tensor:
    """One micro-batch's share of the loss of a critic of its own."""
    part = prepared.select(micro.rows.to(prepared.batch.mask.device))
    loss = algorithm.critic_loss(part, _wide(critic.model.values(micro.inputs), part.batch.mask.shape[1]), totals)
    tally.add(loss.value, loss.terms)
    return loss.value


@torch.no_grad()
def log_probs(
    run: Online,
    model: LanguageModel | None,
    batch: Batch,
    groups: Sequence[Sequence[Trajectory]],
    *,
    reference: bool = False,
    wanted: Tensor | None = None,
) -> Tensor:
    """[N, T] log-probs under `model` of every row, or of those where `wanted` [N] is True; as the `reference` a LoRA model runs
    without its adapter.
    """
    if model is None:
        raise UserError("This algorithm's KL term needs a reference model; none was loaded.")
    out = torch.zeros_like(batch.logp_old)
    wanted = batch.present.cpu() if wanted is None else wanted
    for micro in micro_batches(groups, wanted, run.config.micro_batch_tokens):
        with model.without_adapter() if reference and model.adapter is not None else torch.no_grad():
            logp = model.evaluate(micro.inputs, temperature=run.params.temperature).logp
        out[micro.rows.to(out.device), : logp.shape[1]] = logp.to(out.dtype)
    return out


@torch.no_grad()
def values(run: Online, batch: Batch, groups: Sequence[Sequence[Trajectory]]) -> Tensor:
    """[N, T] the critic's value of the state before each step."""
    out = torch.zeros_like(batch.logp_old)
    for micro in micro_batches(groups, batch.present.cpu(), run.config.micro_batch_tokens):
        own = run.critic
        value = run.model.evaluate(micro.inputs, value=True).value if own is None else own.model.values(micro.inputs)
        assert value is not None
        out[micro.rows.to(out.device), : value.shape[1]] = value.to(out.dtype)
    return out


def _widened(evaluation: Evaluation, width: int) -> Evaluation:
    """The evaluation of a micro-batch [n, t] padded to the batch's [n, T]."""
    given = {name: _wide(x, width) for name, x in vars(evaluation).items() if x is not None}
    return Evaluation(**given)


def _wide(x: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, width - x.shape[1]))


def _compare_some(run: Online, batch: Batch, groups: Sequence[Sequence[Trajectory]], step: int, tally: Tally) -> None:
    """How far sampler and trainer differ on one completion in `COMPARED`, others each time, run forward without what was kept."""
    present = batch.present.cpu().nonzero()[:, 0]
    if not len(present):
        return
    size, count = math.ceil(len(present) / COMPARED), step // COMPARE_EVERY
    some = torch.zeros(len(batch.mask), dtype=torch.bool)
    some[present[(torch.arange(size) + count * size) % len(present)]] = True
    kept, run.model.kept = run.model.kept, None
    try:
        again = log_probs(run, run.model, batch, groups, wanted=some)
    finally:
        run.model.kept = kept
    rows = some.to(batch.mask.device)
    tally.gap(again[rows], batch.select(rows))


def _check_gap(run: Online, gap: float, step: int) -> None:
    half = run.model.network.dtype in (torch.bfloat16, torch.float16)
    bound = run.config.max_logp_difference or (0.1 if half else 1e-3)
    if not gap <= bound:
        raise UserError(
            f"At step {step} sampler and trainer disagree by {gap:.2g} in mean log-probability, above the bound {bound:.2g}: the "
            "completions did not come from the policy that is trained. Look at the sampler, or raise max_logp_difference."
        )


class Tally:
    """Sums the terms of micro-batches within an optimiser step and averages them over the steps."""

    def __init__(self, compares: bool = False) -> None:
        self.compares = compares
        """Whether the first optimiser step's log-probs, which are the trainer's, are held against the sampler's."""
        self.steps = 0
        self.norms: list[list[float]] = []
        self.metrics: dict[str, float] = {}
        self.last: dict[str, float] = {}
        self._now: dict[str, float] = {}
        self._gap_sum, self._gap_max, self._gap_count = 0.0, 0.0, 0

    @property
    def mean_gap(self) -> float:
        return self._gap_sum / max(1, self._gap_count)

    def add(self, value: Tensor, terms: dict[str, Tensor]) -> None:
        for name, term in {"loss": value.detach(), **terms}.items():
            self._now[name] = self._now.get(name, 0.0) + float(term)

    def gap(self, logp: Tensor, batch: Batch) -> None:
        difference = (logp - batch.logp_old).abs()[batch.mask]
        self._gap_sum += float(difference.sum())
        self._gap_max = max(self._gap_max, float(difference.max()))
        self._gap_count += difference.numel()

    def stepped(self, norms: list[float] | None) -> None:
        """An optimiser step ended, with these gradient norms (policy, critic) unless one was not finite."""
        self.last, self._now = self._now, {}
        for name, value in self.last.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value
        if norms is not None:
            self.norms.append(norms)

    def result(self) -> dict[str, Any]:
        figures: dict[str, Any] = {name: value / self.steps for name, value in self.metrics.items()}
        figures["updates"] = len(self.norms)
        for name, norms in zip(("grad_norm", "critic/grad_norm"), zip(*self.norms, strict=True), strict=False):
            figures[name] = math.fsum(norms) / len(norms)
        if self._gap_count:
            figures["sampling/sampling_logp_difference/mean"] = self.mean_gap
            figures["sampling/sampling_logp_difference/max"] = self._gap_max
        return figures
