"""The models of a run: from a folder, the hub or memory, at their beginning or as a checkpoint left them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import transformers
from transformers import PreTrainedTokenizerBase

from psigrad.config import Model, OnlineConfig, PreferenceConfig, Run
from psigrad.errors import UserError, kind_of
from psigrad.language.loading.given_model import GivenModel, take_weights
from psigrad.language.loading.model_source import continued, located, lora_of
from psigrad.language.models import language_model, scalar_model
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.models.lora import Lora
from psigrad.language.models.scalar_model import ScalarModel
from psigrad.processes.parallel import sharded, shards
from psigrad.processes.parallel.world import ALONE, World
from psigrad.runs import machine

M = TypeVar("M", bound=LanguageModel | ScalarModel)
# a bar per weight file drowns ours
transformers.utils.logging.disable_progress_bar()


def load_model(
    settings: Model,
    run: Run,
    found: Path | None,
    world: World = ALONE,
    value_head: bool = False,
    given: GivenModel | None = None,
) -> LanguageModel:
    """The model to train: from `settings.path`, or the one `given` as an object, with the weights of the checkpoint `found` where
    there is one, and with a value head where it is its own critic. In lockstep processes each gets its shard.
    """
    if not settings.path:
        raise UserError("No model was given; name a folder or a hub model with --model (model.path).")
    place, found = found, None if found is not None and shards.written_in(found) else found
    if given is not None and given.network is not None:
        model = _prepared(language_model.prepare, given, settings, run, found, world)
    else:
        model = _loaded(settings, run, found, world, None if given is None else given.tokenizer)
    attend(settings, model)
    if value_head:
        model.add_value_head(found)
    settle(model, world, machine.device(run), place if found is None else None)
    return model


def _loaded(
    settings: Model, run: Run, found: Path | None, world: World, tokenizer: PreTrainedTokenizerBase | None
) -> LanguageModel:
    """The model from its folder or from the hub, under its own tokenizer or the one given."""
    lora, before = lora_of(settings), continued(settings)
    _check_shards(lora, world)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(run.seed)  # a fresh adapter's A matrices
        model = language_model.load(
            str(found) if found is not None and lora is None else located(before.base if before is not None else settings),
            dtype=settings.dtype,
            device=machine.device(run),
            lora=lora,
            adapter=(found or (before.folder if before is not None else None)) if lora is not None else None,
            tokenizer=tokenizer or (before.tokenizer if before is not None else ""),
            gradient_checkpointing=settings.gradient_checkpointing,
            trust_remote_code=settings.trust_remote_code,
            for_shards=world.lockstep,
        )
    model.continued = before is not None
    return model


def _prepared(prepare: Callable[..., M], given: GivenModel, settings: Model, run: Run, found: Path | None, world: World) -> M:
    """What `prepare` makes of a network that is in memory; its beginning is kept at `settings.path`."""
    given.keep(Path(settings.path), world, "model" in run.allow)
    network: Any = given.network
    lora = lora_of(settings)
    if found is not None and lora is None:
        take_weights(network, found)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(run.seed)
        made = prepare(
            network.to(machine.device(run)),
            given.tokenizer,
            lora=lora,
            adapter=found if lora is not None else None,
            gradient_checkpointing=settings.gradient_checkpointing,
        )
    given.made = made
    return made


def _check_shards(lora: Lora | None, world: World) -> None:
    if world.lockstep and lora is not None and (lora.dora or lora.modules_to_save):
        raise UserError(
            "The adapter has use_dora or lora_modules_to_save, which placement.strategy=fsdp cannot merge; use ddp, or a plain "
            "LoRA adapter."
        )


def settle(model: LanguageModel | ScalarModel, world: World, device: str, place: Path | None) -> None:
    """In lockstep processes leave each with its shard on its device. `place` has weights that several processes wrote."""
    if world.lockstep:
        sharded.shard(model, world, device)
    if place is not None:
        shards.read(place, sharded.named_weights(model))


def attend(settings: Model, model: LanguageModel | ScalarModel) -> None:
    """Let the model attend as asked for."""
    if settings.attention == "flex":
        model.attend_by_flex()


def load_scalar_model(
    settings: Model, run: Run, found: Path | None, world: World = ALONE, given: GivenModel | None = None
) -> ScalarModel:
    """As `load_model`, with a scalar head, which is fresh where `settings.path` has none."""
    if not settings.path:
        raise UserError("No model was given; name a folder or a hub model with --model (model.path).")
    place, found = found, None if found is not None and shards.written_in(found) else found
    settings = replace(settings, adapter="merge")  # an adapter of a language model is the beginning of a reward model
    if given is not None and given.network is not None:
        if getattr(given.network.config, "num_labels", 0) != 1 or "SequenceClassification" not in type(given.network).__name__:
            raise UserError(
                f"The model is {kind_of(given.network)}, and a reward model has a head with one label; give "
                "AutoModelForSequenceClassification.from_pretrained(…, num_labels=1), or the folder of a language model."
            )
        model = _prepared(scalar_model.prepare, given, settings, run, found, world)
    else:
        model = _loaded_scalar(settings, run, found, world, None if given is None else given.tokenizer)
    attend(settings, model)
    settle(model, world, machine.device(run), place if found is None else None)
    return model


def _loaded_scalar(
    settings: Model, run: Run, found: Path | None, world: World, tokenizer: PreTrainedTokenizerBase | None
) -> ScalarModel:
    lora = lora_of(settings)
    _check_shards(lora, world)
    whole = found is not None and lora is None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(run.seed)  # a fresh head and a fresh adapter
        return scalar_model.load(
            str(found) if whole else located(settings),
            dtype=settings.dtype,
            device=machine.device(run),
            lora=lora,
            adapter=found if lora is not None else None,
            gradient_checkpointing=settings.gradient_checkpointing,
            fresh_head="refuse" if whole else "random",
            tokenizer=tokenizer,
            trust_remote_code=settings.trust_remote_code,
            for_shards=world.lockstep,
        )


def load_trained_scalar_model(settings: Model, run: Run) -> ScalarModel:
    """A reward model to score with."""
    if not settings.path:
        raise UserError("No reward model was given; name its folder or hub name with --model (model.path).")
    return scalar_model.load(
        located(settings),
        dtype=settings.dtype,
        device=machine.device(run),
        fresh_head="refuse",
        trust_remote_code=settings.trust_remote_code,
    )


def load_reference(
    path: str,
    model: LanguageModel,
    config: OnlineConfig | PreferenceConfig,
    dtype: Literal["", "float32", "bfloat16"] = "",
    world: World = ALONE,
) -> LanguageModel:
    """Another model than the one that trains, with the same tokens. Raises `UserError` where it has others."""
    other = load_model(Model(path=path, adapter="merge", dtype=dtype or config.model.dtype), config.run, None, world)
    if other.tokenizer.get_vocab() != model.tokenizer.get_vocab():
        raise UserError(
            f"The reference {path!r} and the model have different tokenizers; give a reference of the same model family."
        )
    other.network.requires_grad_(False)
    return other
