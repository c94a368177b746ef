"""TRL's settings as psigrad's: `psigrad from-trl` prints what this finds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from psigrad.compat.batch_sizes import BATCH
from psigrad.compat.other_answers import ANSWERS, NO_EQUAL
from psigrad.compat.other_names import VALUES, translated
from psigrad.compat.other_names import ours as our_name
from psigrad.compat.trl_fields import COMPUTED, METHODS, outcome
from psigrad.compat.trl_script import TrlScript, Unread, complete
from psigrad.compat.trl_values import AGGREGATES, LINKS, LOSSES
from psigrad.config.load import flat_names, load, to_dict
from psigrad.config.methods import declaration
from psigrad.config.nested import Given, put
from psigrad.errors import UserError


@dataclass
class Conversion:
    """A method with its settings by dotted name, and what a reader must know."""

    method: str
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
        for part in ("algorithm", "loss"):
            if part in nested:
                nested[part] = {"preset": self.method, **nested[part]}
        return yaml.safe_dump(nested, sort_keys=False, allow_unicode=True)


def convert(found: TrlScript) -> Conversion:
    """The settings that train as TRL would. Raises `UserError` for fields that TRL does not have and values that cannot be."""
    values = complete(found)
    method, settings_class = METHODS[found.config]
    made = Conversion(method, look_at=list(found.look_at))
    _PARTS.get(found.config, _nothing)(values, made)
    rest, computed = {}, (*COMPUTED[""], *COMPUTED.get(found.config, ()))
    for name, value in values.items():
        if name == "dataset_config" or name in computed:
            continue
        said = outcome(found.config, name) or outcome("ModelConfig", name) or outcome("ScriptArguments", name)
        stated = name in found.values
        if name in VALUES and value not in [None, *VALUES[name]]:
            made.no_equal.append(f"{name}={value!r}: {ANSWERS.get(name, 'there is no such value')}.")
        elif said is None or said.kind == "mapped" or name in BATCH:
            rest[name] = value
        elif said.kind == "nothing" and stated:
            made.nothing.append(f"{name}: {said.why}.")
        elif said.kind == "no equal" and stated and value != NO_EQUAL.get(name, (None, ""))[0]:
            made.no_equal.append(f"{name}={value!r}: {said.why}.")
    _common(values, found, made)
    _given(found, made)
    made.settings |= _renamed(settings_class, rest, made)
    usual = to_dict(load(settings_class, flags=dict(declaration(made.method).defaults)))
    _check(settings_class, made)
    made.settings = {name: value for name, value in made.settings.items() if _at(usual, name) != value}
    return made


def _renamed(cls: type[Any], rest: Mapping[str, Any], made: Conversion) -> dict[str, Any]:
    """Fields of the same meaning under our names, batch sizes computed."""
    flat = {name: value for name, value in rest.items() if value is not None and name not in made.settings}
    known = [Given(name, value, "conversion") for name, value in made.settings.items()]
    given = [Given(our_name(cls, name), value, "conversion") for name, value in flat.items()]
    given = [one for one in given if one.name not in made.settings]
    sure = translated(cls, {}, [*known, *given])
    return {one.name: one.value for one in sure if _can_be(cls, one, made)}


def _can_be(cls: type[Any], one: Given, made: Conversion) -> bool:
    """Whether a setting takes the value; if not, the reason is among what has no equal."""
    if one.name not in dict(flat_names(cls)).values():
        return True
    try:
        load(cls, flags={one.name: one.value})
    except UserError as error:
        made.no_equal.append(str(error))
        return False
    return True


def _common(values: Mapping[str, Any], found: TrlScript, made: Conversion) -> None:
    """What every trainer's arguments share."""
    s = made.settings
    for name in ("save_total_limit",):
        if isinstance(values.get(name), int):
            s["run.save_total_limit"] = values[name]
    warmup = values.get("warmup_steps") or values.get("warmup_ratio")
    if isinstance(warmup, float) and 0 < warmup < 1 and (values.get("max_steps") or 0) > 0:
        s["optim.warmup_steps"] = math.ceil(warmup * values["max_steps"])
    elif isinstance(warmup, float) and 0 < warmup < 1:
        made.differs.append(f"Warm-up is {warmup:g} of all steps in TRL; give it in steps: warmup_steps.")
        s["optim.warmup_steps"] = 0
    if isinstance(values.get("ddp_timeout"), int | float):
        s["placement.timeout_minutes"] = values["ddp_timeout"] / 60
    if values.get("use_cpu"):
        s["run.device"] = "cpu"
    if values.get("activation_checkpointing") or values.get("gradient_checkpointing"):
        s["model.gradient_checkpointing"] = True
    options = {**(values.get("model_init_kwargs") or {})}
    dtype = str(options.pop("dtype", None) or options.pop("torch_dtype", None) or values.get("dtype") or "")
    if dtype in ("bfloat16", "float32"):
        s["model.dtype"] = dtype
    elif dtype and dtype != "auto":
        made.no_equal.append(f"dtype={dtype!r}: weights are float32 or bfloat16.")
    if values.get("bf16"):
        made.differs.append(
            "bf16=True computes in bfloat16 from float32 weights; dtype=bfloat16 keeps float32 masters beside them."
        )
    elif values.get("bf16") is None and not values.get("fp16") and found.config != "PPOConfig":
        made.differs.append("Without bf16=False TRL computes in bfloat16, psigrad in float32; dtype=bfloat16 comes near it.")
    options.pop("attn_implementation", None)
    if "revision" in options:
        s["model.revision"] = options.pop("revision")
    made.no_equal += [f"model_init_kwargs[{name!r}]={value!r}: psigrad loads models itself." for name, value in options.items()]
    if values.get("eval_strategy", "no") == "no" and not found.trainer.get("eval_dataset"):
        s["evaluation.eval_prompts"] = 0  # TRL holds nothing out
    if values.get("save_steps") and isinstance(values["save_steps"], float):
        made.no_equal.append(f"save_steps={values['save_steps']}: checkpoints are counted in steps.")
        s["run.save_steps"] = 0
    if found.config == "SFTConfig" and not values.get("assistant_only_loss"):
        made.differs.append("Rows of messages teach the assistant's turns alone; TRL teaches every token of them by default.")


def _given(found: TrlScript, made: Conversion) -> None:
    """What the trainer is given besides its configuration."""
    s, trainer = made.settings, found.trainer
    dataset_config = found.values.get("dataset_config")
    for name, value in trainer.items():
        if name in ("model", "model_name_or_path") and isinstance(value, str) and not isinstance(value, Unread):
            s["model.path"] = value
        elif name in ("ref_model", "teacher_model"):
            if value is not None:
                _or_look(value, "reference", name, made)
        elif name in ("train_dataset", "eval_dataset"):
            if value is not None:
                _dataset(value, "eval_" if name == "eval_dataset" else "", name, made)
        elif name in ("reward_funcs", "reward_model_name_or_path"):
            _rewards(value if isinstance(value, list) else [value], made)
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
    if dataset_config and found.values.get("dataset_name"):
        s["data.dataset"] = f"{found.values['dataset_name']}:{dataset_config}"
    if found.lora is not None:
        _lora(found.lora, made)


def _or_look(value: Any, setting: str, name: str, made: Conversion) -> None:
    if isinstance(value, str) and not isinstance(value, Unread):
        made.settings[setting] = value
    else:
        made.look_at.append(f"{name}={value}: give the folder or hub name of it as {setting}.")


def _dataset(value: Any, prefix: str, name: str, made: Conversion) -> None:
    if isinstance(value, str) and not isinstance(value, Unread):
        value = {"dataset": value}
    if not isinstance(value, dict) or isinstance(value.get("dataset"), Unread):
        made.look_at.append(f"{name}={value}: give the file, or call psigrad.train with the object.")
        return
    if value.get("part") == "test":
        made.look_at.append(f"{name} is a random part of the dataset; psigrad holds out its last eval_prompts rows.")
        return
    split, plain = value.get("split"), value["dataset"]
    if plain in ("json", "csv", "parquet"):  # load_dataset's readers of files
        plain = value.get("data_files")
        if isinstance(plain, dict):  # {split: file or files}; a file of ours has one split
            plain, split = plain.get(split or "train"), None
        files = plain if isinstance(plain, list) else [plain]
        if not all(isinstance(file, str) and not isinstance(file, Unread) for file in files):
            made.look_at.append(f"{name}: give the file of load_dataset as data.{prefix}dataset.")
            return
    made.settings[f"data.{prefix}dataset"] = f"{plain}:{value['config']}" if value.get("config") else plain
    if isinstance(split, str) and not isinstance(split, Unread):
        made.settings[f"data.{prefix}split"] = split


def _rewards(given: list[Any], made: Conversion) -> None:
    functions = [
        one for one in given if isinstance(one, dict) or (isinstance(one, str) and ":" in one and not isinstance(one, Unread))
    ]
    models = [one for one in given if isinstance(one, str) and ":" not in one and not isinstance(one, Unread)]
    if functions:
        made.settings["reward"] = functions
    if models:
        made.settings["reward_model"] = models
    made.look_at += [f"reward_funcs has {one}: name it as module:function." for one in given if isinstance(one, Unread)]
    made.differs += ["Reward models score after the reward functions, in that order."] if functions and models else []


def _lora(lora: Mapping[str, Any], made: Conversion) -> None:
    """A peft LoraConfig."""
    ours = {"r": "lora_rank", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout", "target_modules": "lora_target_modules",
            "use_rslora": "use_rslora", "use_dora": "use_dora", "modules_to_save": "lora_modules_to_save"}  # fmt: skip
    usual = {"r": 8, "lora_alpha": 8, "lora_dropout": 0.0}  # peft's
    for name, value in {**usual, **lora}.items():
        if name in ours and value is not None:
            several = name in ("target_modules", "modules_to_save")
            made.settings[f"model.{ours[name]}"] = [value] if several and isinstance(value, str) else value
        elif name not in ("task_type", "bias", "inference_mode") or (name == "bias" and value != "none"):
            made.no_equal.append(f"LoraConfig({name}={value!r}): psigrad trains LoRA, rsLoRA and DoRA on modules.")
    if "target_modules" not in lora:
        made.differs.append("Without target_modules peft adapts a few modules of each architecture; psigrad every linear layer.")


def _grpo(values: dict[str, Any], made: Conversion) -> None:
    """GRPO's losses are parts of one algorithm."""
    loss, s = values["loss_type"], made.settings
    aggregates = {**AGGREGATES, "sapo": "sequence_mean", "cispo": "token_mean"}
    if loss not in aggregates:
        made.no_equal.append(f"loss_type={loss!r}: there is no such aggregation; dapo stands in its place.")
    aggregate: Any = aggregates.get(loss, "token_mean")
    s["algorithm.aggregate"] = {"part": "fixed_length", "n": values["max_completion_length"]} if loss == "dr_grpo" else aggregate
    if loss == "bnpo":
        made.differs.append("bnpo divides by the tokens of each micro-batch, psigrad by those of the whole step.")
    s["algorithm.surrogate"] = _surrogate(values, loss)
    s["algorithm.ratio"] = {"token": "token", "sequence": "sequence"}.get(values["importance_sampling_level"], "token")
    scale = values["scale_rewards"]
    if values["multi_objective_aggregation"] == "normalize_then_sum":
        s["algorithm.psi"] = "decoupled_group_mean"
    elif scale == "batch":
        s["algorithm.psi"] = "group_mean_batch_std"
    else:
        s["algorithm.psi"] = {"part": "group_mean", "std": scale in (True, "group")}
    keep: list[Any] = ["not_truncated"] if values["mask_truncated_completions"] else []
    if values["top_entropy_quantile"] < 1:
        keep.append({"part": "top_entropy", "share": values["top_entropy_quantile"]})
    if keep:
        s["algorithm.keep"] = keep
    if values["entropy_coef"]:
        s["algorithm.entropy"] = {"coefficient": values["entropy_coef"]}
    kl = {
        "where": "loss",
        "estimator": "k3",
        "coefficient": values["beta"],
        "importance_weighted": values["use_bias_correction_kl"],
    }
    s["algorithm.kl"] = kl if values["beta"] else None
    if values["use_vllm"]:
        s["sampling.sampler"] = "vllm"
        s["algorithm.correction"] = _correction(values) if values["vllm_importance_sampling_correction"] else None


def _surrogate(values: Mapping[str, Any], loss: str) -> dict[str, Any]:
    low = values["epsilon"]
    high = low if values["epsilon_high"] is None else values["epsilon_high"]
    surrogate: dict[str, Any] = {"part": "clip", "low": low, "high": high}
    if loss == "cispo":
        surrogate = {"part": "truncated_weight", "cap": high}
    elif loss == "sapo":
        surrogate = {"part": "soft_clip", "positive": values["sapo_temperature_pos"], "negative": values["sapo_temperature_neg"]}
    elif values["delta"] is not None:
        surrogate = {"part": "dual_clip", "low": low, "high": high, "bound": values["delta"]}
    if values["off_policy_mask_threshold"] is not None:
        surrogate = {"part": "off_policy_mask", "surrogate": surrogate, "delta": values["off_policy_mask_threshold"]}
    return surrogate


def _correction(values: Mapping[str, Any]) -> dict[str, Any]:
    level, _, form = str(values["vllm_importance_sampling_mode"]).partition("_")
    part = "masked_importance" if form == "mask" else "truncated_importance"
    floor = values["vllm_importance_sampling_clip_min"] or 0.0
    return {"part": part, "level": level, "cap": values["vllm_importance_sampling_clip_max"], "floor": floor}


def _rloo(values: dict[str, Any], made: Conversion) -> None:
    s, high = made.settings, values["epsilon_high"]
    s["algorithm.surrogate"] = {"part": "clip", "low": values["epsilon"], "high": values["epsilon"] if high is None else high}
    s["algorithm.kl"] = {"where": "reward", "estimator": "k1", "coefficient": values["beta"]} if values["beta"] else None
    if values["normalize_advantages"]:
        s["algorithm.psi"] = {"part": "whitened", "psi": "leave_one_out"}
    if values["mask_truncated_completions"]:
        s["algorithm.keep"] = ["not_truncated"]


def _preference(values: dict[str, Any], made: Conversion) -> None:
    losses = values["loss_type"] if isinstance(values["loss_type"], list) else [values["loss_type"]]
    s, first = made.settings, losses[0]
    if first not in LOSSES:
        made.no_equal.append(f"loss_type={first!r}: there is no such loss; dpo stands in its place.")
    made.method = LOSSES.get(first, "dpo")
    if first in LINKS:
        s["loss.link"] = first
    if "sft" in losses[1:]:
        s["loss.sft"] = (values.get("loss_weights") or [1.0] * len(losses))[losses.index("sft")]
        values.pop("loss_weights", None)
    made.no_equal += [f"loss_type has {other!r} too: one loss is trained." for other in losses[1:] if other != "sft"]
    s["loss.beta"] = values["beta"]
    if values["label_smoothing"]:
        s["loss.link"] = {"part": "robust" if first == "robust" else "logistic", "label_smoothing": values["label_smoothing"]}


def _kto(values: dict[str, Any], made: Conversion) -> None:
    made.settings |= {f"loss.{name}": values[name] for name in ("beta", "desirable_weight", "undesirable_weight")}
    if values["loss_type"] != "kto":
        made.no_equal.append(f"loss_type={values['loss_type']!r}: KTO with its reference point is what there is.")


def _orpo(values: dict[str, Any], made: Conversion) -> None:
    made.settings["loss.preference"] = values["beta"]


def _cpo(values: dict[str, Any], made: Conversion) -> None:
    simpo = values["loss_type"] == "simpo"
    made.settings |= {"loss.beta": values["beta"], "loss.sft": values["cpo_alpha"]}
    made.settings["loss.margin"] = values["simpo_gamma"] if simpo else 0.0
    if not simpo:
        made.differs.append("CPO sums log-probabilities over a completion; SimPO's score is their mean per token.")


def _online_dpo(values: dict[str, Any], made: Conversion) -> None:
    beta = values["beta"][0] if isinstance(values["beta"], list) else values["beta"]
    made.settings |= {"algorithm.loss.beta": beta, "num_generations": 2}
    if values.get("missing_eos_penalty"):
        made.settings["missing_eos_penalty"] = values["missing_eos_penalty"]
    if values.get("reward_model_path"):
        made.settings["reward_model"] = [values["reward_model_path"]]


def _distill(values: dict[str, Any], made: Conversion) -> None:
    beta = values["beta"]
    estimator = {0.0: "exact_forward", 1.0: "exact"}.get(float(beta), "exact_js")
    made.settings["algorithm.kl"] = {"estimator": estimator, **({"mixture": beta} if estimator == "exact_js" else {})}


def _ppo(values: dict[str, Any], made: Conversion) -> None:
    """PPOConfig of TRL before 1.0."""
    v = {"kl_coef": 0.05, "cliprange": 0.2, "cliprange_value": 0.2, "vf_coef": 0.1, "gamma": 1.0, "lam": 0.95, **values}
    made.settings |= {
        "algorithm.psi": {"part": "whitened", "psi": {"part": "gae", "gamma": v["gamma"], "lam": v["lam"]}},
        "algorithm.surrogate": {"part": "clip", "low": v["cliprange"], "high": v["cliprange"]},
        "algorithm.kl": {"where": "reward", "estimator": "k1", "coefficient": v["kl_coef"]},
        "algorithm.critic": {"coefficient": v["vf_coef"], "clip": v["cliprange_value"]},
    }
    if values.get("reward_model_path"):
        made.settings["reward_model"] = [values["reward_model_path"]]


def _nothing(values: dict[str, Any], made: Conversion) -> None:
    if "loss_type" in values and values["loss_type"] != "nll":
        made.no_equal.append(f"loss_type={values['loss_type']!r}: SFT is cross-entropy.")


_PARTS = {
    "GRPOConfig": _grpo, "RLOOConfig": _rloo, "DPOConfig": _preference, "KTOConfig": _kto, "ORPOConfig": _orpo, "CPOConfig": _cpo,
    "OnlineDPOConfig": _online_dpo, "DistillationConfig": _distill, "PPOConfig": _ppo,
}  # fmt: skip


def _check(cls: type[Any], made: Conversion) -> None:
    """The settings load, and their parts fit."""
    from psigrad.config import algorithms

    config: Any = load(cls, flags={**declaration(made.method).defaults, **made.settings})
    if hasattr(config, "algorithm"):
        algorithms.resolve_online(config.algorithm)
    elif hasattr(config, "loss"):
        algorithms.resolve_loss(config.loss)


def _at(usual: Mapping[str, Any], name: str) -> Any:
    held: Any = usual
    for part in name.split("."):
        held = held.get(part, ...) if isinstance(held, Mapping) else ...
    return held
