"""What one entrance takes all take: each row of the table as a flag, in YAML, as a keyword, in TRL's object and in a script."""

from __future__ import annotations

import dataclasses
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import trl
import yaml
from cases import repeat_for

from psigrad.cli import flags
from psigrad.compat.conversion import convert_object
from psigrad.compat.foreign_names import load, resolve_names
from psigrad.compat.table import TABLE, Entry
from psigrad.compat.translate import our_name
from psigrad.compat.trl import DEFAULTS, FIXED, METHODS
from psigrad.config import OnlineConfig, PreferenceConfig, SFTConfig
from psigrad.config.algorithms import resolve_loss, resolve_online
from psigrad.config.methods import declaration
from psigrad.config.nested import field_types, names_of
from psigrad.config.shortcuts import SHORTCUTS, shortcuts_of
from psigrad.control.settings import ControlConfig
from psigrad.errors import UserError
from psigrad.objective.parts import group_advantage
from psigrad.objective.parts.advantage import group_mean, leave_one_out, whitened
from psigrad.objective.parts.aggregate import fixed_length, sequence_mean, token_mean
from psigrad.objective.parts.off_policy import gamma_weight, off_policy_mask
from psigrad.objective.parts.ratio import masked_importance, truncated_importance
from psigrad.objective.parts.surrogate import clip, dual_clip, soft_clip, truncated_weight
from psigrad_extras.connect.trl_scripts import convert_file

EXPERIMENTAL = {"OnlineDPOConfig": "online_dpo", "ORPOConfig": "orpo", "CPOConfig": "cpo"}
CONFIGS = {
    name: getattr(trl, name, None) or getattr(importlib.import_module(f"trl.experimental.{EXPERIMENTAL[name]}"), name)
    for name in METHODS
    if name != "PPOConfig"
}
# Where the value that a row is tried with does not follow from the row.
SAMPLES = {
    "beta": 0.3, "epsilon": 0.3, "epsilon_high": 0.4, "ent_coef": 0.1, "gae_lambda": 0.5, "gamma": 0.9, "cliprange_value": 0.3,
    "scale_rewards": "none", "aggregate": "token_mean", "dynamic_sampling": True, "margin": 0.7, "sft_weight": 0.2,
    "algorithm": "a2c", "use_bias_correction_kl": False, "mask_truncated_completions": True, "top_entropy_quantile": 0.5,
    "importance_sampling_level": "sequence", "desirable_weight": 2.0, "undesirable_weight": 2.0, "label_smoothing": 0.2,
    "per_device_train_batch_size": 16, "gradient_accumulation_steps": 2, "steps_per_generation": 4, "generation_batch_size": 32,
    "data.train_batch_size": 64, "actor_rollout_ref.actor.ppo_mini_batch_size": 8, "custom_reward_function.path": "mine.py",
    "warmup_ratio": 0.1, "dataset_config": "main", "ddp_timeout": 60,
    "model_init_kwargs": {"dtype": "bfloat16", "revision": "v1"}, "reward_funcs": ["accuracy_reward", "mine.good"],
    "teacher_model_init_kwargs": {"dtype": "bfloat16"}, "loss_type": "cispo", "delta": 4.0, "off_policy_mask_threshold": 0.5,
    "sapo_temperature_pos": 2.0, "sapo_temperature_neg": 2.0, "vespo_k_pos": 1.0, "vespo_k_neg": 2.0, "vespo_lambda_pos": 2.0,
    "vespo_lambda_neg": 1.0, "multi_objective_aggregation": "normalize_then_sum",
    "normalize_advantages": True, "vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 5.0,
    "vllm_importance_sampling_clip_min": 0.5, "vllm_importance_sampling_correction": False, "loss_weights": [1.0, 0.5],
    "lr_scheduler_type": "cosine", "report_to": ["wandb"], "dtype": "bfloat16", "reward_model_path": "a/b",
    "reward_model_name_or_path": "a/b", "sampling.min_p": 0.1, "critic_learning_rate": 0.1,
}  # fmt: skip
# What a row needs beside it to mean anything.
BESIDE: dict[str, dict[str, Any]] = {
    **{name: {"use_vllm": True} for name in TABLE if name.startswith("vllm_importance_sampling_")},
    **{name: {"loss_type": name[:5].rstrip("_")} for name in TABLE if name.startswith(("sapo_", "vespo_"))},
    "dataset_config": {"dataset_name": "a/b"},
    "custom_reward_function.name": {"custom_reward_function.path": "mine.py"},
    "eval_strategy": {"eval_steps": 7},
    "loss_weights": {"loss_type": ["sigmoid", "sft"]},
}
CLASSES: dict[type[Any], str] = {OnlineConfig: "grpo", PreferenceConfig: "dpo", SFTConfig: "sft", ControlConfig: "control"}


def method_of(row: Entry) -> str:
    """A method that has what the row means."""
    named = {**dict.fromkeys(("gae_lambda", "gamma", "cliprange_value"), "ppo"), "margin": "simpo"}
    named |= dict.fromkeys(("sft_weight", "loss_weights"), "dpo")
    if row.library == "sb3" and row.means not in SHORTCUTS and row.name not in names_of(ControlConfig):
        return "control"
    if row.usual and row.name in names_of(OnlineConfig):
        return "dpo"
    if row.means in named or row.name in named:
        return named.get(row.means) or named[row.name]
    meant = {row.means} if row.means else {name for new in row.values.values() for name in new}
    for cls, method in CLASSES.items():
        if meant & {*names_of(cls).values(), *shortcuts_of(cls)}:
            return method
    return "grpo"


def settings_of(method: str) -> type[Any]:
    return ControlConfig if method == "control" else declaration(method).settings


def values_of(row: Entry, method: str) -> list[Any]:
    """Values that the row takes, and one that it does not."""
    if row.name in SAMPLES or row.means in SAMPLES:
        return [SAMPLES.get(row.name, SAMPLES.get(row.means))]
    if row.values or row.usual:
        return [*(value for value in row.values if value is not None), *row.refused, "unheard"]
    types = dict(field_types(settings_of(method)))
    kind = str(types.get(row.means, ""))
    return [next((value for word, value in (("bool", True), ("int", 4), ("float", 0.5)) if f"'{word}'" in kind), "a.jsonl")]


def outcome(read: Any, *given: Any) -> Any:
    """Settings with their method as an object, or what is said in their place."""
    try:
        return comparable(read(*given))
    except UserError as error:
        return str(error)


def comparable(config: Any) -> Any:
    if hasattr(config, "evaluation"):  # TRL holds nothing out, which no option of its says
        config = dataclasses.replace(config, evaluation=dataclasses.replace(config.evaluation, eval_prompts=0))
    if hasattr(config, "prompts_per_step"):
        return config, dataclasses.replace(config, algorithm=nameless(resolve_online(config.algorithm)))
    return (
        (config, dataclasses.replace(config, loss=nameless(resolve_loss(config.loss)))) if hasattr(config, "loss") else (config,)
    )


def nameless(method: Any) -> Any:
    inner = {"loss": nameless(method.loss)} if dataclasses.is_dataclass(getattr(method, "loss", None)) else {}
    return dataclasses.replace(method, name="", **inner)


def written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def by_flag(method: str, given: dict[str, Any]) -> Any:
    defaults = {} if method == "control" else declaration(method).defaults
    words = [word for name, value in given.items() for word in flag(name, value)]
    return flags.parse(settings_of(method), method, words, defaults)


def flag(name: str, value: Any) -> list[str]:
    several = isinstance(value, list) and all(isinstance(one, str) for one in value)
    return [f"--{name}", *value] if several else [f"--{name}={written(value)}"]


def by_file(method: str, given: dict[str, Any]) -> Any:
    Path("c.yaml").write_text(yaml.safe_dump(given))
    defaults = {} if method == "control" else declaration(method).defaults
    return load(settings_of(method), "c.yaml", defaults=defaults)


def by_keyword(method: str, given: dict[str, Any]) -> Any:
    defaults = {} if method == "control" else declaration(method).defaults
    cls = settings_of(method)
    return load(cls, flags={**defaults, **resolve_names(cls, given)})


def by_script(config: str, given: dict[str, Any]) -> Any:
    words = ", ".join(f"{name}={value!r}" for name, value in given.items())
    Path("script.py").write_text(f"from trl import {config}\nargs = {config}({words})\n")
    return of_conversion(config, convert_file("script.py"))


def by_object(config: str, given: dict[str, Any]) -> Any:
    machine = {"use_cpu": True, "bf16": False, "report_to": "none"}
    try:
        args = CONFIGS[config](**{**machine, **given})
    except Exception:  # TRL itself refuses some values, and what needs a GPU, here
        args = CONFIGS[config](**machine)
        for name, value in given.items():
            setattr(args, name, value)
    return of_conversion(config, convert_object(args))


def of_conversion(config: str, made: Any) -> Any:
    if made.no_equal:
        raise UserError("\n".join(made.no_equal))
    kept = {name: value for name, value in made.settings.items() if not name.startswith(("algorithm.", "loss."))}
    cls = METHODS[config][1]
    setting = {OnlineConfig: "algorithm", PreferenceConfig: "loss"}.get(cls)
    return load(cls, flags={**declaration(made.method).defaults, **kept, **({setting: made.spec} if setting else {})})


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def same_sentence(said: str, name: str) -> str:
    """Of a flag as of a setting."""
    return said.replace(f"flag --{name}", f"setting '{name}'").replace(f"--{name} is", f"{name} is").removeprefix("c.yaml: ")


@repeat_for("name", TABLE)
def test_flags_files_and_keywords_come_to_the_same(name, here):
    row = TABLE[name]
    method = method_of(row)
    for value in values_of(row, method):
        given = {**BESIDE.get(name, {}), name: value}
        if our_name(settings_of(method), name) == "run.report_to" and value == "none":
            given = {name: value}
        found = [outcome(read, method, given) for read in (by_flag, by_file, by_keyword)]
        if isinstance(found[0], str):
            assert len({same_sentence(said, name) for said in found}) == 1, found
            told = "; expected '" if row.refused and value not in row.refused else row.why
            assert told in found[0] or row.rule or "given in epochs" in found[0], found[0]
        else:
            assert found[0] == found[1] == found[2], value
        usual = outcome(by_keyword, method, BESIDE.get(name, {}))
        if row.needless or value in row.usual:
            assert found[0] == usual
        elif row.means and value in SAMPLES.values():
            assert found[0] != usual and not isinstance(found[0], str), found[0]


FIELDS = {}  # field -> the configuration of TRL that it is tried in
for _config, _cls in CONFIGS.items():
    for _field in dataclasses.fields(_cls):
        if _field.name in TABLE or _field.name in SHORTCUTS:
            FIELDS.setdefault(_field.name, _config)


@pytest.mark.slow
@repeat_for("name", FIELDS)
def test_an_object_and_a_script_come_to_what_a_file_comes_to(name, here):
    """The parts that an object and a script name: test_parts_of_grpo_by_every_entrance."""
    config, row = FIELDS[name], TABLE.get(name, Entry(name, "trl", means=name))
    method = METHODS[config][0]
    for value in values_of(row, method):
        own = {name: value, **{key: inner for key, inner in BESIDE.get(name, {}).items() if key != "dataset_name"}}
        if name == "ref_model_sync_steps":
            own["sync_ref_model"] = True  # TRL reads the steps with that alone
        usual = {key: inner for key, inner in {**DEFAULTS[config], **FIXED.get(config, {})}.items() if inner is not None}
        machine = {"bf16": False, "use_cpu": True, "report_to": "none"}
        asked = outcome(by_file, method, {**usual, **machine, **own})
        script = outcome(by_script, config, {**machine, **own})
        args = outcome(by_object, config, own)
        if isinstance(asked, str):
            told = row.why if row.why in asked else asked.removeprefix("c.yaml: ")
            assert told in asked and told in script, (asked, script)
            assert told in args or name in ("bf16", "fp16"), args  # which an object has as yes or no
        elif name != "activation_checkpointing":  # on by default in TRL, which changes no figure
            assert not isinstance(script, str) and not isinstance(args, str), (script, args)
            assert asked[-1] == script[-1] == args[-1], value


# What the audit found to be taken by one entrance and refused by another: the parts that it means, written by hand.
ONLINE = {
    ("delta", 4.0): {"surrogate": dual_clip(0.2, 0.2, 4.0)},
    ("multi_objective_aggregation", "normalize_then_sum"): {"psi": group_advantage.decoupled_group_mean()},
    ("off_policy_mask_threshold", 0.5): {"surrogate": off_policy_mask(clip(0.2, 0.2), 0.5)},
    ("vllm_importance_sampling_mode", "token_truncate"): {"correction": truncated_importance(3.0, "token", 0.0)},
    ("vllm_importance_sampling_mode", "sequence_mask"): {"correction": masked_importance(3.0, "sequence", 0.0)},
    ("vllm_importance_sampling_clip_max", 5.0): {"correction": masked_importance(5.0, "sequence", 0.0)},
    ("loss_type", "cispo"): {"surrogate": truncated_weight(0.2), "aggregate": token_mean},
    ("loss_type", "sapo"): {"surrogate": soft_clip(1.0, 1.05), "aggregate": sequence_mean},
    ("loss_type", "vespo"): {"surrogate": gamma_weight(2.0, 3.0, 3.0, 2.0), "aggregate": token_mean},
    ("loss_type", "dapo"): {"surrogate": clip(0.2, 0.2), "aggregate": token_mean},
    ("loss_type", "dr_grpo"): {"surrogate": clip(0.2, 0.2), "aggregate": fixed_length(512)},
    ("scale_rewards", "none"): {"psi": group_mean(std=False)},
}


def everywhere(method, config):
    return ((by_flag, method), (by_file, method), (by_keyword, method), (by_script, config), (by_object, config))


@pytest.mark.parametrize(("name", "value"), ONLINE)
def test_parts_of_grpo_by_every_entrance(name, value, here):
    beside = {**BESIDE.get(name, {}), "max_completion_length": 512}
    for read, whose in everywhere("grpo", "GRPOConfig"):
        method = resolve_online(read(whose, {**beside, name: value}).algorithm)
        assert {part: getattr(method, part) for part in ONLINE[name, value]} == ONLINE[name, value], read


def test_whitened_advantages_of_rloo_by_every_entrance(here):
    for read, whose in everywhere("rloo", "RLOOConfig"):
        assert resolve_online(read(whose, {"normalize_advantages": True}).algorithm).psi == whitened(leave_one_out)


def test_options_that_act_together_do_so_in_trls_order(here):
    given = {"loss_type": "cispo", "epsilon_high": 5.0, "off_policy_mask_threshold": 0.5}
    for read, whose in everywhere("grpo", "GRPOConfig"):
        assert resolve_online(read(whose, given).algorithm).surrogate == off_policy_mask(truncated_weight(5.0), 0.5)
    both = resolve_online(by_keyword("grpo", {"epsilon": 0.1, "delta": 4.0, "off_policy_mask_threshold": 0.5}).algorithm)
    assert both.surrogate == off_policy_mask(dual_clip(0.1, 0.1, 4.0), 0.5)


@pytest.mark.parametrize(
    ("config", "method", "given", "part", "expected"),
    [
        ("ORPOConfig", "orpo", {"beta": 0.3}, "preference", 0.3),
        ("CPOConfig", "simpo", {"loss_type": "sigmoid"}, "margin", 0.0),
        ("CPOConfig", "simpo", {"loss_type": "simpo", "simpo_gamma": 0.7}, "margin", 0.7),
        ("DPOConfig", "dpo", {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.3]}, "sft", 0.3),
        ("KTOConfig", "kto", {"desirable_weight": 2.0}, "desirable_weight", 2.0),
    ],
)
def test_preference_options_by_every_entrance(config, method, given, part, expected, here):
    for read, whose in everywhere(method, config):
        assert getattr(resolve_loss(read(whose, given).loss), part) == expected, read


def test_the_mixture_of_distillation_by_every_entrance(here):
    for beta, estimator in ((0.0, "exact_forward"), (1.0, "exact"), (0.3, "exact_js")):
        for read, whose in everywhere("distill", "DistillationConfig")[:4]:
            kl = resolve_online(read(whose, {"beta": beta}).algorithm).kl
            assert (kl.estimator, kl.coefficient) == (estimator, 1.0) and (beta != 0.3 or kl.mixture == 0.3)


def test_a_loss_of_dpos_is_its_own_method_by_every_entrance(here):
    for read, whose in everywhere("dpo", "DPOConfig"):
        assert nameless(resolve_loss(read(whose, {"loss_type": "ipo"}).loss)) == nameless(resolve_loss("ipo"))


@pytest.mark.parametrize(
    ("config", "method", "given", "said"),
    [
        ("GRPOConfig", "grpo", {"sapo_temperature_pos": 2.0}, "grpo has no soft clip, so sapo_temperature_pos has no effect"),
        ("DPOConfig", "dpo", {"loss_type": "unheard"}, "loss_type is 'unheard': expected one of sigmoid, hinge, ipo"),
        ("DPOConfig", "dpo", {"loss_type": ["sigmoid", "ipo"]}, "loss_type has 'sigmoid' and 'ipo', but psigrad trains one loss"),
        (
            "GRPOConfig",
            "grpo",
            {"loss_type": "luspo"},
            "loss_type is 'luspo': expected one of grpo, dapo, bnpo, dr_grpo, cispo, sapo, vespo",
        ),
        ("DPOConfig", "dpo", {"loss_weights": [1.0, 2.0]}, "psigrad trains one loss; loss.sft adds the likelihood of the chosen"),
        ("GRPOConfig", "grpo", {"model_init_kwargs": "unheard"}, "set dtype and revision"),
        ("GRPOConfig", "grpo", {"model_init_kwargs": {"quantization_config": 4}}, "quantize_base=nf4 or int8 quantises the base"),
        ("SFTConfig", "sft", {"loss_type": "dft"}, "loss_type is 'dft': the method is the command"),
        (
            "SFTConfig",
            "sft",
            {"eval_strategy": "epoch", "num_train_epochs": 3},
            "psigrad counts in steps: an epoch has rows / batch_size",
        ),
    ],
)
def test_what_is_computed_is_refused_in_the_same_words(config, method, given, said, here):
    for read, whose in everywhere(method, config):
        with pytest.raises(UserError) as refused:
            read(whose, given)
        assert said in str(refused.value), read


def test_a_correction_of_vllm_without_vllm_is_needless_as_in_trl(here):
    given = {"vllm_importance_sampling_mode": "token_mask"}
    assert by_flag("grpo", given) == by_file("grpo", given) == by_keyword("grpo", given) == by_keyword("grpo", {})


def test_negative_control_an_entrance_that_refuses_is_noticed(here):
    refused = outcome(by_keyword, "grpo", {"hub_token": "x"})
    assert isinstance(refused, str) and same_sentence(refused, "hub_token") != same_sentence(
        "There is no setting 'hub_token'.", ""
    )
    assert outcome(by_keyword, "grpo", {"delta": 4.0}) != outcome(by_keyword, "grpo", {"delta": 5.0})
