"""The models of a run, loaded from a folder, the hub or memory, with initial weights or those of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from psigrad import extras, redaction
from psigrad.config import Model, OnlineConfig, PreferenceConfig, Run
from psigrad.errors import UserError, kind_of, nearest, reason_of
from psigrad.language.data.chat.arguments import check_arguments, templates_of
from psigrad.language.data.chat.rendering import set_render_settings
from psigrad.language.loading import teacher
from psigrad.language.loading.model_object import ModelObject, load_weights
from psigrad.language.loading.model_source import find_adapter, locate, lora_of, quantisation_of
from psigrad.language.loading.teacher import Teacher
from psigrad.language.models import language_model, scalar_model, sharded
from psigrad.language.models.coded_linear import code_linears
from psigrad.language.models.experts import balance_of
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.models.lora import Lora
from psigrad.language.models.scalar_model import ScalarModel
from psigrad.language.models.sizes import size
from psigrad.language.models.tokenizer_files import read_tokenizer
from psigrad.language.models.towers import disable_progress_bars, tower_names
from psigrad.processes.parallel import shards
from psigrad.processes.parallel.world import ALONE, World
from psigrad.records.checkpoint import MANIFEST
from psigrad.runs import machine

M = TypeVar("M", bound=LanguageModel | ScalarModel)


@disable_progress_bars()
def load_model(
    settings: Model,
    run: Run,
    checkpoint: Path | None,
    world: World = ALONE,
    value_head: bool = False,
    given: ModelObject | None = None,
) -> LanguageModel:
    """Load the model to train, from `settings.path` or the `given` object, with the weights of `checkpoint` if there is one.

    With `value_head`, it is also the critic. With fsdp, each process keeps only its shard.
    """
    if not settings.path:
        raise UserError("No model was given; name a folder or a hub model with --model (model.path).")
    saved = SavedWeights.of(checkpoint)
    whole = saved.full
    if given is not None:
        configure_chat(given.tokenizer, settings, checkpoint)
    if given is not None and given.network is not None:
        model = _prepare_given(language_model.prepare, given, settings, run, whole, world)
    else:
        lora, before = lora_of(settings), find_adapter(settings)
        _check_shards(settings, lora, world)
        learnt = "" if before is None else quantisation_of(before.folder).get("quantize_base", "")
        if learnt and learnt != settings.quantize_base:
            redaction.say(
                f"The adapter was trained on a base quantised to {learnt}; to use the same base, set --quantize-base {learnt}."
            )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(run.seed)  # for the A matrices of a new adapter
            model = language_model.load(
                str(whole) if whole is not None and lora is None else locate(settings if before is None else before.base),
                lora=lora,
                adapter=(whole or (before.folder if before is not None else None)) if lora is not None else None,
                tokenizer=given.tokenizer if given is not None else before.tokenizer if before is not None else "",
                eos_token=settings.eos_token,
                **_options(settings if before is None else replace(settings, vision=before.base.vision), run, world),
            )
        model.from_adapter = before is not None
    configure_chat(model.tokenizer, settings, checkpoint, model.network)
    if (names := tower_names(model.network)) and model.vision is None:
        print_once(
            f"Only the language model in {settings.path} is trained. {', '.join(names)} are not used, and are saved unchanged."
        )
    if value_head:
        model.add_value_head(whole)
    load_shard(model, world, machine.device(run), saved.shards)
    _choose_kernels(model, settings, run)
    model.load_balancing = balance_of(model.network, settings.router_aux_loss_coef)
    return model


@cache
def print_once(text: str) -> None:
    """Print a message unless this process has printed it before."""
    redaction.say(text)


@dataclass(frozen=True)
class SavedWeights:
    """The folder of saved weights: `full` if they are complete, `shards` if each process wrote a part. New runs have neither."""

    full: Path | None = None
    shards: Path | None = None

    @classmethod
    def of(cls, checkpoint: Path | None, part: str = "") -> SavedWeights:
        """Locate the policy's weights in a checkpoint or, if `part` is given, those in its folder `part`, such as critic."""
        place = part_of(checkpoint, part)
        if place is None:
            return cls()
        return cls(shards=place) if shards.has_shards(place) else cls(full=place)


def part_of(checkpoint: Path | None, part: str) -> Path | None:
    """Return the folder of a part of a checkpoint, such as critic; None if `checkpoint` is None, as in a new run.

    Raises `UserError` if the checkpoint has no such part.
    """
    if checkpoint is not None and not (checkpoint / part).is_dir():
        raise UserError(
            f"{checkpoint} has no {part}, since the run was started with settings that need none. Use those settings again, or "
            "choose another output_dir."
        )
    return None if checkpoint is None else checkpoint / part


def _prepare_given(
    prepare: Callable[..., M], given: ModelObject, settings: Model, run: Run, checkpoint: Path | None, world: World
) -> M:
    """Save the initial weights of `given.network` in `settings.path`. Return the model that `prepare` makes from the network."""
    given.save_start(Path(settings.path), world, "model" in run.allow)
    network: Any = given.network
    lora = lora_of(settings)
    if checkpoint is not None and lora is None:
        load_weights(network, checkpoint)
    if lora is not None and settings.quantize_base:
        code_linears(network, settings.quantize_base)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(run.seed)
        made = prepare(
            network.to(machine.device(run)),
            given.tokenizer,
            lora=lora,
            adapter=checkpoint if lora is not None else None,
            gradient_checkpointing=settings.gradient_checkpointing,
            towers=settings.trained_towers,
        )
    given.model = made
    return made


def _choose_kernels(model: LanguageModel | ScalarModel, settings: Model, run: Run) -> None:
    """Set a model's attention implementation, and compile its layers if the settings enable it."""
    model.attend(settings.attention)
    if model.decoder is not None:
        model.decoder.may_dequantise = not run.max_memory  # sampling is faster with dequantised copies, but they need memory
    if settings.compile_layers:
        from psigrad.language.models.fused.inductor import compile_layers  # imported here, since few runs compile

        compile_layers(model)
        if model.why_uncompiled:
            print_once(f"The layers of {settings.path} are not compiled: {model.why_uncompiled}.")


def _options(settings: Model, run: Run, world: World) -> dict[str, Any]:
    """Return the arguments that every loader of a trainable model takes from the settings."""
    return {
        "base": settings.quantize_base,
        "dtype": settings.dtype,
        "device": machine.device(run),
        "gradient_checkpointing": settings.gradient_checkpointing,
        "trust_remote_code": settings.trust_remote_code,
        "for_shards": world.lockstep,
        "vision": settings.vision,
        "towers": settings.trained_towers,
    }


def _check_shards(settings: Model, lora: Lora | None, world: World) -> None:
    if world.lockstep and settings.quantize_base and lora is not None:
        raise UserError("placement.strategy=fsdp cannot shard a quantised base (quantize_base); set placement.strategy=ddp.")
    if world.lockstep and lora is not None and (lora.dora or lora.modules_to_save):
        raise UserError(
            "The adapter has use_dora or lora_modules_to_save, which placement.strategy=fsdp cannot merge; set "
            "placement.strategy=ddp, or give a plain LoRA adapter."
        )


def load_shard(model: LanguageModel | ScalarModel, world: World, device: str, folder: Path | None) -> None:
    """With fsdp, keep only this process's shard of the model. Load the saved shards in `folder`, if given."""
    if world.lockstep:
        sharded.shard(model, world, device)
    if folder is not None:
        shards.read(folder, sharded.named_weights(model))


@disable_progress_bars()
def load_scalar_model(
    settings: Model, run: Run, checkpoint: Path | None, world: World = ALONE, given: ModelObject | None = None
) -> ScalarModel:
    """Load a reward model to train; see `load_model`. The scalar head is new if the model at `settings.path` has none."""
    if not settings.path:
        raise UserError("No model was given; name a folder or a hub model with --model (model.path).")
    saved = SavedWeights.of(checkpoint)
    whole = saved.full
    settings = replace(settings, adapter="merge")  # the adapter of a language model is part of a reward model's initial weights
    if given is not None and given.network is not None:
        if getattr(given.network.config, "num_labels", 0) != 1 or "SequenceClassification" not in type(given.network).__name__:
            raise UserError(
                f"The model is {kind_of(given.network)}, but a reward model needs a head with one label; give "
                "AutoModelForSequenceClassification.from_pretrained(…, num_labels=1), or the folder of a language model."
            )
        model = _prepare_given(scalar_model.prepare, given, settings, run, whole, world)
    else:
        lora = lora_of(settings)
        _check_shards(settings, lora, world)
        trained = whole is not None and lora is None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(run.seed)  # for a new head and a new adapter
            model = scalar_model.load(
                str(whole) if trained else locate(settings),
                lora=lora,
                adapter=whole if lora is not None else None,
                fresh_head="refuse" if trained else "random",
                tokenizer=None if given is None else given.tokenizer,
                **_options(settings, run, world),
            )
    configure_chat(model.tokenizer, settings, checkpoint, model.network)
    load_shard(model, world, machine.device(run), saved.shards)
    _choose_kernels(model, settings, run)
    return model


@disable_progress_bars()
def load_trained_scalar_model(settings: Model, run: Run) -> ScalarModel:
    """Load a trained reward model for scoring."""
    if not settings.path:
        raise UserError("No reward model was given; give its folder or hub name with --model (model.path).")
    return scalar_model.load(
        locate(settings),
        dtype=settings.dtype,
        device=machine.device(run),
        fresh_head="refuse",
        trust_remote_code=settings.trust_remote_code,
        vision=True,  # a trained checkpoint with a tower reads images
    )


@disable_progress_bars()
def load_reference(
    path: str,
    model: LanguageModel,
    config: OnlineConfig | PreferenceConfig,
    world: World = ALONE,
) -> LanguageModel:
    """Load the reference model at `path`, frozen. Raises `UserError` if its vocabulary is not that of the trained `model`."""
    other = _load_frozen_model(path, config, "", world)
    if other.tokenizer.get_vocab() != model.tokenizer.get_vocab():
        raise UserError(
            f"The reference {path!r} and the model have different tokenizers; give a reference of the same model family."
        )
    return other


def _load_frozen_model(
    path: str, config: OnlineConfig | PreferenceConfig, dtype: Literal["", "float32", "bfloat16"], world: World
) -> LanguageModel:
    own = config.model
    trust, dtype = own.trust_remote_code, dtype or own.dtype
    plain = Model(path=path, adapter="merge", dtype=dtype, trust_remote_code=trust, vision=own.vision)
    other = load_model(plain, config.run, None, world)
    other.network.requires_grad_(False)
    return other


@disable_progress_bars()
def load_online_reference(
    config: OnlineConfig, model: LanguageModel, checkpoint: Path | None, world: World = ALONE
) -> LanguageModel | Teacher:
    """Load the reference: the model that `config.reference` names or, if this setting is empty, the policy's initial model.

    The reference is a `Teacher` if it is a server or its tokenizer is not the policy's.
    """
    dtype = config.reference_dtype or config.model.dtype
    if teacher.is_address(config.reference):
        found: Teacher = extras.load("teacher").connect(config, model)
        return found
    if config.reference:
        other = _load_frozen_model(config.reference, config, dtype, world)
        same = other.tokenizer.get_vocab() == model.tokenizer.get_vocab()
        return other if same else teacher.of_model(other, model, config.reference)
    saved = part_of(checkpoint, "reference") if config.ref_model_sync_steps else None  # training changed it
    return load_start(config, model, checkpoint, world, dtype, saved)


@disable_progress_bars()
def load_start(
    config: Any, model: LanguageModel, checkpoint: Path | None, world: World, dtype: str = "", saved: Path | None = None
) -> LanguageModel:
    """Return the run's initial model, with the precision `dtype` and the weights in the folder `saved` if these are given.

    If `model` has a new LoRA adapter, return `model` itself: without its adapter it is the initial model.
    """
    dtype = dtype or config.model.dtype
    if model.is_own_reference:
        return model
    if checkpoint is None and dtype == config.model.dtype and not world.lockstep:
        return model.frozen_copy()
    return load_frozen(replace(config.model, dtype=dtype), config.run, saved, world)


@disable_progress_bars()
def load_frozen(settings: Model, run: Run, checkpoint: Path | None, world: World) -> LanguageModel:
    """Load a model with `load_model`, and freeze it."""
    model = load_model(settings, run, checkpoint, world)
    if not world.lockstep:
        return model.frozen_copy()
    model.network.requires_grad_(False)
    return model


@disable_progress_bars()
def load_critic(config: OnlineConfig, model: LanguageModel, checkpoint: Path | None, world: World = ALONE) -> ScalarModel:
    """Load a separate critic: from `checkpoint`, else `config.critic`, else the policy's initial model. New heads start at 0."""
    saved = SavedWeights.of(checkpoint, "critic")
    start = replace(config.model, path=config.critic, revision="") if config.critic else config.model
    start = replace(start, quantize_base="")  # only the policy's base is quantised; a critic trains all its weights
    made = scalar_model.load(
        str(saved.full or locate(start)),
        fresh_head="zero" if saved.full is None else "refuse",
        **_options(config.model, config.run, world),
    )
    if not made.per_token:
        raise UserError(
            f"The critic {config.critic!r} scores only whole texts, not each token; give a causal language model as the critic."
        )
    if made.tokenizer.get_vocab() != model.tokenizer.get_vocab():
        raise UserError(
            f"The critic {config.critic!r} and the policy have different tokenizers; give a critic of the same model family."
        )
    load_shard(made, world, machine.device(config.run), saved.shards)
    _choose_kernels(made, config.model, config.run)
    return made


def configure_chat(
    tokenizer: PreTrainedTokenizerBase, settings: Model, checkpoint: Path | None = None, network: Any = None
) -> None:
    """Set the tokenizer's chat template and EOS from the settings. A template that prints a date prints the run's first day."""
    if settings.eos_token:
        words = tokenizer.get_vocab()
        if settings.eos_token not in words:
            near = nearest(settings.eos_token, words) or "."
            raise UserError(f"eos_token {settings.eos_token!r} is not a token of the model's tokenizer{near}")
        tokenizer.eos_token = settings.eos_token
    if settings.chat_template_path:
        tokenizer.chat_template = _read_template(settings.chat_template_path)
    began = _first_day(checkpoint) if checkpoint is not None else None
    rows = size(network.config, "vocabulary") if network is not None else 0
    today = date.fromisoformat(began) if began else date.today()
    kwargs = template_kwargs(settings.chat_template_kwargs)
    check_arguments(templates_of(tokenizer), kwargs)
    set_render_settings(tokenizer, kwargs, today, rows)


def _first_day(checkpoint: Path) -> str | None:
    """Return the run's first day from the manifest in `checkpoint` or its parent folder; None if there is no manifest or day."""
    whole = next((folder for folder in (checkpoint, checkpoint.parent) if (folder / MANIFEST).exists()), None)
    day: str | None = None if whole is None else json.loads((whole / MANIFEST).read_text()).get("date")
    return day


def template_kwargs(given: str | Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the chat template, given as a mapping or as JSON text."""
    wanted = "give an object, such as '{\"enable_thinking\": false}'"
    try:
        kwargs = json.loads(given or "{}") if isinstance(given, str) else given
    except ValueError as error:
        raise UserError(f"chat_template_kwargs {given!r} is not JSON ({error}); {wanted}.") from None
    if not isinstance(kwargs, Mapping):
        raise UserError(f"chat_template_kwargs is {kind_of(kwargs)}; {wanted}.")
    return dict(kwargs)


def _read_template(path: str) -> Any:
    """Read a chat template: from a Jinja file, from chat_template.jinja in a folder, or from the tokenizer of a model."""
    place = Path(path).expanduser()
    place = place / "chat_template.jinja" if (place / "chat_template.jinja").is_file() else place
    if place.suffix == ".jinja" and not place.is_file():
        raise UserError(f"There is no file {path!r}; set chat_template_path to a Jinja file, or to a model that has a template.")
    try:
        if place.is_file():
            return place.read_text(encoding="utf-8")
        found = read_tokenizer(path).chat_template
    except (OSError, ValueError) as error:
        raise UserError(
            f"chat_template_path {path!r} cannot be read ({reason_of(error)}); set it to a Jinja file or a model."
        ) from error
    if not found:
        raise UserError(
            f"The tokenizer of {path!r} has no chat template; set chat_template_path to a Jinja file or another model."
        )
    return found
