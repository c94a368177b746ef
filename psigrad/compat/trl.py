"""The defaults of TRL's trainers, and the conversion of options that change the parts of a method."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from psigrad.config.language import OnlineConfig, PreferenceConfig, RewardConfig, SFTConfig
from psigrad.config.shortcuts import Part, Places, Shortcut, find_grouped, find_parameter, find_parts, find_slot
from psigrad.errors import UserError

# TRL's configuration -> (psigrad's method, the class of its settings).
METHODS: Mapping[str, tuple[str, type[Any]]] = {
    **{f"{name}Config": (method, OnlineConfig) for name, method in (
        ("GRPO", "grpo"), ("RLOO", "rloo"), ("PPO", "ppo"), ("OnlineDPO", "online_dpo"), ("Distillation", "distill"),
    )},
    "SFTConfig": ("sft", SFTConfig),
    **{f"{name}Config": (method, PreferenceConfig) for name, method in (
        ("DPO", "dpo"), ("KTO", "kto"), ("ORPO", "orpo"), ("CPO", "simpo"),
    )},
    "RewardConfig": ("reward", RewardConfig),
}  # fmt: skip

# fmt: off
_TRAINING = {
    "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "num_train_epochs": 3.0, "max_steps": -1,
    "learning_rate": 1e-6, "lr_scheduler_type": "linear", "warmup_steps": 0, "weight_decay": 0.0, "adam_beta1": 0.9,
    "adam_beta2": 0.999, "adam_epsilon": 1e-8, "max_grad_norm": 1.0, "seed": 42, "eval_strategy": "no", "save_steps": 500,
    "logging_steps": 10,
}
_SAMPLED = {"max_completion_length": 512, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None}
_CLIPPED = {"num_iterations": 1, "epsilon": 0.2, "epsilon_high": None, "mask_truncated_completions": False}
_PAIRS = {**_TRAINING, "max_length": 1024, "beta": 0.1}
# The defaults of TRL's options that have an equivalent in psigrad.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "GRPOConfig": {
        **_TRAINING, **_SAMPLED, **_CLIPPED, "num_generations": 8, "beta": 0.0, "delta": None, "loss_type": "dapo",
        "scale_rewards": "group", "importance_sampling_level": "token", "use_bias_correction_kl": True,
        "multi_objective_aggregation": "sum_then_normalize", "top_entropy_quantile": 1.0, "entropy_coef": 0.0,
        "off_policy_mask_threshold": None, "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05, "use_vllm": False,
        "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0,
        "vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": "sequence_mask",
        "vllm_importance_sampling_clip_max": 3.0, "vllm_importance_sampling_clip_min": None,
    },
    "RLOOConfig": {**_TRAINING, **_SAMPLED, **_CLIPPED, "num_generations": 2, "beta": 0.05, "normalize_advantages": False},
    # Configurations of TRL before 1.0.
    "PPOConfig": {
        **_TRAINING, "kl_coef": 0.05, "cliprange": 0.2, "cliprange_value": 0.2, "vf_coef": 0.1, "gamma": 1.0, "lam": 0.95,
    },
    "OnlineDPOConfig": {
        **_TRAINING, "learning_rate": 5e-7, "max_new_tokens": 64, "temperature": 0.9, "top_p": 1.0, "top_k": 0, "min_p": None,
        "beta": [0.1], "loss_type": "sigmoid",
    },
    "DistillationConfig": {**_TRAINING, **_SAMPLED, "beta": 1.0},
    "SFTConfig": {**_TRAINING, "learning_rate": 2e-5, "max_length": 1024, "loss_type": "nll"},
    "DPOConfig": {**_PAIRS, "loss_type": ["sigmoid"]},
    "KTOConfig": {**_PAIRS, "loss_type": "kto", "desirable_weight": 1.0, "undesirable_weight": 1.0},
    "ORPOConfig": _PAIRS,
    "CPOConfig": {**_PAIRS, "loss_type": "sigmoid", "cpo_alpha": 1.0, "simpo_gamma": 0.5, "alpha": 0.0},
    "RewardConfig": {**_TRAINING, "learning_rate": 1e-4, "max_length": 1024},
}
# fmt: on
# Constants in a trainer's code, which no field of its configuration sets.
FIXED: Mapping[str, Mapping[str, Any]] = {"OnlineDPOConfig": {"num_generations": 2}}

# A reward of TRL's command line that has another name in psigrad. `psigrad.language.rewards` accepts TRL's other names itself.
REWARDS: Mapping[str, Any] = {
    "get_soft_overlong_punishment": {"reward": "soft_overlong", "max_completion_length": 1280, "soft_punish_cache": 256},
}
# TRL's loss_type. In GRPO it is psigrad's aggregation, and for some values a surrogate. In DPO it is a method or a link.
AGGREGATES = {
    "grpo": "sequence_mean", "dapo": "token_mean", "bnpo": "token_mean", "dr_grpo": "fixed_length",
    "cispo": "token_mean", "sapo": "sequence_mean", "vespo": "token_mean",
}  # fmt: skip
SURROGATES = ("cispo", "sapo", "vespo")
LOSSES = {
    "sigmoid": "dpo", "hinge": "hinge", "ipo": "ipo", "robust": "robust_dpo", "apo_zero": "apo_zero", "apo_down": "apo_down",
    "sigmoid_norm": "ln_dpo", "bco_pair": "dpo", "nca_pair": "dpo", "sppo_hard": "dpo", "simpo": "simpo",
}  # fmt: skip
LINKS = ("bco_pair", "nca_pair", "sppo_hard")  # DPO with another link


def _find_clip(root: Part) -> Places:
    return [(place, part.parameters.get("bound")) for place, part in find_parts(root) if part.name in ("clip", "dual_clip")]


def _write_surrogate(root: Part, place: str, value: Any) -> Any:
    part = root.parameters[place]
    if value == "cispo":
        cap = part.parameters.get("high", part.parameters.get("cap"))
        return {"part": "truncated_weight", **({} if cap is None else {"cap": cap})}
    name, usual = {"sapo": ("soft_clip", {"positive": 1.0, "negative": 1.05}), "vespo": ("gamma_weight", {})}[value]
    return {"part": name, **usual, **(part.spec if part.name == name else {})}


def _write_dual_clip(root: Part, place: str, value: Any) -> Any:
    return {**dict(find_parts(root))[place].spec, "part": "dual_clip", "bound": value}


def _write_mask(root: Part, place: str, value: Any) -> Any:
    part = root.parameters[place]
    inner = part.parameters["surrogate"] if part.name == "off_policy_mask" else part
    return {"part": "off_policy_mask", "surrogate": inner.spec, "delta": value}


def _write_decoupled(root: Part, place: str, value: Any) -> Any:
    if value != "normalize_then_sum":
        raise UserError(f"multi_objective_aggregation is {value!r}; expected sum_then_normalize or normalize_then_sum.")
    return "decoupled_group_mean"


def _write_whitened(root: Part, place: str, value: Any) -> Any:
    if value is not True:
        raise UserError(f"normalize_advantages is {value!r}; expected true or false.")
    part = root.parameters[place]
    return part.spec if part.name == "whitened" else {"part": "whitened", "psi": part.spec}


def _write_correction(change: Callable[[Any], Mapping[str, Any]]) -> Callable[[Part, str, Any], Any]:
    """Return a function that sets the correction of vLLM's log-probs in a method: its fields, updated by `change(value)`."""

    def write(root: Part, place: str, value: Any) -> Any:
        if root.parameters["surrogate"].name == "gamma_weight":
            return None  # gamma_weight already weighs by the sampler's probabilities, as TRL's VESPO does
        part = root.parameters.get(place)
        usual = {"part": "masked_importance", "level": "sequence", "cap": 3.0, "floor": 0.0}
        return {**usual, **(part.spec if isinstance(part, Part) else {}), **change(value)}

    return write


def _read_mode(value: Any) -> Mapping[str, Any]:
    level, _, form = str(value).partition("_")
    return {"part": "masked_importance" if form == "mask" else "truncated_importance", "level": level}


_keep = _write_correction(lambda value: {})
_VLLM = "correction for vLLM's sampling"
# Options of TRL that change parts of a method, in the order in which they are applied, after those of `config/shortcuts.py`.
# fmt: off
PARTS: Mapping[str, Shortcut] = {
    "loss_type": Shortcut("surrogate", "", find_slot("surrogate"), _write_surrogate),
    "sapo_temperature_pos": Shortcut("soft clip", "", find_parameter("positive", "soft_clip")),
    "sapo_temperature_neg": Shortcut("soft clip", "", find_parameter("negative", "soft_clip")),
    **{f"vespo_{name}_{sign[:3]}": Shortcut("weight by VESPO", "", find_parameter(f"{name}_{sign}", "gamma_weight"))
       for name in ("k", "lambda") for sign in ("positive", "negative")},
    "delta": Shortcut("clip of the ratio", "", _find_clip, _write_dual_clip),
    "off_policy_mask_threshold": Shortcut("surrogate", "", find_slot("surrogate"), _write_mask),
    "multi_objective_aggregation": Shortcut("advantage within groups", "", find_grouped, _write_decoupled),
    "normalize_advantages": Shortcut("advantage", "", find_slot("psi"), _write_whitened),
    **{f"vllm_importance_sampling_{name}": Shortcut(_VLLM, "", find_slot("correction"), write) for name, write in {
        "mode": _write_correction(_read_mode),
        "clip_max": _write_correction(lambda value: {"cap": value}),
        "clip_min": _write_correction(lambda value: {"floor": value or 0.0}),
        "correction": lambda root, place, value: _keep(root, place, value) if value else None,
    }.items()},
}
# fmt: on
