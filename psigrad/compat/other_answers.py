"""Settings of TRL, verl and others that there are none of here: which are needless, and what to write for the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from psigrad.compat import zoo_names
from psigrad.compat.trl_values import METHOD

_READ_ONCE = "rows are read once, before the first step"
_SAME_SUM = "a gradient is normalised by global counts, on any number of processes"
# What changes nothing here, and why.
NEEDLESS = {
    **dict.fromkeys(
        ("per_device_eval_batch_size", "eval_accumulation_steps", "padding_free", "auto_find_batch_size"),
        "sequences are packed without padding, within micro_batch_tokens",
    ),
    **dict.fromkeys(("log_completions", "num_completions_to_print"), "completions are in rollouts.jsonl and in the report"),
    **dict.fromkeys(("logging_first_step", "logging_strategy", "log_level"), "every step is in metrics.jsonl"),
    "remove_unused_columns": "every column reaches the reward functions",
    **dict.fromkeys(
        ("dataloader_num_workers", "dataloader_pin_memory", "dataset_num_proc", "preprocessing_num_workers"),
        _READ_ONCE,
    ),
    **dict.fromkeys(("do_train", "do_eval"), "the command says what is done"),
    **dict.fromkeys(
        ("attn_implementation", "use_cache", "gradient_checkpointing_kwargs", "ddp_find_unused_parameters", "save_safetensors"),
        "psigrad chooses it",
    ),
    "disable_dropout": "dropout is off, but for lora_dropout",
    "ds3_gather_for_generation": "the sampler reads the trainer's weights",
    **dict.fromkeys(("bf16_full_eval", "fp16_full_eval", "prediction_loss_only"), "evaluation runs as training does"),
    **dict.fromkeys(("eval_do_concat_batches", "eval_use_gather_object", "batch_eval_metrics"), "evaluation keeps no logits"),
    **dict.fromkeys(("activation_checkpointing_kwargs", "torch_empty_cache_steps", "ddp_backend"), "psigrad chooses it"),
    "average_tokens_across_devices": _SAME_SUM,
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
    "preprocess_logits_for_metrics": "evaluation keeps no logits",
    "reward_processing_classes": "a reward model is read with its own tokenizer",
    "ignore_bias_buffers": "no such buffers are kept",
    "lora_task_type": "the method says it",
    "bnb_4bit_quant_type": "there are no quantised weights",
    "use_bnb_nested_quant": "there are no quantised weights",
    "bnb_4bit_quant_storage": "there are no quantised weights",
}

_NOT_HERE = "psigrad has no such part"
_QUANTISED = "there are no quantised weights; lora_rank=16 with dtype=bfloat16 takes the least memory"
_ADAMW = "the optimiser is AdamW, with learning_rate, weight_decay, lr_scheduler_type and warmup_steps"
_OWN_VLLM = "psigrad starts vLLM itself, beside the trainer: sampler=vllm"
_MARGIN = "the margin is that of the reverse KL"
_CONSTANT = "the coefficient is constant; a callback can change it"
_PUSHED_ONCE = "the model is pushed once, at the end; psigrad push RUN REPO pushes a finished run"
# TRL's default, which needs nothing, and why there is no equal of another value.
NO_EQUAL: Mapping[str, tuple[Any, str]] = {
    "lr_scheduler_kwargs": (None, "schedules are linear, cosine and constant, without parameters"),
    "optim_target_modules": (None, "AdamW steps every weight that learns"),
    "label_smoothing_factor": (0.0, "cross-entropy is not smoothed"),
    "torch_compile": (False, "kernels of psigrad's own compute what is compiled elsewhere"),
    **dict.fromkeys(("torch_compile_backend", "torch_compile_mode"), (None, "nothing is compiled by torch")),
    "liger_kernel_config": (None, "kernels of psigrad's own compute it"),
    "neftune_noise_alpha": (None, "embeddings get no noise"),
    "project": ("huggingface", "the trackers' project is psigrad"),
    **dict.fromkeys(("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"), (None, "trackio runs locally")),
    "eval_delay": (0, "the model is evaluated before its first step and then every eval_steps"),
    "save_only_model": (False, "a checkpoint holds all that a resume needs"),
    "hub_token": (None, "the token is read from HF_TOKEN or `hf auth login`, so that it stands in no file"),
    "hub_strategy": ("every_save", _PUSHED_ONCE),
    "hub_always_push": (False, _PUSHED_ONCE),
    "load_best_model_at_end": (False, "the last weights are kept; a callback can end the run when a metric no longer rises"),
    "metric_for_best_model": (None, "the last weights are kept"),
    "greater_is_better": (None, "the last weights are kept"),
    "data_seed": (None, "one seed derives all others"),
    "parallelism_config": (None, "models are replicated or sharded (placement.strategy)"),
    "train_sampling_strategy": ("random", "rows are shuffled in every epoch"),
    "router_aux_loss_coef": (None, "mixtures of experts train without the auxiliary loss"),
    "chat_template_path": (None, "the tokenizer's own template counts; save it with the tokenizer"),
    "dataset_text_field": ("text", "the column of plain text is text; rename yours in the rows"),
    "dataset_kwargs": (None, _READ_ONCE),
    "eos_token": (None, "the tokenizer's own EOS counts"),
    "truncation_mode": ("keep_start", "rows that are too long are cut at their end, or left out"),
    "packing_strategy": ("bfd", "sequences are packed whole"),
    "eval_packing": (None, "sequences are packed whole"),
    "completion_only_loss": (None, "a row of prompt and completion teaches its completion alone; one of text teaches all of it"),
    "activation_offloading": (False, "activations stay on the device; gradient_checkpointing saves their memory"),
    "cast_lm_head_to_fp32": (False, "log-probabilities are computed in float32 from the head as it is"),
    "loss_weights": (None, "one loss is trained; sft adds the likelihood of the chosen"),
    "ld_alpha": (None, _NOT_HERE),
    "f_divergence_type": ("reverse_kl", _MARGIN),
    "f_alpha_divergence_coef": (0.5, _MARGIN),
    "use_weighting": (False, _NOT_HERE),
    "discopop_tau": (0.05, _NOT_HERE),
    "generation_kwargs": (None, "temperature, top_p, top_k and min_p shape the distribution"),
    "chat_template_kwargs": (None, "the tokenizer's own template counts"),
    "vllm_server_base_url": (None, _OWN_VLLM),
    "vllm_server_host": ("0.0.0.0", _OWN_VLLM),
    "vllm_server_port": (8000, _OWN_VLLM),
    "vllm_server_timeout": (240.0, _OWN_VLLM),
    "vllm_group_port": (51216, _OWN_VLLM),
    "vllm_structured_outputs_regex": (None, "completions are drawn from the policy as it is"),
    "vllm_importance_sampling_cap": (None, "it is the old name of vllm_importance_sampling_clip_max"),
    **dict.fromkeys(("vespo_k_pos", "vespo_lambda_neg"), (2.0, "there is no VESPO")),
    **dict.fromkeys(("vespo_lambda_pos", "vespo_k_neg"), (3.0, "there is no VESPO")),
    "use_adaptive_entropy": (False, _CONSTANT),
    "entropy_coef_min": (0.0, _CONSTANT),
    "entropy_coef_max": (1.0, _CONSTANT),
    "entropy_coef_delta": (0.005, _CONSTANT),
    "entropy_target": (0.2, _CONSTANT),
    "max_tool_calling_iterations": (None, "an episode has max_turns turns"),
    "log_unique_prompts": (False, "every completion is in rollouts.jsonl"),
    "log_completions_hub_repo": (None, "every completion is in rollouts.jsonl"),
    "reward_clip_range": (None, "clip the value in the reward function"),
    "ref_model_sync_steps": (512, "the reference of a preference loss stays as it is"),
    "ref_model_mixup_alpha": (0.6, "the reference of a preference loss stays as it is"),
    "generate_during_eval": (False, "a reward or a metric makes evaluation generate"),
    "teacher_model_revision": (None, "give the teacher as a folder"),
    "alpha": (0.0, "TRL's alpha is that of AlphaPO, which there is none of; the scale of an adapter is lora_alpha"),
    "lora_target_parameters": (None, "an adapter is put on modules"),
    **dict.fromkeys(("load_in_4bit", "load_in_8bit"), (False, _QUANTISED)),
    "dataset_streaming": (False, "rows are read whole"),
    # arguments of TRL's trainers
    "optimizers": ((None, None), _ADAMW),
    "optimizer_cls_and_kwargs": (None, _ADAMW),
    "quantization_config": (None, _QUANTISED),
    "compute_loss_func": (None, "the loss is the method's, whose parts may be your own: algorithm.psi=mine.py:my_advantage"),
    "compute_metrics": (None, "a figure of held-out prompts is metric=module:function, which has the form of a reward"),
    "data_collator": (None, "psigrad packs the rows, and what is learned of one follows from its columns"),
    "model_init": (None, "the model is given as model="),
    "rollout_func": (
        None,
        "episodes of several turns have environment= or tools=, and a sampler of your own is sampler=module:Class",
    ),
    "environment_factory": (None, "it is environment=module:Class with reset(row) and step(text)"),
    "peft_config": (None, "an adapter is asked for by lora_rank=16; psigrad.train takes a LoraConfig as peft_config"),
    **dict.fromkeys(
        ("processing_class", "tokenizer"), (None, "the tokenizer is the model's; psigrad.train takes another one as tokenizer")
    ),
}

# Another setting, or one that counts otherwise: what to write.
_FOLDER = "a run is named by its folder: output_dir=runs/NAME"
_MEMORY = "memory is bounded by micro_batch_tokens, which changes no gradient"
INSTEAD = {
    "model_init_kwargs": "a model is loaded by dtype and revision, and psigrad chooses the rest",
    "teacher_model_init_kwargs": "a teacher is loaded by reference and reference_dtype",
    "ddp_timeout": "how long processes wait for one another is timeout_minutes",
    # parts of TRL's losses that are parts of an algorithm here
    "delta": "a bound on the ratio for negative advantages is algorithm.surrogate={part: dual_clip, bound: 4}",
    "off_policy_mask_threshold": "it is algorithm.surrogate={part: off_policy_mask, delta: 0.1}",
    **dict.fromkeys(
        ("sapo_temperature_pos", "sapo_temperature_neg"), "psigrad sapo has algorithm.surrogate.positive and .negative"
    ),
    "multi_objective_aggregation": "normalize_then_sum is algorithm.psi=decoupled_group_mean",
    "normalize_advantages": "it is algorithm.psi={part: whitened, psi: leave_one_out}",
    **dict.fromkeys(
        (f"vllm_importance_sampling_{name}" for name in ("correction", "mode", "clip_max", "clip_min")),
        "it is algorithm.correction={part: masked_importance, level: sequence, cap: 3}, or truncated_importance, or level: token",
    ),
    "algorithm.adv_estimator": METHOD,
    "train_batch_size": "prompts of a step are prompts_per_step, rows of one are batch_size",
    **dict.fromkeys(
        (
            *("micro_train_batch_size", "micro_rollout_batch_size"),
            *(f"actor_rollout_ref.{part}_micro_batch_size_per_gpu" for part in ("actor.ppo", "ref.log_prob", "rollout.log_prob")),
        ),
        _MEMORY,
    ),
    **dict.fromkeys(("bf16", "fp16", "mixed_precision"), "the precision is dtype=bfloat16 or dtype=float32"),
    "use_vllm": "vLLM is asked for by sampler=vllm",
    "vllm_mode": "vLLM runs in a process of its own beside the trainer, or in the samplers of a cluster (cluster=auto)",
    "use_peft": "an adapter is asked for by lora_rank=16",
    "dataset_config": "a configuration stands behind the dataset's name: dataset=openai/gsm8k:main",
    **dict.fromkeys(
        ("dataset_prompt_column", "data.prompt_key", "formatting_func"),
        "a dataset has TRL's columns, such as prompt or messages; rename or make them in the rows",
    ),
    **dict.fromkeys(("run_name", "trainer.experiment_name", "trainer.project_name", "log_folder", "logging_dir"), _FOLDER),
    **dict.fromkeys(("trainer.logger", "tensorboard_log"), "trackers are report_to=wandb, tensorboard or trackio"),
    "eval_strategy": "evaluation is asked for by eval_steps",
    "save_strategy": "checkpoints are asked for by save_steps and save_minutes; the last step is always kept",
    **dict.fromkeys(("optim", "optim_args"), "the optimiser is AdamW"),
    "warmup_ratio": "it is a share of max_steps, from 0 to 1; warmup_steps counts steps",
    "args": "psigrad.train takes a configuration of TRL; in a file or as flags settings are given one by one",
    "overwrite_output_dir": "a run goes on from its newest checkpoint; for a fresh one give another output_dir",
    "resume_from_checkpoint": "the same command goes on from its newest checkpoint",
    "n_epochs": "passes over a batch are num_iterations",
    "sync_ref_model": "the reference follows the policy with ref_model_sync_steps=512",
    "repetition_penalty": "completions are drawn from the policy as it is; temperature, top_p, top_k and min_p shape it",
    **dict.fromkeys(
        ("deepspeed", "fsdp", "fsdp_config", "accelerate_config"), "models are sharded by strategy=fsdp, on processes=2 or more"
    ),
    "shuffle_dataset": "rows are shuffled in every epoch",
    "use_liger_kernel": "the log-probs are computed in chunks by kernels of psigrad's own",
    "assistant_only_loss": "messages teach the assistant's turns alone; rows of text teach all of it",
    "packing": "sequences are always packed and never attend to each other; leave it out, and give the rows of a step as "
    "batch_size, since TRL counts packs of max_length tokens",
    **zoo_names.INSTEAD,
    # of TRL's and accelerate's commands
    "datasets": "several datasets are dataset=[a.jsonl:0.7, b.jsonl:0.3]",
    "env": "environment variables are set in the shell, and those that a reward needs are named by worker_env",
    "num_machines": "on several machines torchrun or SLURM starts the processes",
    "trainer.nnodes": "on several machines torchrun or SLURM starts the processes",
    "algorithm.use_kl_in_reward": "where the KL term acts is algorithm.kl.where=reward",
    "actor_rollout_ref.rollout.name": "the sampler is sampler=embedded, transformers or vllm",
}
# Settings of ours where they have no meaning, beside those of others.
ANSWERS = (
    {name: why for name, (_, why) in NO_EQUAL.items()}
    | INSTEAD
    | dict.fromkeys(
        ("reward", "reward_funcs", "reward_model"),
        "rewards are for what samples and scores, as grpo, ppo and eval do; other methods learn from the rows of their dataset",
    )
)
