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
from psigrad.models.packing import Rows
from psigrad.rollout.types import Sampler
from psigrad.training.collect import record
from psigrad.training.evaluate import Evaluator
from psigrad.training.journal import Clock, Journal
from psigrad.training.progress import bar
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
    """Run to `total_steps`, saving through `save` as often as the configuration says and before leaving when asked to stop."""
    config, journal = run.config, run.journal
    if state.step == 0:
        _evaluate(run, state)
    with bar("SFT", run.total_steps, shown=config.run.progress, done=state.step) as advance:
        while state.step < run.total_steps:
            if journal.stop_requested():
                save(state)
                journal.stopped(state.step)
            state, note = step(run, state)
            advance(note=note)
            last = state.step == run.total_steps
            if last or (config.evaluation.eval_steps and state.step % config.evaluation.eval_steps == 0):
                _evaluate(run, state)
            if last or (config.run.save_steps and state.step % config.run.save_steps == 0):
                save(state)
    return state


def step(run: Offline, state: State) -> tuple[State, str]:
    """One optimiser step: loss = -sum of log pi over target tokens / number of target tokens in the whole step."""
    config, clock = run.config, Clock()
    picked = [run.examples[i] for i in batch_at(state.step, config.batch_size, len(run.examples), config.run.seed)]
    targets = sum(sum(e.mask) for e in picked)
    totals = {"loss": 0.0, "entropy": 0.0, "mean_token_accuracy": 0.0}

    def loss(rows: Rows) -> Tensor:
        logp = run.model.evaluate(rows).logp
        value = -logp.sum() / targets
        totals["loss"] += float(value.detach())
        return value

    lr = learning_rate(config.optim, state.step, run.total_steps)
    with clock("time/update"):
        parts = _micro_batches(picked, config.micro_batch_tokens)
        norm = run.optimizer.step([lambda rows=rows: loss(rows) for rows in parts], lr)
    number, tokens = state.step + 1, sum(len(e.ids) for e in picked)
    metrics: dict[str, Any] = {
        "loss": totals["loss"],
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
    return after, f"loss {totals['loss']:.3f}"


def _micro_batches(examples: Sequence[Example], budget: int) -> list[Rows]:
    parts = pack_by_tokens([len(e.ids) for e in examples], budget)
    return [Rows([examples[i].ids for i in part], [examples[i].mask for i in part]) for part in parts]


@torch.no_grad()
def held_out_loss(model: LanguageModel, examples: Sequence[Example], budget: int) -> float:
    """Mean of -log pi over the target tokens of held-out examples, in nats."""
    total = sum(float(model.evaluate(rows).logp.double().sum()) for rows in _micro_batches(examples, budget))
    return -total / max(1, sum(sum(e.mask) for e in examples))


def _evaluate(run: Offline, state: State) -> None:
    clock, figures, trajectories = Clock(), {}, []
    with clock("time/eval"):
        if run.held_out:
            figures["eval/loss"] = held_out_loss(run.model, run.held_out, run.config.micro_batch_tokens)
        if run.evaluator is not None:
            scored, trajectories = run.evaluator(run.model, run.sampler, state.step)
            figures |= scored
            rows = {p.index: p.row for p in run.evaluator.prompts}
            run.journal.rollouts([record(t, state.step, "eval", rows[t.row]) for t in trajectories])
    if figures:
        run.journal.metrics(state.step, figures)
        run.journal.timings(state.step, clock, sum(len(t.completion.ids) for t in trajectories))
