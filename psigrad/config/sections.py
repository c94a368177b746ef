"""The sections that several recipes share: model, data, optimiser, sampling, evaluation, run."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import AfterValidator

from psigrad.config.fields import FREE, LENGTH, LIVE, MACHINE, MAIN, PATH, RECORDED, SEVERAL, STEPS, WRITTEN, Needs, On
from psigrad.errors import UserError

# Ranges are checked where settings are loaded: by the command line, YAML and psigrad.train alike.
Count = Annotated[int, Ge(1)]
CountOrZero = Annotated[int, Ge(0)]
Positive = Annotated[float, Gt(0), Lt(math.inf)]
PositiveOrZero = Annotated[float, Ge(0), Lt(math.inf)]
Share = Annotated[float, Ge(0), Le(1)]
BelowOne = Annotated[float, Ge(0), Lt(1)]
# Without these some settings have no effect.
_ADAPTER, _CLUSTER, _PUSHED = Needs("model.lora_rank"), Needs("placement.cluster"), Needs("hub.push_to_hub")
_SHARDS = Needs("placement.strategy=fsdp")
_BEST = Needs("evaluation.load_best_model_at_end", "evaluation.early_stopping_patience")
DRAWS = Needs("reward", "reward_model", "evaluation.metric", "prompts_per_step", "best_of", "output")
# A name, a built-in with parameters ({"reward": "soft_overlong", …}), or the function itself.
Reward = str | dict[str, Any] | Callable[..., Any]


# transformers' names; reduce_lr_on_plateau and greedy follow a metric and not the step.
Schedule = Literal[
    "linear", "cosine", "constant", "cosine_with_restarts", "polynomial", "inverse_sqrt", "cosine_with_min_lr",
    "cosine_warmup_with_min_lr", "warmup_stable_decay",
]  # fmt: skip


def object_of(given: str | Mapping[str, Any]) -> str | dict[str, Any]:
    """A setting that is a mapping, or JSON text of one; empty where it is. Raises `UserError` for other text."""
    try:
        found = json.loads(given) if isinstance(given, str) and given else given or {}
    except ValueError:
        found = None
    if not isinstance(found, Mapping):
        raise UserError(f"lr_scheduler_kwargs is {given!r}; expected name: value pairs, as '{{\"power\": 2}}'.")
    return dict(found) or ""


def columns_of(given: str | Mapping[str, str]) -> dict[str, str]:
    r"""A column mapping written as text, "question=prompt,answer=answer": {"question": "prompt", "answer": "answer"}.

    A comma ends a pair where a name and "=" follow it; `\n` is a line break. Raises `UserError` for a pair without "=".
    """
    if isinstance(given, Mapping):
        return dict(given)
    pairs = [pair.partition("=") for pair in re.split(r",\s*(?=[\w.-]+=)", given) if pair]
    if wrong := ["".join(pair) for pair in pairs if not all(pair)]:
        raise UserError(f"columns has {wrong[0]!r}; expected pairs such as question=prompt,answer=answer.")
    names = [name.strip() for name, _, _ in pairs]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise UserError(f"columns has {twice!r} twice; leave one of them out.")
    return {name: new.replace("\\n", "\n") for name, (_, _, new) in zip(names, pairs, strict=True)}


@dataclass(frozen=True)
class Model:
    """Which model, in which precision, and which of its weights learn."""

    path: Annotated[str, PATH, MAIN] = ""
    """Folder or hub name of any Hugging Face causal language model, or of an adapter of peft; or a GGUF file."""
    revision: str = ""
    """Branch, tag or commit of a hub model; empty: its newest."""
    trust_remote_code: bool = False
    """Run the Python code that comes with a model, with all your rights. Set it only for models whose code you have read."""
    chat_template_path: Annotated[str, PATH] = ""
    """Chat template in place of the tokenizer's own: a Jinja file, or a folder or hub model whose template it is. It is saved
    with the model."""
    chat_template_kwargs: str | dict[str, Any] = ""
    """Arguments of the chat template for every row, as '{"enable_thinking": false}'. A row's own column of that name goes over
    them."""
    eos_token: str = ""
    """Token that ends a text, in place of the tokenizer's own EOS. It is saved with the model."""
    dtype: Annotated[Literal["float32", "bfloat16"], MAIN, On(cuda="bfloat16")] = "float32"
    """Precision of the weights and of the forward pass, as TRL's on a GPU. The optimiser steps float32 masters of bfloat16
    weights. Products of float32 are made in TF32 on a GPU."""
    quantize_base: Literal["", "nf4", "int8", "gguf"] = ""
    """Keep the layers below a LoRA adapter in codes: of 4 bits (nf4: QLoRA's, blocks of 64), of 8 (int8: blocks of 32), or as a
    GGUF file has them (gguf: Q4_0, Q4_K, Q6_K, Q8_0). lora_save=both then leaves the adapter alone. TRL: load_in_4bit,
    load_in_8bit."""
    adapter: Literal["continue", "merge"] = "continue"
    """What becomes of an adapter that is given as the model: it is trained on, or merged into its base, all of whose weights
    then learn. With lora_rank it is merged, and a new adapter put on top."""
    lora_rank: Annotated[CountOrZero, MAIN] = 0
    """Rank of a fresh LoRA adapter (peft); 0 trains every weight, or the adapter that the model is."""
    lora_alpha: Annotated[Positive, _ADAPTER] = 16.0
    """LoRA scaling: the update is multiplied by lora_alpha / lora_rank."""
    lora_dropout: Annotated[BelowOne, _ADAPTER] = 0.0
    """Dropout on the adapter's input. Above 0 the first-step ratio is no longer 1."""
    lora_target_modules: Annotated[tuple[str, ...], _ADAPTER] = ("all-linear",)
    """Module names that get an adapter; "all-linear" is every linear layer but the head. A regular expression, given alone, has
    peft's meaning: it must match a module's whole name."""
    use_rslora: Annotated[bool, _ADAPTER] = False
    """Multiply the update by lora_alpha / √lora_rank instead (rank-stabilised LoRA)."""
    use_dora: Annotated[bool, _ADAPTER] = False
    """Learn the length of each row of the adapted matrices too (DoRA)."""
    lora_modules_to_save: Annotated[tuple[str, ...], _ADAPTER] = ()
    """Modules that are trained whole beside the adapter and saved with it, such as lm_head."""
    lora_save: Annotated[Literal["both", "merged", "adapter"], RECORDED] = "adapter"
    """What the run's model/ holds at the end: the adapter alone, the whole model with it merged in, or both, the adapter then in
    model/adapter. `psigrad export --to merged` makes the whole of the adapter. A reward model is left whole in any case."""
    router_aux_loss_coef: PositiveOrZero | None = None
    """Weight of the auxiliary loss that keeps the load of a model of experts even, in every method but reward models; empty: that
    of the model's configuration, as TRL. 0: none."""
    attention: Annotated[Literal["auto", "sdpa", "varlen", "flex"], RECORDED] = "auto"
    """How packed sequences attend where the fused decoder does not compute. On a GPU "varlen" (torch's kernel, or flash-attn's)
    and "flex" (compiled FlexAttention) compute the scores that are needed, where "sdpa" pads; "auto" takes the first that runs
    and gives the numbers of the last. On a CPU that is "sdpa"."""
    gradient_checkpointing: Annotated[bool, RECORDED, On(cuda=True)] = False
    """Recompute activations in the backward pass, and a large float32 head's gradient where it is needed: less memory, a third
    more time, with a vocabulary of 150,000 before a small model nearly twice. TRL: on."""


@dataclass(frozen=True)
class Data:
    """Where the rows come from."""

    dataset: Annotated[str | Any, PATH, SEVERAL, MAIN] = ""
    """JSONL, JSON, Parquet or CSV file, folder of them, hub name, or task:NAME for a task of reasoning-gym, in one of TRL's
    dataset forms; from Python also rows. Several may be given, each with a weight: a.jsonl:0.7 b.jsonl:0.3."""
    columns: Annotated[str | Mapping[str, str], AfterValidator(lambda given: columns_of(given) or "")] = ""
    """Columns of the rows under other names: question=prompt,answer=answer renames two, prompt={question} Think first. makes one
    of others. In YAML and Python also a mapping."""
    plain_prompts: bool = False
    """Send plain prompts to a chat model as they are. Otherwise each is one user turn of the chat template, and plain answers are
    the assistant's; a model without a template gets them as they are."""
    split: str = "train"
    """Split to train on, or a slice of it: train[:90%], train[100:]. A file has the split train alone."""
    eval_dataset: Annotated[str | Any, PATH, SEVERAL] = ""
    """Held-out rows for evaluation; empty: `eval_prompts` rows of `dataset`, drawn at random, are held out."""
    eval_split: Annotated[str, Needs("data.eval_dataset")] = "test"
    """Split to evaluate on, or a slice of it. A file has the splits train and test."""
    max_rows: CountOrZero = 0
    """Read only so many rows of each dataset; one of the hub is then streamed, and not downloaded whole. 0: all."""
    max_prompt_length: CountOrZero = 0
    """Rows whose prompt has more tokens than this are refused; 0: no limit but the model's."""
    bad_rows: Literal["stop", "skip"] = "stop"
    """What a malformed row does: stop the run, or be left out and counted."""
    num_proc: Annotated[CountOrZero, FREE] = 0
    """Processes that turn rows into tokens, where there are thousands; 0: one for each core. Files of rows are encoded once, and
    kept for the next start (docs/data.md)."""


@dataclass(frozen=True)
class Optim:
    """The optimiser and its schedule."""

    optimizer: Literal["adamw", "adamw_8bit", "muon", "adafactor"] = "adamw"
    """What steps the weights: adamw; adamw_8bit, with moments of 8 bits (bitsandbytes' formula) but for embeddings; muon
    (torch.optim.Muon), at adamw's learning rates, for matrices other than embeddings and heads, which adamw steps; or adafactor
    (transformers'), which keeps next to no state."""
    bf16_stochastic_round: Annotated[bool, Needs("optim.optimizer=adamw", "optim.optimizer=adamw_8bit")] = False
    """Step bfloat16 weights without float32 masters: each is rounded up or down by chance, so that the mean is right (torchao's
    name). It takes 4 bytes a weight less."""
    learning_rate: Annotated[PositiveOrZero, LIVE, MAIN] = 1e-6
    """Peak learning rate."""
    weight_decay: Annotated[PositiveOrZero, LIVE] = 0.0
    """Decoupled weight decay, on matrices only."""
    adam_beta1: BelowOne = 0.9
    """Decay of the first moment."""
    adam_beta2: BelowOne = 0.999
    """Decay of the second moment."""
    adam_epsilon: Positive = 1e-8
    """Added to the root of the second moment."""
    max_grad_norm: Annotated[PositiveOrZero, LIVE] = 1.0
    """Clip the global gradient norm to this; 0: never."""
    lr_scheduler_type: Schedule = "linear"
    """Shape of the decay after warm-up, by transformers' names."""
    lr_scheduler_kwargs: Annotated[str | Mapping[str, Any], AfterValidator(lambda given: object_of(given))] = ""
    """Parameters of the schedule, as '{"min_lr_rate": 0.1}' for cosine_with_min_lr, {"num_decay_steps": 200} for
    warmup_stable_decay, {"num_cycles": 3} for cosine_with_restarts, {"power": 2} for polynomial, {"timescale": 1000} for
    inverse_sqrt."""
    warmup_steps: Annotated[CountOrZero, STEPS] = 0
    """Steps of linear warm-up. The first has the rate learning_rate / (warmup_steps + 1), where transformers' first has 0."""
    rehearse: Annotated[bool, RECORDED] = False
    """Run one forward and backward pass over the longest samples before the first step, and discard its gradients: a lack of
    memory shows at once."""


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn."""

    max_completion_length: Annotated[Count, MAIN] = 256
    """Most tokens in one completion, EOS included. TRL: 512."""
    temperature: Annotated[PositiveOrZero, LIVE, MAIN] = 1.0
    """Softmax temperature; 0 is greedy (evaluation only)."""
    top_p: Annotated[float, Gt(0), Le(1), LIVE] = 1.0
    """Nucleus: smallest set of tokens whose probability reaches this."""
    top_k: Annotated[CountOrZero, LIVE] = 0
    """Keep the k most probable tokens; 0: all."""
    min_p: Annotated[Share, LIVE] = 0.0
    """Keep tokens with at least this share of the most probable token's probability."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a completion, besides the model's EOS."""
    sampler: Annotated[str, MAIN] = "embedded"
    """Who samples: embedded (psigrad's own), transformers (its generate), vllm (its engine, in a process of its own), or
    module:Class of your own."""
    vllm_memory: Annotated[float, Gt(0), Lt(1), RECORDED, Needs("sampling.sampler=vllm")] = 0.4
    """With sampler=vllm: share of the GPU's memory that vLLM may take for its weights and cache. A sampler of a cluster has its
    GPU to itself: there it is 0.8 unless another than 0.4 is given."""
    vllm_sleep: Annotated[bool, RECORDED] = False
    """With sampler=vllm on the GPU that trains: vLLM leaves its memory while the run trains (sleep level 1)."""
    vllm_readback: Annotated[bool, RECORDED, Needs("sampling.sampler=vllm")] = True
    """With sampler=vllm: after each update compare bit for bit what the engine computes with. All weights are read once more, and
    without a GPU stay in the host's memory until then. Off: only log-probs at the start are compared."""
    tensor_parallel_size: Annotated[Count, RECORDED] = 1
    """With sampler=vllm: devices that each engine divides the model among."""
    max_decode_batch: Annotated[Count, RECORDED] = 256
    """Sequences decoded at once; more wait and enter as others finish."""
    cuda_graphs: bool = True
    """With sampler=embedded on a GPU: record a decoding step once for each size of the batch and replay it, several tokens at a
    time. The cache then stays in memory; where it would take more than a fifth of the GPU's, steps are not recorded."""

    def vllm_memory_alone(self, gpus: float = 1.0) -> float:
        """The share of vLLM's engine on `gpus` of its own."""
        return 0.8 * min(1.0, gpus) if self.vllm_memory == Sampling.vllm_memory else self.vllm_memory

    @property
    def filtered(self) -> bool:
        """Whether tokens are drawn from another distribution than the policy's."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


@dataclass(frozen=True)
class Evaluation:
    """Held-out evaluation during and after the run."""

    eval_steps: Annotated[CountOrZero, LIVE, STEPS, MAIN] = 0
    """Evaluate every this many steps; 0: only at the end."""
    eval_prompts: CountOrZero | None = None
    """Held-out prompts; 0: none, or in `eval` all. Not given: up to 64 (256 comparisons), at most a tenth of the dataset."""
    num_generations_eval: Annotated[Count, MAIN, DRAWS] = 1
    """Completions per held-out prompt; more than one gives pass@k."""
    eval_temperature: Annotated[PositiveOrZero, DRAWS] = 1.0
    """Temperature of evaluation samples; 0 is greedy."""
    metric: Reward = ""
    """`module:function` or built-in that scores held-out completions; empty: the reward."""
    load_best_model_at_end: Annotated[bool, Needs("evaluation.eval_steps")] = False
    """Leave the weights of the best evaluation behind, not the last ones. Their checkpoint is made then, and kept beside those of
    save_total_limit."""
    metric_for_best_model: Annotated[str, _BEST] = ""
    """Which held-out figure is meant, such as loss or exact; empty: the one that heads the report."""
    greater_is_better: Annotated[bool | None, _BEST] = None
    """Whether more of it is better; not given: unless its name ends in loss."""
    early_stopping_patience: Annotated[CountOrZero, Needs("evaluation.eval_steps")] = 0
    """End the run after so many evaluations in a row that were no better; 0: never."""
    early_stopping_threshold: Annotated[PositiveOrZero, Needs("evaluation.early_stopping_patience")] = 0.0
    """How much better an evaluation must be to count as better."""
    eval_kl: bool = False
    """Also measure the exact KL to the starting model (keeps a copy of it in memory)."""


@dataclass(frozen=True)
class Placement:
    """On which processes a run computes. It changes results by rounding at most."""

    processes: Annotated[Count, RECORDED, MAIN] = 1
    """Processes of this machine that train together, each on its share of every step. On several machines start them by torchrun
    or SLURM and leave this at 1."""
    strategy: Annotated[Literal["ddp", "fsdp"], RECORDED] = "ddp"
    """What each process holds: the whole model (ddp), or a shard of its weights, gradients and optimiser (fsdp, PyTorch's
    fully_shard)."""
    dp_replicate_size: Annotated[Count, RECORDED, _SHARDS] = 1
    """With fsdp: groups of processes that each hold the whole model in shards (HSDP): what a layer is gathered from stays within
    a group, and gradients are summed over all of them."""
    tp_size: Annotated[Count, RECORDED, _SHARDS] = 1
    """With fsdp: processes that compute every layer together, each with some of its heads and columns, by the plan that
    transformers has for the family (tensor parallelism)."""
    cp_size: Annotated[Count, RECORDED, _SHARDS] = 1
    """With fsdp: processes that divide the tokens of every row, and in attention the heads (context parallelism, Ulysses)."""
    timeout_minutes: Annotated[Positive, RECORDED] = 30.0
    """A process that waits longer than this for another ends."""
    cluster: Annotated[str, RECORDED] = ""
    """Sample on a Ray cluster: its address, or auto for the one that is running or else this machine alone; empty: the processes
    that train sample too."""
    samplers: Annotated[CountOrZero, RECORDED, _CLUSTER] = 0
    """With a cluster: how many processes sample; 0: as many as it has room for, and more when it grows."""
    sampler_cpus: Annotated[Count, RECORDED, _CLUSTER] = 1
    """With a cluster: CPU cores of each of them."""
    sampler_gpus: Annotated[PositiveOrZero, RECORDED, _CLUSTER] = 0.0
    """With a cluster: GPUs of each of them; below 1 they share one."""
    weight_transfer: Annotated[Literal["auto", "object_store", "nccl", "gloo"], RECORDED, _CLUSTER] = "auto"
    """With a cluster: how weights go to vLLM's engines: a broadcast from the trainer's GPU to theirs (nccl), one between CPUs
    (gloo), or Ray's object_store; auto: nccl where both have GPUs. Others always get them from the object store."""
    parcel_prompts: Annotated[Count, RECORDED, _CLUSTER] = 2
    """With a cluster: prompts that go to a process together. Their completions are decoded in one batch."""
    scorers: Annotated[CountOrZero, RECORDED] = 0
    """With a cluster: processes on it that run the reward functions, each with `reward_workers` of its own; 0: the trainer's
    machine runs them."""
    scorer_cpus: Annotated[Count, RECORDED, Needs("placement.scorers")] = 1
    """With a cluster: CPU cores of each of those."""
    environment_actors: Annotated[CountOrZero, RECORDED] = 0
    """With a cluster: processes on it that play the environment or run the tools, each with `environment_workers` of its own; 0:
    the trainer's machine does."""
    environment_cpus: Annotated[Count, RECORDED, Needs("placement.environment_actors")] = 1
    """With a cluster: CPU cores of each of those."""


@dataclass(frozen=True)
class Hub:
    """Whether and where the finished model is uploaded. Names are those of transformers' TrainingArguments."""

    push_to_hub: Annotated[bool, FREE] = False
    """Upload the model with its card when the run is finished, with the token in HF_TOKEN or of `hf auth login`."""
    hub_model_id: Annotated[str, FREE, _PUSHED] = ""
    """Repository to upload to: user/name, or a name alone, which is then yours; empty: the name of the run's folder."""
    hub_private_repo: Annotated[bool, FREE, _PUSHED] = False
    """Make a new repository private; one that is there and public is refused."""
    hub_revision: Annotated[str, FREE, _PUSHED] = ""
    """Branch to upload to, made where it is missing; empty: main."""


@dataclass(frozen=True)
class Run:
    """Where the run lives and how long it goes on."""

    output_dir: Annotated[str, WRITTEN, FREE, MAIN] = ""
    """Run folder; empty: runs/<recipe>-<time>."""
    max_steps: Annotated[CountOrZero, LENGTH, MAIN] = 0
    """Optimiser steps (SFT) or collect-and-update steps (online); 0: num_train_epochs decides."""
    num_train_epochs: Annotated[Positive, LENGTH, MAIN, Needs("run.max_steps=0")] = 1.0
    """Passes over the data, where max_steps is 0; half a pass is 0.5. TRL: 3."""
    seed: Annotated[int, MAIN] = 0
    """The one seed; every other is derived from it."""
    save_steps: Annotated[CountOrZero, RECORDED, LIVE, STEPS] = 0
    """Checkpoint every this many steps; 0: by time alone (save_minutes)."""
    save_minutes: Annotated[PositiveOrZero, RECORDED, LIVE] = 10.0
    """Checkpoint too when this many minutes have passed since the last one; 0: never by time."""
    logging_steps: Annotated[CountOrZero, RECORDED, STEPS] = 10
    """Where the output is no terminal: print a line of figures every this many steps, or after ten seconds; 0: none."""
    watchdog_minutes: Annotated[PositiveOrZero, RECORDED] = 30.0
    """Report a phase of the run that lasts longer than this many minutes, and write all stacks to stacks.txt; 0: never."""
    async_save: Annotated[bool, RECORDED, On(cuda=True)] = False
    """Copy what a checkpoint holds to the host's memory, and write it in a thread while steps go on. Not with callbacks, which
    are shown a checkpoint that is there."""
    save_total_limit: Annotated[Count, RECORDED] = 2
    """Checkpoints kept; the newest that verifies is never deleted."""
    resume: Annotated[Literal["auto", "never", "must"], FREE] = "auto"
    """auto: go on from the newest checkpoint if there is one; never: refuse a folder with one; must: refuse a folder without."""
    extend: Annotated[bool, FREE] = False
    """Go on beyond the end of a run to a larger max_steps (control: total_timesteps). The schedule bends to the new end."""
    allow: Annotated[tuple[str, ...], FREE] = ()
    """What may have changed since the run was started, by name: a setting, or dataset, model, reward, threads and so on. It is
    recorded."""
    callbacks: Annotated[tuple[str | Any, ...], RECORDED] = ()
    """Callbacks of the shape of transformers' TrainerCallback: module:Class or file.py:Class, {callback: module:Class, parameter:
    value}; from Python also objects."""
    report_to: Annotated[tuple[str, ...], RECORDED, MAIN] = ()
    """Trackers besides the run folder: tensorboard, wandb, trackio, mlflow, swanlab."""
    threads: Annotated[CountOrZero, MACHINE] = 0
    """CPU threads for torch; 0: OMP_NUM_THREADS where it is set, else one per core."""
    device: Annotated[str, MACHINE] = "auto"
    """auto: cuda where there is one, else cpu."""
    max_memory: Annotated[str, MACHINE] = ""
    """Stay below this much memory, as 8GB: micro-batches become as small, and activations are computed anew, as `psigrad plan`
    counts that it takes. Empty: as the settings say."""
    progress: Annotated[bool, FREE] = True
    """Show progress bars and tables."""
    report: Annotated[bool, FREE] = True
    """Draw report.html at the end."""

    def steps(self, rows: int, per_step: int) -> int:
        """Steps of the run on so many rows, of which each step takes `per_step`; 0 where neither rows nor steps are known."""
        return self.max_steps or math.ceil(self.num_train_epochs * rows / per_step)
