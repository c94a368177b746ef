"""The sections of settings that several recipes share: model, data, optimiser, sampling, evaluation, placement, hub, run."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import AfterValidator

from psigrad.config.fields import FREE, LENGTH, LIVE, MACHINE, MAIN, PATH, RECORDED, SEVERAL, STEPS, WRITTEN, DeviceDefault, Needs
from psigrad.errors import UserError

# Ranges are checked when settings are loaded, so the command line, YAML and psigrad.train have the same ones.
Count = Annotated[int, Ge(1)]
CountOrZero = Annotated[int, Ge(0)]
Positive = Annotated[float, Gt(0), Lt(math.inf)]
PositiveOrZero = Annotated[float, Ge(0), Lt(math.inf)]
Share = Annotated[float, Ge(0), Le(1)]
BelowOne = Annotated[float, Ge(0), Lt(1)]
# Settings without which others have no effect.
_ADAPTER, _CLUSTER, _PUSHED = Needs("model.lora_rank"), Needs("placement.cluster"), Needs("hub.push_to_hub")
_SHARDS = Needs("placement.strategy=fsdp")
_BEST = Needs("evaluation.load_best_model_at_end", "evaluation.early_stopping_patience")
DRAWS = Needs("reward", "reward_model", "evaluation.metric", "prompts_per_step", "best_of", "output")
# A name, a built-in with parameters ({"reward": "soft_overlong", …}), or the function itself.
Reward = str | dict[str, Any] | Callable[..., Any]


# transformers' names. reduce_lr_on_plateau and greedy are missing, since they follow a metric and not the step.
Schedule = Literal[
    "linear", "cosine", "constant", "cosine_with_restarts", "polynomial", "inverse_sqrt", "cosine_with_min_lr",
    "cosine_warmup_with_min_lr", "warmup_stable_decay",
]  # fmt: skip


def object_of(given: str | Mapping[str, Any]) -> str | dict[str, Any]:
    """Return a mapping, or the JSON text of one, as a dict; "" if either is empty. Raises `UserError` for anything else."""
    try:
        found = json.loads(given) if isinstance(given, str) and given else given or {}
    except ValueError:
        found = None
    if not isinstance(found, Mapping):
        raise UserError(f"lr_scheduler_kwargs is {given!r}; expected a mapping of names to values, such as '{{\"power\": 2}}'.")
    return dict(found) or ""


def parse_columns(given: str | Mapping[str, str]) -> dict[str, str]:
    """Parse the setting `columns`: "question=prompt,answer=answer" -> {"question": "prompt", "answer": "answer"}."""
    if isinstance(given, Mapping):
        return dict(given)
    # A comma ends a pair only if a name and "=" follow it, since a template may contain commas.
    pairs = [pair.partition("=") for pair in re.split(r",\s*(?=[\w.-]+=)", given) if pair]
    if wrong := ["".join(pair) for pair in pairs if not all(pair)]:
        raise UserError(f"columns has {wrong[0]!r}; expected pairs such as question=prompt,answer=answer.")
    names = [name.strip() for name, _, _ in pairs]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise UserError(f"columns has {twice!r} twice; remove one of them.")
    return {name: new.replace("\\n", "\n") for name, (_, _, new) in zip(names, pairs, strict=True)}


@dataclass(frozen=True)
class Model:
    """The model, its precision, and the weights that are trained."""

    path: Annotated[str, PATH, MAIN] = ""
    """Folder or hub name of any Hugging Face causal language model or of a peft adapter, or a GGUF file."""
    revision: str = ""
    """Branch, tag or commit of a hub model; empty: the newest commit."""
    trust_remote_code: bool = False
    """Run the Python code that comes with a model, with all your permissions. Read that code first."""
    chat_template_path: Annotated[str, PATH] = ""
    """Chat template to use instead of the tokenizer's: a Jinja file, or the folder or hub name of a model with a template. A
    run saves it with its model."""
    chat_template_kwargs: str | dict[str, Any] = ""
    """Arguments of the chat template for every row, such as '{"enable_thinking": false}'. A row's column
    chat_template_kwargs overrides them."""
    eos_token: str = ""
    """Token that ends a text, instead of the tokenizer's EOS. A run saves it with its model."""
    dtype: Annotated[Literal["float32", "bfloat16"], MAIN, DeviceDefault(cuda="bfloat16")] = "float32"
    """Precision of the weights and of the forward pass. In training, the optimiser updates float32 copies (masters) of bfloat16
    weights. On a GPU, float32 products use TF32."""
    quantize_base: Literal["", "nf4", "int8", "gguf"] = ""
    """Quantise the base of a LoRA adapter: to 4 bits (nf4, as in QLoRA), to 8 bits (int8), or in the types of a GGUF file (gguf).
    """
    adapter: Literal["continue", "merge"] = "continue"
    """If the model is given as an adapter: continue to train it, or merge it into its base and train all weights. With lora_rank
    it is merged, and a new adapter is trained."""
    lora_rank: Annotated[CountOrZero, MAIN] = 0
    """Rank of a new LoRA adapter (peft); 0: no new adapter. All weights are then trained, or only `model` if it is an adapter."""
    lora_alpha: Annotated[Positive, _ADAPTER] = 16.0
    """LoRA scaling: the adapter's update is multiplied by lora_alpha / lora_rank."""
    lora_dropout: Annotated[BelowOne, _ADAPTER] = 0.0
    """Dropout on the adapter's input. Above 0 the ratio π/π_old differs from 1 even before a batch's first update, since sampling
    has no dropout."""
    lora_target_modules: Annotated[tuple[str, ...], _ADAPTER] = ("all-linear",)
    """Names of the modules that get an adapter; "all-linear" is every linear layer but the head. Or one regular expression that
    matches their whole names, as in peft."""
    use_rslora: Annotated[bool, _ADAPTER] = False
    """Rank-stabilised LoRA: multiply the adapter's update by lora_alpha / √lora_rank."""
    use_dora: Annotated[bool, _ADAPTER] = False
    """Also learn the length of each row of the adapted matrices (DoRA)."""
    lora_modules_to_save: Annotated[tuple[str, ...], _ADAPTER] = ()
    """Modules to train in full and save with the adapter, such as lm_head."""
    lora_save: Annotated[Literal["both", "merged", "adapter"], RECORDED] = "adapter"
    """Contents of model/ at the end. adapter: the adapter; merged: the full model with the adapter merged in; both: the full
    model, and the adapter in model/adapter. A reward model is always saved in full."""
    vision: bool = False
    """Also load the vision tower, for rows with images. Needed only for models whose language model can be loaded alone (Qwen
    3.5); Gemma 3 and SmolVLM always load their tower."""
    trained_towers: tuple[str, ...] = ()
    """Modules outside the language model that are also trained, such as connector or vision_model. With lora_rank, adapters on
    their linear layers are trained instead. All other modules are frozen."""
    router_aux_loss_coef: PositiveOrZero | None = None
    """Weight of the loss that balances the load of a mixture of experts; empty: the weight in the model's configuration. 0: none.
    """
    attention: Annotated[Literal["auto", "sdpa", "varlen", "flex"], RECORDED] = "auto"
    """Attention over packed sequences, in families that do not run fused (docs/families.md). On a GPU, "varlen" (torch's kernel,
    or flash-attn's) and "flex" (FlexAttention) compute only the scores that are needed; "sdpa" pads. On a GPU,
    "auto" tries "varlen", then "flex", and takes the first that gives the results of "sdpa". Otherwise "auto" is "sdpa"."""
    compile_layers: Annotated[bool, RECORDED] = False
    """On a GPU, compile each kind of layer by torch.compile, for training and sampling. It takes a minute at the start."""
    gradient_checkpointing: Annotated[bool, RECORDED, DeviceDefault(cuda=True)] = False
    """Recompute activations in the backward pass. It saves memory. A step takes a third longer; with a small model and a
    vocabulary of 150,000, nearly twice as long."""


@dataclass(frozen=True)
class Data:
    """The datasets and how their rows are read."""

    dataset: Annotated[str | Any, PATH, SEVERAL, MAIN] = ""
    """File (JSONL, JSON, Parquet or CSV), folder of such files, hub name, or task:NAME (see `psigrad tasks`). From
    Python, a list of rows too. Rows have one of TRL's forms. Several datasets may each have a weight: a.jsonl:0.7 b.jsonl:0.3."""
    columns: Annotated[str | Mapping[str, str], AfterValidator(lambda given: parse_columns(given) or "")] = ""
    """New names of columns: `question=prompt` reads the column question as prompt, and `prompt={question} Think first.` builds
    the prompt from question. In YAML and Python also a mapping."""
    plain_prompts: bool = False
    """Send plain prompts to a chat model unchanged. Otherwise a prompt becomes a user turn of the chat template, and a plain
    answer becomes the assistant's turn. A model without a template gets every prompt unchanged."""
    split: str = "train"
    """Split of `dataset` to read, or a slice of it: train[:90%], train[100:]. A file has one split, named train (for `eval` and
    `sample` also test)."""
    eval_dataset: Annotated[str | Any, PATH, SEVERAL] = ""
    """Held-out rows for evaluation; empty: `eval_prompts` rows of `dataset`, drawn at random, are held out."""
    eval_split: Annotated[str, Needs("data.eval_dataset")] = "test"
    """Split of `eval_dataset` to read, or a slice of it. A file has one split, named train or test."""
    max_rows: CountOrZero = 0
    """Maximum rows to read from each dataset; a dataset of the hub is then streamed. 0: all."""
    max_prompt_length: CountOrZero = 0
    """Maximum tokens of a prompt. A row with a longer prompt counts as malformed (data.bad_rows). 0: no limit but the model's."""
    bad_rows: Literal["stop", "skip"] = "stop"
    """stop: end with an error at a malformed row; skip: skip the row and count it."""
    image_urls: bool = False
    """Download images that rows give as http or https URLs, once, into the cache. Use it only with rows that you trust, since
    this machine then opens every address in them."""
    num_proc: Annotated[CountOrZero, FREE] = 0
    """Processes that tokenize a large dataset (thousands of rows); 0: one per core. The tokens of files are cached
    (docs/data.md)."""


@dataclass(frozen=True)
class Optim:
    """The optimiser and its schedule."""

    optimizer: Literal["adamw", "adamw_8bit", "muon", "adafactor"] = "adamw"
    """Optimiser of the weights. adamw_8bit: AdamW with 8-bit moments (bitsandbytes' formula), except for embeddings. muon:
    torch.optim.Muon for matrices except embeddings and heads, with updates scaled so that AdamW's learning rates fit; AdamW for
    all other weights. adafactor: transformers' Adafactor, which keeps almost no state."""
    bf16_stochastic_round: Annotated[bool, Needs("optim.optimizer=adamw", "optim.optimizer=adamw_8bit")] = False
    """Update bfloat16 weights without float32 copies, which saves 4 bytes per weight. Each weight is rounded up or down at
    random, so that rounding adds no bias."""
    learning_rate: Annotated[PositiveOrZero, LIVE, MAIN] = 1e-6
    """Peak learning rate."""
    weight_decay: Annotated[PositiveOrZero, LIVE] = 0.0
    """Decoupled weight decay, on matrices only."""
    adam_beta1: BelowOne = 0.9
    """Decay β₁ of Adam's mean of gradients."""
    adam_beta2: BelowOne = 0.999
    """Decay β₂ of Adam's mean of squared gradients."""
    adam_epsilon: Positive = 1e-8
    """Number ε that Adam adds to the root of the mean squared gradient."""
    max_grad_norm: Annotated[PositiveOrZero, LIVE] = 1.0
    """Clip the global gradient norm to this; 0: never."""
    lr_scheduler_type: Schedule = "linear"
    """Shape of the decay after warm-up, under transformers' names."""
    lr_scheduler_kwargs: Annotated[str | Mapping[str, Any], AfterValidator(lambda given: object_of(given))] = ""
    """Parameters of the schedule: '{"min_lr_rate": 0.1}' for cosine_with_min_lr, {"num_decay_steps": 200} for
    warmup_stable_decay, {"num_cycles": 3} for cosine_with_restarts, {"power": 2} for polynomial, {"timescale": 1000} for
    inverse_sqrt."""
    warmup_steps: Annotated[CountOrZero, STEPS] = 0
    """Steps of linear warm-up. The first step has the rate learning_rate / (warmup_steps + 1); in transformers it has 0."""
    rehearse: Annotated[bool, RECORDED] = False
    """Run a forward and backward pass over the longest samples before the first step, and discard its gradients, so that a lack
    of memory shows at once."""


@dataclass(frozen=True)
class Sampling:
    """The sampling of completions."""

    max_completion_length: Annotated[Count, MAIN] = 256
    """Maximum tokens in one completion, including EOS."""
    temperature: Annotated[PositiveOrZero, LIVE, MAIN] = 1.0
    """Softmax temperature of training samples, above 0. Evaluation uses eval_temperature."""
    top_p: Annotated[float, Gt(0), Le(1), LIVE] = 1.0
    """Sample from the smallest set of tokens whose total probability reaches this (nucleus sampling)."""
    top_k: Annotated[CountOrZero, LIVE] = 0
    """Sample from the k most probable tokens; 0: from all."""
    min_p: Annotated[Share, LIVE] = 0.0
    """Sample only tokens with at least this share of the most probable token's probability."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids of extra tokens that end a completion, besides the model's EOS."""
    sampler: Annotated[str, MAIN] = "embedded"
    """embedded: psigrad's own; transformers: model.generate(); vllm: vLLM in a separate process; or a custom module:Class."""
    vllm_memory: Annotated[float, Gt(0), Lt(1), RECORDED, Needs("sampling.sampler=vllm")] = 0.4
    """With sampler=vllm: share of the GPU's memory for vLLM's weights and cache. In a cluster, where samplers and trainer share
    no GPU, the default is 0.8."""
    vllm_sleep: Annotated[bool, RECORDED] = False
    """With sampler=vllm on the GPU that trains: vLLM frees its memory while the run trains."""
    vllm_device: Annotated[str, RECORDED, Needs("sampling.sampler=vllm")] = ""
    """With sampler=vllm: the engine's first GPU, such as cuda:1; empty: the GPU that trains. On another GPU, sampling
    and training overlap if `lag` is above 0 and the run has one process."""
    vllm_readback: Annotated[bool, RECORDED, Needs("sampling.sampler=vllm")] = True
    """With sampler=vllm: after each update, compare the engine's weights bit for bit with the weights that were sent. false:
    compare only log-probs, at the start."""
    tensor_parallel_size: Annotated[Count, RECORDED] = 1
    """With sampler=vllm: devices over which each engine splits the model."""
    max_decode_batch: Annotated[Count, RECORDED] = 256
    """Maximum number of sequences decoded at once; the others wait. On a GPU psigrad's own sampler halves the number until the
    sequences' keys and values fit into half of the free memory."""
    cuda_graphs: bool = True
    """With sampler=embedded on a GPU: capture decoding steps as a CUDA graph per batch size, and replay it."""

    def vllm_memory_alone(self, gpus: float = 1.0) -> float:
        """Return `vllm_memory` if it was changed, otherwise vLLM's share of memory on `gpus` GPUs without a trainer."""
        return 0.8 * min(1.0, gpus) if self.vllm_memory == Sampling.vllm_memory else self.vllm_memory

    @property
    def filtered(self) -> bool:
        """True if top_p, top_k or min_p can exclude tokens from sampling."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


@dataclass(frozen=True)
class Evaluation:
    """Held-out evaluation during and after the run."""

    eval_steps: Annotated[CountOrZero, LIVE, STEPS, MAIN] = 0
    """Number of steps between evaluations; 0: only at the end."""
    eval_prompts: CountOrZero | None = None
    """Number of held-out prompts. 0: training evaluates nothing; `eval` and `sample` use all rows. Not given: 64, or 256 for
    comparisons. Without eval_dataset, this default is at most a tenth of the dataset."""
    num_generations_eval: Annotated[Count, MAIN, DRAWS] = 1
    """Completions per prompt in evaluations and in `sample`; an evaluation with more than one also gives pass@k."""
    eval_temperature: Annotated[PositiveOrZero, DRAWS] = 1.0
    """Softmax temperature in evaluations and in `sample`; 0 is greedy."""
    metric: Reward = ""
    """`module:function` or built-in that scores held-out completions; empty: the reward."""
    load_best_model_at_end: Annotated[bool, Needs("evaluation.eval_steps")] = False
    """At the end, save the weights of the best evaluation instead of the last weights. The best evaluation's checkpoint is kept
    in addition to save_total_limit."""
    metric_for_best_model: Annotated[str, _BEST] = ""
    """Held-out metric that decides which evaluation is best, such as loss or exact; empty: the one in the run's last line."""
    greater_is_better: Annotated[bool | None, _BEST] = None
    """True if a greater value of metric_for_best_model is better. Not given: true unless its name ends in loss."""
    early_stopping_patience: Annotated[CountOrZero, Needs("evaluation.eval_steps")] = 0
    """End the run after this many evaluations in a row without improvement of metric_for_best_model; 0: never."""
    early_stopping_threshold: Annotated[PositiveOrZero, Needs("evaluation.early_stopping_patience")] = 0.0
    """Minimum improvement of metric_for_best_model that counts for early_stopping_patience."""
    eval_kl: bool = False
    """Also measure the exact KL to the starting model. A copy of that model stays in memory."""


@dataclass(frozen=True)
class Placement:
    """The processes and machines of a run. Except for rounding, they do not change the results."""

    processes: Annotated[Count, RECORDED, MAIN] = 1
    """Processes on this machine that train together, each on its share of every step. On several machines, start them with
    torchrun, also under SLURM, and leave this at 1."""
    strategy: Annotated[Literal["ddp", "fsdp"], RECORDED] = "ddp"
    """ddp: each process holds the full model; fsdp: each holds a shard of its weights, gradients and optimiser state (PyTorch's
    fully_shard)."""
    dp_replicate_size: Annotated[Count, RECORDED, _SHARDS] = 1
    """With fsdp: number of process groups (HSDP). Each group holds the full model in shards. Layers are gathered within a
    group; gradients are summed over all groups."""
    tp_size: Annotated[Count, RECORDED, _SHARDS] = 1
    """With fsdp: processes over which every layer is split (tensor parallelism). The heads and columns of each process
    follow transformers' plan for the model family."""
    cp_size: Annotated[Count, RECORDED, _SHARDS] = 1
    """With fsdp: processes over which the tokens of every row are split (context parallelism, Ulysses). Attention
    splits the heads instead."""
    reduce_once: Annotated[bool, RECORDED, Needs("placement.strategy=fsdp")] = False
    """With fsdp: sum gradients over the processes once per optimiser step, not in each pass. This saves messages, but each
    process holds the whole float32 gradient."""
    timeout_minutes: Annotated[Positive, RECORDED] = 30.0
    """Minutes that a process waits for another one before failing with an error."""
    cluster: Annotated[str, RECORDED] = ""
    """Address of a Ray cluster to sample on. auto: a running cluster, or else one that is started on this machine. Empty: the
    training processes sample too."""
    samplers: Annotated[CountOrZero, RECORDED, _CLUSTER] = 0
    """With a cluster: processes that sample; 0: as many as fit, and more when the cluster grows."""
    sampler_cpus: Annotated[Count, RECORDED, _CLUSTER] = 1
    """With a cluster: CPU cores per sampling process."""
    sampler_gpus: Annotated[PositiveOrZero, RECORDED, _CLUSTER] = 0.0
    """With a cluster: GPUs per sampling process; below 1, several share one."""
    weight_transfer: Annotated[Literal["auto", "object_store", "nccl", "gloo"], RECORDED, _CLUSTER] = "auto"
    """With a cluster: how weights get to vLLM's engines. nccl: from GPU to GPU; gloo: from CPU to CPU; object_store: through
    Ray's object store; auto: nccl if trainer and engines have GPUs."""
    parcel_prompts: Annotated[Count, RECORDED, _CLUSTER] = 2
    """With a cluster: prompts that are sent to a process together. Their completions are decoded in one batch."""
    scorers: Annotated[CountOrZero, RECORDED] = 0
    """With a cluster: processes on the cluster that run the reward functions, each with its own `reward_workers`; 0: the
    trainer's machine runs them."""
    scorer_cpus: Annotated[Count, RECORDED, Needs("placement.scorers")] = 1
    """With a cluster: CPU cores per scoring process."""
    environment_actors: Annotated[CountOrZero, RECORDED] = 0
    """With a cluster: processes on the cluster that run environments or tools, each with its own `environment_workers`; 0:
    the trainer's machine runs them."""
    environment_cpus: Annotated[Count, RECORDED, Needs("placement.environment_actors")] = 1
    """With a cluster: CPU cores per environment process."""


@dataclass(frozen=True)
class Hub:
    """The upload of the finished model. Names are those of transformers' TrainingArguments."""

    push_to_hub: Annotated[bool, FREE] = False
    """Upload the model and its card after the run, with the token in HF_TOKEN or that of `hf auth login`."""
    hub_model_id: Annotated[str, FREE, _PUSHED] = ""
    """Repository to upload to: user/name, or a name in your own account; empty: the name of the run folder."""
    hub_private_repo: Annotated[bool, FREE, _PUSHED] = False
    """Create a new repository as private. An upload to an existing public one fails with an error."""
    hub_revision: Annotated[str, FREE, _PUSHED] = ""
    """Branch to upload to, created if it is missing; empty: main."""


@dataclass(frozen=True)
class Run:
    """The run folder, the length of the run, its checkpoints and its output."""

    output_dir: Annotated[str, WRITTEN, FREE, MAIN] = ""
    """Run folder; empty: a new one, such as runs/sft-20251231-093000."""
    max_steps: Annotated[CountOrZero, LENGTH, MAIN] = 0
    """Optimiser steps of the run; in online methods, rounds of sampling and training; 0: num_train_epochs decides."""
    num_train_epochs: Annotated[Positive, LENGTH, MAIN, Needs("run.max_steps=0")] = 1.0
    """Passes over the data, if max_steps is 0; half a pass is 0.5."""
    seed: Annotated[int, MAIN] = 0
    """Seed of the run. Every other seed is derived from it."""
    save_steps: Annotated[CountOrZero, RECORDED, LIVE, STEPS] = 0
    """Number of steps between checkpoints; 0: only by time (save_minutes)."""
    save_minutes: Annotated[PositiveOrZero, RECORDED, LIVE] = 10.0
    """Also write a checkpoint when this many minutes have passed since the last one; 0: never by time."""
    logging_steps: Annotated[CountOrZero, RECORDED, STEPS] = 10
    """If the output is not a terminal: number of steps between printed lines of metrics; a line also follows ten seconds
    after the last one. 0: no lines."""
    watchdog_minutes: Annotated[PositiveOrZero, RECORDED] = 30.0
    """Report a phase of the run that lasts longer than this many minutes, and 10 times as long as any earlier phase of its
    kind. Write the stacks of all threads to stacks.txt. 0: never."""
    async_save: Annotated[bool, RECORDED, DeviceDefault(cuda=True)] = False
    """Write checkpoints in a thread while training continues. With callbacks, training waits instead, since callbacks
    receive a finished checkpoint."""
    save_total_limit: Annotated[Count, RECORDED] = 2
    """Checkpoints to keep. The newest undamaged one is never deleted."""
    resume: Annotated[Literal["auto", "never", "must"], FREE] = "auto"
    """auto: resume from the newest checkpoint if there is one; never: fail if there is one; must: fail if there is none."""
    extend: Annotated[bool, FREE] = False
    """Continue a run beyond its end to a larger max_steps (control: total_timesteps). The schedule adapts to the new end."""
    allow: Annotated[tuple[str, ...], FREE] = ()
    """Settings that may differ when a run is resumed. Further names are dataset (for changed rows), model (for changed
    weights), reward (for changed code) and others; an unknown name raises an error that lists all. Changes are logged."""
    callbacks: Annotated[tuple[str | Any, ...], RECORDED] = ()
    """Callbacks with the interface of transformers' TrainerCallback: module:Class or file.py:Class, or {callback: module:Class,
    parameter: value}; from Python also objects."""
    report_to: Annotated[tuple[str, ...], RECORDED, MAIN] = ()
    """Trackers besides the run folder: tensorboard, wandb, trackio, mlflow, swanlab."""
    threads: Annotated[CountOrZero, MACHINE] = 0
    """CPU threads for torch; 0: OMP_NUM_THREADS if it is set, else one per core."""
    device: Annotated[str, MACHINE] = "auto"
    """Device to compute on. auto: cuda if available, else cpu."""
    max_memory: Annotated[str, MACHINE] = ""
    """Limit on the memory of the device that trains, such as 8GB: micro-batches are made smaller and activations are recomputed
    until the run fits. Empty: no limit."""
    progress: Annotated[bool, FREE] = True
    """Show progress bars and tables."""
    report: Annotated[bool, FREE] = True
    """Draw report.html at the end."""

    def steps(self, rows: int, per_step: int) -> int:
        """Return `max_steps`. If it is 0, return the steps that `num_train_epochs` over `rows` take at `per_step` rows a step."""
        return self.max_steps or math.ceil(self.num_train_epochs * rows / per_step)
