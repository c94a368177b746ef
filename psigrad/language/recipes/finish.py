"""Functions that the recipes share: they make the optimiser and sampler, train offline on tokenized rows, and finish a run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from psigrad import extras, redaction
from psigrad.config import OnlineConfig, PreferenceConfig, RewardConfig, SFTConfig
from psigrad.errors import reason_of
from psigrad.language.data.dataset_rows import Row
from psigrad.language.data.row_cache import PreparedRows
from psigrad.language.data.row_rendering import first_rows
from psigrad.language.loading import samplers
from psigrad.language.loading.load_model import load_model, load_scalar_model, print_once
from psigrad.language.loading.model_object import ModelObject
from psigrad.language.loading.model_source import write_end_tokens
from psigrad.language.models import sharded
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.models.scalar_model import ScalarModel
from psigrad.language.models.towers import tower_names, write
from psigrad.language.recipes.learners import Learner, begin
from psigrad.language.recipes.loops import SampledEvaluation, train_offline
from psigrad.language.recipes.memory_check import check_offline
from psigrad.language.recipes.row_limits import check_features, check_images
from psigrad.language.recipes.run_pins import collect_pins
from psigrad.language.recipes.scorers import RewardSetup, evaluator_for
from psigrad.language.rollout.types import ReplicaSampler, Sampler, State
from psigrad.language.training.offline import offline
from psigrad.language.training.offline.offline import Task
from psigrad.optim import Optimizer
from psigrad.processes.parallel.world import ALONE, World
from psigrad.runs import session
from psigrad.runs.best import Best
from psigrad.runs.journal import Journal
from psigrad.runs.result import Result

Config = SFTConfig | OnlineConfig | RewardConfig | PreferenceConfig


def optimizer_of(model: LanguageModel | ScalarModel, config: Config, world: World = ALONE) -> Optimizer:
    """Return the optimiser of the model's trainable weights."""
    towers = tower_names(model.network) if model.vision is not None else ()
    if frozen := [name for name in towers if name.rpartition(".")[2] not in config.model.trained_towers]:
        print_once(
            f"{', '.join(frozen)} of {config.model.path} are frozen; to train one, pass the last part of its name "
            "to --trained-towers."
        )
    recompute = config.model.gradient_checkpointing
    root: Any = model.shard_root
    reduces = root.set_requires_gradient_sync if config.placement.reduce_once and root is not None else None
    return Optimizer(model.trainable(), config.optim, recompute=recompute, world=world, seed=config.run.seed, reduces=reduces)


def train_on_rows(
    config: SFTConfig | RewardConfig | PreferenceConfig,
    journal: Journal,
    model: LanguageModel | ScalarModel,
    prepared: PreparedRows[Any],
    checkpoint: Path | None,
    task: Task,
    held_out: Task | None,
    generated: SampledEvaluation | None = None,
    judges: Sequence[RewardSetup | None] = (),
    given: ModelObject | None = None,
) -> Result:
    """Train on the rows of `task`, from the `checkpoint` if there is one, and save the model.

    `held_out` is a second task, on which the loss is evaluated. `generated` evaluates sampled completions. `judges` are the
    reward and the held-out metric.
    """
    check_images(config, model, prepared.rows)
    check_features(model, (*prepared.rows, *prepared.held_out))
    learner = Learner(model, optimizer_of(model, config, journal.world))
    note_rows(config, model, prepared.rows, journal, checkpoint)
    pins, counted = collect_pins(config, model.tokenizer, prepared, judges), (len(prepared.rows), len(prepared.held_out))
    begun = begin(config, journal, [learner], pins, checkpoint, State(), counted)
    steps = config.run.steps(len(task), config.batch_size)
    run = offline.OfflineRun(config, task, held_out, learner.optimizer, steps, journal.world, journal.watch)
    if config.optim.rehearse:
        check_offline(run)
    train_offline(run, begun.state, begun.save, journal, config.evaluation.eval_steps, generated)
    return finish(config, journal, model, given)


@contextlib.contextmanager
def sampler_of(
    config: SFTConfig | OnlineConfig | PreferenceConfig, model: LanguageModel, journal: Journal | None = None, longest: int = 0
) -> Iterator[Sampler]:
    """Yield the sampler that the settings name, on a cluster or on this machine.

    `longest` is the maximum number of tokens in a prompt plus its completion; 0 means the model's limit.
    """
    if config.placement.cluster and journal is not None:
        with extras.load("cluster").open_sampler(config, model, journal, longest) as sampler:
            yield sampler
        return
    log = None if journal is None else journal.log
    drawn = config.sampling
    # vLLM reads weights from shards. The policy's log-probs of a filtered distribution need a full copy.
    itself = model.shard_root is None or (drawn.sampler == "vllm" and not drawn.filtered)
    twin = model if itself else load_model(config.model, config.run, None)
    whole = partial(load_model, config.model, replace(config.run, device="cpu"), None)
    with contextlib.closing(samplers.make(drawn, twin, log, longest, whole)) as sampler:
        yield sampler if twin is model else ReplicaSampler(sampler, sharded.Replica(model, twin).refresh)


@contextlib.contextmanager
def generated_of(
    config: SFTConfig | PreferenceConfig,
    model: LanguageModel,
    measure: RewardSetup,
    rows: Sequence[Row],
    reference: Callable[[], LanguageModel | None],
    journal: Journal,
) -> Iterator[SampledEvaluation | None]:
    """Yield the evaluation that samples completions of the held-out `rows` and scores them; None without rewards or rows."""
    if not (measure.weights and rows):
        yield None
        return
    with measure.scorer(model.tokenizer, journal) as scorer:
        kl_to = reference() if config.evaluation.eval_kl else None
        evaluator = evaluator_for(config, model, measure, scorer, rows, kl_to, world=journal.world)
        with sampler_of(config, model) as sampler:
            yield SampledEvaluation(model, sampler, evaluator)


def note_rows(
    config: Config, model: LanguageModel | ScalarModel, rows: Sequence[Row], journal: Journal, checkpoint: Path | None
) -> None:
    """If no `checkpoint` is resumed, write the event `first_rows` for `psigrad studio`: some rows as the model reads them."""
    separator = config.step_separator if isinstance(config, RewardConfig) else "\n"
    if checkpoint is None:
        journal.folder.event("first_rows", rows=first_rows(model.tokenizer, rows, separator))


def finish(
    config: Config, journal: Journal, model: LanguageModel | ScalarModel, given: ModelObject | None = None, **noted: Any
) -> Result:
    """Save the final model and write the report. `noted` goes into the end event; `given` is the user's model object, if any."""
    world = journal.world
    model = _best_of(config, journal, model, given) if config.evaluation.load_best_model_at_end else model
    kept = "merged" if model.adapter is None else config.model.lora_save
    if kept == "adapter" and isinstance(model, ScalarModel):
        kept = "both"  # an adapter does not record how its rows were read
    write_it = partial(write_model, model) if model.shard_root is None else partial(sharded.save_merged, model, world)

    def write_folder(folder: Path) -> None:
        write_it(folder, saved_form=kept)
        write_end_tokens(folder, model.tokenizer)

    journal.folder.save_model(write_folder)
    if world.rank and model.shard_root is not None:
        write_folder(journal.folder.path)  # all ranks take part in gathering the weights
    session.note_end(journal, **noted)
    if world.rank == 0:
        write_card(journal.folder.path)
    written = write_report(journal.folder.path) if config.run.report and world.rank == 0 else None
    before, after = session.evaluations(journal.folder.path)
    return Result(journal.folder.path, journal.folder.path / "model", written, before, after)


def _best_of(
    config: Config, journal: Journal, model: LanguageModel | ScalarModel, given: ModelObject | None
) -> LanguageModel | ScalarModel:
    """Return the model of the checkpoint with the best evaluation; `model` if there is none. See `finish` for `given`."""
    best = next((found for found in journal.callbacks.callbacks if isinstance(found, Best)), None)
    step, value = journal.world.broadcast((best.step, best.value) if best else (0, 0.0))
    place = journal.folder.checkpoints / f"step-{step:08d}"
    if not step or not place.is_dir():
        why = (
            f"the checkpoint of step {step}, whose evaluation was the best, is gone"
            if step
            else "no evaluation gave a value of the metric"
        )
        journal.log("kept_last", f"The last weights are kept: {why}.", best=step)
        return model
    journal.log("kept", f"The weights of step {step}, whose evaluation was the best ({value:.4g}), are kept.", step=step)
    if model.adapter is not None and model.shard_root is None:  # only the adapter was trained; a given network has wrapped layers
        adapter: Any = model.adapter
        adapter.load_adapter(place, "default", is_trainable=True)
        return model
    if isinstance(model, LanguageModel):
        return load_model(config.model, config.run, place, journal.world, given=given)
    loaded = load_scalar_model(config.model, config.run, place, journal.world, given)
    loaded.network.config = model.network.config  # the recipe stored values in this configuration
    return loaded


def write_model(model: LanguageModel | ScalarModel, folder: Path, saved_form: str) -> None:
    """Write the merged model, the "adapter", or "both": then the adapter goes to adapter/."""
    if saved_form == "adapter":
        write(model.adapter, model.tokenizer, folder)
        return
    model.save_merged(folder)
    if saved_form == "both":
        write(model.adapter, model.tokenizer, folder / "adapter")


def write_card(folder: Path) -> None:
    """Write README.md into the folder of the weights, where users expect it. If it cannot be written, print the reason."""
    from psigrad.records.report import card

    model = folder / "model"
    try:
        (model / "README.md").write_text(card.text(folder), encoding="utf-8")
        (model / "adapter" / "README.md").unlink(missing_ok=True)  # PEFT's card is an unfilled template
    except OSError as error:
        redaction.say(f"{model / 'README.md'} could not be written: {reason_of(error)}.")


def write_report(folder: Path) -> Path:
    """Write the report.html of one run and return its path."""
    from psigrad.records import report

    return report.write([folder])
