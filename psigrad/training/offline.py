"""Training on recorded data: supervised fine-tuning, the offline kin of loop.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from psigrad.config import SFTConfig
from psigrad.data.batches import batch_at, pack_by_tokens
from psigrad.data.templates import Example
from psigrad.models.language_model import LanguageModel
from psigrad.models.logprobs import TokenStats
from psigrad.models.packing import Rows
from psigrad.rollout.types import Sampler
from psigrad.training.cycle import cycle
from psigrad.training.evaluate import Evaluator
from psigrad.training.journal import Clock, Journal
from psigrad.training.state import State
from psigrad.training.update import Optimizer, learning_rate


@dataclass(frozen=True)
class Offline:
    """The parts of one SFT run. `evaluator` scores generated completions; without one, held-out loss is all there is."""

    config: SFTConfig
    model: LanguageModel
    optimizer: Optimizer
    examples: Sequence[Example]
    held_out: Sequence[Example]
    total_steps: int
    journal: Journal
    sampler: Sampler
    evaluator: Evaluator | None = None


def train(run: Offline, state: State, save: Callable[[State], None]) -> State:
    """Run to `total_steps`, evaluating and saving through `save` as often as the configuration says."""
    return cycle(
        "SFT",
        state,
        run.total_steps,
        lambda s: step(run, s),
        lambda s: _evaluate(run, s),
        save,
        settings=run.config.run,
        eval_steps=run.config.evaluation.eval_steps,
        journal=run.journal,
    )


def step(run: Offline, state: State) -> tuple[State, str]:
    """One optimiser step: loss = -sum of log pi over target tokens / number of target tokens in the whole step."""
    config, clock = run.config, Clock()
    picked = [run.examples[i] for i in batch_at(state.step, config.batch_size, len(run.examples), config.run.seed)]
    targets = sum(sum(e.mask) for e in picked)
    seen: list[TokenStats] = []

    def loss(rows: Rows) -> Tensor:
        stats, _ = run.model.stats(rows, entropy=True, accuracy=True)
        seen.append(stats.detach())
        return -stats.logp.sum() / targets

    lr = learning_rate(config.optim, state.step, run.total_steps)
    with clock("time/update"):
        parts = _micro_batches(picked, config.micro_batch_tokens)
        norm = run.optimizer.step([lambda rows=rows: loss(rows) for rows in parts], lr)
    number, tokens = state.step + 1, sum(len(e.ids) for e in picked)
    metrics: dict[str, Any] = {
        **_means(seen, targets),
        "learning_rate": lr,
        "num_tokens": state.tokens + tokens,
        "epoch": number * config.batch_size / len(run.examples),
        "updates": int(norm is not None),
    }
    if norm is not None:
        metrics["grad_norm"] = norm
    run.journal.metrics(number, metrics)
    run.journal.timings(number, clock, tokens)
    run.optimizer.check(number)
    after = replace(state, step=number, tokens=state.tokens + tokens, nonfinite=run.optimizer.nonfinite)
    return after, f"loss {metrics['loss']:.3f}"


def _means(seen: Sequence[TokenStats], targets: int) -> dict[str, float]:
    """Loss, entropy and accuracy as means over target tokens, in nats."""
    total = {"loss": 0.0, "entropy": 0.0, "mean_token_accuracy": 0.0}
    for stats in seen:
        assert stats.entropy is not None and stats.hit is not None
        total["loss"] -= float(stats.logp.sum())
        total["entropy"] += float(stats.entropy.sum())
        total["mean_token_accuracy"] += float(stats.hit.sum())
    return {name: value / max(1, targets) for name, value in total.items()}


def _micro_batches(examples: Sequence[Example], budget: int) -> list[Rows]:
    parts = pack_by_tokens([len(e.ids) for e in examples], budget)
    return [Rows([examples[i].ids for i in part], [examples[i].mask for i in part]) for part in parts]


@torch.no_grad()
def held_out_figures(model: LanguageModel, examples: Sequence[Example], budget: int) -> dict[str, float]:
    """Loss, entropy and accuracy on the target tokens of held-out examples, as `eval/…`."""
    seen = [model.stats(rows, entropy=True, accuracy=True)[0] for rows in _micro_batches(examples, budget)]
    return {f"eval/{name}": value for name, value in _means(seen, sum(sum(e.mask) for e in examples)).items()}


def _evaluate(run: Offline, state: State) -> None:
    if run.held_out:
        clock = Clock()
        with clock("time/eval"):
            figures = held_out_figures(run.model, run.held_out, run.config.micro_batch_tokens)
        run.journal.metrics(state.step, figures)
        run.journal.timings(state.step, clock, sum(len(e.ids) for e in run.held_out))
    if run.evaluator is not None:
        run.evaluator.record(run.model, run.sampler, state.step, run.journal)
