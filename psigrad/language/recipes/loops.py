"""The training loops of language models: online RL, and training on recorded data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from psigrad.language.models.language_model import LanguageModel
from psigrad.language.recipes.changes import apply_changes, change_settings
from psigrad.language.recipes.evaluator import Evaluator
from psigrad.language.recipes.learners import CheckpointWriter
from psigrad.language.rollout.types import Sampler, State
from psigrad.language.training.offline import offline
from psigrad.language.training.offline.offline import OfflineRun
from psigrad.language.training.online import online_rl
from psigrad.language.training.online.online_run import OnlineRun
from psigrad.runs.cycle import Loop, cycle
from psigrad.runs.journal import Journal
from psigrad.step import Clock

LESS_MEMORY = (
    "Resume with a smaller micro_batch_tokens, keep_activations_gb or sampling.max_decode_batch, or with "
    "model.gradient_checkpointing=true; these settings may change when a run resumes. `psigrad plan` shows where memory goes."
)


@dataclass(frozen=True)
class SampledEvaluation:
    """The model, the sampler and the evaluator for an evaluation on sampled completions of held-out prompts."""

    model: LanguageModel
    sampler: Sampler
    evaluator: Evaluator


def train_online(
    run: OnlineRun, state: State, save: CheckpointWriter, journal: Journal, evaluate: Callable[[int], None] | None = None
) -> State:
    """Run online RL from `state` to the last step. `evaluate(step)` evaluates the policy after that many steps."""

    def judge(state: State) -> None:
        if evaluate is not None:
            with journal.interruptible():
                for pending in state.pending if run.rollout.collector.plays else ():  # environments serve one player at a time
                    pending.result()
                evaluate(state.step)

    journal.callbacks.trial = partial(change_settings, run)
    loop = Loop(
        name=run.algorithm.name or "policy gradient",
        total=run.total_steps,
        step=lambda state: online_rl.step(apply_changes(run, state.changes), state),
        evaluate=judge,
        save=save,
        updates=run.updates,
        eval_steps=run.config.evaluation.eval_steps,
        less_memory=LESS_MEMORY,
        wait=save.wait,
    )
    return cycle(loop, state, run.config.run, journal)


def train_offline(
    run: OfflineRun,
    state: State,
    save: CheckpointWriter,
    journal: Journal,
    eval_steps: int,
    generated: SampledEvaluation | None = None,
) -> State:
    """Train on recorded data from `state` to the last step.

    Every `eval_steps` steps, evaluate the held-out rows and, if `generated` is given, sampled completions.
    """

    def judge(state: State) -> None:
        with journal.interruptible():
            _evaluate(apply_changes(run, state.changes), state, journal)
            if generated is not None:
                generated.evaluator.record(generated.model, generated.sampler, state.step, journal)

    journal.callbacks.trial = partial(change_settings, run)
    loop = Loop(
        name=run.task.name,
        total=run.total_steps,
        step=lambda state: offline.step(apply_changes(run, state.changes), state),
        evaluate=judge,
        save=save,
        updates=lambda: run.optimizer.updates,
        eval_steps=eval_steps,
        less_memory=LESS_MEMORY,
        wait=save.wait,
    )
    return cycle(loop, state, run.config.run, journal)


def _evaluate(run: OfflineRun, state: State, journal: Journal) -> None:
    """Evaluate the held-out rows, if there are any."""
    if run.held_out is None:
        return
    clock = Clock(journal.watch)
    with clock("time/eval"), torch.no_grad():
        figures: Mapping[str, float | str] = run.held_out.held_out(run.config.micro_batch_tokens, run.world)
    named = {f"{'held_out' if isinstance(value, str) else 'eval'}/{name}": value for name, value in figures.items()}
    journal.metrics(state.step, named)
    journal.timings(state.step, clock.read(), run.held_out.tokens(range(len(run.held_out))))
