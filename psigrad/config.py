"""Every setting of a run, as frozen dataclasses. The configuration is the object: no second class, no registry.

A string under a field is its help text on the command line. Names are those of TRL and transformers where users know them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

# Ranges are checked where settings are loaded: by the command line, YAML and psigrad.train alike.
Count = Annotated[int, Ge(1)]
CountOrZero = Annotated[int, Ge(0)]
Positive = Annotated[float, Gt(0), Lt(math.inf)]
PositiveOrZero = Annotated[float, Ge(0), Lt(math.inf)]
Share = Annotated[float, Ge(0), Le(1)]
BelowOne = Annotated[float, Ge(0), Lt(1)]
# A name, a built-in with parameters ({"reward": "soft_overlong", …}), or the function itself.
Reward = str | dict[str, Any] | Callable[..., Any]


@dataclass(frozen=True)
class Model:
    """Which model, in which precision, and which of its weights learn."""

    path: str = ""
    """Folder or hub name of any Hugging Face causal language model."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the weights and of the forward pass."""
    lora_rank: CountOrZero = 0
    """Rank of a LoRA adapter (peft); 0 trains every weight."""
    lora_alpha: Positive = 16.0
    """LoRA scaling: the update is multiplied by lora_alpha / lora_rank."""
    lora_dropout: BelowOne = 0.0
    """Dropout on the adapter's input. Above 0 the first-step ratio is no longer 1."""
    lora_target_modules: tuple[str, ...] = ("all-linear",)
    """Module names that get an adapter; "all-linear" is every linear layer but the head."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""


@dataclass(frozen=True)
class Data:
    """Where the rows come from."""

    dataset: str | Any = ""
    """JSONL, JSON or Parquet file, folder of them, or hub name, in one of TRL's dataset forms; from Python also rows."""
    split: str = "train"
    """Split to train on, for hub datasets."""
    eval_dataset: str | Any = ""
    """Held-out rows for evaluation; empty: the last `eval_prompts` rows of `dataset` are held out."""
    eval_split: str = "test"
    """Split to evaluate on, for hub datasets."""
    max_prompt_length: CountOrZero = 0
    """Rows whose prompt has more tokens than this are refused; 0: no limit but the model's."""
    bad_rows: Literal["stop", "skip"] = "stop"
    """What a malformed row does: stop the run, or be left out and counted."""


@dataclass(frozen=True)
class Optim:
    """AdamW and its schedule."""

    learning_rate: PositiveOrZero = 1e-6
    """Peak learning rate."""
    weight_decay: PositiveOrZero = 0.0
    """Decoupled weight decay, on matrices only."""
    adam_beta1: BelowOne = 0.9
    """Decay of the first moment."""
    adam_beta2: BelowOne = 0.999
    """Decay of the second moment."""
    adam_epsilon: Positive = 1e-8
    """Added to the root of the second moment."""
    max_grad_norm: PositiveOrZero = 1.0
    """Clip the global gradient norm to this; 0: never."""
    lr_scheduler_type: Literal["linear", "cosine", "constant"] = "linear"
    """Shape of the decay after warm-up."""
    warmup_steps: CountOrZero = 0
    """Steps of linear warm-up."""


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn."""

    max_completion_length: Count = 256
    """Most tokens in one completion, EOS included."""
    temperature: PositiveOrZero = 1.0
    """Softmax temperature; 0 is greedy (evaluation only)."""
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    """Nucleus: smallest set of tokens whose probability reaches this."""
    top_k: CountOrZero = 0
    """Keep the k most probable tokens; 0: all."""
    min_p: Share = 0.0
    """Keep tokens with at least this share of the most probable token's probability."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a completion, besides the model's EOS."""
    sampler: Literal["embedded", "transformers"] = "embedded"
    """Who samples: psigrad's own sampler or transformers' generate."""
    max_decode_batch: Count = 256
    """Sequences decoded at once; more wait and enter as others finish."""


@dataclass(frozen=True)
class Evaluation:
    """Held-out evaluation during and after the run."""

    eval_steps: CountOrZero = 0
    """Evaluate every this many steps; 0: only at the end."""
    eval_prompts: CountOrZero = 64
    """Held-out prompts; 0: none, or in `eval` all."""
    num_generations_eval: Count = 1
    """Completions per held-out prompt; more than one gives pass@k."""
    eval_temperature: PositiveOrZero = 1.0
    """Temperature of evaluation samples; 0 is greedy."""
    metric: Reward = ""
    """`module:function` or built-in that scores held-out completions; empty: the reward."""
    eval_kl: bool = False
    """Also measure the exact KL to the starting model (keeps a copy of it in memory)."""


@dataclass(frozen=True)
class Run:
    """Where the run lives and how long it goes on."""

    output_dir: str = ""
    """Run folder; empty: runs/<recipe>-<time>."""
    max_steps: CountOrZero = 0
    """Optimiser steps (SFT) or collect-and-update steps (online); 0: one pass over the data."""
    seed: int = 0
    """The one seed; every other is derived from it."""
    save_steps: CountOrZero = 0
    """Checkpoint every this many steps; 0: only at the end and when asked to stop."""
    save_total_limit: Count = 2
    """Checkpoints kept; the newest that verifies is never deleted."""
    resume: Literal["auto", "never", "must"] = "auto"
    """auto: go on from the newest checkpoint if there is one; never: refuse a folder with one; must: refuse a folder without."""
    report_to: tuple[str, ...] = ()
    """Trackers besides the run folder: tensorboard, wandb, trackio."""
    threads: CountOrZero = 0
    """CPU threads for torch; 0: one per core."""
    device: str = "auto"
    """auto: cuda where there is one, else cpu."""
    progress: bool = True
    """Show progress bars and tables."""
    report: bool = True
    """Draw report.html at the end."""


@dataclass(frozen=True)
class SFTConfig:
    """Supervised fine-tuning: cross-entropy on completion tokens (prompt-completion rows) or assistant turns (messages)."""

    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    optim: Optim = field(default_factory=lambda: Optim(learning_rate=2e-5))
    sampling: Sampling = field(default_factory=Sampling)
    evaluation: Evaluation = field(default_factory=Evaluation)
    run: Run = field(default_factory=Run)
    batch_size: Count = 16
    """Rows per optimiser step."""
    max_length: Count = 1024
    """Rows with more tokens than this are cut at the end."""
    micro_batch_tokens: Count = 16384
    """Tokens per forward pass; a step is split to fit, which changes no gradient."""
    reward: tuple[Reward, ...] = ()
    """Reward functions, only to evaluate generated completions; empty: held-out loss alone."""


@dataclass(frozen=True)
class OnlineConfig:
    """Online reinforcement learning with a `PolicyGradient`: GRPO, RLOO, DAPO, REINFORCE and the rest of the catalog."""

    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    optim: Optim = field(default_factory=Optim)
    sampling: Sampling = field(default_factory=Sampling)
    evaluation: Evaluation = field(default_factory=Evaluation)
    run: Run = field(default_factory=Run)
    algorithm: Any = "grpo"
    """Preset name, or {preset: grpo, part: value, …}, or a PolicyGradient."""
    reward: tuple[Reward, ...] = ()
    """Reward functions: built-in names or module:function, with TRL's signature."""
    reward_weights: tuple[float, ...] = ()
    """One weight per reward function; empty: all 1."""
    reward_timeout: Positive = 10.0
    """Wall-clock seconds one completion's scoring may take before its worker is killed."""
    reward_workers: Count = 1
    """Processes that score."""
    max_unscored: Share = 0.1
    """Share of completions in one step that may stay unscored before the run stops."""
    prompts_per_step: Count = 16
    """Prompts collected per step."""
    num_generations: Count = 8
    """Completions per prompt (the group size G)."""
    num_iterations: Count = 1
    """Passes over each collected batch."""
    num_minibatches: Count = 1
    """Optimiser steps per pass; each takes an equal share of the groups."""
    micro_batch_tokens: Count = 16384
    """Tokens per forward pass; a step is split to fit, which changes no gradient."""
    max_refills: CountOrZero = 4
    """With dynamic sampling: extra collections per step before going on with the groups that have signal."""
    max_logp_difference: PositiveOrZero = 0.0
    """Stop when sampler and trainer log-probs differ by more than this in the mean; 0: 1e-3 in float32, 0.1 in bfloat16."""


@dataclass(frozen=True)
class EvalConfig:
    """Sample held-out prompts from a model and score them."""

    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=lambda: Data(split="test"))
    sampling: Sampling = field(default_factory=Sampling)
    evaluation: Evaluation = field(default_factory=lambda: Evaluation(eval_prompts=0))
    run: Run = field(default_factory=Run)
    reward: tuple[Reward, ...] = ()
    """What scores the completions; one function, or several that are added up."""
    reward_weights: tuple[float, ...] = ()
    """One weight per reward function; empty: all 1."""
    reward_timeout: Positive = 10.0
    """Wall-clock seconds one completion's scoring may take before its worker is killed."""
    reward_workers: Count = 1
    """Processes that score."""
    micro_batch_tokens: Count = 16384
    """Tokens per forward pass."""
