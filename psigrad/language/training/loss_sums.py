"""Sums of losses and their terms over the micro-batches of an optimiser step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from psigrad.objective import Loss
from psigrad.processes.parallel.world import ALONE, World, sum_figures


class LossSums:
    """Sums of the terms of micro-batches within an optimiser step, averaged over the steps."""

    def __init__(self, world: World = ALONE) -> None:
        self.world = world
        self.steps = 0
        self.norms: list[list[float]] = []
        """The gradient norms (policy, critic) of each step whose gradient was finite."""
        self.last: dict[str, float] = {}
        """The sums of the last optimiser step."""
        self._total: dict[str, float] = {}
        self._now: dict[str, Tensor] = {}

    def add(self, loss: Loss) -> Tensor:
        """Add a micro-batch's share of the loss, and return it for the backward pass."""
        for name, term in {"loss": loss.value.detach(), **loss.terms}.items():
            self._now[name] = term.double() + self._now.get(name, 0.0)  # float() here would stall a GPU
        return loss.value

    def of(self, share: Callable[[], Loss], weight: float = 1.0) -> Tensor:
        """Compute a share and add it. With weight 0, return a loss of 0 that is not counted."""
        loss = share()
        return self.add(loss) if weight else 0.0 * loss.value

    def end_step(self, norms: list[float] | None) -> None:
        """End an optimiser step with these gradient norms, None if one was not finite."""
        self.steps += 1
        self.last, self._now = sum_figures(self.world, {name: float(term) for name, term in self._now.items()}), {}
        for name, value in self.last.items():
            self._total[name] = self._total.get(name, 0.0) + value
        if norms is not None:
            self.norms.append(norms)

    def figures(self) -> dict[str, Any]:
        """Return the means over the optimiser steps, under TRL's names."""
        figures: dict[str, Any] = {name: value / self.steps for name, value in self._total.items()}
        figures["updates"] = len(self.norms)
        for name, norms in zip(("grad_norm", "critic/grad_norm"), zip(*self.norms, strict=True), strict=False):
            figures[name] = math.fsum(norms) / len(norms)
        return figures
