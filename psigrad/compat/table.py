"""The table of known settings of TRL, verl, OpenRLHF, Stable-Baselines3 and rl-zoo3.

Each has its equivalent in psigrad, or the reason why there is none. TRL's names include those of its trainers' arguments and
commands, and of the configurations of transformers and peft.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

Settings = Mapping[str, Any]


class Entry(NamedTuple):
    """One name of another library. It has at least one of `means`, `values`, `rule` and `why`, or is `needless`."""

    name: str
    library: str = ""
    means: str = ""
    """psigrad's name of the same setting, or of the same part of a method (`config/shortcuts.py`)."""
    values: Mapping[Any, Settings] = MappingProxyType({})
    """Value -> psigrad's settings for it. For a name that psigrad has too, these are values that only other libraries have."""
    rule: str = ""
    """psigrad's settings that are computed from this one and other settings of the run (`translate.py`, `trl.py`)."""
    usual: tuple[Any, ...] = ()
    """Values that have no effect, such as the default, and so need no equivalent."""
    why: str = ""
    """The sentence for the user: the replacement, the reason for none, or, if `needless`, the reason why it changes nothing."""
    needless: bool = False
    refused: tuple[str, ...] = ()
    """For a name that psigrad has too: values of other libraries without an equivalent. `why` says what to do instead."""


def _same(ours: str, trl: str = "", verl: str = "", openrlhf: str = "", sb3: str = "") -> Iterator[Entry]:
    """Yield the entries of other libraries' names (separated by spaces) for psigrad's setting `ours`."""
    for library, names in (("trl", trl), ("verl", verl), ("openrlhf", openrlhf), ("sb3", sb3)):
        yield from (Entry(name, library, means=ours) for name in names.split())


def _needless(why: str, names: str) -> Iterator[Entry]:
    return (Entry(name, "trl", why=why, needless=True) for name in names.split())


def _no_equal(why: str, /, **usual: Any) -> Iterator[Entry]:
    """Return the entries of names without an equivalent, given with their defaults. Only other values raise an error."""
    return (Entry(name, "trl", usual=(value,), why=why) for name, value in usual.items())


def _instead(why: str, names: str, library: str = "trl") -> Iterator[Entry]:
    return (Entry(name, library, why=why) for name in names.split())


def _is(name: str, values: Mapping[Any, Settings], why: str = "", library: str = "trl", usual: tuple[Any, ...] = ()) -> Entry:
    """Return the entry of a name of which only some values have an equivalent."""
    return Entry(name, library, values=values, why=why, usual=usual)


_ADAPTIVE = "psigrad ppo_penalty adapts the coefficient of the KL; it is fixed in other methods"
_READ_ONCE = "psigrad reads the rows once, before the first step"
_ADAMW_8BIT = ("adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit")
_PUSHED_ONCE = "the model is pushed once, at the end; psigrad push RUN REPO pushes a finished run"
_FOLDER = "a run has the name of its folder; set output_dir=runs/NAME"
_MEMORY = "micro_batch_tokens limits the memory, and changes no gradient"
_TRACKERS = "report_to chooses the trackers: wandb, tensorboard, trackio, mlflow or swanlab"
_PRECISION = "dtype=bfloat16 or dtype=float32 sets the precision"
_REWARDS = "only methods and commands that sample, like grpo, ppo and eval, take rewards; other methods learn from dataset rows"
_CHECKPOINTS = "save_steps and save_minutes set when checkpoints are written"
_TORCHRUN = "on several machines torchrun starts the processes, also under SLURM"
_ONLINE = "only online methods (such as grpo) have it, as a part of their algorithm"
_COLUMNS = "psigrad reads TRL's columns, such as prompt and messages; rename yours with columns=question=prompt"
_NO_EVALUATION = {"evaluation.eval_steps": 0, "evaluation.eval_prompts": 0}
_NO_CHECKPOINTS = {"run.save_steps": 0, "run.save_minutes": 0.0}
METHOD = "the method is the command: psigrad grpo, psigrad ppo, psigrad dapo, psigrad ipo; in Python, the first argument"

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_BATCH = "prompts_per_step and num_minibatches, or batch_size"
# fmt: off
_ROWS = (
    # The same setting under another name.
    *_same("model.path", "model_name_or_path", "actor_rollout_ref.model.path", "pretrain"),
    *_same("model.revision", "model_revision"),
    *_same("model.dtype", "torch_dtype"),
    *_same("model.lora_rank", "lora_r", "actor_rollout_ref.model.lora_rank"),
    *_same("model.lora_alpha", "", "actor_rollout_ref.model.lora_alpha"),
    *_same("model.gradient_checkpointing", "activation_checkpointing", "actor_rollout_ref.model.enable_gradient_checkpointing"),
    *_same("data.dataset", "dataset_name train_dataset", "data.train_files", "prompt_data"),
    *_same("data.eval_dataset", "eval_dataset_name", "data.val_files"),
    *_same("data.split", "dataset_train_split"),
    *_same("data.eval_split", "dataset_test_split"),
    *_same("data.max_prompt_length", "max_prompt_tokens", "", "prompt_max_len"),
    *_same("reward_model", "reward_model_name_or_path reward_model_path"),
    *_same("reference", "ref_model teacher_model_name_or_path"),
    *_same("optim.learning_rate", "lr", f"{_ACTOR}.optim.lr", "actor_learning_rate"),
    *_same("optim.warmup_steps", "", f"{_ACTOR}.optim.lr_warmup_steps"),
    *_same("optim.weight_decay", "", f"{_ACTOR}.optim.weight_decay"),
    *_same("optim.max_grad_norm", "", f"{_ACTOR}.grad_clip"),
    *_same("sampling.max_completion_length", "max_new_tokens response_length max_response_length", "data.max_response_length",
        "generate_max_len"),
    *_same("sampling.temperature", "", f"{_ROLLOUT}.temperature"),
    *_same("sampling.top_p", "", f"{_ROLLOUT}.top_p"),
    *_same("sampling.top_k", "", f"{_ROLLOUT}.top_k"),
    *_same("sampling.vllm_memory", "vllm_gpu_memory_utilization", f"{_ROLLOUT}.gpu_memory_utilization"),
    *_same("placement.cp_size", "actor_rollout_ref.actor.ulysses_sequence_parallel_size"),
    *_same("sampling.tensor_parallel_size", "vllm_tensor_parallel_size", f"{_ROLLOUT}.tensor_model_parallel_size"),
    *_same("data.num_proc", "dataset_num_proc preprocessing_num_workers"),
    *_same("sampling.vllm_sleep", "vllm_enable_sleep_mode"),
    *_same("prompts_per_step", "", "", "rollout_batch_size"),
    *_same("num_generations", "rollout_n", f"{_ROLLOUT}.n", "n_samples_per_prompt"),
    *_same("num_iterations", "num_ppo_epochs", f"{_ACTOR}.ppo_epochs"),
    *_same("num_minibatches", "num_mini_batches"),
    *_same("micro_batch_tokens", "", f"{_ACTOR}.ppo_max_token_len_per_gpu"),
    *_same("critic", "", "critic.model.path"),
    *_same("critic_learning_rate", "", "critic.optim.lr"),
    *_same("max_length", "max_seq_length"),
    *_same("run.num_train_epochs", "total_epochs num_epochs", "trainer.total_epochs", "num_episodes"),
    *_same("run.max_steps", "total_training_steps", "trainer.total_training_steps"),
    *_same("run.save_steps", "", "trainer.save_freq"),
    *_same("evaluation.eval_steps", "", "trainer.test_freq"),
    *_same("run.output_dir", "", "trainer.default_local_dir"),
    *_same("placement.processes", "num_processes", "trainer.n_gpus_per_node"),
    *_same("filter_metric", "", "algorithm.filter_groups.metric"),
    *_same("algorithm", sb3="algo"),
    *_same("total_timesteps", sb3="n_timesteps"),
    *_same("eval_episodes", sb3="n_eval_episodes"),
    *_same("run.threads", sb3="num_threads"),
    # The same part of the method.
    *_same("beta", "kl_coef", f"{_ACTOR}.kl_loss_coef algorithm.kl_ctrl.kl_coef", "init_kl_coef"),
    *_same("epsilon", "cliprange", f"{_ACTOR}.clip_ratio", "", "clip_range"),
    *_same("epsilon_high", "", f"{_ACTOR}.clip_ratio_high"),
    *_same("ent_coef", "entropy_coef entropy_coeff", f"{_ACTOR}.entropy_coeff"),
    *_same("gae_lambda", "lam lambd", "algorithm.lam"),
    *_same("gamma", "", "algorithm.gamma"),
    *_same("cliprange_value", "value_clip", "critic.cliprange_value"),
    *_same("scale_rewards", "", "algorithm.norm_adv_by_std_in_grpo"),
    *_same("aggregate", "loss_agg_mode", f"{_ACTOR}.loss_agg_mode"),
    *_same("dynamic_sampling", "", "algorithm.filter_groups.enable"),
    *_same("margin", "simpo_gamma"),
    *_same("sft_weight", "cpo_alpha rpo_alpha"),
    # psigrad's settings with values of other libraries.
    Entry("model.dtype", values={"auto": {}}),
    Entry("model.chat_template_path", values={None: {"model.chat_template_path": ""}}),
    Entry("model.chat_template_kwargs", values={None: {"model.chat_template_kwargs": ""}}),
    Entry("model.eos_token", values={None: {"model.eos_token": ""}}),
    Entry("run.max_steps", values={-1: {"run.max_steps": 0}}),
    Entry("run.report_to", values={"none": {"run.report_to": ()}}),
    Entry("sampling.top_k", values={-1: {"sampling.top_k": 0}}),
    Entry("sampling.min_p", values={None: {"sampling.min_p": 0.0}}),
    Entry("optim.lr_scheduler_type", values={"constant_with_warmup": {"optim.lr_scheduler_type": "constant"}},
        refused=("reduce_lr_on_plateau", "greedy"),
        why="a callback can follow a metric as reduce_lr_on_plateau and greedy do: call control.change(learning_rate=…) in "
            "on_evaluate (docs/python.md)"),
    Entry("evaluation.metric_for_best_model", values={None: {"evaluation.metric_for_best_model": ""}}),
    Entry("optim.lr_scheduler_kwargs", values={None: {"optim.lr_scheduler_kwargs": ""}}),
    Entry("epsilon_high", values={None: {}}),
    Entry("top_entropy_quantile", values={1.0: {"top_entropy_quantile": None}}),
    # Names of which each value corresponds to settings of psigrad.
    _is("bf16", {True: {"model.dtype": "bfloat16"}, False: {"model.dtype": "float32"}}, _PRECISION),
    _is("fp16", {False: {}}, _PRECISION),
    _is("use_cpu", {True: {"run.device": "cpu"}, False: {}}),
    _is("tf32", {True: {}, False: {}}),
    _is("use_vllm", {True: {"sampling.sampler": "vllm"}, False: {}}, "set sampler=vllm to sample with vLLM"),
    _is("use_peft", {True: {"model.lora_rank": 16, "model.lora_alpha": 32.0, "model.lora_dropout": 0.05}, False: {}},
        "lora_rank=16 adds an adapter"),
    _is("sync_ref_model", {True: {"ref_model_sync_steps": 512}, False: {}},
        "set ref_model_sync_steps=512, so that the reference follows the policy"),
    _is("disable_tqdm", {True: {"run.progress": False}, False: {}}),
    # YAML reads `no` as False.
    _is("eval_strategy", {"steps": {}, "no": _NO_EVALUATION, False: _NO_EVALUATION}, "eval_steps sets when to evaluate"),
    _is("save_strategy", {"steps": {}, "no": _NO_CHECKPOINTS, False: _NO_CHECKPOINTS},
        f"{_CHECKPOINTS}; the last step is always kept"),
    _is("optim", {
        **{name: {} for name in ("adamw_torch", "adamw_torch_fused", "adamw_hf")},
        **{name: {"optim.optimizer": name} for name in ("adamw", "adamw_8bit", "muon", "adafactor")},
        **{name: {"optim.optimizer": "adamw_8bit"} for name in _ADAMW_8BIT},
    }, "set optimizer to adamw, adamw_8bit, muon or adafactor"),
    _is("shuffle_dataset", {True: {}}, "rows are shuffled in every epoch"),
    _is("assistant_only_loss", {True: {}}, "messages train only the assistant's turns; rows of text train all tokens"),
    _is("completion_only_loss", {True: {}},
        "rows of prompt and completion train only the completion; rows of text train all tokens", usual=(None,)),
    _is("hub_strategy", {"every_save": {}, "end": {}}, _PUSHED_ONCE),
    _is("resume_from_checkpoint", {True: {}, False: {"run.resume": "never"}},
        "repeat the command to resume from the newest checkpoint"),
    _is("use_liger_kernel", {False: {}}, "psigrad's own kernels compute the log-probs in chunks"),
    _is("packing", {False: {}}, "sequences are always packed and never attend to each other; remove it, and give the "
        "rows of a step as batch_size, since TRL counts packs of max_length tokens"),
    _is(f"{_ROLLOUT}.name", {"vllm": {"sampling.sampler": "vllm"}, "hf": {"sampling.sampler": "transformers"}},
        "set sampler to embedded, transformers or vllm", "verl"),
    _is("actor_rollout_ref.model.use_remove_padding", {True: {}}, "", "verl"),
    _is("trainer.nnodes", {1: {}}, _TORCHRUN, "verl"),
    _is("algorithm.use_kl_in_reward", {False: {}}, "algorithm.kl.where=reward puts the KL term into the reward", "verl"),
    _is("algorithm.kl_ctrl.type", {"fixed": {}}, _ADAPTIVE, "verl"),
    Entry("algorithm.kl_ctrl.horizon", "verl", usual=(10000,), why=_ADAPTIVE),
    Entry("algorithm.kl_ctrl.target_kl", "verl", usual=(0.1,), why=_ADAPTIVE),
    Entry("algorithm.kl_penalty", "verl", usual=("kl",), why="kl_estimator=k1, k2 or k3 sets the estimate of the KL"),
    Entry("algorithm.use_pf_ppo", "verl", usual=(False,), why="psigrad has no PF-PPO"),
    _is(f"{_ACTOR}.use_kl_loss", {True: {}, False: {"algorithm.kl": None}}, "", "verl"),
    _is(f"{_ACTOR}.kl_loss_type", {**{name: {"kl_estimator": "k3"} for name in ("low_var_kl", "k3")},
        **{name: {"kl_estimator": "k2"} for name in ("mse", "k2")}}, "", "verl"),
    _is("policy", {
        "MlpPolicy": {}, "MultiInputPolicy": {},
        "CnnPolicy": {"network.net_arch": (512,), "network.activation": "relu", "network.critic": "shared"},
    }, "net_arch, activation, critic and cnn set a control network, and model names a language model", "sb3"),
    _is("use_sde", {False: {}}, "psigrad has no gSDE; log_std_init sets the initial deviation of continuous actions", "sb3"),
    # Names that are computed from several settings.
    *(Entry(name, "trl", rule=_BATCH) for name in ("per_device_train_batch_size", "gradient_accumulation_steps")),
    *(Entry(name, "trl", rule=_BATCH) for name in ("steps_per_generation", "generation_batch_size")),
    *(Entry(name, "verl", rule=_BATCH) for name in ("data.train_batch_size", f"{_ACTOR}.ppo_mini_batch_size")),
    *(Entry(f"custom_reward_function.{name}", "verl", rule="reward") for name in ("path", "name")),
    Entry("loss_type", "trl", rule="aggregate, the surrogate, or the loss", why=METHOD),
    Entry("warmup_ratio", "trl", why="it is a share of max_steps, from 0 to 1; warmup_steps counts steps"),
    Entry("dataset_config", "trl", rule="data.dataset=NAME:CONFIGURATION",
        why="write the configuration after the dataset's name: dataset=openai/gsm8k:main"),
    Entry("ddp_timeout", "trl", rule="timeout_minutes", why="timeout_minutes sets how long processes wait for one another"),
    Entry("model_init_kwargs", "trl", rule="model.dtype and model.revision",
        why="set dtype and revision; psigrad chooses the other arguments"),
    Entry("teacher_model_init_kwargs", "trl", rule="reference_dtype", why="set reference and reference_dtype"),
    Entry("delta", "trl", rule="algorithm.surrogate={part: dual_clip, bound: DELTA}", usual=(None,), why=_ONLINE),
    Entry("off_policy_mask_threshold", "trl", rule="algorithm.surrogate={part: off_policy_mask, …}", usual=(None,), why=_ONLINE),
    Entry("sapo_temperature_pos", "trl", rule="algorithm.surrogate.positive", usual=(1.0,), why=_ONLINE),
    Entry("sapo_temperature_neg", "trl", rule="algorithm.surrogate.negative", usual=(1.05,), why=_ONLINE),
    *(Entry(f"vespo_{name}_{sign[:3]}", "trl", rule=f"algorithm.surrogate.{name}_{sign}", usual=(usual,), why=_ONLINE)
      for name, sign, usual in (
          ("k", "positive", 2.0), ("lambda", "positive", 3.0), ("k", "negative", 3.0), ("lambda", "negative", 2.0))),
    Entry("multi_objective_aggregation", "trl", values={"sum_then_normalize": {}},
        rule="algorithm.psi=decoupled_group_mean for normalize_then_sum", why=_ONLINE),
    Entry("normalize_advantages", "trl", values={False: {}}, rule="algorithm.psi={part: whitened, …}", why=_ONLINE),
    *(Entry(f"vllm_importance_sampling_{name}", "trl", rule="algorithm.correction, with sampler=vllm", why=_ONLINE)
      for name in ("mode", "clip_max", "clip_min", "correction")),
    # Names that change nothing in psigrad.
    *_needless("sequences are packed without padding, within micro_batch_tokens",
        "per_device_eval_batch_size eval_accumulation_steps padding_free auto_find_batch_size"),
    *_needless("completions are in rollouts.jsonl and in the report; show_completions prints some",
        "log_completions num_completions_to_print"),
    *_needless("every step is in metrics.jsonl", "logging_first_step logging_strategy log_level"),
    *_needless("every column reaches the reward functions", "remove_unused_columns"),
    *_needless(_READ_ONCE,
        "dataloader_num_workers dataloader_pin_memory dataloader_drop_last "
        "dataloader_persistent_workers dataloader_prefetch_factor dataloader_in_order dataloader_multiprocessing_context "
        "accelerator_config label_names length_column_name"),
    *_needless("the command determines what is done", "do_train do_eval"),
    *_needless("psigrad chooses it",
        "attn_implementation use_cache gradient_checkpointing_kwargs ddp_find_unused_parameters save_safetensors "
        "activation_checkpointing_kwargs torch_empty_cache_steps ddp_backend"),
    *_needless("dropout is off, except for lora_dropout", "disable_dropout"),
    *_needless("the sampler reads the trainer's weights", "ds3_gather_for_generation"),
    *_needless("evaluation runs as training does", "bf16_full_eval fp16_full_eval prediction_loss_only"),
    *_needless("evaluation keeps no logits",
        "eval_do_concat_batches eval_use_gather_object batch_eval_metrics preprocess_logits_for_metrics"),
    *_needless("a gradient is normalised by global counts, on any number of processes",
        "average_tokens_across_devices save_on_each_node local_rank ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph"),
    *_needless("rank 0 writes all logs", "log_on_each_node log_level_replica logging_nan_inf_filter debug"),
    *_needless("num_tokens is always logged", "include_num_input_tokens_seen"),
    *_needless("the model is evaluated before its first step anyway", "eval_on_start"),
    *_needless("SIGTERM saves anyway", "enable_jit_checkpoint"),
    *_needless("runs resume bit for bit anyway", "ignore_data_skip full_determinism restore_callback_states_from_checkpoint"),
    *_needless("psigrad does not measure it", "skip_memory_metrics do_predict include_for_metrics"),
    *_needless("nothing is padded", "pad_to_multiple_of pad_token padding_value is_encoder_decoder"),
    *_needless("reference log-probs are always computed once and cached", "precompute_ref_log_probs precompute_ref_batch_size"),
    *_needless("psigrad samples", "cache_implementation transformers_continuous_batching_config use_transformers_paged"),
    *_needless("psigrad's sampler batches continuously", "use_transformers_continuous_batching"),
    *_needless("vLLM chooses it", "vllm_model_impl"),
    *_needless("the limit is the model's own length", "vllm_max_model_length"),
    *_needless("rollouts and the report show images anyway", "log_multimodal"),
    *_needless("psigrad loads each reward model with its own tokenizer", "reward_processing_classes"),
    *_needless("psigrad keeps no bias buffers", "ignore_bias_buffers"),
    *_needless("the method determines it", "lora_task_type"),
    _is("bnb_4bit_quant_type", {"nf4": {}}, "a base in 4 bits is always nf4"),
    *_needless("scales are float32, and psigrad has its own layout of codes", "use_bnb_nested_quant bnb_4bit_quant_storage"),
    # Names without an equivalent, each with its default, which is accepted because it has no effect.
    *_no_equal("the optimiser steps every trained weight", optim_target_modules=None),
    *_no_equal("only sft smooths cross-entropy; for DPO's losses set loss.label_smoothing", label_smoothing_factor=0.0),
    *_no_equal("on a GPU set model.compile_layers; on a CPU psigrad has its own kernels", torch_compile=False),
    *_no_equal("psigrad compiles layers with torch's defaults", torch_compile_backend=None, torch_compile_mode=None),
    *_no_equal("psigrad has its own kernels", liger_kernel_config=None),
    *_no_equal("psigrad adds no noise to embeddings", neftune_noise_alpha=None),
    *_no_equal("the trackers' project is always psigrad", project="huggingface"),
    *_no_equal("trackio runs locally", trackio_space_id=None, trackio_bucket_id=None, trackio_static_space_id=None),
    *_no_equal("the model is evaluated before its first step and then every eval_steps", eval_delay=0),
    *_no_equal("a checkpoint holds all that a resume needs", save_only_model=False),
    *_no_equal("psigrad reads the token from HF_TOKEN or `hf auth login`, so that no file contains it", hub_token=None),
    *_no_equal(_PUSHED_ONCE, hub_always_push=False),
    *_no_equal("psigrad derives every seed from the setting seed", data_seed=None),
    *_no_equal("set dp_replicate_size, tp_size and cp_size in the section placement", parallelism_config=None),
    *_no_equal("rows are shuffled in every epoch", train_sampling_strategy="random"),
    Entry("output_router_logits", "trl", values={False: {"model.router_aux_loss_coef": 0.0}, True: {}}),
    *_no_equal("psigrad reads plain text from the column text; rename yours with columns=body=text", dataset_text_field="text"),
    *_no_equal(_READ_ONCE, dataset_kwargs=None),
    *_no_equal("rows that are too long are cut at their end, or dropped", truncation_mode="keep_start"),
    *_no_equal("sequences are packed whole", packing_strategy="bfd", eval_packing=None),
    *_no_equal("activations stay on the device; gradient_checkpointing saves their memory", activation_offloading=False),
    *_no_equal("log-probabilities are computed in float32 from the head in its own precision", cast_lm_head_to_fp32=False),
    Entry("loss_weights", "trl", rule="loss.sft, with loss_type=[…, sft]", usual=(None,),
        why="psigrad trains one loss; loss.sft adds the likelihood of the chosen completions"),
    *_no_equal("psigrad's losses have no such term", ld_alpha=None, use_weighting=False, discopop_tau=0.05),
    *_no_equal("preference losses use the reverse KL", f_divergence_type="reverse_kl", f_alpha_divergence_coef=0.5),
    *_no_equal("temperature, top_p, top_k and min_p shape the distribution", generation_kwargs=None),
    *_no_equal("psigrad starts vLLM itself, beside the trainer; set sampler=vllm",
        vllm_server_base_url=None, vllm_server_host="0.0.0.0", vllm_server_port=8000, vllm_server_timeout=240.0,
        vllm_group_port=51216),
    *_no_equal("psigrad samples from the unchanged policy, without a grammar", vllm_structured_outputs_regex=None),
    *_no_equal("it is the old name of vllm_importance_sampling_clip_max; use that one", vllm_importance_sampling_cap=None),
    *_no_equal("the coefficient is constant; a callback can change it",
        use_adaptive_entropy=False, entropy_coef_min=0.0, entropy_coef_max=1.0, entropy_coef_delta=0.005,
        entropy_target=0.2),
    *_no_equal("max_turns limits the turns of an episode", max_tool_calling_iterations=None),
    *_no_equal("every completion is in rollouts.jsonl", log_unique_prompts=False, log_completions_hub_repo=None),
    *_no_equal("clip the value in the reward function", reward_clip_range=None),
    *_no_equal("the reference of a preference loss does not change", ref_model_sync_steps=512, ref_model_mixup_alpha=0.6),
    *_no_equal("evaluation generates completions if it has a reward or a metric", generate_during_eval=False),
    *_no_equal("give the teacher as a folder", teacher_model_revision=None),
    *_no_equal("TRL's alpha belongs to AlphaPO, which psigrad does not have; lora_alpha sets the scale of an adapter", alpha=0.0),
    *_no_equal("psigrad adapts modules, not single parameters", lora_target_parameters=None),
    _is("load_in_4bit", {True: {"model.quantize_base": "nf4"}, False: {}}),
    _is("load_in_8bit", {True: {"model.quantize_base": "int8"}, False: {}}),
    *_no_equal("quantize_base=nf4 or int8 quantises the base", quantization_config=None),
    *_no_equal("the whole dataset is read before the first step", dataset_streaming=False),
    *_no_equal("set optimizer, learning_rate, weight_decay, lr_scheduler_type and warmup_steps",
        optimizers=(None, None), optimizer_cls_and_kwargs=None),
    *_no_equal("the method sets the loss; replace one of its parts with yours: algorithm.psi=mine.py:my_advantage",
        compute_loss_func=None),
    *_no_equal("set metric=module:function, which has a reward's signature", compute_metrics=None),
    *_no_equal("psigrad packs the rows itself; the columns of the dataset determine what is learned", data_collator=None),
    *_no_equal("give the model as model=", model_init=None),
    *_no_equal("environment= or tools= gives episodes of several turns, and sampler=module:Class a custom sampler",
        rollout_func=None),
    *_no_equal("give environment=module:Class with reset(row) and step(text)", environment_factory=None),
    *_no_equal("lora_rank=16 adds an adapter; psigrad.train takes a LoraConfig as peft_config", peft_config=None),
    *_no_equal("the model comes with its tokenizer; pass another one to psigrad.train as tokenizer", processing_class=None,
        tokenizer=None),
    # Names with a replacement.
    Entry("reward", why=_REWARDS),
    Entry("reward_funcs", "trl", means="reward", why=_REWARDS),
    *_instead(_REWARDS, "reward_model", ""),
    *_instead(METHOD, "algorithm.adv_estimator", "verl"),
    *_instead("set prompts_per_step in online methods, and batch_size in others", "train_batch_size", "openrlhf"),
    *_instead(_MEMORY, "micro_train_batch_size micro_rollout_batch_size", "openrlhf"),
    *_instead(_MEMORY,
        f"{_ACTOR}.ppo_micro_batch_size_per_gpu actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu "
        f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu", "verl"),
    *_instead(_PRECISION, "mixed_precision"),
    *_instead("vLLM runs in a separate process next to the trainer, or in the samplers of a cluster (cluster=auto)",
        "vllm_mode"),
    *_instead(_COLUMNS, "dataset_prompt_column formatting_func"),
    *_instead(_COLUMNS, "data.prompt_key", "verl"),
    *_instead(_FOLDER, "run_name log_folder logging_dir"),
    *_instead(_FOLDER, "trainer.experiment_name trainer.project_name", "verl"),
    *_instead(_TRACKERS, "trainer.logger", "verl"),
    *_instead("give learning_rate, weight_decay and, for AdamW, adam_beta1, adam_beta2 and adam_epsilon as settings",
        "optim_args"),
    *_instead("only psigrad.train takes a configuration of TRL; in a file or as flags give each setting by its name", "args"),
    *_instead("a run resumes from its newest checkpoint; for a new run give another output_dir", "overwrite_output_dir"),
    *_instead("num_iterations sets the passes over a batch", "n_epochs", "sb3"),
    *_instead("completions are sampled from the policy; temperature, top_p, top_k and min_p shape it",
        "repetition_penalty"),
    *_instead("set strategy=fsdp and processes=2 or more to shard the model", "deepspeed fsdp fsdp_config accelerate_config"),
    *_instead("give several datasets with their weights as dataset=[a.jsonl:0.7, b.jsonl:0.3]", "datasets"),
    *_instead("set environment variables in the shell, and name those that a reward needs in worker_env", "env"),
    *_instead(_TORCHRUN, "num_machines"),
    # Names of rl-zoo3 and Stable-Baselines3.
    *_instead("psigrad has no gSDE; log_std_init sets the initial deviation of continuous actions", "sde_sample_freq", "sb3"),
    *_instead("give each hyperparameter as a separate setting, such as learning_rate=1e-3",
        "hyperparams hyperparameters hyperparameter", "sb3"),
    *_instead("eval_steps sets when to evaluate", "eval_freq", "sb3"),
    *_instead(_CHECKPOINTS, "save_freq", "sb3"),
    *_instead(_TRACKERS, "track tensorboard_log", "sb3"),
    *_instead("write net_arch: [64, 64], activation: relu and log_std_init: -2 as settings", "policy_kwargs", "sb3"),
    *_instead("give them as the setting wrappers: [module:Class]", "env_wrapper frame_stack", "sb3"),
    *_instead("give settings with --config FILE; the same --output-dir resumes a run", "conf_file trained_agent", "sb3"),
    *_instead("psigrad control has no search for hyperparameters; call psigrad.control from Optuna", "optimize n_trials", "sb3"),
    *_instead("vectorization=serial, sync or async sets how copies of an environment are stepped", "vec_env", "sb3"),
)
# fmt: on
TABLE: Mapping[str, Entry] = MappingProxyType({row.name: row for row in _ROWS})
assert len(TABLE) == len(_ROWS), "a name occurs twice"
NOTHING = Entry("")
"""The entry of an unknown name."""
