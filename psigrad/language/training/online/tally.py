"""Figures of an update: its losses over micro-batches and optimiser steps, and how far sampler and trainer differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from psigrad.objective import Batch, Loss
from psigrad.processes.parallel.world import ALONE, World, sum_figures


@dataclass(frozen=True)
class Outcome:
    """What came of training on a collection: its metrics, the algorithm's new state, the advantage of each row (mean over its
    tokens), and what the first rows looked like token by token.
    """

    metrics: Mapping[str, Any]
    algorithm: dict[str, float]
    advantages: list[float] = field(default_factory=list)
    tokens: list[dict[str, Any]] = field(default_factory=list)


class Tally:
    """Sums the terms of micro-batches within an optimiser step and averages them over the steps."""

    def __init__(self, compares: bool = False, world: World = ALONE) -> None:
        self.world, self.compares = world, compares
        """Whether the first optimiser step's log-probs, which are the trainer's, are held against the sampler's."""
        self.steps = 0
        self.norms: list[list[float]] = []
        self.metrics: dict[str, float] = {}
        self.last: dict[str, float] = {}
        self._now: dict[str, float] = {}
        self._gap_sum, self._gap_max, self._gap_count = 0.0, 0.0, 0

    @property
    def mean_gap(self) -> float:
        """Mean absolute difference of the log-probs compared, in nats."""
        return self._gap_sum / max(1, self._gap_count)

    def add(self, loss: Loss) -> Tensor:
        """Count a micro-batch's share of the loss and its terms; the share, for the backward pass."""
        for name, term in {"loss": loss.value.detach(), **loss.terms}.items():
            self._now[name] = self._now.get(name, 0.0) + float(term)
        return loss.value

    def of(self, share: Callable[[], Loss], weight: float = 1.0) -> Tensor:
        """`add` of what `share` computes; with weight 0 a loss of 0 that counts nowhere."""
        loss = share()
        return self.add(loss) if weight else 0.0 * loss.value

    def gap(self, logp: Tensor, batch: Batch) -> None:
        """Hold the trainer's log-probs [n, T] against the sampler's in `batch`."""
        difference = (logp - batch.logp_old).abs()[batch.mask]
        self._gap_sum += float(difference.sum())
        self._gap_max = max(self._gap_max, float(difference.max()))
        self._gap_count += difference.numel()

    def stepped(self, norms: list[float] | None) -> None:
        """An optimiser step ended, with these gradient norms (policy, critic) unless one was not finite."""
        self.last, self._now = sum_figures(self.world, self._now), {}
        for name, value in self.last.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value
        if norms is not None:
            self.norms.append(norms)

    def joined(self) -> Tally:
        """This tally after the processes have put together what each compared."""
        each = self.world.all_gather((self._gap_sum, self._gap_max, self._gap_count))
        sums, largest, counts = zip(*each, strict=True)
        self._gap_sum, self._gap_max, self._gap_count = math.fsum(sums), max(largest), sum(counts)
        return self

    def result(self) -> dict[str, Any]:
        """The figures, under TRL's names."""
        figures: dict[str, Any] = {name: value / self.steps for name, value in self.metrics.items()}
        figures["updates"] = len(self.norms)
        for name, norms in zip(("grad_norm", "critic/grad_norm"), zip(*self.norms, strict=True), strict=False):
            figures[name] = math.fsum(norms) / len(norms)
        if self._gap_count:
            figures["sampling/sampling_logp_difference/mean"] = self.mean_gap
            figures["sampling/sampling_logp_difference/max"] = self._gap_max
        return figures
