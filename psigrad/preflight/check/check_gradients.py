"""Whether a step's gradient is the same however its work is divided: into micro-batches, and among processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from psigrad.config import OnlineConfig
from psigrad.language.recipes.online_settings import method
from psigrad.language.training.online.forward import MicroBatch, inputs_of, micro_batches, rows_of, to_batch, widen
from psigrad.language.training.update import Optimizer, add_up
from psigrad.objective import PolicyGradient, Totals
from psigrad.objective.catalog import DAPO
from psigrad.objective.parts.advantage import group_mean
from psigrad.preflight.check.check_subject import Finding, Subject

Gradient = dict[str, Tensor]
# Numbers of processes whose shares are added up.
RANKS = (2, 3)


def _algorithm(config: OnlineConfig) -> PolicyGradient:
    """The run's own, where it trains on rewards without a critic or a reference; else DAPO without its filters."""
    algorithm = method(config)
    usable = isinstance(algorithm, PolicyGradient) and not (algorithm.needs_critic or algorithm.needs_reference)
    if not usable or not isinstance(algorithm, PolicyGradient) or not algorithm.needs_reward:
        algorithm = replace(DAPO, name="")
    return replace(algorithm, psi=group_mean(), keep=(), correction=None)


class _Step:
    """One step on the subject's completions, whose gradient is found in any number of parts."""

    def __init__(self, subject: Subject) -> None:
        self.subject, self.algorithm = subject, _algorithm(subject.config)
        # rewards by length are different within a group and need no reward function
        scored = [
            [replace(t, reward=float((7 * k + len(t.completion.ids)) % 5), status="scored") for k, t in enumerate(group)]
            for group in subject.trajectories
        ]
        self.batch = to_batch(scored).to(subject.model.device)
        self.prepared = self.algorithm.prepare(self.batch, self.algorithm.initial_state())
        self.optimizer = Optimizer(subject.model.trainable(), subject.config.optim)
        self.whole = self.algorithm.totals(self.prepared)

    def parts(self, budget: int, ranks: int = 1) -> list[MicroBatch]:
        """The micro-batches of at most `budget` tokens, as many for each of `ranks` processes as can be."""
        return micro_batches(self.batch, self.prepared.needs_gradient.cpu(), budget, ranks)

    def totals(self, parts: Sequence[MicroBatch]) -> Totals:
        """What losses divide by where these parts are all there is."""
        return self.algorithm.totals(self.prepared, torch.cat([rows_of(part) for part in parts]))

    def gradient(self, parts: Sequence[MicroBatch], totals: Callable[[MicroBatch], Totals], scale: float = 1.0) -> Gradient:
        """The sum over the parts, by name."""
        add_up([self.optimizer], [partial(self._loss, part, totals(part), scale) for part in parts])
        learns = self.subject.model.trainable()
        found = {name: p.grad.detach().clone() for name, p in learns.items() if p.grad is not None}
        self.optimizer.clear()
        return found

    def _loss(self, part: MicroBatch, totals: Totals, scale: float) -> Tensor:
        temperature, entropy = self.subject.params.temperature, self.algorithm.needs_entropy
        evaluation = self.subject.model.evaluate(inputs_of(self.batch, part), temperature=temperature, entropy=entropy)
        rows = self.prepared.select(rows_of(part).to(self.batch.mask.device))
        share = self.algorithm.loss(rows, widen(evaluation, self.batch.mask.shape[1]), totals, self.prepared.state)
        return share.value * scale


def in_micro_batches(subject: Subject) -> Finding:
    """micro-batches."""
    step = _Step(subject)
    one = step.gradient(step.parts(1 << 30), lambda part: step.whole)
    longest = max(len(p) + len(c) for p, c in subject.alone)
    value = max(steepest(step.gradient(step.parts(budget), lambda part: step.whole), one) for budget in (longest, 2 * longest))
    many = step.parts(longest)
    control = steepest(step.gradient(many, lambda part: step.totals([part]), 1 / len(many)), one)
    return Finding("micro-batches", "gradients of one pass and of many", value, subject.bounds[1], control)


def among_processes(subject: Subject) -> Finding:
    """processes."""
    step = _Step(subject)
    one = step.gradient(step.parts(1 << 30), lambda part: step.whole)
    value, control = 0.0, 0.0
    for ranks in RANKS:
        shares = [step.parts(1, ranks)[rank::ranks] for rank in range(ranks)]
        summed = _sum([step.gradient(share, lambda part: step.whole) for share in shares if share])
        # the planted fault: the mean over processes, which data parallelism takes by default, of what is divided by all already
        mean = {name: part / ranks for name, part in summed.items()}
        value, control = max(value, steepest(summed, one)), max(control, steepest(mean, one))
    return Finding("processes", "gradients of one process and of the sum over many", value, subject.bounds[1], control)


def _sum(parts: Sequence[Gradient]) -> Gradient:
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: torch.stack([part[name] for part in parts if name in part]).sum(0) for name in names}


def steepest(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The greatest difference of a parameter's gradient, as a share of its norm; a very small one counts by the whole norm."""
    if a.keys() != b.keys():
        return float("inf")
    least = 1e-3 * float(torch.stack([g.double().norm() for g in b.values()]).norm())
    return max(float((a[n].double() - g.double()).norm() / g.double().norm().clamp(min=least)) for n, g in b.items())
