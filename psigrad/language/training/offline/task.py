"""What recorded data teaches: one file per kind of row, each turning rows into shares of a loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from psigrad.objective import Loss
from psigrad.processes.parallel.world import ALONE, World

__all__ = ["Share", "Task"]

Share = Callable[[], Loss]


class Task(Protocol):
    """Rows to learn from, and how any of them become a loss."""

    @property
    def name(self) -> str:
        """What the progress bar says."""
        ...

    def __len__(self) -> int:
        """Number of rows."""
        ...

    def tokens(self, rows: Sequence[int]) -> int:
        """Tokens in these rows."""
        ...

    def shares(self, rows: Sequence[int], budget: int, ranks: int = 1) -> list[Share]:
        """The loss of one optimiser step on these rows, as one function per forward pass of at most `budget` tokens.

        For several `ranks`, which take turns in taking one, there are about as many tokens in each. Values, gradients and terms
        of all of them add up to those of the step, however it is split.
        """
        ...

    def held_out(self, budget: int, world: World = ALONE) -> dict[str, float]:
        """Figures over all rows, to be called without gradient. Each process of the world computes its share of the passes, and
        all of them get the whole.
        """
        ...
