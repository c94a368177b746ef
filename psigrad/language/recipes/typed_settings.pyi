"""Settings of `psigrad.train` by their names, one class per kind of training. Written by docs/make/typed.py."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict

import peft
from transformers import PreTrainedModel, PreTrainedTokenizerBase

_Path = str | os.PathLike[str]
_Dataset = _Path | Iterable[Mapping[str, Any]]
_Reward = str | dict[str, Any] | Callable[..., Any]

class Given(TypedDict, total=False):
    model: _Path | PreTrainedModel
    dataset: _Dataset
    eval_dataset: _Dataset
    tokenizer: _Path | PreTrainedTokenizerBase
    processing_class: _Path | PreTrainedTokenizerBase
    reward: _Reward | Iterable[_Reward]
    peft_config: peft.LoraConfig
    args: Any

class SFTSettings(Given, total=False):
    model_name_or_path: str
    model_revision: str
    torch_dtype: Literal["float32", "bfloat16"]
    lora_r: int
    activation_checkpointing: bool
    dataset_name: str | Any
    train_dataset: str | Any
    eval_dataset_name: str | Any
    dataset_train_split: str
    dataset_test_split: str
    reward_model_name_or_path: str | Sequence[str]
    reward_model_path: str | Sequence[str]
    lr: float
    max_new_tokens: int
    response_length: int
    max_response_length: int
    vllm_gpu_memory_utilization: float
    vllm_tensor_parallel_size: int
    dataset_num_proc: int
    preprocessing_num_workers: int
    vllm_enable_sleep_mode: bool
    max_seq_length: int
    total_epochs: float
    num_epochs: float
    total_training_steps: int
    num_processes: int
    reward_funcs: str | Mapping[str, Any] | Callable[..., Any] | Sequence[str | Mapping[str, Any] | Callable[..., Any]]
    reward_model: str | Sequence[str]
    reward_weights: float | Sequence[float]
    reward_timeout: float
    reward_workers: int
    worker_memory_gb: float
    worker_env: str | Sequence[str]
    micro_batch_tokens: int
    revision: str
    trust_remote_code: bool
    chat_template_path: str
    chat_template_kwargs: str | Mapping[str, Any]
    eos_token: str
    dtype: Literal["float32", "bfloat16"]
    quantize_base: Literal["", "nf4", "int8", "gguf"]
    adapter: Literal["continue", "merge"]
    lora_rank: int
    lora_alpha: float
    lora_dropout: float
    lora_target_modules: str | Sequence[str]
    use_rslora: bool
    use_dora: bool
    lora_modules_to_save: str | Sequence[str]
    lora_save: Literal["both", "merged", "adapter"]
    router_aux_loss_coef: float | None
    attention: Literal["auto", "sdpa", "varlen", "flex"]
    gradient_checkpointing: bool
    columns: str | Mapping[str, Any]
    plain_prompts: bool
    split: str
    eval_split: str
    max_rows: int
    bad_rows: Literal["stop", "skip"]
    num_proc: int
    optimizer: Literal["adamw", "adamw_8bit", "muon", "adafactor"]
    bf16_stochastic_round: bool
    learning_rate: float
    weight_decay: float
    adam_beta1: float
    adam_beta2: float
    adam_epsilon: float
    max_grad_norm: float
    lr_scheduler_type: Literal[
        "linear",
        "cosine",
        "constant",
        "cosine_with_restarts",
        "polynomial",
        "inverse_sqrt",
        "cosine_with_min_lr",
        "cosine_warmup_with_min_lr",
        "warmup_stable_decay",
    ]
    lr_scheduler_kwargs: str | Mapping[str, Any]
    warmup_steps: int
    rehearse: bool
    max_completion_length: int
    top_p: float
    top_k: int
    min_p: float
    stop_token_ids: int | Sequence[int]
    sampler: str
    vllm_memory: float
    vllm_sleep: bool
    vllm_readback: bool
    tensor_parallel_size: int
    max_decode_batch: int
    cuda_graphs: bool
    eval_steps: int
    eval_prompts: int | None
    num_generations_eval: int
    eval_temperature: float
    metric: str | Mapping[str, Any] | Callable[..., Any]
    load_best_model_at_end: bool
    metric_for_best_model: str
    greater_is_better: bool | None
    early_stopping_patience: int
    early_stopping_threshold: float
    eval_kl: bool
    output_dir: _Path
    max_steps: int
    num_train_epochs: float
    seed: int
    save_steps: int
    save_minutes: float
    logging_steps: int
    watchdog_minutes: float
    async_save: bool
    save_total_limit: int
    resume: Literal["auto", "never", "must"]
    extend: bool
    allow: str | Sequence[str]
    callbacks: str | Any | Sequence[str | Any]
    report_to: str | Sequence[str]
    threads: int
    device: str
    max_memory: str
    progress: bool
    report: bool
    processes: int
    strategy: Literal["ddp", "fsdp"]
    dp_replicate_size: int
    tp_size: int
    cp_size: int
    timeout_minutes: float
    cluster: str
    scorers: int
    scorer_cpus: int
    push_to_hub: bool
    hub_model_id: str
    hub_private_repo: bool
    hub_revision: str
    batch_size: int
    max_length: int
    label_smoothing_factor: float
    train_empty_thinking: bool

SFTMethod = Literal["sft",]

class OnlineSettings(Given, total=False):
    model_name_or_path: str
    model_revision: str
    torch_dtype: Literal["float32", "bfloat16"]
    lora_r: int
    activation_checkpointing: bool
    dataset_name: str | Any
    train_dataset: str | Any
    eval_dataset_name: str | Any
    dataset_train_split: str
    dataset_test_split: str
    max_prompt_tokens: int
    reward_model_name_or_path: str | Sequence[str]
    reward_model_path: str | Sequence[str]
    ref_model: str
    teacher_model_name_or_path: str
    lr: float
    max_new_tokens: int
    response_length: int
    max_response_length: int
    vllm_gpu_memory_utilization: float
    vllm_tensor_parallel_size: int
    dataset_num_proc: int
    preprocessing_num_workers: int
    vllm_enable_sleep_mode: bool
    rollout_n: int
    num_ppo_epochs: int
    num_mini_batches: int
    total_epochs: float
    num_epochs: float
    total_training_steps: int
    num_processes: int
    reward_funcs: str | Mapping[str, Any] | Callable[..., Any] | Sequence[str | Mapping[str, Any] | Callable[..., Any]]
    reward_model: str | Sequence[str]
    reward_weights: float | Sequence[float]
    reward_timeout: float
    reward_workers: int
    worker_memory_gb: float
    worker_env: str | Sequence[str]
    environment: str | Callable[..., Any]
    tools: str | Callable[..., Any] | Sequence[str | Callable[..., Any]]
    environment_timeout: float
    environment_workers: int
    environment_sandbox: bool
    environment_files: str | Sequence[str]
    max_turns: int
    max_turn_length: int
    max_observation_length: int
    turns_together: bool
    agent: str | Callable[..., Any]
    agent_command: str
    agent_timeout: float
    agent_workers: int
    agent_calls: int
    micro_batch_tokens: int
    revision: str
    trust_remote_code: bool
    chat_template_path: str
    chat_template_kwargs: str | Mapping[str, Any]
    eos_token: str
    dtype: Literal["float32", "bfloat16"]
    quantize_base: Literal["", "nf4", "int8", "gguf"]
    adapter: Literal["continue", "merge"]
    lora_rank: int
    lora_alpha: float
    lora_dropout: float
    lora_target_modules: str | Sequence[str]
    use_rslora: bool
    use_dora: bool
    lora_modules_to_save: str | Sequence[str]
    lora_save: Literal["both", "merged", "adapter"]
    router_aux_loss_coef: float | None
    attention: Literal["auto", "sdpa", "varlen", "flex"]
    gradient_checkpointing: bool
    columns: str | Mapping[str, Any]
    plain_prompts: bool
    split: str
    eval_split: str
    max_rows: int
    max_prompt_length: int
    bad_rows: Literal["stop", "skip"]
    num_proc: int
    optimizer: Literal["adamw", "adamw_8bit", "muon", "adafactor"]
    bf16_stochastic_round: bool
    learning_rate: float
    weight_decay: float
    adam_beta1: float
    adam_beta2: float
    adam_epsilon: float
    max_grad_norm: float
    lr_scheduler_type: Literal[
        "linear",
        "cosine",
        "constant",
        "cosine_with_restarts",
        "polynomial",
        "inverse_sqrt",
        "cosine_with_min_lr",
        "cosine_warmup_with_min_lr",
        "warmup_stable_decay",
    ]
    lr_scheduler_kwargs: str | Mapping[str, Any]
    warmup_steps: int
    rehearse: bool
    max_completion_length: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    stop_token_ids: int | Sequence[int]
    sampler: str
    vllm_memory: float
    vllm_sleep: bool
    vllm_readback: bool
    tensor_parallel_size: int
    max_decode_batch: int
    cuda_graphs: bool
    eval_steps: int
    eval_prompts: int | None
    num_generations_eval: int
    eval_temperature: float
    metric: str | Mapping[str, Any] | Callable[..., Any]
    load_best_model_at_end: bool
    metric_for_best_model: str
    greater_is_better: bool | None
    early_stopping_patience: int
    early_stopping_threshold: float
    eval_kl: bool
    output_dir: _Path
    max_steps: int
    num_train_epochs: float
    seed: int
    save_steps: int
    save_minutes: float
    logging_steps: int
    watchdog_minutes: float
    async_save: bool
    save_total_limit: int
    resume: Literal["auto", "never", "must"]
    extend: bool
    allow: str | Sequence[str]
    callbacks: str | Any | Sequence[str | Any]
    report_to: str | Sequence[str]
    threads: int
    device: str
    max_memory: str
    progress: bool
    report: bool
    processes: int
    strategy: Literal["ddp", "fsdp"]
    dp_replicate_size: int
    tp_size: int
    cp_size: int
    timeout_minutes: float
    cluster: str
    samplers: int
    sampler_cpus: int
    sampler_gpus: float
    weight_transfer: Literal["auto", "object_store", "nccl", "gloo"]
    parcel_prompts: int
    scorers: int
    scorer_cpus: int
    environment_actors: int
    environment_cpus: int
    push_to_hub: bool
    hub_model_id: str
    hub_private_repo: bool
    hub_revision: str
    algorithm: Any
    reference: str
    reference_model: str
    reference_tokenizer: str
    reference_top_k: int
    reference_dtype: Literal["", "float32", "bfloat16"]
    ref_model_sync_steps: int
    ref_model_mixup_alpha: float
    teacher_prompt: str
    critic: str
    critic_shared: bool
    critic_learning_rate: float
    critic_warmup_steps: int
    missing_eos_penalty: float
    max_unscored: float
    prompts_per_step: int
    num_generations: int
    num_iterations: int
    num_minibatches: int
    lag: int
    max_refills: int
    filter_metric: str
    router_replay: bool
    keep_activations_gb: float
    max_logp_difference: float
    record_tokens: int
    record_prompts: int
    record_rows: int

OnlineMethod = Literal[
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "cispo",
    "rloo",
    "reinforce",
    "reinforce_moving_average",
    "reinforce_total_return",
    "reinforce_reward_to_go",
    "reinforce_pp",
    "ppo",
    "ppo_penalty",
    "vc_ppo",
    "vapo",
    "reinforce_pp_baseline",
    "opo",
    "maxrl",
    "pass_at_k",
    "sapo",
    "dppo",
    "gmpo",
    "gdpo",
    "process_grpo",
    "top_entropy",
    "clip_cov",
    "kl_cov",
    "distill",
    "raft",
    "online_dpo",
]

class PreferenceSettings(Given, total=False):
    model_name_or_path: str
    model_revision: str
    torch_dtype: Literal["float32", "bfloat16"]
    lora_r: int
    activation_checkpointing: bool
    dataset_name: str | Any
    train_dataset: str | Any
    eval_dataset_name: str | Any
    dataset_train_split: str
    dataset_test_split: str
    reward_model_name_or_path: str | Sequence[str]
    reward_model_path: str | Sequence[str]
    ref_model: str
    teacher_model_name_or_path: str
    lr: float
    max_new_tokens: int
    response_length: int
    max_response_length: int
    vllm_gpu_memory_utilization: float
    vllm_tensor_parallel_size: int
    dataset_num_proc: int
    preprocessing_num_workers: int
    vllm_enable_sleep_mode: bool
    max_seq_length: int
    total_epochs: float
    num_epochs: float
    total_training_steps: int
    num_processes: int
    reward_funcs: str | Mapping[str, Any] | Callable[..., Any] | Sequence[str | Mapping[str, Any] | Callable[..., Any]]
    reward_model: str | Sequence[str]
    reward_weights: float | Sequence[float]
    reward_timeout: float
    reward_workers: int
    worker_memory_gb: float
    worker_env: str | Sequence[str]
    micro_batch_tokens: int
    revision: str
    trust_remote_code: bool
    chat_template_path: str
    chat_template_kwargs: str | Mapping[str, Any]
    eos_token: str
    dtype: Literal["float32", "bfloat16"]
    quantize_base: Literal["", "nf4", "int8", "gguf"]
    adapter: Literal["continue", "merge"]
    lora_rank: int
    lora_alpha: float
    lora_dropout: float
    lora_target_modules: str | Sequence[str]
    use_rslora: bool
    use_dora: bool
    lora_modules_to_save: str | Sequence[str]
    lora_save: Literal["both", "merged", "adapter"]
    router_aux_loss_coef: float | None
    attention: Literal["auto", "sdpa", "varlen", "flex"]
    gradient_checkpointing: bool
    columns: str | Mapping[str, Any]
    plain_prompts: bool
    split: str
    eval_split: str
    max_rows: int
    bad_rows: Literal["stop", "skip"]
    num_proc: int
    optimizer: Literal["adamw", "adamw_8bit", "muon", "adafactor"]
    bf16_stochastic_round: bool
    learning_rate: float
    weight_decay: float
    adam_beta1: float
    adam_beta2: float
    adam_epsilon: float
    max_grad_norm: float
    lr_scheduler_type: Literal[
        "linear",
        "cosine",
        "constant",
        "cosine_with_restarts",
        "polynomial",
        "inverse_sqrt",
        "cosine_with_min_lr",
        "cosine_warmup_with_min_lr",
        "warmup_stable_decay",
    ]
    lr_scheduler_kwargs: str | Mapping[str, Any]
    warmup_steps: int
    rehearse: bool
    max_completion_length: int
    top_p: float
    top_k: int
    min_p: float
    stop_token_ids: int | Sequence[int]
    sampler: str
    vllm_memory: float
    vllm_sleep: bool
    vllm_readback: bool
    tensor_parallel_size: int
    max_decode_batch: int
    cuda_graphs: bool
    eval_steps: int
    eval_prompts: int | None
    num_generations_eval: int
    eval_temperature: float
    metric: str | Mapping[str, Any] | Callable[..., Any]
    load_best_model_at_end: bool
    metric_for_best_model: str
    greater_is_better: bool | None
    early_stopping_patience: int
    early_stopping_threshold: float
    eval_kl: bool
    output_dir: _Path
    max_steps: int
    num_train_epochs: float
    seed: int
    save_steps: int
    save_minutes: float
    logging_steps: int
    watchdog_minutes: float
    async_save: bool
    save_total_limit: int
    resume: Literal["auto", "never", "must"]
    extend: bool
    allow: str | Sequence[str]
    callbacks: str | Any | Sequence[str | Any]
    report_to: str | Sequence[str]
    threads: int
    device: str
    max_memory: str
    progress: bool
    report: bool
    processes: int
    strategy: Literal["ddp", "fsdp"]
    dp_replicate_size: int
    tp_size: int
    cp_size: int
    timeout_minutes: float
    cluster: str
    scorers: int
    scorer_cpus: int
    push_to_hub: bool
    hub_model_id: str
    hub_private_repo: bool
    hub_revision: str
    loss: Any
    reference: str
    cache_reference: bool
    batch_size: int
    max_length: int

PreferenceMethod = Literal[
    "dpo",
    "cdpo",
    "robust_dpo",
    "ipo",
    "hinge",
    "ln_dpo",
    "simpo",
    "orpo",
    "apo_zero",
    "apo_down",
    "kto",
]

class RewardSettings(Given, total=False):
    model_name_or_path: str
    model_revision: str
    torch_dtype: Literal["float32", "bfloat16"]
    lora_r: int
    activation_checkpointing: bool
    dataset_name: str | Any
    train_dataset: str | Any
    eval_dataset_name: str | Any
    dataset_train_split: str
    dataset_test_split: str
    lr: float
    dataset_num_proc: int
    preprocessing_num_workers: int
    max_seq_length: int
    total_epochs: float
    num_epochs: float
    total_training_steps: int
    num_processes: int
    micro_batch_tokens: int
    revision: str
    trust_remote_code: bool
    chat_template_path: str
    chat_template_kwargs: str | Mapping[str, Any]
    eos_token: str
    dtype: Literal["float32", "bfloat16"]
    quantize_base: Literal["", "nf4", "int8", "gguf"]
    adapter: Literal["continue", "merge"]
    lora_rank: int
    lora_alpha: float
    lora_dropout: float
    lora_target_modules: str | Sequence[str]
    use_rslora: bool
    use_dora: bool
    lora_modules_to_save: str | Sequence[str]
    lora_save: Literal["both", "merged", "adapter"]
    attention: Literal["auto", "sdpa", "varlen", "flex"]
    gradient_checkpointing: bool
    columns: str | Mapping[str, Any]
    plain_prompts: bool
    split: str
    eval_split: str
    max_rows: int
    bad_rows: Literal["stop", "skip"]
    num_proc: int
    optimizer: Literal["adamw", "adamw_8bit", "muon", "adafactor"]
    bf16_stochastic_round: bool
    learning_rate: float
    weight_decay: float
    adam_beta1: float
    adam_beta2: float
    adam_epsilon: float
    max_grad_norm: float
    lr_scheduler_type: Literal[
        "linear",
        "cosine",
        "constant",
        "cosine_with_restarts",
        "polynomial",
        "inverse_sqrt",
        "cosine_with_min_lr",
        "cosine_warmup_with_min_lr",
        "warmup_stable_decay",
    ]
    lr_scheduler_kwargs: str | Mapping[str, Any]
    warmup_steps: int
    rehearse: bool
    eval_steps: int
    eval_prompts: int | None
    load_best_model_at_end: bool
    metric_for_best_model: str
    greater_is_better: bool | None
    early_stopping_patience: int
    early_stopping_threshold: float
    output_dir: _Path
    max_steps: int
    num_train_epochs: float
    seed: int
    save_steps: int
    save_minutes: float
    logging_steps: int
    watchdog_minutes: float
    async_save: bool
    save_total_limit: int
    resume: Literal["auto", "never", "must"]
    extend: bool
    allow: str | Sequence[str]
    callbacks: str | Any | Sequence[str | Any]
    report_to: str | Sequence[str]
    threads: int
    device: str
    max_memory: str
    progress: bool
    report: bool
    processes: int
    strategy: Literal["ddp", "fsdp"]
    dp_replicate_size: int
    tp_size: int
    cp_size: int
    timeout_minutes: float
    push_to_hub: bool
    hub_model_id: str
    hub_private_repo: bool
    hub_revision: str
    process: bool
    step_separator: str
    center_rewards_coefficient: float
    label_smoothing: float
    batch_size: int
    max_length: int

RewardMethod = Literal["reward",]
