"""Settings of TRL, verl and others that there are none of here: which are needless, and what to write for the rest."""

from __future__ import annotations

from psigrad.config import zoo_names
from psigrad.config.trl_values import METHOD

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
        "rows are read once, before the first step",
    ),
    **dict.fromkeys(("do_train", "do_eval"), "the command says what is done"),
    **dict.fromkeys(
        ("attn_implementation", "use_cache", "gradient_checkpointing_kwargs", "ddp_find_unused_parameters", "save_safetensors"),
        "psigrad chooses it",
    ),
    "disable_dropout": "dropout is off, but for lora_dropout",
    "ds3_gather_for_generation": "the sampler reads the trainer's weights",
}

# Another setting, or one that counts otherwise: what to write.
_FOLDER = "a run is named by its folder: output_dir=runs/NAME"
_MEMORY = "memory is bounded by micro_batch_tokens, which changes no gradient"
INSTEAD = {
    "algorithm.adv_estimator": METHOD,
    "train_batch_size": "prompts of a step are prompts_per_step, rows of one are batch_size",
    **dict.fromkeys(
        (
            *("micro_train_batch_size", "micro_rollout_batch_size"),
            *(f"actor_rollout_ref.{part}_micro_batch_size_per_gpu" for part in ("actor.ppo", "ref.log_prob", "rollout.log_prob")),
        ),
        _MEMORY,
    ),
    **dict.fromkeys(("bf16", "fp16"), "the precision is dtype=bfloat16 or dtype=float32"),
    "use_vllm": "vLLM is asked for by sampler=vllm",
    "vllm_mode": "vLLM runs in a process of its own beside the trainer, or in the samplers of a cluster (cluster=auto)",
    "use_peft": "an adapter is asked for by lora_rank=16",
    **dict.fromkeys(
        ("load_in_4bit", "load_in_8bit"),
        "there are no quantised weights; lora_rank=16 with dtype=bfloat16 takes the least memory",
    ),
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
    "warmup_ratio": "warm-up is counted in steps: warmup_steps",
    "args": "settings are given one by one; psigrad from-trl SCRIPT writes those of a configuration of TRL",
    "overwrite_output_dir": "a run goes on from its newest checkpoint; for a fresh one give another output_dir",
    "resume_from_checkpoint": "the same command goes on from its newest checkpoint",
    "n_epochs": "passes over a batch are num_iterations",
    "sync_ref_model": "the reference follows the policy with ref_model_sync_steps=512",
    "repetition_penalty": "completions are drawn from the policy as it is; temperature, top_p, top_k and min_p shape it",
    **dict.fromkeys(("deepspeed", "fsdp", "fsdp_config"), "models are sharded by strategy=fsdp"),
    "shuffle_dataset": "rows are shuffled in every epoch",
    "use_liger_kernel": "the log-probs are computed in chunks by kernels of psigrad's own",
    "assistant_only_loss": "messages teach the assistant's turns alone; rows of text teach all of it",
    "packing": "sequences are always packed and never attend to each other; leave it out, and give the rows of a step as "
    "batch_size, since TRL counts packs of max_length tokens",
    **zoo_names.INSTEAD,
    "trainer.nnodes": "on several machines torchrun or SLURM starts the processes",
    "algorithm.use_kl_in_reward": "where the KL term acts is algorithm.kl.where=reward",
    "actor_rollout_ref.rollout.name": "the sampler is sampler=embedded, transformers or vllm",
}
# Settings of ours where they have no meaning, beside those of others.
ANSWERS = INSTEAD | dict.fromkeys(
    ("reward", "reward_funcs", "reward_model"),
    "rewards are for what samples and scores, as grpo, ppo and eval do; other methods learn from the rows of their dataset",
)
