"""Preference training, from settings to a trained model on disk."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from psigrad.cache_folder import cache_folder
from psigrad.config import PreferenceConfig
from psigrad.config.algorithms import resolve_loss
from psigrad.errors import UserError
from psigrad.language.data import pairs
from psigrad.language.examples import Answer
from psigrad.language.loading.load_model import load_frozen, load_model, load_reference
from psigrad.language.loading.model_object import ModelObject, digest_weights
from psigrad.language.loading.samplers import check_sampling
from psigrad.language.models import sharded
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.models.packing import Ids
from psigrad.language.recipes.finish import generated_of, train_on_rows
from psigrad.language.recipes.row_encoding import Encoder
from psigrad.language.recipes.row_limits import check_positions, prepare_answers, token_limit
from psigrad.language.recipes.run_pins import static_pins
from psigrad.language.recipes.scorers import RewardSetup
from psigrad.language.training.offline.offline import Task
from psigrad.language.training.offline.preference_task import KTOTask, PreferenceTask, mismatch, reference_logps
from psigrad.objective.preferences.preference_loss import KahnemanTversky, Preference
from psigrad.processes.parallel.world import World
from psigrad.runs import session
from psigrad.runs.journal import Journal
from psigrad.runs.result import Result


def run(config: PreferenceConfig, given: ModelObject | None = None) -> Result:
    """Start or resume a run that trains `config.model`, or the object `given`, by `config.loss` on preference rows.

    KTO takes unpaired-preference rows.
    """
    loss = resolve_loss(config.loss)
    check_sampling(config.sampling)
    rewards, metric = RewardSetup.of(config), RewardSetup.of_metric(config)
    with session.open_run(config, loss.name) as journal, contextlib.ExitStack() as stack:
        if (done := session.load_finished(config, journal, static_pins(config, (rewards, metric)))) is not None:
            return done
        checkpoint = session.newest_checkpoint(journal)
        model = load_model(config.model, config.run, checkpoint, journal.world, given=given)
        encode: Any = pairs.encode_labelled if isinstance(loss, KahnemanTversky) else pairs.encode_pair
        encoder, limit = Encoder(model.tokenizer, partial(encode, model.tokenizer)), token_limit(config, model)
        prepared = prepare_answers(config, encoder, limit, journal)
        reference = _reference(config, loss, model, checkpoint, journal.world)
        check_positions(max(map(pairs.longest_text, [*prepared.items, *prepared.held_out_items])), reference=reference)
        task = _task(config, loss, model, reference, list(prepared.items), journal)
        held_out = _task(config, loss, model, reference, list(prepared.held_out_items), journal) if prepared.held_out else None
        start = lambda: reference or model.frozen_copy()  # noqa: E731
        generated = stack.enter_context(generated_of(config, model, metric or rewards, prepared.held_out, start, journal))
        return train_on_rows(config, journal, model, prepared, checkpoint, task, held_out, generated, (rewards, metric), given)


def _reference(
    config: PreferenceConfig, loss: Preference | KahnemanTversky, model: LanguageModel, checkpoint: Path | None, world: World
) -> LanguageModel | None:
    """Return the model that computes the reference's log-probs before training; None if they are not needed."""
    if config.reference and not loss.needs_reference:
        raise UserError(f"The settings name a reference model, but {loss.name} uses none; remove reference.")
    if not (loss.needs_reference or config.evaluation.eval_kl):
        return None
    if config.reference:
        return load_reference(config.reference, model, config, world=world)
    if model.is_own_reference:
        return model  # its new adapter can be turned off
    if checkpoint is None and not config.evaluation.eval_kl:
        return model  # no step has changed it yet
    return load_frozen(replace(config.model, lora_rank=0), config.run, None, world)


def _task(
    config: PreferenceConfig,
    loss: Preference | KahnemanTversky,
    model: LanguageModel,
    reference: LanguageModel | None,
    items: Sequence[Any],
    journal: Journal,
) -> Task:
    """Return the training task on the tokenized rows `items`, with the reference's log-probs if the loss needs them."""
    if isinstance(loss, KahnemanTversky):
        answers = [[row.answer, other] for row, other in zip(items, mismatch(items), strict=True)]
        return KTOTask(model, loss, items, _logps(config, reference, [row.prompt for row in items], answers, journal.world))
    if not loss.needs_reference:
        return PreferenceTask(model, loss, items)
    known = _logps(config, reference, [p.prompt for p in items], [[p.chosen, p.rejected] for p in items], journal.world)
    return PreferenceTask(model, loss, items, known)


def _logps(
    config: PreferenceConfig,
    reference: LanguageModel | None,
    prompts: Sequence[Ids],
    answers: Sequence[Sequence[Answer]],
    world: World,
) -> list[list[float]]:
    """Return the log-prob under `reference` of each answer of each prompt.

    With `cache_reference`, log-probs of the same weights and tokens are read from the disk if an earlier run computed them.
    """
    assert reference is not None
    if not config.cache_reference:
        return reference_logps(reference, prompts, answers, config.micro_batch_tokens, world)
    cache = cache_folder("reference")
    path = cache / f"{_content(reference, prompts, answers)}.safetensors"
    cached: list[list[float]] | None = None
    with contextlib.suppress(OSError, SafetensorError):
        cached = load_file(path)["logps"].tolist()
    if (known := world.broadcast(cached)) is not None:
        return known
    computed = reference_logps(reference, prompts, answers, config.micro_batch_tokens, world)
    if world.rank:
        return computed
    with contextlib.suppress(OSError):  # without a writable cache the run only takes longer
        cache.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(f".{os.getpid()}")
        save_file({"logps": torch.tensor(computed, dtype=torch.float64)}, beside)
        os.replace(beside, path)
    return computed


def _content(model: LanguageModel, prompts: Sequence[Ids], answers: Sequence[Sequence[Answer]]) -> str:
    """Return the cache key: the SHA-256 of the reference's weights and of all tokens."""
    digest = hashlib.sha256()
    held = model.network.state_dict().items() if model.shard_root is None else sharded.gather(model)
    digest_weights(digest, ((name, tensor) for name, tensor in held if not (model.is_own_reference and "lora_" in name)))
    texts = [[[text.ids, text.mask] for answer in group for text in answer.texts] for group in answers]
    tokens = [[list(p), own] for p, own in zip(prompts, texts, strict=True)]
    digest.update(json.dumps(tokens).encode())
    return digest.hexdigest()
