"""What recipes load before training: model, rows, prompts, sampler; and what they leave behind."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from psigrad.config import (
    Data,
    EvalConfig,
    OnlineConfig,
    PreferenceConfig,
    RewardConfig,
    SampleConfig,
    Sampling,
    SFTConfig,
)
from psigrad.errors import UserError, reason_of
from psigrad.language.data import mixing
from psigrad.language.data.dataset_rows import Form, Row
from psigrad.language.data.sources import LoadedRows, from_rows, holdout, load
from psigrad.language.data.templates import ignores_tools, prompt_ids, stop_token_id
from psigrad.language.models.backbone import write
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.models.scalar_model import ScalarModel
from psigrad.language.recipes.pinned import pinned
from psigrad.language.rollout.types import SamplingParams
from psigrad.language.training import rehearsal
from psigrad.language.training.offline import offline
from psigrad.language.training.offline.offline import Generated
from psigrad.language.training.offline.task import Task
from psigrad.language.training.online.ledger import Prompt
from psigrad.language.training.update import Optimizer
from psigrad.processes.parallel import sharded
from psigrad.processes.parallel.world import ALONE, World
from psigrad.runs import session
from psigrad.runs.journal import Journal
from psigrad.runs.result import Result
from psigrad.runs.state import Learner, State

Config = SFTConfig | OnlineConfig | RewardConfig | PreferenceConfig


def check_sampling(sampling: Sampling) -> None:
    """Refuse settings that describe no distribution before anything is loaded."""
    SamplingParams(sampling.max_completion_length, sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p)


def optimizer_of(model: LanguageModel | ScalarModel, config: Config, world: World = ALONE) -> Optimizer:
    """The optimiser of what learns in the model."""
    return Optimizer(model.trainable(), config.optim, recompute=config.model.gradient_checkpointing, world=world)


def token_limit(config: SFTConfig | RewardConfig | PreferenceConfig, model: LanguageModel | ScalarModel) -> int:
    """The most tokens of a row: `max_length`, or the model's positions if they are fewer."""
    return min(config.max_length or model.max_length, model.max_length)


def named_limit(config: SFTConfig | RewardConfig | PreferenceConfig, limit: int) -> str:
    """What a `token_limit` comes from, and what to do about it."""
    if limit == config.max_length:
        return f"max_length {limit} tokens; raise it"
    return f"{limit} tokens, the model's number of positions; shorten them or take a model with more"


def refuse_none(config: RewardConfig | PreferenceConfig, limit: int, kept: int, left_out: int, journal: Journal) -> None:
    """Note how many rows have more tokens than `limit`; refuse a dataset if none is left."""
    if left_out:
        text = f"{left_out} of {left_out + kept} rows have more than {limit} tokens and are left out."
        journal.tell("rows_left_out", text, longer_than_max_length=left_out, kept=kept)
    if not kept:
        raise UserError(f"All {left_out} rows have more than {named_limit(config, limit)}.")


def read_rows(config: Config, form: Form) -> tuple[list[Row], list[Row]]:
    """Training rows and held-out rows. Without an eval dataset the last `eval_prompts` rows are held out."""
    data, wanted = config.data, config.evaluation.eval_prompts
    if datasets := mixing.several(data.dataset):
        return _read_several(config, form, datasets)
    rows = read_dataset(config, form, data.dataset, data.split)
    if data.eval_dataset:
        held = read_dataset(config, form, data.eval_dataset, data.eval_split)
        return rows.rows, held.rows[:wanted]
    if not wanted:
        return rows.rows, []
    train, held = holdout(rows, wanted)
    return train.rows, held.rows


def _read_several(config: Config, form: Form, datasets: Sequence[mixing.Named]) -> tuple[list[Row], list[Row]]:
    """Rows of several datasets by their weights. Each gives its share of the held-out rows."""
    data, wanted = config.data, config.evaluation.eval_prompts
    parts = [read_dataset(config, form, one.name, data.split) for one in datasets]
    weights = [one.weight for one in datasets]
    shares = [len(part.rows) if weight is None else weight for part, weight in zip(parts, weights, strict=True)]
    held: list[Row] = []
    if data.eval_dataset:
        held = read_dataset(config, form, data.eval_dataset, data.eval_split).rows[:wanted]
    elif wanted:
        parts, held = mixing.held_out(parts, shares, wanted)
    return mixing.mixed([part.rows for part in parts], weights, config.run.seed), held


def read_dataset(config: Config | EvalConfig | SampleConfig, form: Form, dataset: Any, split: str) -> LoadedRows:
    """The rows of one dataset in TRL's forms; a missing name is refused."""
    data = config.data
    if datasets := mixing.several(dataset):
        read = [read_dataset(config, form, one.name, split) for one in datasets]
        return LoadedRows([row for part in read for row in part.rows], [bad for part in read for bad in part.skipped])
    if not isinstance(dataset, str):
        rows = islice(dataset, data.max_rows) if data.max_rows else dataset
        return from_rows(rows, form, bad_rows=data.bad_rows)
    if not dataset:
        raise UserError(
            "No dataset was given; name a JSONL or Parquet file, a folder or a hub dataset with --dataset (data.dataset)."
        )
    return load(dataset, form=form, split=split, bad_rows=data.bad_rows, max_rows=data.max_rows)


def prompts_of(
    rows: Sequence[Row], model: LanguageModel, data: Data, completion: int, journal: Journal | None = None
) -> list[Prompt]:
    """The rows with their prompt tokens, each of which leaves room for `completion` tokens among the model's positions.

    A prompt that is empty or too long is refused by its place in the file, or left out and counted with `bad_rows: skip`.
    """
    prompts = [Prompt(i, tuple(prompt_ids(model.tokenizer, row)), row) for i, row in enumerate(rows)]
    room = model.max_length - completion
    bad = {}
    for prompt in prompts:
        tokens = len(prompt.ids)
        if not tokens:
            bad[prompt.index] = "the prompt has no tokens; give it some text, or the tokenizer a BOS token"
        elif 0 < data.max_prompt_length < tokens:
            bad[prompt.index] = (
                f"the prompt has {tokens} tokens, above max_prompt_length {data.max_prompt_length}; shorten it or raise the limit"
            )
        elif tokens > room:
            bad[prompt.index] = (
                f"the prompt has {tokens} tokens, and with max_completion_length {completion} the model's {model.max_length} "
                f"positions leave {max(0, room)}; shorten it or lower max_completion_length"
            )
    if journal is not None and (deaf := next((row for row in rows[:1] if ignores_tools(model.tokenizer, row)), None)) is not None:
        text = (
            f"The chat template does not show the tools to the model ({deaf.source}); take a model whose template offers tools."
        )
        journal.tell("tools_ignored", text)
    kept = [prompt for prompt in prompts if prompt.index not in bad]
    if bad and (data.bad_rows == "stop" or not kept):
        first = next(iter(bad))
        more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
        raise UserError(f"{rows[first].source}: {bad[first]}, or leave such rows out with bad_rows=skip{more}.")
    if bad and journal is not None:
        text = f"{len(bad)} of {len(rows)} prompts have no tokens or too many and are left out."
        journal.tell("rows_left_out", text, longer_than_max_length=len(bad), kept=len(kept))
    return kept


def with_teacher_prompts(
    prompts: Sequence[Prompt], column: str, model: LanguageModel, reference: LanguageModel, completion: int
) -> list[Prompt]:
    """The prompts with the tokens of what the reference reads in their place, from a column of the dataset.

    Raises `UserError` for a row that has none, or one that leaves no room for `completion` tokens.
    """
    found = []
    for prompt in prompts:
        own = prompt.row.columns.get(column)
        if not own:
            known = ", ".join(sorted(prompt.row.columns)) or "none"
            raise UserError(
                f"{prompt.row.source}: teacher_prompt is {column!r} and the row has no such column; it has {known}. Give every "
                "row the prompt that the reference reads, as text or messages like the prompt."
            )
        if isinstance(own, str) != isinstance(prompt.row.prompt, str):
            raise UserError(f"{prompt.row.source}: prompt and {column} are text and messages; give both in the same form.")
        ids = tuple(prompt_ids(model.tokenizer, replace(prompt.row, prompt=own)))
        if len(ids) > reference.max_length - completion:
            raise UserError(
                f"{prompt.row.source}: {column} has {len(ids)} tokens, and with max_completion_length {completion} the "
                f"reference's {reference.max_length} positions leave {max(0, reference.max_length - completion)}; shorten it."
            )
        found.append(replace(prompt, teacher_ids=ids))
    return found


def sampling_params(
    sampling: Sampling, model: LanguageModel, rows: Sequence[Row], temperature: float | None = None
) -> SamplingParams:
    """The distribution that is sampled from; evaluation may have its own temperature.

    Chat models end a turn with a token that is not always the EOS; where the prompts are conversations it stops a completion too.
    """
    chat = (stop_token_id(model.tokenizer),) if rows and not isinstance(rows[0].prompt, str) else ()
    return SamplingParams(
        max_tokens=sampling.max_completion_length,
        temperature=sampling.temperature if temperature is None else temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        stop_token_ids=(*sampling.stop_token_ids, *chat),
    )


def train_on_rows(
    config: SFTConfig | RewardConfig | PreferenceConfig,
    journal: Journal,
    model: LanguageModel | ScalarModel,
    rows: tuple[Sequence[Row], Sequence[Row]],
    found: Path | None,
    task: Task,
    held_out: Task | None,
    generated: Generated | None = None,
    functions: Sequence[Callable[..., Any]] = (),
) -> Result:
    """The rest of every offline recipe: train on `task` from the checkpoint `found` on, and leave the model behind.

    `rows` are those of training and those that are held out. `functions` are the reward functions, whose code is pinned.
    """
    learner = Learner(model, optimizer_of(model, config, journal.world))
    pins, counted = pinned(config, model.tokenizer, *rows, functions), (len(rows[0]), len(rows[1]))
    begun = session.begin(config, journal, [learner], pins, found, State(), counted)
    steps = config.run.steps(len(task), config.batch_size)
    job = offline.Offline(config, task, held_out, learner.optimizer, steps, journal, generated)
    if config.optim.rehearse:
        rehearsal.offline(job)
    offline.train(job, begun.state, begun.save)
    return finish(config, journal, model)


def finish(config: Config, journal: Journal, model: LanguageModel | ScalarModel, **noted: Any) -> Result:
    """The final model, the report, and what they hold; `noted` goes into the event."""
    world = journal.world
    kept = "merged" if model.adapter is None else config.model.lora_save
    in_shards = model.root is not None
    leave = partial(sharded.save_merged, model, world, kept=kept) if in_shards else partial(write_model, model, kept=kept)
    journal.folder.save_model(leave)
    if world.rank and model.root is not None:
        leave(journal.folder.path)  # what the others have of it
    journal.folder.flush()
    journal.folder.event("finished", **noted)
    if world.rank == 0:
        write_card(journal.folder.path)
    written = write_report(journal.folder.path) if config.run.report and world.rank == 0 else None
    before, after = session.evaluations(journal.folder.path)
    return Result(journal.folder.path, journal.folder.path / "model", written, before, after)


def write_model(model: LanguageModel | ScalarModel, folder: Path, kept: str) -> None:
    """What `model.lora_save` asks for, in Hugging Face form: the whole model, its adapter, or both, the adapter in `adapter/`."""
    if kept == "adapter":
        write(model.adapter, model.tokenizer, folder)
        return
    model.save_merged(folder)
    if kept == "both":
        write(model.adapter, model.tokenizer, folder / "adapter")


def write_card(folder: Path) -> None:
    """README.md beside the weights, as everybody looks for it there. A card that cannot be written ends no run."""
    from psigrad.records.report import card

    model = folder / "model"
    try:
        (model / "README.md").write_text(card.text(folder), encoding="utf-8")
        (model / "adapter" / "README.md").unlink(missing_ok=True)  # peft's, a form that nobody has filled in
    except OSError as error:
        print(f"psigrad: {model / 'README.md'} could not be written: {reason_of(error)}.", file=sys.stderr)


def write_report(folder: Path) -> Path:
    """report.html of one run; matplotlib is loaded only here."""
    from psigrad.records import report

    return report.write([folder])


def summary(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """The headline table of the report, for people."""
    (folder / "summary.json").write_text(json.dumps({"rows": list(rows)}, indent=1) + "\n")
