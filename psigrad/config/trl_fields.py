"""Every field of TRL's configurations: what it is here, or why there is no equal. A test walks over TRL's own classes.

Names that mean the same are in `psigrad.config.other_names`; here is what is left of TRL 1.x and of its experimental trainers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from psigrad.config.batch_sizes import BATCH
from psigrad.config.language import OnlineConfig, PreferenceConfig, RewardConfig, SFTConfig
from psigrad.config.load import flat_names
from psigrad.config.other_answers import INSTEAD, NEEDLESS
from psigrad.config.other_names import SAME, VALUES

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
# Fields that become parts of the algorithm or of the loss, or that are computed (`psigrad.config.from_trl`).
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

_READ_ONCE = "rows are read once, before the first step"
_SAME_SUM = "a gradient is normalised by global counts, on any number of processes"
# What changes nothing here, and why.
NOTHING: Mapping[str, str] = {
    **dict.fromkeys(("bf16_full_eval", "fp16_full_eval", "prediction_loss_only"), "evaluation runs as training does"),
    **dict.fromkeys(("eval_do_concat_batches", "eval_use_gather_object", "batch_eval_metrics"), "evaluation keeps no logits"),
    **dict.fromkeys(("activation_checkpointing_kwargs", "torch_empty_cache_steps", "ddp_backend"), "psigrad chooses it"),
    **dict.fromkeys(("average_tokens_across_devices",), _SAME_SUM),
    **dict.fromkeys(("log_on_each_node", "log_level_replica", "logging_nan_inf_filter", "debug"), "rank 0 writes what there is"),
    "include_num_input_tokens_seen": "num_tokens is always logged",
    "eval_on_start": "the model is evaluated before its first step anyway",
    "enable_jit_checkpoint": "SIGTERM saves anyway",
    **dict.fromkeys(
        ("save_on_each_node", "local_rank", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph"), _SAME_SUM
    ),
    **dict.fromkeys(
        ("ignore_data_skip", "full_determinism", "restore_callback_states_from_checkpoint"), "resume is bitwise anyway"
    ),
    **dict.fromkeys(
        (
            *("dataloader_drop_last", "dataloader_persistent_workers", "dataloader_prefetch_factor", "dataloader_in_order"),
            *("dataloader_multiprocessing_context", "accelerator_config", "label_names", "length_column_name"),
        ),
        _READ_ONCE,
    ),
    **dict.fromkeys(("skip_memory_metrics", "do_predict", "include_for_metrics"), "there is no such figure"),
    **dict.fromkeys(("pad_to_multiple_of", "pad_token", "padding_value", "is_encoder_decoder"), "nothing is padded"),
    **dict.fromkeys(("precompute_ref_log_probs", "precompute_ref_batch_size"), "they are always computed once and kept"),
    **dict.fromkeys(
        ("cache_implementation", "transformers_continuous_batching_config", "use_transformers_paged"), "psigrad samples"
    ),
    "use_transformers_continuous_batching": "psigrad's sampler batches continuously",
    "vllm_model_impl": "vLLM chooses it",
    "vllm_max_model_length": "the model's own length counts",
    "log_multimodal": "models are of text",
    "ignore_bias_buffers": "no such buffers are kept",
    "lora_task_type": "the method says it",
    "bnb_4bit_quant_type": "there are no quantised weights",
    "use_bnb_nested_quant": "there are no quantised weights",
    "bnb_4bit_quant_storage": "there are no quantised weights",
}

_NOT_HERE = "psigrad has no such part"
# TRL's default, and why there is no equal where a script says otherwise.
NO_EQUAL: Mapping[str, tuple[Any, str]] = {
    "lr_scheduler_kwargs": (None, "schedules are linear, cosine and constant, without parameters"),
    "optim_target_modules": (None, "AdamW steps every weight that learns"),
    "label_smoothing_factor": (0.0, "cross-entropy is not smoothed"),
    **dict.fromkeys(("torch_compile",), (False, "kernels of psigrad's own compute what is compiled elsewhere")),
    **dict.fromkeys(("torch_compile_backend", "torch_compile_mode"), (None, "nothing is compiled by torch")),
    "liger_kernel_config": (None, "kernels of psigrad's own compute it"),
    "neftune_noise_alpha": (None, "embeddings get no noise"),
    "project": ("huggingface", "the trackers' project is psigrad"),
    **dict.fromkeys(("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"), (None, "trackio runs locally")),
    "eval_delay": (0, "evaluation begins before the first step"),
    "save_only_model": (False, "a checkpoint holds all that a resume needs"),
    "hub_token": (None, "the token is read from HF_TOKEN or `hf auth login`, so that it stands in no file"),
    "hub_strategy": ("every_save", "the model is pushed once, at the end; psigrad push RUN REPO pushes a finished run"),
    "hub_always_push": (False, "the model is pushed once, at the end; psigrad push RUN REPO pushes a finished run"),
    "load_best_model_at_end": (False, "the last weights are kept; a callback can end the run when a metric no longer rises"),
    "metric_for_best_model": (None, "the last weights are kept"),
    "greater_is_better": (None, "the last weights are kept"),
    "data_seed": (None, "one seed derives all others"),
    "parallelism_config": (None, "models are replicated or sharded (placement.strategy)"),
    "train_sampling_strategy": ("random", "rows are shuffled in every epoch"),
    "router_aux_loss_coef": (None, "mixtures of experts train without the auxiliary loss"),
    "chat_template_path": (None, "the tokenizer's own template counts; save it with the tokenizer"),
    "dataset_text_field": ("text", "rows are TRL's prompt-completion or messages"),
    "dataset_kwargs": (None, _READ_ONCE),
    "eos_token": (None, "the tokenizer's own EOS counts"),
    "truncation_mode": ("keep_start", "rows that are too long are cut at their end, or left out"),
    "packing_strategy": ("bfd", "sequences are packed whole"),
    "eval_packing": (None, "sequences are packed whole"),
    "completion_only_loss": (None, "a prompt-completion row teaches its completion"),
    "activation_offloading": (False, "activations stay on the device; gradient_checkpointing saves their memory"),
    "cast_lm_head_to_fp32": (False, "log-probabilities are computed in float32 from the head as it is"),
    "loss_weights": (None, "one loss is trained; sft adds the likelihood of the chosen"),
    "ld_alpha": (None, _NOT_HERE),
    "f_divergence_type": ("reverse_kl", "the margin is that of the reverse KL"),
    "f_alpha_divergence_coef": (0.5, "the margin is that of the reverse KL"),
    "use_weighting": (False, _NOT_HERE),
    "discopop_tau": (0.05, _NOT_HERE),
    "generation_kwargs": (None, "temperature, top_p, top_k and min_p shape the distribution"),
    "chat_template_kwargs": (None, "the tokenizer's own template counts"),
    **dict.fromkeys(
        ("vllm_server_base_url", "vllm_structured_outputs_regex"),
        (None, "psigrad starts vLLM itself, beside the trainer"),
    ),
    "vllm_server_host": ("0.0.0.0", "psigrad starts vLLM itself, beside the trainer"),
    "vllm_server_port": (8000, "psigrad starts vLLM itself, beside the trainer"),
    "vllm_server_timeout": (240.0, "psigrad starts vLLM itself, beside the trainer"),
    "vllm_group_port": (51216, "psigrad starts vLLM itself, beside the trainer"),
    "vllm_importance_sampling_cap": (None, "it is the old name of vllm_importance_sampling_clip_max"),
    **dict.fromkeys(("vespo_k_pos", "vespo_lambda_neg"), (2.0, "there is no VESPO")),
    **dict.fromkeys(("vespo_lambda_pos", "vespo_k_neg"), (3.0, "there is no VESPO")),
    "use_adaptive_entropy": (False, "the coefficient is constant; a callback can change it"),
    "entropy_coef_min": (0.0, "the coefficient is constant; a callback can change it"),
    "entropy_coef_max": (1.0, "the coefficient is constant; a callback can change it"),
    "entropy_coef_delta": (0.005, "the coefficient is constant; a callback can change it"),
    "entropy_target": (0.2, "the coefficient is constant; a callback can change it"),
    "max_tool_calling_iterations": (None, "an episode has max_turns turns"),
    "log_unique_prompts": (False, "every completion is in rollouts.jsonl"),
    "log_completions_hub_repo": (None, "every completion is in rollouts.jsonl"),
    "reward_clip_range": (None, "clip the value in the reward function"),
    "ref_model_sync_steps": (512, "the reference of a preference loss stays as it is"),
    "ref_model_mixup_alpha": (0.6, "the reference of a preference loss stays as it is"),
    "generate_during_eval": (False, "a reward or a metric makes evaluation generate"),
    "teacher_model_revision": (None, "give the teacher as a folder"),
    "alpha": (0.0, "there is no AlphaPO"),
    "lora_target_parameters": (None, "an adapter is put on modules"),
    "load_in_4bit": (False, "there are no quantised weights"),
    "load_in_8bit": (False, "there are no quantised weights"),
    "dataset_streaming": (False, "rows are read whole"),
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
    for table in (NOTHING, NEEDLESS):
        if name in table:
            return FieldOutcome("nothing", table[name])
    if name in NO_EQUAL:
        return FieldOutcome("no equal", NO_EQUAL[name][1])
    if name in BATCH:
        return FieldOutcome("mapped", "prompts_per_step" if settings is OnlineConfig else "batch_size")
    if name in VALUES:
        return FieldOutcome("mapped", "by its value")
    return FieldOutcome("no equal", INSTEAD[name]) if name in INSTEAD else None
