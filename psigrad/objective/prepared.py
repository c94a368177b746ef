"""What a method makes of a collected batch before any optimiser step, and a micro-batch's share of the loss of one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from psigrad.objective.batch import PER_ROW, PER_STEP, Batch
from psigrad.objective.lazy_torch import Tensor


@dataclass(frozen=True, eq=False)
class Prepared:
    """A collected batch with its advantages, ready for any number of passes."""

    batch: Batch
    """As collected: `reward` is without a KL penalty."""
    advantage: Tensor
    """[N, T], 0 on masked steps."""
    keep: Tensor
    """[N] bool: rows that are trained on."""
    needs_gradient: Tensor
    """[N] bool: False where a row surely contributes exactly zero gradient, so that its forward pass may be skipped."""
    metrics: dict[str, float]
    """Figures of the whole batch."""
    state: dict[str, float]
    """The state after this batch."""
    returns: Tensor | None = None
    """[N, T] target of the critic, when there is one."""
    counts: Tensor | None = None
    """[N, T] bool: steps whose surrogate counts, where a filter leaves some out; None: all steps of the kept rows."""
    marks: Tensor | None = None
    """[N, T]: the steps that a surrogate with "marks" in its `needs` has chosen, as True or as a weight above 0."""

    @cached_property
    def whole(self) -> bool:
        """Whether every step is known to be trained on, as `Batch.whole` knows it."""
        return self.batch.whole and bool((self.keep & self.needs_gradient).all())

    def select(self, rows: Tensor | slice) -> Prepared:
        """The same for these rows (indices or a boolean mask)."""
        return replace(
            self,
            batch=self.batch.select(rows),
            advantage=self.advantage[rows],
            keep=self.keep[rows],
            needs_gradient=self.needs_gradient[rows],
            **dict[str, Any]({name: x[rows] for name, x in self._optional()}),
        )

    def _optional(self) -> list[tuple[str, Any]]:
        given = ((name, getattr(self, name)) for name in ("returns", "counts", "marks"))
        return [(name, x) for name, x in given if x is not None]

    def steps(self) -> Prepared:
        """Every chosen step of the kept rows as a row of its own, row by row, for minibatches of steps; without inputs.

        Only the per-step parts are the same on it: the token ratio, and the token_mean aggregate.
        """
        mask = self.batch.mask & self.keep[:, None]
        at = mask.flatten().nonzero()[:, 0]  # looked for once: a boolean index looks for itself each time
        rows = at.div(mask.shape[1], rounding_mode="floor")
        own = {name: getattr(self.batch, name) for name in (*PER_STEP, *PER_ROW)}
        per_step: dict[str, Any] = {name: _pick(own[name], at) for name in PER_STEP if own[name] is not None}
        per_row: dict[str, Any] = {name: own[name][rows] for name in PER_ROW if own[name] is not None}
        return replace(
            self,
            batch=Batch(**per_step, **per_row),
            advantage=_pick(self.advantage, at),
            keep=self.keep[rows],
            needs_gradient=self.needs_gradient[rows],
            **dict[str, Any]({name: _pick(x, at) for name, x in self._optional()}),
        )


@dataclass(frozen=True, eq=False)
class Loss:
    """A micro-batch's share of the loss of one optimiser step; shares add up, for value, gradient and terms."""

    value: Tensor
    """Scalar with gradient."""
    terms: dict[str, Tensor]
    """Detached scalars. Metrics are means over the steps of rows that need a gradient."""


def _pick(x: Tensor, at: Tensor) -> Tensor:
    """Elements of a [N, T] by their place in the flat order, as a column."""
    return x.flatten()[at][:, None]
