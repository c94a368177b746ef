"""TRL's trainers as psigrad's methods: from an object of their configuration, or what a script says and gives them."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import yaml

from psigrad.compat.table import NOTHING, TABLE
from psigrad.compat.translate import DEFAULT, Translation, is_known, one_value, refusal, translate
from psigrad.compat.trl import DEFAULTS, FIXED, METHODS
from psigrad.config.methods import declaration, other_methods
from psigrad.config.nested import Given, names_of, put, value_below
from psigrad.errors import UserError, kind_of

# What TRL computes from other fields, where nobody gave them.
_DERIVED = ("generation_batch_size", "steps_per_generation")


class Unevaluated(str):
    """The source of an expression whose value only a run of the script would tell."""


@dataclass
class TrlScript:
    """TRL's configuration class, its values and those of an adapter, what the trainer is given, and what could not be read."""

    config: str
    values: dict[str, Any] = field(default_factory=dict)
    lora: dict[str, Any] | None = None
    trainer: dict[str, Any] = field(default_factory=dict)
    look_at: list[str] = field(default_factory=list)


@dataclass
class Conversion:
    """A method with its settings by dotted name, and what a reader must know."""

    method: str
    trainer: str
    """The method of TRL's trainer, whose loss may make it another one."""
    settings: dict[str, Any] = field(default_factory=dict)
    differs: list[str] = field(default_factory=list)
    """What is trained a little otherwise."""
    no_equal: list[str] = field(default_factory=list)
    nothing: list[str] = field(default_factory=list)
    look_at: list[str] = field(default_factory=list)

    def yaml(self) -> str:
        """The settings as a file for --config."""
        nested: dict[str, Any] = {}
        for name, value in self.settings.items():
            put(nested, name, value, "conversion")
        changed = nested.keys() & {"algorithm", "loss"}
        return yaml.safe_dump(nested | dict.fromkeys(changed, self.spec), sort_keys=False, allow_unicode=True)

    @property
    def spec(self) -> str | dict[str, Any]:
        """The method, with the parts of it that are other than usual."""
        parts: dict[str, Any] = {}
        for name, value in self.settings.items():
            first, _, rest = name.partition(".")
            if first in ("algorithm", "loss"):
                put(parts, f"algorithm.{rest}", value, "conversion")
        return {"preset": self.method, **parts["algorithm"]} if parts else self.method


def convert_object(args: Any) -> Conversion:
    """The settings that train as TRL would with the configuration `args`. Only what differs from a fresh object was asked for.

    Raises `UserError` where `args` is no configuration of TRL, and where what it asks for has no equal.
    """
    name = type(args).__name__
    if name not in METHODS or not hasattr(args, "per_device_train_batch_size"):
        raise UserError(
            f"args is {kind_of(args)}; expected a configuration of TRL, such as {', '.join(METHODS)}, or settings by name."
        )
    fresh = type(args)(use_cpu=args.use_cpu, bf16=args.bf16, fp16=args.fp16)  # a GPU's defaults are not a CPU's
    values: dict[str, Any] = {"bf16": bool(args.bf16), "use_cpu": args.use_cpu}
    for option, default in {**DEFAULTS[name], **{f.name: getattr(fresh, f.name) for f in fields(fresh)}}.items():
        value, usual = (one.value if isinstance(one, enum.Enum) else one for one in (getattr(args, option, default), default))
        if value != usual and (is_known(option) or option in names_of(METHODS[name][1])):
            values[option] = value
    if getattr(args, "steps_per_generation", None) == args.gradient_accumulation_steps:
        values = {option: value for option, value in values.items() if option not in _DERIVED}
    made = convert(TrlScript(name, values))
    if made.no_equal:
        raise UserError(f"args asks for what psigrad has no equal of: {' '.join(made.no_equal)} Leave it out of {name}.")
    return made


def convert(script: TrlScript) -> Conversion:
    """The settings that train as TRL would: its defaults, what the script says over them, and what the trainer is given.

    Raises `UserError` where batch sizes make no step.
    """
    method, cls = METHODS[script.config]
    usual = {**DEFAULTS[script.config], **FIXED.get(script.config, {})}
    given = [Given(name, value, DEFAULT) for name, value in usual.items() if name not in script.values and value is not None]
    given += [Given(name, value, script.config) for name, value in script.values.items() if value is not None]
    translation = translate(cls, declaration(method).defaults, given)
    settings = {one.name: one.value for one in translation.settings}
    made = Conversion(settings.pop("loss.preset", method), method, settings, look_at=list(script.look_at))
    _tell(cls, translation, made)
    _tell_differences({**usual, **script.values}, script, made)
    _take_trainer(script, made)
    if {"reward", "reward_model"} <= made.settings.keys():
        made.differs.append("Reward models score after the reward functions, in that order.")
    below = declaration(made.method).defaults
    made.settings = {
        name: value
        for name, value in made.settings.items()
        if name.startswith(("algorithm.", "loss.")) or _as_tuple(value_below(cls, below, name)) != _as_tuple(value)
    }
    return made


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _tell(cls: type[Any], translation: Translation, made: Conversion) -> None:
    """What was not taken, and why; what is no setting of the method is none of the settings."""
    if made.settings.get("run.max_steps"):
        made.settings.pop("run.num_train_epochs", None)  # a default of TRL's, which its max_steps overrides
    for one, sentence in translation.refused:
        row = TABLE.get(one.name, NOTHING)
        if one.name in ("warmup_ratio", "optim.warmup_steps"):
            made.differs.append(sentence)  # TRL's share of the run is found by trying: it stops no conversion
        elif row.why and sentence == refusal(one.name, one_value(one.value)):
            made.no_equal.append(f"{one.name}={one.value!r}: {row.why}.")
        elif one.source != DEFAULT:
            made.no_equal.append(sentence)
    for one in translation.needless:
        if TABLE[one.name].needless:
            made.nothing.append(f"{one.name}: {TABLE[one.name].why}.")
    for name in [name for name in made.settings if name.partition(".")[0] not in ("algorithm", "loss")]:
        if name not in names_of(cls):
            value = made.settings.pop(name)
            made.no_equal.append(f"{name}={value!r}{other_methods(cls, name) or f': {made.method} has no such setting.'}")


def _tell_differences(values: Mapping[str, Any], script: TrlScript, made: Conversion) -> None:
    """What trains otherwise under the same settings, and what TRL does that no field of its says."""
    if values.get("bf16"):
        made.differs.append(
            "bf16=True computes in bfloat16 from float32 weights; dtype=bfloat16 keeps float32 masters beside them."
        )
    elif values.get("bf16") is None and not values.get("fp16") and script.config != "PPOConfig":
        made.differs.append(
            "Without bf16=False TRL computes in bfloat16, psigrad on a CPU in float32; dtype=bfloat16 comes near it."
        )
    if values.get("eval_strategy", "no") == "no" and not script.trainer.get("eval_dataset"):
        made.settings["evaluation.eval_prompts"] = 0  # TRL holds nothing out
    if script.config == "SFTConfig" and not values.get("assistant_only_loss"):
        made.differs.append("Rows of messages teach the assistant's turns alone; TRL teaches every token of them by default.")
    if values.get("loss_type") == "bnpo":
        made.differs.append("bnpo divides by the tokens of each micro-batch, psigrad by those of the whole step.")
    if script.config == "CPOConfig" and values["loss_type"] != "simpo":
        made.differs.append("CPO sums log-probabilities over a completion; SimPO's score is their mean per token.")


def _take_trainer(script: TrlScript, made: Conversion) -> None:
    """What the trainer is given besides its configuration."""
    s, trainer = made.settings, script.trainer
    for name, value in trainer.items():
        if name in ("model", "model_name_or_path") and _is_text(value):
            s["model.path"] = value
        elif name in ("ref_model", "teacher_model"):
            if _is_text(value):
                s["reference"] = value
            elif value is not None:
                made.look_at.append(f"{name}={value}: give the folder or hub name of it as reference.")
        elif name in ("train_dataset", "eval_dataset"):
            if value is not None:
                _take_dataset(value, "eval_" if name == "eval_dataset" else "", name, made)
        elif name in ("reward_funcs", "reward_model_name_or_path"):
            _take_rewards(value if isinstance(value, list) else [value], made)
        elif name == "tools":
            s["tools"] = [str(tool) for tool in value]
        elif name == "environment_factory":
            made.look_at.append(
                f"environment_factory={value}: an environment here has reset(row) and step(text); see docs/multi_turn.md."
            )
        elif name == "callbacks":
            made.look_at.append(f"callbacks={value}: give them as callbacks=[…] or --callbacks file.py:Class.")
        elif name in ("processing_class", "tokenizer"):
            if value != s.get("model.path") and value != trainer.get("model"):
                made.look_at.append(f"{name}={value}: psigrad.train takes it as tokenizer=.")
        elif value is not None:
            made.look_at.append(f"{name}={value}: this goes into no setting.")
    if script.lora is not None:
        _take_adapter(script.lora, made)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and not isinstance(value, Unevaluated)


def _take_dataset(value: Any, prefix: str, name: str, made: Conversion) -> None:
    value = {"dataset": value} if _is_text(value) else value
    if not isinstance(value, dict) or isinstance(value.get("dataset"), Unevaluated):
        made.look_at.append(f"{name}={value}: give the file, or call psigrad.train with the object.")
        return
    if value.get("part") == "test":
        made.look_at.append(f"{name} is a random part of the dataset; psigrad holds out eval_prompts rows, drawn at random too.")
        return
    split, plain = value.get("split"), value["dataset"]
    if plain in ("json", "csv", "parquet"):  # load_dataset's readers of files
        plain = value.get("data_files")
        if isinstance(plain, dict):  # {split: file or files}; a file of ours has one split
            plain, split = plain.get(split or "train"), None
        if not all(_is_text(file) for file in (plain if isinstance(plain, list) else [plain])):
            made.look_at.append(f"{name}: give the file of load_dataset as data.{prefix}dataset.")
            return
    made.settings[f"data.{prefix}dataset"] = f"{plain}:{value['config']}" if value.get("config") else plain
    if _is_text(split):
        made.settings[f"data.{prefix}split"] = split


def _take_rewards(given: list[Any], made: Conversion) -> None:
    functions = [one for one in given if isinstance(one, dict) or (_is_text(one) and ":" in one)]
    models = [one for one in given if _is_text(one) and ":" not in one]
    made.settings |= {name: found for name, found in (("reward", functions), ("reward_model", models)) if found}
    made.look_at += [f"reward_funcs has {one}: name it as module:function." for one in given if isinstance(one, Unevaluated)]


def _take_adapter(lora: Mapping[str, Any], made: Conversion) -> None:
    """A peft LoraConfig."""
    ours = {"r": "lora_rank", "target_modules": "lora_target_modules", "modules_to_save": "lora_modules_to_save"}
    usual = {"r": 8, "lora_alpha": 8, "lora_dropout": 0.0}  # peft's
    for name, value in {**usual, **lora}.items():
        if name in (*ours, "lora_alpha", "lora_dropout", "use_rslora", "use_dora") and value is not None:
            several = name.endswith(("modules", "modules_to_save")) and isinstance(value, str)
            made.settings[f"model.{ours.get(name, name)}"] = [value] if several else value
        elif name not in ("task_type", "bias", "inference_mode") or (name == "bias" and value != "none"):
            made.no_equal.append(f"LoraConfig({name}={value!r}): psigrad trains LoRA, rsLoRA and DoRA on modules.")
    if "target_modules" not in lora:
        made.differs.append("Without target_modules peft adapts a few modules of each architecture; psigrad every linear layer.")
