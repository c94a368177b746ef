"""Conversion of a TRL script into a method and settings: its configuration, and the trainer's other arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from psigrad.compat.conversion import Conversion, translated, without_usual

_TOKENIZER = "pass this object to psigrad.train as tokenizer="
# Arguments of a trainer -> advice on the equivalent in psigrad.
_LOOK_AT = {
    "environment_factory": "write a class with reset(row) and step(text) instead; see docs/multi_turn.md",
    "callbacks": "pass the callbacks as callbacks=[…] or --callbacks file.py:Class",
    "processing_class": _TOKENIZER,
    "tokenizer": _TOKENIZER,
}


class Unevaluated(str):
    """The source text of an expression whose value is known only when the script runs."""


@dataclass
class TrlScript:
    """The contents of a TRL script: its configuration's class and values, adapter, trainer's arguments, and unread parts."""

    config: str
    values: dict[str, Any] = field(default_factory=dict)
    lora: dict[str, Any] | None = None
    trainer: dict[str, Any] = field(default_factory=dict)
    look_at: list[str] = field(default_factory=list)


def convert(script: TrlScript) -> Conversion:
    """Return the settings that train as TRL would: its defaults, the script's values over them, and the trainer's arguments.

    Raises `UserError` if the batch sizes do not fit together.
    """
    made = translated(script.config, script.values, held_out=bool(script.trainer.get("eval_dataset")))
    made.look_at += script.look_at
    _take_trainer(script, made)
    if {"reward", "reward_model"} <= made.settings.keys():
        made.differs.append("psigrad orders its rewards: all functions first, then the models.")
    return without_usual(made)


def _take_trainer(script: TrlScript, made: Conversion) -> None:
    """Convert the trainer's arguments besides its configuration."""
    s, trainer = made.settings, script.trainer
    for name, value in trainer.items():
        if name in ("model", "model_name_or_path") and _is_text(value):
            s["model.path"] = value
        elif name in ("ref_model", "teacher_model"):
            if _is_text(value):
                s["reference"] = value
            elif value is not None:
                made.look_at.append(f"{name}={value}: set reference to the folder or hub name of this model.")
        elif name in ("train_dataset", "eval_dataset"):
            if value is not None:
                _take_dataset(value, "eval_" if name == "eval_dataset" else "", name, made)
        elif name in ("reward_funcs", "reward_model_name_or_path"):
            _take_rewards(value if isinstance(value, list) else [value], made)
        elif name == "tools":
            s["tools"] = [str(tool) for tool in value]
        elif name in ("processing_class", "tokenizer") and value in (s.get("model.path"), trainer.get("model")):
            continue
        elif value is not None or name in _LOOK_AT:
            made.look_at.append(f"{name}={value}: {_LOOK_AT.get(name, 'psigrad has no setting for it')}.")
    if script.lora is not None:
        _take_adapter(script.lora, made)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and not isinstance(value, Unevaluated)


def _take_dataset(value: Any, prefix: str, name: str, made: Conversion) -> None:
    value = {"dataset": value} if _is_text(value) else value
    if not isinstance(value, dict) or isinstance(value.get("dataset"), Unevaluated):
        made.look_at.append(f"{name}={value}: give the name of a file, or pass the object to psigrad.train.")
        return
    if value.get("part") == "test":
        made.look_at.append(f"{name} is a random part of the dataset; psigrad also holds out random rows (eval_prompts).")
        return
    split, plain = value.get("split"), value["dataset"]
    if plain in ("json", "csv", "parquet"):  # the names of load_dataset's file formats
        plain = value.get("data_files")
        if isinstance(plain, dict):  # {split: file or files}; in psigrad a file has one split
            plain, split = plain.get(split or "train"), None
        if not all(_is_text(file) for file in (plain if isinstance(plain, list) else [plain])):
            made.look_at.append(f"{name}: set data.{prefix}dataset to the file that load_dataset reads.")
            return
    made.settings[f"data.{prefix}dataset"] = f"{plain}:{value['config']}" if value.get("config") else plain
    if _is_text(split):
        made.settings[f"data.{prefix}split"] = split


def _take_rewards(given: list[Any], made: Conversion) -> None:
    functions = [one for one in given if isinstance(one, dict) or (_is_text(one) and ":" in one)]
    models = [one for one in given if _is_text(one) and ":" not in one]
    made.settings |= {name: found for name, found in (("reward", functions), ("reward_model", models)) if found}
    made.look_at += [f"reward_funcs has {one}: give it as module:function." for one in given if isinstance(one, Unevaluated)]


def _take_adapter(lora: Mapping[str, Any], made: Conversion) -> None:
    """Add the settings for a peft LoraConfig with these arguments to `made`."""
    ours = {"r": "lora_rank", "target_modules": "lora_target_modules", "modules_to_save": "lora_modules_to_save"}
    usual = {"r": 8, "lora_alpha": 8, "lora_dropout": 0.0}  # peft's
    for name, value in {**usual, **lora}.items():
        if name in (*ours, "lora_alpha", "lora_dropout", "use_rslora", "use_dora") and value is not None:
            several = name.endswith(("modules", "modules_to_save")) and isinstance(value, str)
            made.settings[f"model.{ours.get(name, name)}"] = [value] if several else value
        elif name not in ("task_type", "bias", "inference_mode") or (name == "bias" and value != "none"):
            made.no_equal.append(f"LoraConfig({name}={value!r}): psigrad supports only LoRA, rsLoRA and DoRA on modules.")
    if "target_modules" not in lora:
        made.differs.append("Without target_modules peft adapts only a few kinds of modules; psigrad adapts every linear layer.")
