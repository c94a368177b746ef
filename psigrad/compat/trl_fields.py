"""Every field of TRL's configurations: what it is here, or why there is no equal. A test walks over TRL's own classes.

Names that mean the same are in `psigrad.compat.other_names`, those that are answered in `psigrad.compat.other_answers`; here is
what a script of TRL 1.x, or of its experimental trainers, says besides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from psigrad.compat.batch_sizes import BATCH
from psigrad.compat.other_answers import INSTEAD, NEEDLESS, NO_EQUAL
from psigrad.compat.other_names import SAME, VALUES
from psigrad.config.language import OnlineConfig, PreferenceConfig, RewardConfig, SFTConfig
from psigrad.config.load import flat_names

# TRL's configuration -> our method and the class of its settings.
METHODS: Mapping[str, tuple[str, type[Any]]] = {
    "GRPOConfig": ("grpo", OnlineConfig),
    "RLOOConfig": ("rloo", OnlineConfig),
    "PPOConfig": ("ppo", OnlineConfig),
    "OnlineDPOConfig": ("online_dpo", OnlineConfig),
    "DistillationConfig": ("distill", OnlineConfig),
    "SFTConfig": ("sft", SFTConfig),
    "DPOConfig": ("dpo", PreferenceConfig),
    "KTOConfig": ("kto", PreferenceConfig),
    "ORPOConfig": ("orpo", PreferenceConfig),
    "CPOConfig": ("simpo", PreferenceConfig),
    "RewardConfig": ("reward", RewardConfig),
}

_TRAINING = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3.0,
    "max_steps": -1,
    "learning_rate": 1e-6,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "seed": 42,
    "save_steps": 500,
    "logging_steps": 10,
}
_SAMPLED = {"max_completion_length": 512, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None}
# What TRL does where a script says nothing, as far as it is a setting here.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "GRPOConfig": {
        **_TRAINING,
        **_SAMPLED,
        "num_generations": 8,
        "num_iterations": 1,
        "beta": 0.0,
        "epsilon": 0.2,
        "epsilon_high": None,
        "delta": None,
        "loss_type": "dapo",
        "scale_rewards": "group",
        "importance_sampling_level": "token",
        "use_bias_correction_kl": True,
        "mask_truncated_completions": False,
        "multi_objective_aggregation": "sum_then_normalize",
        "top_entropy_quantile": 1.0,
        "entropy_coef": 0.0,
        "off_policy_mask_threshold": None,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "use_vllm": False,
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": "sequence_mask",
        "vllm_importance_sampling_clip_max": 3.0,
        "vllm_importance_sampling_clip_min": None,
    },
    "RLOOConfig": {
        **_TRAINING,
        **_SAMPLED,
        "num_generations": 2,
        "num_iterations": 1,
        "beta": 0.05,
        "epsilon": 0.2,
        "epsilon_high": None,
        "normalize_advantages": False,
        "mask_truncated_completions": False,
    },
    "PPOConfig": {**_TRAINING},
    "OnlineDPOConfig": {
        **_TRAINING,
        "learning_rate": 5e-7,
        "max_new_tokens": 64,
        "temperature": 0.9,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": None,
        "beta": [0.1],
        "loss_type": "sigmoid",
    },
    "DistillationConfig": {**_TRAINING, **_SAMPLED, "beta": 1.0},
    "SFTConfig": {**_TRAINING, "learning_rate": 2e-5, "max_length": 1024, "loss_type": "nll"},
    "DPOConfig": {**_TRAINING, "max_length": 1024, "beta": 0.1, "loss_type": ["sigmoid"], "label_smoothing": 0.0},
    "KTOConfig": {
        **_TRAINING,
        "max_length": 1024,
        "beta": 0.1,
        "loss_type": "kto",
        "desirable_weight": 1.0,
        "undesirable_weight": 1.0,
    },
    "ORPOConfig": {**_TRAINING, "max_length": 1024, "beta": 0.1},
    "CPOConfig": {
        **_TRAINING,
        "max_length": 1024,
        "beta": 0.1,
        "loss_type": "sigmoid",
        "label_smoothing": 0.0,
        "cpo_alpha": 1.0,
        "simpo_gamma": 0.5,
        "alpha": 0.0,
    },
    "RewardConfig": {**_TRAINING, "learning_rate": 1e-4, "max_length": 1024},
}
_GENERAL = (*_TRAINING, *_SAMPLED, "num_generations", "num_iterations")
# Fields that become parts of the algorithm or of the loss, or that are computed (`psigrad.compat.from_trl`).
COMPUTED: Mapping[str, tuple[str, ...]] = {
    "": ("use_cpu", "ddp_timeout", "activation_checkpointing", "model_init_kwargs", "warmup_ratio", "dtype", "save_total_limit"),
    "ModelConfig": ("dtype",),
    **{name: tuple(field for field in DEFAULTS[name] if field not in _GENERAL) for name in ("GRPOConfig", "RLOOConfig")},
    "PPOConfig": ("kl_coef", "cliprange", "cliprange_value", "vf_coef", "gamma", "lam", "reward_model_path"),
    "OnlineDPOConfig": ("beta", "loss_type", "reward_model_path", "missing_eos_penalty", "max_length"),
    "DistillationConfig": ("beta", "teacher_model_init_kwargs"),
    "SFTConfig": ("loss_type", "assistant_only_loss"),
    "DPOConfig": ("beta", "loss_type", "label_smoothing"),
    "KTOConfig": ("beta", "loss_type", "desirable_weight", "undesirable_weight"),
    "ORPOConfig": ("beta",),
    "CPOConfig": ("beta", "loss_type", "label_smoothing", "cpo_alpha", "simpo_gamma"),
    "ScriptArguments": ("dataset_config",),
}

Kind = Literal["mapped", "nothing", "no equal"]


class FieldOutcome(NamedTuple):
    """What becomes of a field: mapped onto settings, without effect here, or without an equal; and why."""

    kind: Kind
    why: str


def outcome(config: str, name: str) -> FieldOutcome | None:
    """What becomes of the field `name` of TRL's class `config`; None where nobody has said."""
    settings = METHODS.get(config, ("", OnlineConfig))[1]
    ours = {own: dotted for pair in flat_names(settings) for own, dotted in (pair, (pair[1], pair[1]))}
    if name in COMPUTED.get(config, ()) or name in COMPUTED[""]:
        return FieldOutcome("mapped", "computed")
    if name in ours or SAME.get(name) in ours:
        return FieldOutcome("mapped", ours.get(name) or SAME[name])
    if name in NEEDLESS:
        return FieldOutcome("nothing", NEEDLESS[name])
    if name in NO_EQUAL:
        return FieldOutcome("no equal", NO_EQUAL[name][1])
    if name in BATCH:
        return FieldOutcome("mapped", "prompts_per_step" if settings is OnlineConfig else "batch_size")
    if name in VALUES:
        return FieldOutcome("mapped", "by its value")
    return FieldOutcome("no equal", INSTEAD[name]) if name in INSTEAD else None
