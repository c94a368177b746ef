"""One step of training on recorded data, and the protocol `Task`, which SFT, reward models and preference methods implement."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from psigrad.language.models.backbone import Pretrained
from psigrad.language.models.experts import add_balance_loss
from psigrad.language.models.packing import batch_at
from psigrad.language.rollout.types import State
from psigrad.language.training.loss_sums import LossSums, within_memory
from psigrad.objective import Loss
from psigrad.optim import Optimizer, learning_rate
from psigrad.processes.parallel.world import ALONE, World, num_teams, shard
from psigrad.step import Clock, Observe, Outcome

if TYPE_CHECKING:
    from psigrad.config import Optim, Run

Share = Callable[[], Loss]
"""A function that computes the loss of one forward pass."""


class Task(Protocol):
    """A kind of training on recorded rows, such as SFT. A task has the rows and the model, and computes losses on rows."""

    @property
    def name(self) -> str:
        """The label on the progress bar."""

    @property
    def model(self) -> Pretrained:
        """The model that is trained."""

    def __len__(self) -> int:
        """Return the number of rows."""

    def tokens(self, rows: Sequence[int]) -> int:
        """Return the number of tokens in these rows."""

    def shares(self, rows: Sequence[int], budget: int, ranks: int = 1) -> list[Share]:
        """Divide an optimiser step on these rows into forward passes. Return one loss function per pass.

        A pass has at most `budget` tokens, unless a single row has more. `ranks` is the number of processes that share the
        passes. The losses, gradients and terms of all passes add up to those of the step.
        """

    def held_out(self, budget: int, world: World = ALONE) -> Mapping[str, float | str]:
        """Return metrics over all rows: numbers, and texts from `marks_of`. All processes must call this under `no_grad`."""


class Settings(Protocol):
    """The common settings of offline recipes."""

    @property
    def optim(self) -> Optim:
        """The settings of the optimiser."""

    @property
    def run(self) -> Run:
        """The run folder, seed, checkpoints and trackers."""

    @property
    def batch_size(self) -> int:
        """The number of rows per optimiser step."""

    @property
    def micro_batch_tokens(self) -> int:
        """The maximum number of tokens in one forward pass."""


@dataclass(frozen=True)
class OfflineRun:
    """The objects of one run on recorded data. `held_out` is a second task, which has the held-out rows and is only evaluated."""

    config: Settings
    task: Task
    held_out: Task | None
    optimizer: Optimizer
    total_steps: int
    world: World = ALONE
    """The processes of the run."""
    watch: Observe = contextlib.nullcontext
    """A function that observes the phases of a step."""


def step(run: OfflineRun, state: State) -> Outcome[State]:
    """Take one optimiser step on `batch_size` rows, and return its outcome. Weights and optimiser change in place."""
    config, clock = run.config, Clock(run.watch)
    rows = batch_at(state.step, config.batch_size, len(run.task), config.run.seed)
    lr = learning_rate(config.optim, state.step, run.total_steps)
    run.task.model.dropout_masks.draw(config.run.seed, state.step)
    with clock("time/update"):
        (norm, sums), changes, notes = within_memory(run, [run.optimizer], lambda run: learn(run, rows, lr), state.changes)
    number, tokens = state.step + 1, run.task.tokens(rows)
    metrics: dict[str, Any] = {
        **sums.last,
        "learning_rate": lr,
        "num_tokens": state.tokens + tokens,
        "epoch": number * config.batch_size / len(run.task),
        "updates": int(norm is not None),
    }
    if norm is not None:
        metrics["grad_norm"] = norm
    nonfinite = run.optimizer.nonfinite
    after = replace(state, step=number, tokens=state.tokens + tokens, nonfinite=nonfinite, changes=changes)
    return Outcome(after, metrics, timings=clock.read(), tokens=tokens, notes=notes, summary=f"loss {sums.last['loss']:.3f}")


def learn(run: OfflineRun, rows: Sequence[int], lr: float) -> tuple[float | None, LossSums]:
    """Take one optimiser step on these rows. Return (the gradient's norm or None if it is not finite, the step's `LossSums`)."""
    world, sums = run.world, LossSums(run.world)
    passes = run.task.shares(rows, run.config.micro_batch_tokens, num_teams(world))
    shares = shard(world, [partial(add_balance_loss, run.task.model, share, len(passes)) for share in passes])
    norm = run.optimizer.step([partial(sums.of, share, weight) for share, weight in shares], lr, sums.read)
    sums.end_step(None if norm is None else [norm])
    return norm, sums


def terms_of(share: Share) -> dict[str, float]:
    """Call a function from `Task.shares`, and return the terms of its loss as numbers."""
    return {name: float(term) for name, term in share().terms.items()}


def marks_of(hits: Iterable[float]) -> str:
    """Return a text for reports with one character per hit: "1" for 1 (ranked correctly), "h" for ½ (a tie), "0" for 0."""
    return "".join("0h1"[round(2 * hit)] for hit in hits)


def sum_terms(terms: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the sum of each term over several forward passes."""
    total: dict[str, float] = {}
    for own in terms:
        for name, term in own.items():
            total[name] = total.get(name, 0.0) + term
    return total
