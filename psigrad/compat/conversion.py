"""Conversion of configuration objects of TRL's trainers into a method and settings of psigrad."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import yaml

from psigrad.compat.table import NOTHING, TABLE
from psigrad.compat.translate import DEFAULT, Translation, is_known, one_value, refusal, translate
from psigrad.compat.trl import DEFAULTS, FIXED, METHODS
from psigrad.config.methods import declaration, other_methods
from psigrad.config.nested import GivenSetting, names_of, put, value_below
from psigrad.errors import UserError, kind_of

# The fields that TRL computes from others if they are not given.
_DERIVED = ("generation_batch_size", "steps_per_generation")


@dataclass
class Conversion:
    """A method with its settings by dotted name, and notes for the user."""

    method: str
    trainer: str
    """The method of TRL's trainer. `method` differs from it if psigrad has a separate method for the configuration's loss."""
    settings: dict[str, Any] = field(default_factory=dict)
    differs: list[str] = field(default_factory=list)
    """Notes on small differences in training from TRL."""
    no_equal: list[str] = field(default_factory=list)
    nothing: list[str] = field(default_factory=list)
    look_at: list[str] = field(default_factory=list)

    def yaml(self) -> str:
        """Return the settings as YAML, for a file that --config reads."""
        nested: dict[str, Any] = {}
        for name, value in self.settings.items():
            put(nested, name, value, "conversion")
        changed = nested.keys() & {"algorithm", "loss"}
        return yaml.safe_dump(nested | dict.fromkeys(changed, self.spec), sort_keys=False, allow_unicode=True)

    @property
    def spec(self) -> str | dict[str, Any]:
        """The method's name, or a mapping that also has its parts that differ from the defaults."""
        parts: dict[str, Any] = {}
        for name, value in self.settings.items():
            first, _, rest = name.partition(".")
            if first in ("algorithm", "loss"):
                put(parts, f"algorithm.{rest}", value, "conversion")
        return {"preset": self.method, **parts["algorithm"]} if parts else self.method


def convert_object(args: Any) -> Conversion:
    """Return the settings that train as TRL would with the configuration `args`.

    Only fields that differ from those of a new object of the class count as given. Raises `UserError` if `args` is not a TRL
    configuration, or if a given field has no equivalent.
    """
    name = type(args).__name__
    if name not in METHODS or not hasattr(args, "per_device_train_batch_size"):
        raise UserError(
            f"args is {kind_of(args)}; expected one of TRL's {', '.join(METHODS)}; give other settings as keyword arguments."
        )
    fresh = type(args)(use_cpu=args.use_cpu, bf16=args.bf16, fp16=args.fp16)  # defaults differ between GPU and CPU
    values: dict[str, Any] = {"bf16": bool(args.bf16), "use_cpu": args.use_cpu}
    for option, default in {**DEFAULTS[name], **{f.name: getattr(fresh, f.name) for f in fields(fresh)}}.items():
        value, usual = (one.value if isinstance(one, enum.Enum) else one for one in (getattr(args, option, default), default))
        if value != usual and (is_known(option) or option in names_of(METHODS[name][1])):
            values[option] = value
    if getattr(args, "steps_per_generation", None) == args.gradient_accumulation_steps:
        values = {option: value for option, value in values.items() if option not in _DERIVED}
    made = without_usual(translated(name, values))
    if made.no_equal:
        raise UserError(f"args has options without an equivalent in psigrad. {' '.join(made.no_equal)} Remove them from {name}.")
    return made


def translated(config: str, values: Mapping[str, Any], *, held_out: bool = False) -> Conversion:
    """Return the settings that train as TRL would with the configuration class `config`, with `values` over its defaults.

    `held_out` is True if the trainer gets held-out rows. Raises `UserError` if the batch sizes do not fit together.
    """
    method, cls = METHODS[config]
    usual = {**DEFAULTS[config], **FIXED.get(config, {})}
    if not values.get("sync_ref_model"):
        values = {name: value for name, value in values.items() if name != "ref_model_sync_steps"}  # TRL reads it only then
    given = [GivenSetting(name, value, DEFAULT) for name, value in usual.items() if name not in values and value is not None]
    given += [GivenSetting(name, value, config) for name, value in values.items() if value is not None]
    translation = translate(cls, declaration(method).defaults, given)
    settings = {one.name: one.value for one in translation.settings}
    made = Conversion(settings.pop("loss.preset", method), method, settings)
    _tell(cls, translation, made)
    if {**usual, **values}.get("eval_strategy", "no") == "no" and not held_out:
        made.settings["evaluation.eval_prompts"] = 0  # TRL holds nothing out
    made.differs += _differences(config, {**usual, **values})
    return made


def without_usual(made: Conversion) -> Conversion:
    """Return the conversion without the settings that equal the method's defaults."""
    cls, below = declaration(made.trainer).settings, declaration(made.method).defaults
    kept = {
        name: value
        for name, value in made.settings.items()
        if name.startswith(("algorithm.", "loss.")) or _as_tuple(value_below(cls, below, name)) != _as_tuple(value)
    }
    return replace(made, settings=kept)


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _tell(cls: type[Any], translation: Translation, made: Conversion) -> None:
    """Remove the settings that the method does not have from `made`, and add to it notes on all that was not converted."""
    if made.settings.get("run.max_steps"):
        made.settings.pop("run.num_train_epochs", None)  # TRL's default, which max_steps overrides
    for one, sentence in translation.refused:
        row = TABLE.get(one.name, NOTHING)
        if one.name in ("warmup_ratio", "optim.warmup_steps"):
            made.differs.append(sentence)  # a share of the run cannot be converted, but must not stop the conversion
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


def _differences(config: str, values: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each way in which psigrad trains differently from TRL although the settings are equal."""
    if values.get("bf16"):
        yield (
            "With bf16=True TRL keeps float32 weights and computes in bfloat16. With dtype=bfloat16 psigrad keeps bfloat16 "
            "weights, and updates float32 copies of them."
        )
    elif values.get("bf16") is None and not values.get("fp16") and config != "PPOConfig":
        yield "TRL computes in bfloat16 unless bf16=False; psigrad computes in float32 on a CPU. Set dtype=bfloat16 to match."
    if config == "SFTConfig" and not values.get("assistant_only_loss"):
        yield "In rows of messages psigrad trains only on the assistant's turns; TRL by default trains on every token."
    if config == "GRPOConfig" and values.get("entropy_coef"):
        yield "TRL's entropy bonus is a mean over each micro-batch, psigrad's over the whole step."
    if values.get("top_entropy_quantile", 1.0) != 1.0:
        yield (
            "TRL's top_entropy_quantile ranks the tokens of each micro-batch in each pass; psigrad ranks the tokens of "
            "the whole step once."
        )
    if values.get("importance_sampling_level") == "sequence" and values.get("beta") and values.get("use_bias_correction_kl"):
        yield "TRL weights the KL term by the ratio of the whole completion, psigrad by the ratio of each token."
    if values.get("loss_type") in ("dapo", "cispo", "vespo") and values.get("steps_per_generation", 0) > values.get(
        "gradient_accumulation_steps", 1
    ):
        yield "TRL divides each update by the mean number of tokens per update, psigrad by the number of tokens in that update."
    if values.get("loss_type") == "bnpo":
        yield "TRL's bnpo divides by the number of tokens in each micro-batch, psigrad by the number in the whole step."
    if config == "CPOConfig" and values["loss_type"] != "simpo":
        yield "TRL's CPO sums log-probs over a completion; psigrad's simpo takes their mean per token."
