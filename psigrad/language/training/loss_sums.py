"""Loss metrics, summed over the micro-batches of a step, and a retry with smaller micro-batches if memory runs out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from psigrad.objective import Loss
from psigrad.optim.gradients import PassOutOfMemoryError, is_out_of_memory
from psigrad.optim.optimizer import Optimizer
from psigrad.processes.parallel.world import ALONE, World, sum_figures

R = TypeVar("R")
T = TypeVar("T")
SETTING = "micro_batch_tokens"
# Micro-batches of fewer tokens save no memory worth the time.
LEAST = 16


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors in the host's memory, with unchanged dtypes. All tensors on a GPU are copied in one transfer."""
    there = [x for x in tensors if not x.is_cpu]
    flat = torch.cat([x.flatten().double() for x in there]).cpu() if there else torch.zeros(0)
    parts = iter(flat.split([x.numel() for x in there]))
    return [x if x.is_cpu else next(parts).view(x.shape).to(x.dtype) for x in tensors]


class LossSums:
    """The loss and its terms, summed over the micro-batches of a step, then averaged over all steps that had a loss."""

    def __init__(self, world: World = ALONE) -> None:
        self.world = world
        self.steps = 0
        self.norms: list[list[float]] = []
        """The gradient norms ([policy], or [policy, critic]) of each step whose gradient was finite."""
        self.last: dict[str, float] = {}
        """The sums of the last optimiser step."""
        self._total: dict[str, float] = {}
        self._with_signal = 0
        self._now: dict[str, Tensor] = {}
        self._later: list[tuple[Tensor, Callable[[Tensor], None]]] = []
        self._read: dict[str, float] = {}

    def add(self, loss: Loss) -> Tensor:
        """Add a micro-batch's loss to the step's sums. Return the value of this loss, for the caller's backward pass."""
        for name, term in {"loss": loss.value.detach(), **loss.terms}.items():
            self._now[name] = term.double() + self._now.get(name, 0.0)  # float() here would stall a GPU
        return loss.value

    def of(self, share: Callable[[], Loss], weight: float = 1.0) -> Tensor:
        """Call `share`, `add` the loss, and return its value. If `weight` is 0, only return the value times 0."""
        loss = share()
        return self.add(loss) if weight else 0.0 * loss.value  # a pass of weight 0 only keeps step with other processes

    def later(self, x: Tensor, use: Callable[[Tensor], None]) -> None:
        """Copy x to the host at the next `read` or `end_step`, whichever comes first. Then call `use` with the copy."""
        self._later.append((x.detach(), use))

    def read(self, x: Tensor) -> Any:
        """Return `x.tolist()`. The same transfer to the host also copies the step's sums and the tensors given to `later`."""
        found: list[Tensor] = []
        self.later(x, found.append)
        self._transfer()
        return found[0].tolist()

    def _transfer(self) -> None:
        terms, later, self._now, self._later = self._now, self._later, {}, []
        values = to_host([*terms.values(), *(x for x, _ in later)])
        if terms:
            self._read.update(zip(terms, torch.stack(values[: len(terms)]).tolist(), strict=True))
        for (_, use), x in zip(later, values[len(terms) :], strict=True):
            use(x)

    def end_step(self, norms: list[float] | None) -> None:
        """End an optimiser step. `norms` are the gradient norms, [policy] or [policy, critic]; None if one was not finite."""
        self.steps += 1
        self._transfer()  # nothing is left if a norm was read
        self.last, self._read = sum_figures(self.world, self._read), {}
        self._with_signal += bool(self.last)
        for name, value in self.last.items():
            self._total[name] = self._total.get(name, 0.0) + value
        if norms is not None:
            self.norms.append(norms)

    def figures(self) -> dict[str, Any]:
        """Return each term's mean over the steps that had a loss, the mean gradient norms, and the number of `updates`."""
        figures: dict[str, Any] = {name: value / self._with_signal for name, value in self._total.items()}
        figures["updates"] = len(self.norms)
        for name, norms in zip(("grad_norm", "critic/grad_norm"), zip(*self.norms, strict=True), strict=False):
            figures[name] = math.fsum(norms) / len(norms)
        return figures


def within_memory(
    run: R, optimizers: list[Optimizer], learn: Callable[[R], T], changes: dict[str, Any]
) -> tuple[T, dict[str, Any], dict[str, str]]:
    """Return (the result of `learn(run)`, changed settings, notes). If memory runs out, retry with smaller micro-batches.

    `changes` are the settings changed earlier in the run. A retry adds the new `micro_batch_tokens`. The notes are {kind of
    event: log message}.
    """
    given: Any = run
    notes: dict[str, str] = {}
    before = sum(optimizer.updates for optimizer in optimizers)
    while True:
        try:
            return learn(given), changes, notes
        except Exception as error:
            # Several processes must retry together, so only after an error that all of them raise.
            size, common = getattr(given.config, SETTING), given.world.size == 1 or isinstance(error, PassOutOfMemoryError)
            moved = sum(optimizer.updates for optimizer in optimizers) != before
            if not (common and is_out_of_memory(error)) or moved or size < 2 * LEAST:
                raise
        # Outside the handler: the error's frames hold the activations of the pass.
        for optimizer in optimizers:
            optimizer.clear()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        given = replace(given, config=replace(given.config, **{SETTING: size // 2}))
        changes = {**changes, SETTING: size // 2}
        notes[f"micro_batches_of_{size // 2}"] = (
            f"A pass of {size:,} tokens ran out of memory, so the step is repeated with {SETTING}={size // 2}, which changes no "
            "gradient. The run keeps that size."
        )
