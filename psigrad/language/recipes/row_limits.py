"""Checks that prompts leave room for a completion, that rows fit `max_length`, and that settings support the rows' images."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from psigrad.config import Data, OnlineConfig, Placement, PreferenceConfig, RewardConfig, Sampling, SFTConfig
from psigrad.config.algorithms import resolve_loss
from psigrad.errors import UserError
from psigrad.language import images
from psigrad.language.data import pairs
from psigrad.language.data.dataset_layouts import Log, to_model_rows, to_turns
from psigrad.language.data.dataset_rows import Row, RowError
from psigrad.language.data.image_rows import digests_of
from psigrad.language.data.row_cache import PreparedRows
from psigrad.language.data.sources import read_rows
from psigrad.language.data.templates import describe_rewrites, prompt_ids
from psigrad.language.loading.teacher import Teacher, is_address
from psigrad.language.models.backbone import Pretrained
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.models.scalar_model import ScalarModel
from psigrad.language.recipes.row_encoding import Encoder, encode_rows, prepare
from psigrad.language.rollout.types import Prompt, Prompts
from psigrad.objective.preferences.preference_loss import KahnemanTversky
from psigrad.runs.journal import Journal


def encode_prompts(rows: Sequence[Row], model: LanguageModel, data: Data, completion: int, log: Log | None = None) -> Prompts:
    """Return the rows with the tokens of their prompts.

    A prompt that leaves no room for `completion` tokens, or is longer than the settings allow, raises `UserError` or, with
    `bad_rows: skip`, is dropped.
    """
    room, limit = model.max_length - completion, data.max_prompt_length

    def keep(made: tuple[int, list[int]]) -> tuple[Any, dict[str, int]]:
        tokens, why = len(made[1]), ""
        if 0 < limit < tokens:
            why = f"the prompt has {tokens} tokens, above max_prompt_length {limit}; shorten the prompt or raise the limit"
        elif tokens > room:
            why = (
                f"the prompt has {tokens} tokens, but only {max(0, room)} fit (the model's {model.max_length} positions minus "
                f"max_completion_length {completion}); shorten the prompt or lower max_completion_length"
            )
        return (None, {f"{rows[made[0]].source}: {why}": 1}) if why else (made, {})

    encoder = Encoder(model.tokenizer, lambda i: (i, prompt_ids(model.tokenizer, rows[i])), keep)
    made, faults = encode_rows(range(len(rows)), encoder, data, log)
    if log is not None:
        log_rewrites(model.tokenizer, rows, log)
    if faults and (data.bad_rows == "stop" or not made):
        more = f" {len(faults)} of {len(rows)} prompts are too long." if len(faults) > 1 else ""
        raise UserError(f"{next(iter(faults))}, or skip such rows with --bad-rows skip.{more}")
    if faults and log is not None:
        text = f"{len(faults)} of {len(rows)} prompts have too many tokens and were skipped."
        log("rows_left_out", text, longer_than_max_length=len(faults), kept=len(made))
    return Prompts(rows, made)


def log_rewrites(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], log: Log) -> None:
    """Log what the chat template does not support in one of the first 100 rows, and what replaces it."""
    for row in rows[:100]:
        with contextlib.suppress(RowError):  # such a row was dropped and reported already
            if notes := describe_rewrites(tokenizer, row):
                text = f"The chat template does not support everything in {row.source}: {'; '.join(notes)}."
                log("messages_rewritten", text, what=notes)
                return


def add_teacher_prompts(
    prompts: Sequence[Prompt], config: OnlineConfig, model: LanguageModel, reference: LanguageModel | Teacher | None
) -> Sequence[Prompt]:
    """Add to each prompt the tokens that the reference reads, if `teacher_prompt` is set or the reference is a `Teacher`."""
    column, completion = config.teacher_prompt, config.sampling.max_completion_length
    if reference is None or not (column or isinstance(reference, Teacher)):
        return prompts
    tokenizer = reference.tokenizer if isinstance(reference, Teacher) else model.tokenizer
    found = []
    for prompt in prompts:
        read = _teacher_row(prompt.row, column, model.tokenizer) if column else prompt.row
        ids = tuple(prompt_ids(tokenizer, read))
        if len(ids) > reference.max_length - completion:
            raise UserError(
                f"{prompt.row.source}: {column or 'the prompt'} has {len(ids)} tokens, but only "
                f"{max(0, reference.max_length - completion)} fit (the reference's {reference.max_length} positions minus "
                f"max_completion_length {completion}); shorten the prompt."
            )
        found.append(replace(prompt, teacher_ids=ids))
    return found


def _teacher_row(row: Row, column: str, tokenizer: PreTrainedTokenizerBase) -> Row:
    own = row.columns.get(column)
    if not own:
        known = ", ".join(sorted(row.columns)) or "none"
        raise UserError(
            f"{row.source}: teacher_prompt is {column!r}, but the row has only the columns {known}. Give every "
            "row this column, as text if its prompt is text, otherwise as messages."
        )
    if isinstance(own, str) != isinstance(row.dataset_prompt, str):
        raise UserError(
            f"{row.source}: one of prompt and {column} is text and the other is messages; give both as text, or both as messages."
        )
    read = replace(row, prompt=own, plain_prompt=None)
    return read if isinstance(row.prompt, str) else to_turns(tokenizer, read)


def check_images(config: Any, model: Pretrained | None = None, rows: Iterable[Row] = ()) -> None:
    """Raise `UserError` if there are images, but the sampler, the placement or the reference supports only text.

    If `model` is None, images are assumed if the settings `model.vision` or `model.trained_towers` are set.
    """
    placement, sampler = getattr(config, "placement", Placement()), getattr(config, "sampling", Sampling()).sampler
    reasons = {
        f"sampling.sampler={sampler} reads only text; set sampler to embedded": sampler in ("transformers", "vllm"),
        f"placement.cp_size={placement.cp_size} can split only rows of text; set cp_size to 1": placement.cp_size > 1,
        "placement.cluster samples on machines that get no images; remove it to sample on this machine": bool(placement.cluster),
        "a reference server reads only text; give a folder as reference": is_address(getattr(config, "reference", "")),
    }
    if not (why := next((why for why, holds in reasons.items() if holds), "")):
        return
    if model is None:
        towers = {"vision loads": config.model.vision, "trained_towers trains": bool(config.model.trained_towers)}
        given = next((f"model.{name} a vision tower" for name, is_set in towers.items() if is_set), "")
    else:
        given = next((f"{row.source} has an image" for row in rows if digests_of(row)), "") if model.vision is not None else ""
    if given:
        raise UserError(f"{given}, but {why}, or train without images.")


def check_features(model: Pretrained, rows: Iterable[Row]) -> None:
    """Raise `UserError` if the vision tower returns fewer or more features for an image than the image has tokens."""
    if model.vision is None or model.shard_root is not None:  # the first step checks sharded models
        return
    found = (images.picture(digest) for row in rows for digest in digests_of(row))
    with torch.no_grad():
        for one in {model.vision.count(picture): picture for picture in found}.values():  # one of each size, to save time
            model.vision.features(model.network, [one])


def token_limit(config: SFTConfig | RewardConfig | PreferenceConfig, model: LanguageModel | ScalarModel) -> int:
    """Return the maximum number of tokens of a row: the smaller of `max_length` and the model's number of positions."""
    return min(config.max_length or model.max_length, model.max_length)


def check_positions(longest: int, **others: Any) -> None:
    """Raise `UserError` if one of the models `others` has fewer than `longest` positions."""
    for name, other in others.items():
        if isinstance(other, Pretrained) and longest > other.max_length:  # some models would read it without an error
            raise UserError(
                f"The {name} has {other.max_length} positions, and texts of this run have up to {longest} tokens; shorten the "
                f"texts or give another {name}."
            )


def name_limit(config: SFTConfig | RewardConfig | PreferenceConfig, limit: int) -> str:
    """Return the end of a message about a text that has more than `limit` tokens: the limit, its origin, and what to do."""
    if limit == config.max_length:
        return f"max_length {limit} tokens; raise max_length"
    return f"{limit} tokens, the model's number of positions; shorten them, or use a model with more positions"


def dataset_form(config: OnlineConfig | SFTConfig | RewardConfig | PreferenceConfig) -> str:
    """Return the form of dataset rows that a run with these settings trains on: "sft", or a key of `dataset_rows.FORMS`."""
    if isinstance(config, OnlineConfig):
        return "prompt-only"
    if isinstance(config, SFTConfig):
        return "sft"
    if isinstance(config, RewardConfig):
        return "stepwise" if config.process else "preference"
    return "unpaired-preference" if isinstance(resolve_loss(config.loss), KahnemanTversky) else "preference"


def prepare_answers(
    config: RewardConfig | PreferenceConfig, encoder: Encoder[Row], limit: int, journal: Journal
) -> PreparedRows[Any]:
    """Return the rows of a preference, unpaired-preference or stepwise dataset, and their tokens.

    Rows with more tokens than `limit` are dropped.
    """
    form = dataset_form(config)
    settings = [form, limit, config.evaluation.eval_prompts, config.run.seed, getattr(config, "step_separator", ""), type(config)]
    return prepare(config.data, encoder.tokenizer, settings, journal, partial(_answers, config, form, encoder, limit))


def _answers(
    config: RewardConfig | PreferenceConfig, form: str, encoder: Encoder[Row], limit: int, log: Log
) -> PreparedRows[Any]:
    read = read_rows(config.data, form, config.evaluation.eval_prompts, config.run.seed, log)
    rows = to_model_rows(encoder.tokenizer, read, config.data.plain_prompts, log)
    # A truncated answer cannot be judged.
    short = replace(encoder, filter=lambda made: (made, {}) if pairs.longest_text(made) <= limit else (None, {"long": 1}))
    found = []
    for part in filter(None, rows):
        made, counts = encode_rows(part, short, config.data, log)
        if left := counts["long"]:
            text = f"{left} of {left + len(made)} rows have more than {limit} tokens and are dropped."
            log("rows_left_out", text, longer_than_max_length=left, kept=len(made))
        if not made:
            raise UserError(f"All {left} rows have more than {name_limit(config, limit)}.")
        found.append(made)
    return PreparedRows(rows[0], rows[1], found[0], found[1] if rows[1] else [])
