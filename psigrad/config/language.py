"""The settings of the recipes that train or evaluate a language model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Lt
from pydantic import AfterValidator

from psigrad.config.fields import LIVE, MAIN, PATH, RECORDED, WRITTEN, DeviceDefault, Needs, Unread
from psigrad.config.sections import (
    DRAWS,
    BelowOne,
    Count,
    CountOrZero,
    Data,
    Evaluation,
    Hub,
    Model,
    Optim,
    Placement,
    Positive,
    PositiveOrZero,
    Reward,
    Run,
    Sampling,
    Share,
)

if TYPE_CHECKING:
    from psigrad.objective import PolicyGradient
    from psigrad.objective.preferences.preference_loss import KahnemanTversky, OnlinePreference, Preference

    Algorithm = str | Mapping[str, Any] | PolicyGradient | OnlinePreference
    Loss = str | Mapping[str, Any] | Preference | KahnemanTversky
else:
    # Classes are checked by name. Importing them would import torch, and settings must be readable without it.
    def _named(*classes: str) -> AfterValidator:
        def check(value: Any) -> Any:
            if not isinstance(value, str | Mapping) and not {c.__name__ for c in type(value).__mro__} & set(classes):
                raise ValueError(f"expected a preset's name, a mapping of names to values, or a {classes[0]}")
            return value

        return AfterValidator(check)

    Algorithm = Annotated[Any, _named("PolicyGradient", "OnlinePreference")]
    Loss = Annotated[Any, _named("Preference", "KahnemanTversky")]


# Settings without which others have no effect.
_SCORED, _PLAYED, _SERVED = Needs("reward", "evaluation.metric"), Needs("environment", "tools"), Needs("server")
_ASKED = Needs("agent", "agent_command")
_WORKERS, _ENCLOSED = Needs(*_SCORED.settings, *_PLAYED.settings, *_ASKED.settings), Needs(*_PLAYED.settings, *_ASKED.settings)
# Settings of shared sections that some commands do not read.
_NO_SAMPLERS = (
    "samplers", "sampler_cpus", "sampler_gpus", "weight_transfer", "parcel_prompts", "environment_actors", "environment_cpus",
)  # fmt: skip
_Placed = Annotated[Placement, Unread(*_NO_SAMPLERS)]
_Rows = Annotated[Data, Unread("max_prompt_length")]
_JudgedRows = Annotated[Data, Unread("eval_dataset", "eval_split")]
# If only evaluations sample, there is one temperature and one number of completions per prompt.
_Evaluated = Annotated[Sampling, Unread(temperature="evaluation.eval_temperature"), DRAWS]
_GROUPS = {"num_generations": "evaluation.num_generations_eval"}
_AsItIs = Annotated[
    Model,
    Unread(
        "adapter", *(f.name for f in fields(Model) if f.name.startswith(("lora_", "use_", "gradient_", "quantize_", "router_")))
    ),
]
_DURING_A_RUN = (
    "eval_steps", "eval_kl", "load_best_model_at_end", "metric_for_best_model", "greater_is_better", "early_stopping_patience",
    "early_stopping_threshold",
)  # fmt: skip
_AtOnce = Annotated[Run, Unread(*(f.name for f in fields(Run) if f.name not in ("seed", "threads", "device")))]


@dataclass(frozen=True)
class PackingSettings:
    """The setting that limits the size of a forward pass."""

    micro_batch_tokens: Annotated[CountOrZero, RECORDED, MAIN, DeviceDefault(cuda=0)] = 4096
    """Tokens per forward pass; 0: as many as fit in the device's free memory. A larger training step takes several passes, with
    the same gradient. On a CPU a few thousand are fastest. 0 on a GPU also stops gradient_checkpointing if that is faster."""


@dataclass(frozen=True)
class RewardSettings:
    """The settings for scoring completions: reward functions, reward models, and the processes that run them."""

    reward: Annotated[tuple[Reward, ...], MAIN] = ()
    """Reward functions: built-in names or module:function, with TRL's signature."""
    reward_model: Annotated[tuple[str, ...], PATH, MAIN] = ()
    """Folders or hub names of reward models. Their scores are added to those of the reward functions."""
    reward_weights: tuple[float, ...] = ()
    """One weight per reward function, then one per reward model; empty: all 1."""
    reward_timeout: Annotated[Positive, RECORDED, _SCORED] = 10.0
    """Wall-clock seconds that a reward function may take for a group before its worker is killed. Then each completion of the
    group is scored alone, within the same limit."""
    reward_workers: Annotated[Count, RECORDED, _SCORED] = 1
    """Processes that score completions."""
    worker_memory_gb: Annotated[PositiveOrZero, RECORDED, _WORKERS] = 16.0
    """Memory limit of each process that runs your rewards, environments or tools, in 1e9 bytes; 0: no limit."""
    skip_special_tokens: Annotated[bool, Needs(*_SCORED.settings, "reward_model")] = True
    """Remove the tokenizer's special tokens from the text that rewards read. false: keep special tokens inside a turn, such as
    <think> in some vocabularies."""
    worker_env: Annotated[tuple[str, ...], RECORDED, _WORKERS] = ()
    """Names of extra environment variables for the processes that run your rewards, environments or tools, such as
    OPENAI_API_KEY. By default these processes get no secrets."""


@dataclass(frozen=True)
class EpisodeSettings:
    """The settings of episodes with several turns: the environment, tools or agent that the policy interacts with."""

    environment: Annotated[str | Callable[..., Any], MAIN] = ""
    """Text environment that answers each turn: a built-in one (guess, calculator, grid, kuhn, pennies), or a custom module:Class
    with reset(row) and step(text). In the games kuhn and pennies, the policy plays every player (seat). From other libraries:
    openenv:ADDRESS, verifiers:TASKSET, textarena:GAME, or an MCP server as "mcp:COMMAND" or mcp:http://…"""
    tools: Annotated[tuple[str | Callable[..., Any], ...], MAIN] = ()
    """Tools that the policy may call, offered through the chat template: typed Python functions as module:function, and all
    tools of an MCP server as "mcp:COMMAND" or mcp:http://…"""
    environment_timeout: Annotated[Positive, RECORDED, _PLAYED] = 10.0
    """Wall-clock seconds that one call of an environment or tool may take before its process is killed."""
    environment_workers: Annotated[Count, RECORDED, _PLAYED] = 1
    """Processes that run environments and tools."""
    environment_sandbox: Annotated[bool, RECORDED, _ENCLOSED] = False
    """Run environments, tools and agents in bubblewrap: no network, write access to a temporary folder only, read access to
    Python, the working folder and their own folders. An agent can still call the policy."""
    environment_files: Annotated[tuple[str, ...], PATH, RECORDED, Needs("environment_sandbox")] = ()
    """With environment_sandbox: extra files and folders that environments, tools and agents may read."""
    max_turns: Annotated[Count, _PLAYED] = 8
    """Maximum number of the policy's turns in an episode. A longer episode is cut."""
    max_turn_length: Annotated[CountOrZero, _PLAYED] = 0
    """Maximum tokens of one turn of the policy; max_completion_length then limits the sum over an episode's turns. 0:
    max_completion_length limits each turn."""
    max_observation_length: Annotated[CountOrZero, _PLAYED] = 0
    """Maximum tokens of an environment's or tool's answer; 0: no limit. A longer answer is cut. So is an answer that leaves no
    room for another turn."""
    turns_together: Annotated[bool, RECORDED, _PLAYED] = False
    """Sample the next turns only when all episodes have their answers. Slower, but the order in which answers arrive then cannot
    change results, even by rounding."""
    agent: Annotated[str | Callable[..., Any], MAIN] = ""
    """A custom agent that calls the policy over HTTP: module:function or file.py:function, which takes the row and a client or a
    base_url. It returns its reward, or None to leave the reward to the reward functions."""
    agent_command: Annotated[str, MAIN] = ""
    """Command that starts a custom agent, which finds the policy at OPENAI_BASE_URL or ANTHROPIC_BASE_URL. It reads the row as
    JSON from its standard input, and writes its reward as its last line of output."""
    agent_timeout: Annotated[Positive, RECORDED, _ASKED] = 600.0
    """Wall-clock seconds that one session of an agent may take before its process is killed."""
    agent_workers: Annotated[Count, RECORDED, _ASKED] = 4
    """Concurrent sessions of the agent, each in its own process."""
    agent_calls: Annotated[Count, _ASKED] = 64
    """Maximum requests of one session. A session with more requests is dropped and gets no reward."""

    @property
    def plays(self) -> bool:
        """True if each completion comes from an episode with an environment, tools or an agent."""
        return bool(self.environment or self.tools or self.asks)

    @property
    def asks(self) -> bool:
        """True if each completion comes from a session of an agent that calls the policy. The agent may also return a reward."""
        return bool(self.agent or self.agent_command)


@dataclass(frozen=True)
class ServerSettings:
    """The settings of an OpenAI-compatible server that samples instead of a local model."""

    server: Annotated[str, MAIN] = ""
    """Address of an OpenAI-compatible server to sample from, without a local model: http://localhost:8000/v1. `model` is then the
    model's name on that server, and may be omitted if it serves only one."""
    server_key_variable: Annotated[str, _SERVED] = "OPENAI_API_KEY"
    """Name of the environment variable with the server's key. The variable may be unset."""
    server_timeout: Annotated[Positive, _SERVED] = 600.0
    """Seconds that one request to the server may take."""
    server_attempts: Annotated[Count, _SERVED] = 5
    """Maximum attempts for one completion, if the server is busy or down. The command fails after the last one."""
    server_concurrency: Annotated[Count, _SERVED] = 16
    """Concurrent requests to the server."""


@dataclass(frozen=True)
class _Sections:
    """The sections of a recipe that trains a language model."""

    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    optim: Optim = field(default_factory=Optim)
    sampling: Sampling = field(default_factory=Sampling)
    evaluation: Evaluation = field(default_factory=Evaluation)
    run: Run = field(default_factory=Run)
    placement: Placement = field(default_factory=Placement)
    hub: Hub = field(default_factory=Hub)


@dataclass(frozen=True)
class _SectionsForRows(_Sections):
    """The sections of a recipe that learns from recorded rows and samples only to evaluate."""

    data: _Rows = field(default_factory=Data)
    sampling: _Evaluated = field(default_factory=Sampling)
    placement: _Placed = field(default_factory=Placement)


@dataclass(frozen=True)
class SFTConfig(_SectionsForRows, PackingSettings, RewardSettings):
    """Supervised fine-tuning: cross-entropy on a row's completion or, in a row of messages, on the assistant's turns.

    Rewards are used only to evaluate completions.
    """

    optim: Optim = field(default_factory=lambda: Optim(learning_rate=2e-5))
    batch_size: Annotated[Count, MAIN] = 16
    """Rows per optimiser step."""
    max_length: Annotated[Count, MAIN] = 1024
    """Maximum tokens of a row; longer rows are cut at the end."""
    label_smoothing_factor: BelowOne = 0.0
    """Share of the target probability that is spread evenly over all tokens of the vocabulary. The held-out loss ignores it."""
    train_empty_thinking: bool = False
    """Also train on the empty thought that some chat templates write before an answer without a thought (Qwen3: <think></think>).
    Otherwise it is context without loss, as in sampling with thinking disabled."""


@dataclass(frozen=True)
class OnlineConfig(_Sections, PackingSettings, EpisodeSettings, RewardSettings):
    """Online reinforcement learning: each step samples completions, scores them by rewards or a teacher, and trains on them."""

    algorithm: Algorithm = "grpo"
    """Preset name, or {preset: grpo, part: value, …}, or a PolicyGradient."""
    reference: Annotated[str, PATH] = ""
    """Reference policy of the KL term, such as a teacher: a folder, a hub name, or the address (http://localhost:8000/v1) of an
    OpenAI-compatible server that returns the log-probs of a prompt. Empty: the model that training starts from."""
    reference_model: str = ""
    """If `reference` is a server: name of its model; empty: the only one that it serves."""
    reference_tokenizer: Annotated[str, PATH] = ""
    """If `reference` is a server: folder or hub name of its model's tokenizer; empty: the policy's."""
    reference_top_k: Count = 20
    """If `reference` is a server: tokens per position whose log-probs it returns. The exact KL counts all others as one token."""
    reference_dtype: Literal["", "float32", "bfloat16"] = ""
    """Precision of the reference; empty: the model's."""
    ref_model_sync_steps: CountOrZero = 0
    """Number of steps between moves of the reference towards the policy; 0: it never moves."""
    ref_model_mixup_alpha: Annotated[Share, Needs("ref_model_sync_steps")] = 0.6
    """With ref_model_sync_steps: the reference becomes α · policy + (1 - α) · reference. 1 copies the policy; a small α after
    every step gives an exponential moving average."""
    past_opponents: Share = 0.0
    """In games with several players (seats): share of prompts played against a past self, a frozen copy of the policy. The policy
    then learns in one seat. 0: it plays all seats and learns in each."""
    past_every: Annotated[Count, Needs("past_opponents")] = 50
    """With past_opponents: number of steps between copies of the policy as a new past self. The first past self is the policy at
    the start of the run."""
    past_kept: Annotated[Count, Needs("past_opponents")] = 1
    """With past_opponents: draw from this many of the newest past selves. The full weights of each stay in memory."""
    teacher_prompt: str = ""
    """Column with another prompt for the reference, such as one with the solution (self-distillation); empty: the policy's
    prompt."""
    critic: Annotated[str, PATH] = ""
    """In methods with a critic: folder or hub name of a reward model or language model to start the critic from; empty: the
    policy's own weights."""
    critic_shared: bool = False
    """Put a value head on the policy's backbone instead of training a separate critic. It takes less memory; the critic's
    gradients also change the policy."""
    critic_learning_rate: Annotated[PositiveOrZero, LIVE] = 0.0
    """Peak learning rate of a separate critic. 0: the policy's rate or 0.05 / width of the model, whichever is larger (about 1e-5
    for 7B parameters)."""
    critic_warmup_steps: CountOrZero = 0
    """Initial steps in which only a separate critic learns, not the policy."""
    missing_eos_penalty: Annotated[PositiveOrZero, LIVE] = 0.0
    """Penalty subtracted from the reward of every completion that the length limit cut."""
    max_unscored: Share = 0.1
    """Stop the run if scoring fails (an exception, a time-out) for more than this share of the last 200 completions. At the
    start, also stop it if scoring fails for all completions, once there are 8."""
    prompts_per_step: Annotated[Count, MAIN] = 16
    """Prompts per step, each with num_generations completions."""
    num_generations: Annotated[Count, MAIN] = 8
    """Completions per prompt (the group size G)."""
    num_iterations: Annotated[Count, LIVE] = 1
    """Passes over each collected batch."""
    num_minibatches: Annotated[Count, LIVE] = 1
    """Optimiser steps per pass; each takes an equal share of the groups."""
    lag: CountOrZero = 0
    """Train each step on completions sampled with the weights of this many steps ago, so that sampling and training overlap. It
    needs a correction (algorithm.correction)."""
    max_refills: Annotated[CountOrZero, LIVE] = 4
    """With dynamic_sampling: maximum number of extra collections per step. If too few groups with unequal rewards are found, the
    step trains on these few."""
    filter_metric: str = ""
    """With dynamic_sampling: the reward function whose values must differ in a group; empty: the weighted sum of all
    rewards but soft_overlong."""
    router_replay: bool = False
    """Train a mixture of experts with the experts that each token used when it was sampled (R3, arXiv:2510.11370). It needs the
    embedded sampler, and works with neither episodes nor agents."""
    keep_activations_gb: Annotated[PositiveOrZero | None, RECORDED] = None
    """Memory, in 1e9 bytes, for activations that training reuses from sampling. 0: none. Those that do not fit are recomputed.
    Not given: a quarter of the memory that the model leaves free at the start. Only for families that run fused
    (docs/families.md), and not with gradient checkpointing, episodes, lag or several processes."""
    max_logp_difference: PositiveOrZero = 0.0
    """Stop if sampler and trainer differ in log-prob by more nats than this, on average over a step's tokens. 0: 1e-3 in
    float32, 0.1 in bfloat16."""
    record_tokens: Annotated[CountOrZero, RECORDED, LIVE] = 4
    """Prompts per step for which rollouts.jsonl also has each token's log-prob, entropy and advantage."""
    record_prompts: Annotated[CountOrZero, RECORDED, LIVE] = 0
    """Prompts per step whose completions are written to rollouts.jsonl; 0: all."""
    show_completions: Annotated[CountOrZero, RECORDED] = 0
    """Print this many completions of a step with their rewards, every logging_steps steps; 0: none."""
    record_rows: Annotated[CountOrZero, RECORDED] = 0
    """Keep about this many rows of completions. rollouts.jsonl is split at every gigabyte, and its oldest files are deleted.
    0: keep all."""


@dataclass(frozen=True)
class RewardConfig(PackingSettings):
    """A reward model: a scalar head on a language model, trained on comparisons or, with `process`, on labelled steps."""

    model: Annotated[Model, Unread("router_aux_loss_coef")] = field(default_factory=Model)
    data: _Rows = field(default_factory=Data)
    optim: Optim = field(default_factory=lambda: Optim(learning_rate=1e-4))
    evaluation: Annotated[Evaluation, Unread("num_generations_eval", "eval_temperature", "metric", "eval_kl")] = field(
        default_factory=Evaluation
    )
    run: Run = field(default_factory=Run)
    placement: Annotated[Placement, Unread("cluster", "scorers", "scorer_cpus", *_NO_SAMPLERS)] = field(default_factory=Placement)
    hub: Hub = field(default_factory=Hub)
    process: Annotated[bool, MAIN] = False
    """Train on stepwise rows (prompt, completions, labels): one score per step instead of one for the whole text."""
    step_separator: Annotated[str, Needs("process")] = "\n"
    """Text that ends a step, in process reward models."""
    center_rewards_coefficient: PositiveOrZero = 0.0
    """Weight of (r_w + r_l)² in the loss, with r_w the chosen and r_l the rejected answer's reward. It pulls their mean to 0."""
    label_smoothing: Annotated[float, Ge(0), Lt(0.5)] = 0.0
    """Share of the comparisons whose label is assumed to be wrong."""
    batch_size: Annotated[Count, MAIN] = 16
    """Pairs (with `process`: rows) per optimiser step."""
    max_length: Annotated[CountOrZero, MAIN] = 1024
    """Maximum tokens of a prompt with one completion; rows with a longer one are dropped and counted; 0: no limit."""


@dataclass(frozen=True)
class PreferenceConfig(_SectionsForRows, PackingSettings, RewardSettings):
    """Training on recorded comparisons, by direct preference optimisation (DPO) or a relative of it.

    Rewards are used only to evaluate completions, not to train. Without a reward, evaluation uses the held-out comparisons.
    """

    loss: Loss = "dpo"
    """Preset name, or {preset: dpo, beta: 0.3, …}, or a Preference."""
    reference: Annotated[str, PATH, MAIN] = ""
    """In methods with a reference policy: its folder or hub name; empty: the model that training starts from."""
    cache_reference: bool = True
    """Cache the reference's log-probs on disk, for the next run with the same model and data."""
    batch_size: Annotated[Count, MAIN] = 16
    """Pairs (KTO: completions) per optimiser step."""
    max_length: Annotated[CountOrZero, MAIN] = 1024
    """Maximum tokens of a prompt with one completion; rows with a longer one are dropped and counted; 0: no limit."""


@dataclass(frozen=True)
class EvalConfig(PackingSettings, ServerSettings, EpisodeSettings, RewardSettings):
    """Sample completions of held-out prompts and score them."""

    model: _AsItIs = field(default_factory=Model)
    data: _JudgedRows = field(default_factory=lambda: Data(split="test"))
    sampling: _Evaluated = field(default_factory=Sampling)
    evaluation: Annotated[Evaluation, Unread(*_DURING_A_RUN, **_GROUPS)] = field(
        default_factory=lambda: Evaluation(eval_prompts=0)
    )
    run: _AtOnce = field(default_factory=Run)
    best_of: Annotated[Count, MAIN] = 1
    """Sample this many completions of each prompt and keep the one with the highest reward."""
    benchmark: Annotated[Literal["", "gsm8k", "math", "mmlu"], MAIN] = ""
    """Benchmark whose prompt format and scoring are used. `reward`, `reward_model` or `metric` replaces its scoring."""
    num_fewshot: Annotated[CountOrZero, Needs("benchmark")] = 0
    """With a benchmark: worked examples before each question."""
    likelihood: bool = False
    """With multiple-choice questions, such as mmlu: answer with the letter that the model finds likeliest, as lm-eval does,
    instead of sampling."""
    fewshot_dataset: Annotated[str, PATH, Needs("num_fewshot")] = ""
    """With num_fewshot: dataset whose first rows are the examples; empty: `dataset`, whose first rows are then not evaluated."""
    output: Annotated[str, WRITTEN, MAIN] = ""
    """JSON file for the figures, the settings that made them, and every completion."""


@dataclass(frozen=True)
class SampleConfig(PackingSettings, ServerSettings, EpisodeSettings, RewardSettings):
    """Sample completions from a model and write them as a dataset."""

    model: _AsItIs = field(default_factory=Model)
    data: _JudgedRows = field(default_factory=lambda: Data())
    sampling: _Evaluated = field(default_factory=Sampling)
    evaluation: Annotated[Evaluation, Unread(*_DURING_A_RUN, "metric", **_GROUPS)] = field(
        default_factory=lambda: Evaluation(eval_prompts=0, num_generations_eval=8)
    )
    run: _AtOnce = field(default_factory=Run)
    keep: Annotated[Literal["all", "best", "pairs"], MAIN] = "all"
    """Completions to write for each prompt: all, the best one, or pairs of the best and the worst."""
    bradley_terry: Annotated[PositiveOrZero, Needs("keep=pairs")] = 0.0
    """With keep=pairs: draw the winner of two completions with probability σ(bradley_terry · difference of rewards), like a noisy
    human judge; 0: pair the best with the worst."""
    output: Annotated[str, WRITTEN, MAIN] = ""
    """JSONL file for the sampled rows."""


Scored = SFTConfig | OnlineConfig | PreferenceConfig | EvalConfig | SampleConfig
"""Settings with completions that are scored."""
Played = OnlineConfig | EvalConfig | SampleConfig
"""Settings with episodes."""


@dataclass(frozen=True)
class LmEvalConfig(PackingSettings):
    """Run tasks of EleutherAI's lm-eval (--tasks) on a model (--model), with psigrad's packed forward pass and sampler.

    With a --baseline, also report the difference between the two models, paired by document.
    """

    model: Annotated[str, PATH, MAIN] = ""
    """Folder or hub name of a model or of a peft adapter, or a GGUF file."""
    baseline: Annotated[str, PATH, MAIN] = ""
    """Another model to compare with, such as the one that training started from. The difference shows what training broke."""
    tasks: Annotated[tuple[str, ...], MAIN] = ()
    """Names of lm-eval's tasks, custom YAML files, or `everyday`, 110 facts and points of grammar that come with psigrad and need
    no network."""
    include_path: Annotated[str, PATH] = ""
    """Folder with YAML files of custom tasks, which `tasks` may then name."""
    num_fewshot: CountOrZero = 0
    """Examples before each question; 0: the task's own number."""
    limit: Annotated[CountOrZero, MAIN] = 0
    """Use only the first N documents of each task; 0: all."""
    apply_chat_template: bool = False
    """Format each question as a conversation with the chat template."""
    chat_template_kwargs: str | dict[str, Any] = ""
    """Arguments of the chat template, such as '{"enable_thinking": false}'. If a template prints today's date, a run's model gets
    the date of its run instead."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the weights and of the forward pass."""
    max_decode_batch: Count = 256
    """Sequences decoded at once."""
    seed: int = 0
    """Seed of sampled answers and of the choice of examples."""
    threads: CountOrZero = 0
    """CPU threads; 0: OMP_NUM_THREADS if it is set, else one per core."""
    device: str = "auto"
    """Device to compute on. auto: cuda if available, else cpu."""
    trust_remote_code: bool = False
    """Run the Python code that comes with a model, with all your permissions."""
    output: Annotated[str, WRITTEN, MAIN] = ""
    """JSON file for the figures and every document's result."""
