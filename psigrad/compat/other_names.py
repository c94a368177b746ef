"""Settings under the names of TRL, transformers, verl, OpenRLHF and Stable-Baselines3, for flags, YAML files and Python alike.

Those that mean the same are taken, batch sizes are computed, what changes nothing here is left out, and every other known name is
answered with what to write.
"""

from __future__ import annotations

import math
import os
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from functools import cache
from typing import Any, get_type_hints

from psigrad.compat import zoo_names
from psigrad.compat.batch_sizes import BATCH, batches_of
from psigrad.compat.other_answers import ANSWERS, NEEDLESS, NO_EQUAL
from psigrad.compat.trl_values import loss_type
from psigrad.config.nested import Given
from psigrad.config.shortcuts import SHORTCUTS, shortcuts_of
from psigrad.config.shortcuts import expand as placed
from psigrad.errors import UserError

# The same setting under another name.
SAME = {
    **dict.fromkeys(("model_name_or_path", "actor_rollout_ref.model.path", "pretrain"), "model.path"),
    "model_revision": "model.revision",
    "torch_dtype": "model.dtype",
    **dict.fromkeys(("lora_r", "actor_rollout_ref.model.lora_rank"), "model.lora_rank"),
    "actor_rollout_ref.model.lora_alpha": "model.lora_alpha",
    **dict.fromkeys(
        ("activation_checkpointing", "actor_rollout_ref.model.enable_gradient_checkpointing"), "model.gradient_checkpointing"
    ),
    **dict.fromkeys(("dataset_name", "train_dataset", "data.train_files"), "data.dataset"),
    **dict.fromkeys(("eval_dataset_name", "data.val_files"), "data.eval_dataset"),
    "dataset_train_split": "data.split",
    "dataset_test_split": "data.eval_split",
    **dict.fromkeys(("prompt_max_len", "max_prompt_tokens"), "data.max_prompt_length"),
    "reward_funcs": "reward",
    **dict.fromkeys(("reward_model_name_or_path", "reward_model_path"), "reward_model"),
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
    **dict.fromkeys(("trainer.n_gpus_per_node", "num_processes"), "placement.processes"),
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
    "use_cpu": {True: {"run.device": "cpu"}, False: {}},
    "tf32": {True: {}, False: {}},
    "use_vllm": {True: {"sampling.sampler": "vllm"}, False: {}},
    "actor_rollout_ref.rollout.name": {"vllm": {"sampling.sampler": "vllm"}, "hf": {"sampling.sampler": "transformers"}},
    "actor_rollout_ref.rollout.top_k": {-1: {"sampling.top_k": 0}},
    "use_peft": {True: {"model.lora_rank": 16}, False: {}},
    "completion_only_loss": {True: {}},
    "hub_strategy": {"every_save": {}, "end": {}},
    "sync_ref_model": {True: {"ref_model_sync_steps": 512}, False: {}},
    "disable_tqdm": {True: {"run.progress": False}, False: {}},
    "eval_strategy": {
        "steps": {},
        "no": {"evaluation.eval_steps": 0},
        False: {"evaluation.eval_steps": 0},
    },  # YAML reads no as False
    "save_strategy": {"steps": {}, "no": {"run.save_steps": 0}, False: {"run.save_steps": 0}},
    "optim": {"adamw_torch": {}, "adamw_torch_fused": {}, "adamw_hf": {}},
    **{name: {True: {}} for name in ("shuffle_dataset", "assistant_only_loss")},
    "resume_from_checkpoint": {True: {}, False: {"run.resume": "never"}},
    "use_liger_kernel": {False: {}},
    "packing": {False: {}},
    "multi_objective_aggregation": {"sum_then_normalize": {}},
    "normalize_advantages": {False: {}},
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
# Where "epoch" means these counts of steps.
_BY_EPOCH = {"eval_strategy": "evaluation.eval_steps", "save_strategy": "run.save_steps"}
# Of those above, what another setting of the same run may say more exactly: TRL's default of it.
_ONLY_A_DEFAULT = ("use_peft", "sync_ref_model")

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
            leaves = [(leaf, inner) for leaf, inner in _leaves(str(name), value) if inner is not None or leaf not in SAME]
            flat += [Given(ours(cls, leaf), inner, source) for leaf, inner in leaves]
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
    by_epoch: list[Given] = []
    shares: list[Given] = []
    for one in given:
        meant = VALUES.get(one.name, {}) if one.name != "optim" or isinstance(one.value, str) else {}
        value = value_of(one.value)
        if value is None and None not in meant and is_known(one.name) and not _has(known, one.name):
            continue  # not set, as TRL's files write it
        if _is_share(one.name, value) and _has(known, "optim.warmup_steps"):
            shares.append(one)
        elif _hashable(value) and value in meant:
            new = [Given(name, inner, one.source) for name, inner in meant[value].items() if _has(known, name)]
            weak += new if one.name in _ONLY_A_DEFAULT else []
            found += [] if one.name in _ONLY_A_DEFAULT else new
        elif _has(known, one.name) and not (one.name == "optim" and isinstance(one.value, str)):
            found.append(one)
        elif one.name in BATCH or one.name in _FUNCTION:
            others[one.name] = one
        elif one.name == "loss_type":
            found += loss_type(one, known, values)
        elif one.name in _BY_EPOCH and value == "epoch":
            by_epoch += [one] if _has(known, _BY_EPOCH[one.name]) else []
        elif refused(one.name, value):
            wrong.append(one)
        elif one.name not in NEEDLESS and one.name not in NO_EQUAL:
            found.append(one)  # refused by name where the settings are built
    if wrong:
        raise UserError("\n".join(dict.fromkeys(refusal(one.name, value_of(one.value)) for one in wrong)))

    def number(name: str) -> Any:
        return next((g.value for g in reversed(found) if g.name == name), _at(values, name, cls))

    said = {g.name for g in found}
    found += [g for g in weak if g.name not in said and not _stated(values, g.name)]
    found += [step for one in shares for step in _warmup(one, number)]
    batches = batches_of(known, said, others, number)
    found += [_each_epoch(one, batches, known, number) for one in by_epoch]
    return [*placed(cls, values, found), *_function(others), *batches]


def _each_epoch(one: Given, batches: Sequence[Given], known: set[str], number: Callable[[str], Any]) -> Given:
    """Once an epoch, in steps: 0 where the run is one epoch, at whose end a run evaluates and saves anyway."""
    setting = _BY_EPOCH[one.name]
    if not number("run.max_steps") and number("run.num_train_epochs") == 1:
        return Given(setting, 0, one.source)
    size = "prompts_per_step" if "prompts_per_step" in known else "batch_size"
    rows = next((g.value for g in batches if g.name == size), None) or number(size) or 1
    each = f"an epoch has rows / {size} of them; for 1,000 rows give {setting.partition('.')[2]}={math.ceil(1000 / int(rows))}"
    raise UserError(f"{one.name} is 'epoch', and psigrad counts in steps: {each}.")


def _is_share(name: str, value: Any) -> bool:
    """Whether it is TRL's warm-up as a share of a run: warmup_ratio, and a warmup_steps below 1."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return 0 <= value <= 1 if name == "warmup_ratio" else name == "optim.warmup_steps" and 0 < value < 1


def _warmup(one: Given, number: Callable[[str], Any]) -> list[Given]:
    """A share of a run in steps, where the steps of the run are known. Steps that are given beat it, as in TRL."""
    share, steps = value_of(one.value), number("run.max_steps")
    if not share or number("optim.warmup_steps") or not isinstance(steps, int):
        return []
    if not steps:
        raise UserError(
            f"{one.name.removeprefix('optim.')} is {share:g} of a run that is counted in epochs; give warmup_steps in steps, or "
            "max_steps."
        )
    return [Given("optim.warmup_steps", math.ceil(share * steps), one.source)]


def value_of(value: Any) -> Any:
    """A list of one as that one: a flag's values are a list."""
    return value[0] if isinstance(value, list | tuple) and len(value) == 1 else value


def refused(name: str, value: Any) -> bool:
    """Whether a setting of others, or this value of it, has no meaning here."""
    taken = VALUES.get(name, {})
    if value is None or (_hashable(value) and value in taken) or (name in _BY_EPOCH and value == "epoch"):
        return False
    if _is_share(name, value) or (name in NO_EQUAL and value == NO_EQUAL[name][0]):
        return False
    return name in ANSWERS or (bool(taken) and all(name not in meant for meant in taken.values()))


def refusal(name: str, value: Any, shown: str = "") -> str:
    """What to write in place of a setting of others, in a sentence; `shown` is the flag as it was typed."""
    why = f": {ANSWERS[name]}." if name in ANSWERS else "."
    if taken := [repr(one) for one in VALUES.get(name, {}) if one is not False or "no" not in VALUES[name]]:
        taken += ["'epoch'"] if name in _BY_EPOCH else []
        only = " or ".join(filter(None, (", ".join(taken[:-1]), taken[-1])))
        return f"{shown or name} is {value!r}, and only {only} is taken{why}"
    return f"There is no {f'flag {shown}' if shown else f'setting {name!r}'}{why}"


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
