"""Settings under the names of TRL, transformers, verl, OpenRLHF and Stable-Baselines3, for flags, YAML files and Python alike.

Those that mean the same are taken, batch sizes are computed, what changes nothing here is left out, and every other known name is
answered with what to write.
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from functools import cache
from typing import Any, get_type_hints

from psigrad.config import zoo_names
from psigrad.config.nested import Given
from psigrad.config.other_answers import ANSWERS, NEEDLESS
from psigrad.config.shortcuts import SHORTCUTS, placed, shortcuts_of
from psigrad.config.trl_values import loss_type
from psigrad.errors import UserError

# The same setting under another name.
SAME = {
    **dict.fromkeys(("model_name_or_path", "actor_rollout_ref.model.path", "pretrain"), "model.path"),
    "model_revision": "model.revision",
    "torch_dtype": "model.dtype",
    **dict.fromkeys(("lora_r", "actor_rollout_ref.model.lora_rank"), "model.lora_rank"),
    "actor_rollout_ref.model.lora_alpha": "model.lora_alpha",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "model.gradient_checkpointing",
    **dict.fromkeys(("dataset_name", "train_dataset", "data.train_files"), "data.dataset"),
    **dict.fromkeys(("eval_dataset_name", "data.val_files"), "data.eval_dataset"),
    "dataset_train_split": "data.split",
    "dataset_test_split": "data.eval_split",
    **dict.fromkeys(("prompt_max_len", "max_prompt_tokens"), "data.max_prompt_length"),
    "reward_funcs": "reward",
    "reward_model_name_or_path": "reward_model",
    **dict.fromkeys(("ref_model", "teacher_model_name_or_path"), "reference"),
    **dict.fromkeys(("lr", "actor_rollout_ref.actor.optim.lr", "actor_learning_rate"), "optim.learning_rate"),
    "actor_rollout_ref.actor.optim.lr_warmup_steps": "optim.warmup_steps",
    "actor_rollout_ref.actor.optim.weight_decay": "optim.weight_decay",
    "actor_rollout_ref.actor.grad_clip": "optim.max_grad_norm",
    **dict.fromkeys(
        ("max_new_tokens", "response_length", "generate_max_len", "max_response_length", "data.max_response_length"),
        "sampling.max_completion_length",
    ),
    "actor_rollout_ref.rollout.temperature": "sampling.temperature",
    "actor_rollout_ref.rollout.top_p": "sampling.top_p",
    **dict.fromkeys(("vllm_gpu_memory_utilization", "actor_rollout_ref.rollout.gpu_memory_utilization"), "sampling.vllm_memory"),
    **dict.fromkeys(
        ("vllm_tensor_parallel_size", "actor_rollout_ref.rollout.tensor_model_parallel_size"), "sampling.tensor_parallel_size"
    ),
    "vllm_enable_sleep_mode": "sampling.vllm_sleep",
    **dict.fromkeys(("rollout_n", "n_samples_per_prompt", "actor_rollout_ref.rollout.n"), "num_generations"),
    **dict.fromkeys(("num_ppo_epochs", "actor_rollout_ref.actor.ppo_epochs"), "num_iterations"),
    "num_mini_batches": "num_minibatches",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "micro_batch_tokens",
    "critic.model.path": "critic",
    "critic.optim.lr": "critic_learning_rate",
    "max_seq_length": "max_length",
    **dict.fromkeys(("total_epochs", "num_epochs", "trainer.total_epochs"), "run.num_train_epochs"),
    **dict.fromkeys(("total_training_steps", "trainer.total_training_steps"), "run.max_steps"),
    "trainer.save_freq": "run.save_steps",
    "trainer.test_freq": "evaluation.eval_steps",
    "trainer.default_local_dir": "run.output_dir",
    "trainer.n_gpus_per_node": "placement.processes",
    **zoo_names.SAME,
    # parts of the algorithm (shortcuts.py)
    **dict.fromkeys(("kl_coef", "init_kl_coef", "actor_rollout_ref.actor.kl_loss_coef", "algorithm.kl_ctrl.kl_coef"), "beta"),
    **dict.fromkeys(("cliprange", "clip_range", "actor_rollout_ref.actor.clip_ratio"), "epsilon"),
    "actor_rollout_ref.actor.clip_ratio_high": "epsilon_high",
    **dict.fromkeys(("entropy_coef", "entropy_coeff", "actor_rollout_ref.actor.entropy_coeff"), "ent_coef"),
    **dict.fromkeys(("lam", "lambd", "algorithm.lam"), "gae_lambda"),
    "algorithm.gamma": "gamma",
    **dict.fromkeys(("value_clip", "critic.cliprange_value"), "cliprange_value"),
    "algorithm.norm_adv_by_std_in_grpo": "scale_rewards",
    **dict.fromkeys(("loss_agg_mode", "actor_rollout_ref.actor.loss_agg_mode"), "aggregate"),
    "algorithm.filter_groups.enable": "dynamic_sampling",
    "algorithm.filter_groups.metric": "filter_metric",
    "simpo_gamma": "margin",
    **dict.fromkeys(("cpo_alpha", "rpo_alpha"), "sft_weight"),
}

# Values that mean something of ours: name -> value -> our settings. Names of ours are here for values of others.
VALUES: dict[str, dict[Any, dict[str, Any]]] = {
    "bf16": {True: {"model.dtype": "bfloat16"}, False: {}},
    "fp16": {False: {}},
    "tf32": {True: {}, False: {}},
    "use_vllm": {True: {"sampling.sampler": "vllm"}, False: {}},
    "actor_rollout_ref.rollout.name": {"vllm": {"sampling.sampler": "vllm"}, "hf": {"sampling.sampler": "transformers"}},
    "actor_rollout_ref.rollout.top_k": {-1: {"sampling.top_k": 0}},
    "use_peft": {True: {"model.lora_rank": 16}, False: {}},
    "load_in_4bit": {False: {}},
    "load_in_8bit": {False: {}},
    "sync_ref_model": {True: {"ref_model_sync_steps": 512}, False: {}},
    "disable_tqdm": {True: {"run.progress": False}, False: {}},
    "eval_strategy": {
        "steps": {},
        "no": {"evaluation.eval_steps": 0},
        False: {"evaluation.eval_steps": 0},
    },  # YAML reads no as False
    "save_strategy": {"steps": {}, "no": {"run.save_steps": 0}, False: {"run.save_steps": 0}},
    "optim": {"adamw_torch": {}, "adamw_torch_fused": {}, "adamw_hf": {}},
    **{name: {True: {}} for name in ("shuffle_dataset", "assistant_only_loss", "resume_from_checkpoint")},
    "use_liger_kernel": {False: {}},
    "packing": {False: {}},
    "actor_rollout_ref.model.use_remove_padding": {True: {}},
    "trainer.nnodes": {1: {}},
    "algorithm.use_kl_in_reward": {False: {}},
    "actor_rollout_ref.actor.use_kl_loss": {True: {}, False: {"algorithm.kl": None}},
    "actor_rollout_ref.actor.kl_loss_type": {
        **{name: {"kl_estimator": "k3"} for name in ("low_var_kl", "k3")},
        **{name: {"kl_estimator": "k2"} for name in ("mse", "k2")},
    },
    **zoo_names.VALUES,
    "run.max_steps": {-1: {"run.max_steps": 0}},
    "run.report_to": {"none": {"run.report_to": ()}},
    "sampling.top_k": {-1: {"sampling.top_k": 0}},
    "sampling.min_p": {None: {"sampling.min_p": 0.0}},
    "optim.lr_scheduler_type": {"constant_with_warmup": {"optim.lr_scheduler_type": "constant"}},
}
# Of those above, what another setting of the same run may say more exactly: TRL's default of it.
_ONLY_A_DEFAULT = ("use_peft", "sync_ref_model")

# How much a step computes, from which `_batches` computes ours.
BATCH = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "generation_batch_size"),
    *("data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size"),
)
# A file and a function, which are one name here.
_FUNCTION = ("custom_reward_function.path", "custom_reward_function.name")


def ours(cls: Any, name: str) -> str:
    """Our dotted name of a setting of class `cls`: "lr" -> "optim.learning_rate"; an unknown one stays as it is."""
    known = _names(cls)
    if name in SAME and known.get(name, name) == name and SAME[name] in {*known.values(), *shortcuts_of(cls)}:
        return SAME[name]
    return known.get(name, name)


def is_known(name: str) -> bool:
    """Whether something can be said to a name that is none of ours."""
    return any(name in table for table in (SAME, VALUES, NEEDLESS, BATCH, _FUNCTION, ANSWERS, SHORTCUTS, ("loss_type",)))


def answer(name: str) -> str:
    """What to write in place of a setting of others; empty where nothing is known of it."""
    return ANSWERS.get(name, "")


def divided(cls: type[Any], values: Mapping[str, Any], source: str) -> tuple[dict[str, Any], list[Given]]:
    """(settings in our sections, settings by name alone) of a file, in which both may stand: `learning_rate: 1e-5` too."""
    nested: dict[str, Any] = {}
    flat: list[Given] = []
    hints = get_type_hints(cls)
    for name, value in values.items():
        section = is_dataclass(hints.get(name))
        if section and isinstance(value, Mapping):
            fields = get_type_hints(hints[name])
            theirs = {key: inner for key, inner in value.items() if key not in fields and is_known(f"{name}.{key}")}
            flat += [Given(ours(cls, f"{name}.{key}"), inner, source) for key, inner in theirs.items()]
            nested[name] = {key: inner for key, inner in value.items() if key not in theirs}
        elif name == "model" and isinstance(value, str | os.PathLike):
            flat.append(Given("model.path", value, source))
        elif name == "optim" and isinstance(value, str):
            flat.append(Given(name, value, source))
        elif name in hints:
            nested[name] = value
        else:
            flat += [Given(ours(cls, leaf), inner, source) for leaf, inner in _leaves(str(name), value)]
    return nested, flat


def _leaves(name: str, value: Any) -> list[tuple[str, Any]]:
    """verl's files are trees: actor_rollout_ref: {actor: {optim: {lr: 1e-6}}}."""
    if is_known(name) or not isinstance(value, Mapping) or not value:
        return [(name, value)]
    return [leaf for key, inner in value.items() for leaf in _leaves(f"{name}.{key}", inner)]


def translated(cls: Any, values: Mapping[str, Any], given: Sequence[Given]) -> list[Given]:
    """What was given, in our names: values and batch sizes of others computed, what is needless left out.

    `values` are settings that rank below `given`. Raises `UserError` for what means something else here, all of it at once.
    """
    known, found, weak, others, wrong = {*_names(cls).values(), *shortcuts_of(cls)}, [], [], {}, []
    for one in given:
        meant = VALUES.get(one.name, {}) if one.name != "optim" or isinstance(one.value, str) else {}
        value = value_of(one.value)
        if _hashable(value) and value in meant:
            new = [Given(name, inner, one.source) for name, inner in meant[value].items() if _has(known, name)]
            weak += new if one.name in _ONLY_A_DEFAULT else []
            found += [] if one.name in _ONLY_A_DEFAULT else new
        elif _has(known, one.name) and not (one.name == "optim" and isinstance(one.value, str)):
            found.append(one)
        elif one.name in BATCH or one.name in _FUNCTION:
            others[one.name] = one
        elif one.name == "loss_type":
            found += loss_type(one, known, values)
        elif one.name in ANSWERS:
            wrong.append(one)
        elif one.name not in NEEDLESS:
            found.append(one)  # refused by name where the settings are built
    if wrong:
        raise UserError("\n".join(dict.fromkeys(refusal(one.name, value_of(one.value)) for one in wrong)))

    def number(name: str) -> int:
        return int(next((g.value for g in reversed(found) if g.name == name), _at(values, name, cls)))

    said = {g.name for g in found}
    found += [g for g in weak if g.name not in said and not _stated(values, g.name)]
    return [*placed(cls, values, found), *_function(others), *_batches(known, said, others, number)]


def value_of(value: Any) -> Any:
    """A list of one as that one: a flag's values are a list."""
    return value[0] if isinstance(value, list | tuple) and len(value) == 1 else value


def refusal(name: str, value: Any, shown: str = "") -> str:
    """What to write in place of a setting of others, in a sentence; `shown` is the flag as it was typed."""
    if taken := [one for one in VALUES.get(name, {}) if one is not False or "no" not in VALUES[name]]:
        return f"{shown or name} is {value!r}, and only {' or '.join(map(repr, taken))} is taken: {ANSWERS[name]}."
    return f"There is no {f'flag {shown}' if shown else f'setting {name!r}'}: {ANSWERS[name]}."


def refuse_two_values(cls: Any, given: Iterable[tuple[str, Any]], where: str = "") -> None:
    """Raises `UserError` where one setting is given under two names with two values."""
    first: dict[str, tuple[str, Any]] = {}
    for name, value in given:
        mine = ours(cls, name)
        other, before = first.setdefault(mine, (name, value))
        if other != name and repr(before) != repr(value):
            raise UserError(
                f"{where}{other} is {reprlib.repr(before)} and {name} is {reprlib.repr(value)}, and both are the setting {mine}; "
                "give one of them."
            )


def leaves_of(values: Mapping[str, Any], cls: Any) -> Iterator[tuple[str, Any]]:
    """(name as it stands, value) of every setting of a file, in sections or not."""
    hints = get_type_hints(cls)
    for name, value in values.items():
        if is_dataclass(hints.get(name)) and isinstance(value, Mapping):
            yield from ((f"{name}.{key}", inner) for key, inner in value.items())
        elif name in hints:
            yield str(name), value
        else:
            yield from _leaves(str(name), value)


def _function(others: Mapping[str, Given]) -> list[Given]:
    if _FUNCTION[0] not in others:
        return []
    path, name = others[_FUNCTION[0]], others.get(_FUNCTION[1], Given("", "compute_score", ""))
    return [Given("reward", (f"{path.value}:{name.value}",), path.source)]


def _batches(known: set[str], said: set[str], others: Mapping[str, Given], number: Callable[[str], int]) -> list[Given]:
    """Our batch sizes out of TRL's (of a device, in samples) and verl's (of all devices, in prompts)."""
    theirs = {name: _whole(others[name]) for name in BATCH if name in others}
    if not theirs:
        return []
    online, size = "prompts_per_step" in known, next(iter(theirs))
    ours = "prompts_per_step" if online else "batch_size"
    if ours in said:
        raise UserError(f"{size} and {ours} both say how large a step is; give one of them.")
    source = others[size].source
    devices = max(number("placement.processes"), int(os.environ.get("WORLD_SIZE", 1)))
    if "data.train_batch_size" in theirs or "actor_rollout_ref.actor.ppo_mini_batch_size" in theirs:
        rows = theirs.get("data.train_batch_size") or number(ours)
        mini = theirs.get("actor_rollout_ref.actor.ppo_mini_batch_size", rows)
        if rows % mini:
            raise UserError(f"ppo_mini_batch_size {mini} does not divide train_batch_size {rows}; give one that does.")
        return [Given(ours, rows, source), *([Given("num_minibatches", rows // mini, source)] if online else [])]
    rows, accumulated = theirs.get("per_device_train_batch_size", 8), theirs.get("gradient_accumulation_steps", 1)
    if not online:
        return [Given(ours, rows * accumulated * devices, source)]
    return _generation_batch(theirs, rows * devices, accumulated, number("num_generations"), source)


def _generation_batch(theirs: Mapping[str, int], at_once: int, accumulated: int, group: int, source: str) -> list[Given]:
    """Prompts and minibatches of a step of TRL's online trainers, which count completions."""
    rounds = theirs.get("steps_per_generation", accumulated)
    completions = theirs.get("generation_batch_size", at_once * rounds)
    update = at_once * accumulated
    sum_of = f"{completions} completions a step"
    if "generation_batch_size" not in theirs:
        sum_of = f"{at_once} completions at once × {rounds} = {completions} a step"
    if completions % group:
        raise UserError(
            f"The batch sizes make {sum_of}, which is no multiple of num_generations {group}; change one of them, or give "
            "prompts_per_step, the prompts of a step over all devices."
        )
    if completions % update:
        raise UserError(
            f"The batch sizes make {sum_of} and {update} an update; give steps_per_generation as a multiple of "
            "gradient_accumulation_steps, or prompts_per_step and num_minibatches."
        )
    return [Given("prompts_per_step", completions // group, source), Given("num_minibatches", completions // update, source)]


def _whole(given: Given) -> int:
    if isinstance(given.value, bool) or not isinstance(given.value, int) or given.value < 1:
        raise UserError(f"{given.name} is {given.value!r}; expected a whole number of at least 1.")
    return given.value


@cache
def _names(cls: Any, prefix: str = "") -> dict[str, str]:
    """Leaf, and dotted, name -> dotted name of every setting."""
    found: dict[str, str] = {}
    for name, hint in get_type_hints(cls).items():
        dotted = prefix + name
        inner = _names(hint, f"{dotted}.") if isinstance(hint, type) and is_dataclass(hint) else {name: dotted}
        found |= {**inner, dotted: dotted}
    return found


def _has(known: set[str], name: str) -> bool:
    """Whether a setting is ours: by its own name, or as a field of a mapping such as `algorithm`."""
    return name in known or (name.startswith(("algorithm.", "loss.")) and name.partition(".")[0] in known and not is_known(name))


def _stated(values: Mapping[str, Any], name: str) -> bool:
    first, _, rest = name.partition(".")
    inner = values.get(first)
    return first in values and (not rest or (isinstance(inner, Mapping) and rest in inner))


def _at(values: Mapping[str, Any], name: str, cls: type[Any]) -> Any:
    """The value of a setting in nested `values`, or the usual one."""
    first, _, rest = name.partition(".")
    inner = values.get(first, getattr(cls(), first))
    if not rest:
        return inner
    return inner[rest] if isinstance(inner, Mapping) and rest in inner else getattr(getattr(cls(), first), rest)


def _hashable(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float | bool)
