"""Training on recorded data: the loop, and what it asks of a task. SFT, reward models and preferences are tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from psigrad.config import Evaluation, Optim, Run
from psigrad.language.models.backbone import Pretrained
from psigrad.language.models.experts import balanced
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.models.packing import batch_at
from psigrad.language.rollout.types import Sampler
from psigrad.language.training.evaluator import Evaluator
from psigrad.language.training.learners import LESS_MEMORY, Keeper, State, apply_changes, with_changes
from psigrad.language.training.update import Optimizer, learning_rate
from psigrad.objective import Loss
from psigrad.processes.parallel.world import ALONE, World, shard, shares_of, sum_figures
from psigrad.runs.cycle import cycle
from psigrad.runs.journal import Journal

Share = Callable[[], Loss]
"""The loss of one forward pass."""


class Task(Protocol):
    """Rows to learn from, and how any of them become a loss."""

    @property
    def name(self) -> str:
        """What the progress bar says."""
        ...

    @property
    def model(self) -> Pretrained:
        """What learns."""
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


class Settings(Protocol):
    """What an offline recipe's settings have in common."""

    @property
    def optim(self) -> Optim:
        """Settings of the optimiser."""

    @property
    def evaluation(self) -> Evaluation:
        """When and on what to evaluate."""

    @property
    def run(self) -> Run:
        """Run folder, seed, checkpoints and trackers."""

    @property
    def batch_size(self) -> int:
        """Rows of each optimiser step."""

    @property
    def micro_batch_tokens(self) -> int:
        """Most tokens of one forward pass."""


@dataclass(frozen=True)
class Generated:
    """Evaluation on generated completions, for models that generate."""

    model: LanguageModel
    sampler: Sampler
    evaluator: Evaluator


@dataclass(frozen=True)
class Offline:
    """The parts of one offline run; `held_out` has the rows that are not trained on."""

    config: Settings
    task: Task
    held_out: Task | None
    optimizer: Optimizer
    total_steps: int
    journal: Journal
    generated: Generated | None = None


def train(run: Offline, state: State, save: Keeper) -> State:
    """Run to `total_steps`, evaluating and saving through `save` as often as the configuration says."""
    often = run.config.evaluation.eval_steps
    run.journal.callbacks.trial = partial(with_changes, run)
    turn = lambda state: step(apply_changes(run, state.changes), state)  # noqa: E731

    def evaluate(state: State) -> None:
        with run.journal.interruptible():
            _evaluate(apply_changes(run, state.changes), state)

    updates = lambda: run.optimizer.updates  # noqa: E731
    given = (run.config.run, often, run.journal, updates, LESS_MEMORY, save.wait)
    return cycle(run.task.name, state, run.total_steps, turn, evaluate, save, *given)


def step(run: Offline, state: State) -> tuple[State, str]:
    """One optimiser step on `batch_size` rows."""
    config, clock = run.config, run.journal.clock()
    rows = batch_at(state.step, config.batch_size, len(run.task), config.run.seed)
    lr = learning_rate(config.optim, state.step, run.total_steps)
    sums: dict[str, Tensor] = {}
    with clock("time/update"):
        world = run.journal.world
        whole = run.task.shares(rows, config.micro_batch_tokens, shares_of(world))
        shares = shard(world, [partial(balanced, run.task.model, share, len(whole)) for share in whole])
        norm = run.optimizer.step([partial(_count, share, weight, sums) for share, weight in shares], lr)
        figures = sum_figures(world, {name: float(term) for name, term in sums.items()})
    number, tokens = state.step + 1, run.task.tokens(rows)
    metrics: dict[str, Any] = {
        **figures,
        "learning_rate": lr,
        "num_tokens": state.tokens + tokens,
        "epoch": number * config.batch_size / len(run.task),
        "updates": int(norm is not None),
    }
    if norm is not None:
        metrics["grad_norm"] = norm
    run.journal.metrics(number, metrics)
    run.journal.timings(number, clock, tokens)
    run.optimizer.check(number)
    after = replace(state, step=number, tokens=state.tokens + tokens, nonfinite=run.optimizer.nonfinite)
    return after, f"loss {figures['loss']:.3f}"


def _count(share: Share, weight: float, sums: dict[str, Tensor]) -> Tensor:
    """The loss of one share, its terms added to `sums`; with weight 0 a loss of 0 that counts nowhere."""
    loss = share()
    if not weight:
        return 0.0 * loss.value
    for name, term in loss.terms.items():
        sums[name] = term.double() + sums.get(name, 0.0)  # as a float it would make a GPU's queue run dry
    return loss.value


def _evaluate(run: Offline, state: State) -> None:
    if run.held_out is not None:
        clock = run.journal.clock()
        with clock("time/eval"), torch.no_grad():
            figures: Mapping[str, float] = run.held_out.held_out(run.config.micro_batch_tokens, run.journal.world)
        run.journal.metrics(state.step, {f"eval/{name}": value for name, value in figures.items()})
        run.journal.timings(state.step, clock, run.held_out.tokens(range(len(run.held_out))))
    if run.generated is not None:
        run.generated.evaluator.record(run.generated.model, run.generated.sampler, state.step, run.journal)
