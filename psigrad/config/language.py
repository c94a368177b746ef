"""The settings of the recipes that train or judge a language model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Lt
from pydantic import AfterValidator

from psigrad.config.fields import LIVE, MAIN, PATH, RECORDED, WRITTEN, Needs, NotRead, On
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
    from psigrad.objective.preferences.preference_catalog import OnlinePreference
    from psigrad.objective.preferences.preference_loss import KahnemanTversky, Preference

    Algorithm = str | Mapping[str, Any] | PolicyGradient | OnlinePreference
    Loss = str | Mapping[str, Any] | Preference | KahnemanTversky
else:
    # The classes are known by name: to import them takes torch, and settings are read before it is there.
    def _named(*classes: str) -> AfterValidator:
        def check(value: Any) -> Any:
            if not isinstance(value, str | Mapping) and not {c.__name__ for c in type(value).__mro__} & set(classes):
                raise ValueError(f"expected a name, a mapping of parts, or a {classes[0]}")
            return value

        return AfterValidator(check)

    Algorithm = Annotated[Any, _named("PolicyGradient", "OnlinePreference")]
    Loss = Annotated[Any, _named("Preference", "KahnemanTversky")]


# Without these some settings have no effect.
_SCORED, _PLAYED, _SERVED = Needs("reward", "evaluation.metric"), Needs("environment", "tools"), Needs("server")
_ASKED = Needs("agent", "agent_command")
_WORKERS, _ENCLOSED = Needs(*_SCORED.settings, *_PLAYED.settings, *_ASKED.settings), Needs(*_PLAYED.settings, *_ASKED.settings)
# What some commands do not read of the sections that they share with others.
_NO_SAMPLERS = (
    "samplers", "sampler_cpus", "sampler_gpus", "weight_transfer", "parcel_prompts", "environment_actors", "environment_cpus",
)  # fmt: skip
_Placed = Annotated[Placement, NotRead(*_NO_SAMPLERS)]
_Rows = Annotated[Data, NotRead("max_prompt_length")]
_JudgedRows = Annotated[Data, NotRead("eval_dataset", "eval_split")]
# Where completions are drawn by evaluations alone, they have one temperature and one number for each prompt.
_Evaluated = Annotated[Sampling, NotRead(temperature="evaluation.eval_temperature"), DRAWS]
_GROUPS = {"num_generations": "evaluation.num_generations_eval"}
_AsItIs = Annotated[
    Model,
    NotRead(
        "adapter", *(f.name for f in fields(Model) if f.name.startswith(("lora_", "use_", "gradient_", "quantize_", "router_")))
    ),
]
_DURING_A_RUN = (
    "eval_steps", "eval_kl", "load_best_model_at_end", "metric_for_best_model", "greater_is_better", "early_stopping_patience",
    "early_stopping_threshold",
)  # fmt: skip
_AtOnce = Annotated[Run, NotRead(*(f.name for f in fields(Run) if f.name not in ("seed", "threads", "device")))]


@dataclass(frozen=True)
class PackingSettings:
    """How much goes into a forward pass."""

    micro_batch_tokens: Annotated[CountOrZero, RECORDED, MAIN, On(cuda=0)] = 4096
    """Tokens per forward pass; a step is split to fit, which changes no gradient. On a CPU a few thousand are fastest: their
    activations stay near the processor. 0: as many as the device's free memory has room for, by `psigrad plan`'s arithmetic."""


@dataclass(frozen=True)
class RewardSettings:
    """Who scores completions."""

    reward: Annotated[tuple[Reward, ...], MAIN] = ()
    """Reward functions: built-in names or module:function, with TRL's signature."""
    reward_model: Annotated[tuple[str, ...], PATH, MAIN] = ()
    """Folders or hub names of reward models, whose scores are added to the reward functions'."""
    reward_weights: tuple[float, ...] = ()
    """One weight per reward function, then one per reward model; empty: all 1."""
    reward_timeout: Annotated[Positive, RECORDED, _SCORED] = 10.0
    """Wall-clock seconds that a function may take for a group, then for each of it alone, before its worker is killed."""
    reward_workers: Annotated[Count, RECORDED, _SCORED] = 1
    """Processes that score."""
    worker_memory_gb: Annotated[PositiveOrZero, RECORDED, _WORKERS] = 16.0
    """Memory that each process with your rewards, environments or tools may take, in 1e9 bytes; 0: no limit."""
    worker_env: Annotated[tuple[str, ...], RECORDED, _WORKERS] = ()
    """Environment variables that these processes get besides the usual ones, as API keys. They get no secrets by default."""


@dataclass(frozen=True)
class EpisodeSettings:
    """Who answers the policy, in episodes of several turns."""

    environment: Annotated[str | Callable[..., Any], MAIN] = ""
    """Text environment that answers each turn: guess, calculator, grid, module:Class with reset(row) and step(text), or one of
    another library: openenv:ADDRESS, verifiers:TASKSET, and an MCP server as "mcp:COMMAND" or mcp:http://…"""
    tools: Annotated[tuple[str | Callable[..., Any], ...], MAIN] = ()
    """What the policy may call, offered through the chat template: typed Python functions, as module:function, and all tools of
    an MCP server, as "mcp:COMMAND" or mcp:http://…"""
    environment_timeout: Annotated[Positive, RECORDED, _PLAYED] = 10.0
    """Wall-clock seconds that one call of an environment or tool may take before its process is killed."""
    environment_workers: Annotated[Count, RECORDED, _PLAYED] = 1
    """Processes that environments and tools run in."""
    environment_sandbox: Annotated[bool, RECORDED, _ENCLOSED] = False
    """Run them in bubblewrap too, and agents: no network, nothing to write to but a temporary folder, and of the machine's files
    only Python, the working folder and where they are imported from. An agent still reaches the policy."""
    environment_files: Annotated[tuple[str, ...], PATH, RECORDED, Needs("environment_sandbox")] = ()
    """Files and folders that they may read besides, with environment_sandbox."""
    max_turns: Annotated[Count, _PLAYED] = 8
    """Turns of the policy after which an episode is cut."""
    max_turn_length: Annotated[CountOrZero, _PLAYED] = 0
    """Tokens of one turn of the policy; all its turns together then have max_completion_length. 0: each turn may have that."""
    max_observation_length: Annotated[CountOrZero, _PLAYED] = 0
    """Tokens of one answer of an environment or tool, which is cut behind them; 0: as many as leave room for another turn."""
    turns_together: Annotated[bool, RECORDED, _PLAYED] = False
    """Have each turn wait for the answers of all episodes: slower, and no batch depends on how long an answer took. In half
    precision, and with top_p, top_k or min_p, only this makes a run repeat bitwise.
    """
    agent: Annotated[str | Callable[..., Any], MAIN] = ""
    """An agent of yours that asks the policy over HTTP: module:function or file.py:function, given the row and a client or a
    base_url. It returns its reward, or None and leaves that to the reward functions."""
    agent_command: Annotated[str, MAIN] = ""
    """The same as a program: it finds the policy by OPENAI_BASE_URL or ANTHROPIC_BASE_URL, gets the row as JSON on its standard
    input, and writes its reward as its last line."""
    agent_timeout: Annotated[Positive, RECORDED, _ASKED] = 600.0
    """Wall-clock seconds that one session of an agent may take before its process is killed."""
    agent_workers: Annotated[Count, RECORDED, _ASKED] = 4
    """Sessions at a time, each in a process of its own."""
    agent_calls: Annotated[Count, _ASKED] = 64
    """Requests of one session that the policy answers; an agent that asks more has no reward."""

    @property
    def plays(self) -> bool:
        """Whether a completion is an episode, or a session of an agent."""
        return bool(self.environment or self.tools or self.asks)

    @property
    def asks(self) -> bool:
        """Whether it is a session of an agent, which may give the reward too, as an environment does."""
        return bool(self.agent or self.agent_command)


@dataclass(frozen=True)
class ServerSettings:
    """An OpenAI-compatible server that samples in place of a model here."""

    server: Annotated[str, MAIN] = ""
    """Address of an OpenAI-compatible server that samples, such as http://localhost:8000/v1; `model` is then the name of the
    model there, which may be left out where it serves only one."""
    server_key_variable: Annotated[str, _SERVED] = "OPENAI_API_KEY"
    """Environment variable with the server's key; it may be unset."""
    server_timeout: Annotated[Positive, _SERVED] = 600.0
    """Seconds that one request to the server may take."""
    server_attempts: Annotated[Count, _SERVED] = 5
    """Requests for one completion before the command ends, while the server is busy, down or broken."""
    server_concurrency: Annotated[Count, _SERVED] = 16
    """Requests at a time."""


@dataclass(frozen=True)
class _Sections:
    """The sections of what trains a language model."""

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
    """Those of what learns from recorded rows, and samples to evaluate alone."""

    data: _Rows = field(default_factory=Data)
    sampling: _Evaluated = field(default_factory=Sampling)
    placement: _Placed = field(default_factory=Placement)


@dataclass(frozen=True)
class SFTConfig(_SectionsForRows, PackingSettings, RewardSettings):
    """Supervised fine-tuning: cross-entropy on completion tokens (prompt-completion rows) or assistant turns (messages).

    Rewards only evaluate generated completions; without one, held-out loss alone.
    """

    optim: Optim = field(default_factory=lambda: Optim(learning_rate=2e-5))
    batch_size: Annotated[Count, MAIN] = 16
    """Rows per optimiser step."""
    max_length: Annotated[Count, MAIN] = 1024
    """Rows with more tokens than this are cut at the end."""
    label_smoothing_factor: BelowOne = 0.0
    """Share of the target probability that all tokens of the vocabulary share evenly; held-out loss is without it."""
    train_empty_thinking: bool = False
    """Also learn the empty thought that some chat templates write before an answer without one (Qwen3: <think></think>); else it
    is context, as where sampling is asked not to think."""


@dataclass(frozen=True)
class OnlineConfig(_Sections, PackingSettings, EpisodeSettings, RewardSettings):
    """Online reinforcement learning with a `PolicyGradient`: GRPO, RLOO, DAPO, REINFORCE and the rest of the catalog."""

    algorithm: Algorithm = "grpo"
    """Preset name, or {preset: grpo, part: value, …}, or a PolicyGradient."""
    reference: Annotated[str, PATH] = ""
    """Folder or hub name of the policy that the KL term holds to, such as a teacher; empty: the model that training starts
    from. Or the address of a server with OpenAI's API, such as http://localhost:8000/v1, that tells the log-probs of a prompt."""
    reference_model: str = ""
    """The name of the model on that server; empty: the only one that it serves."""
    reference_tokenizer: Annotated[str, PATH] = ""
    """Folder or hub name of the tokenizer of the model on that server; empty: the policy's."""
    reference_top_k: Count = 20
    """Of how many tokens at each place that server is asked for the log-probs; all others count as one in the exact KL."""
    reference_dtype: Literal["", "float32", "bfloat16"] = ""
    """Precision of the reference; empty: the model's."""
    ref_model_sync_steps: CountOrZero = 0
    """Move the reference towards the policy after every so many steps; 0: it stays as it is."""
    ref_model_mixup_alpha: Annotated[Share, Needs("ref_model_sync_steps")] = 0.6
    """How far: the reference becomes this · policy + (1 - this) · reference. 1 copies the policy; a small share after every step
    is an exponential moving average."""
    teacher_prompt: str = ""
    """Column of the dataset with the prompt that the reference reads in place of the policy's, such as one with the solution
    (self-distillation); empty: it reads the same."""
    critic: Annotated[str, PATH] = ""
    """Folder or hub name of a reward model or language model that the critic starts from; empty: the policy's own weights."""
    critic_shared: bool = False
    """A value head on the policy's own backbone in place of a critic of its own: less memory, and value gradients in the
    policy."""
    critic_learning_rate: Annotated[PositiveOrZero, LIVE] = 0.0
    """Peak learning rate of a critic of its own; 0: 0.05 / width of the model, where the policy's is not higher. That moves V by
    some 0.05 a step, and is 1e-5 for a model of 7B."""
    critic_warmup_steps: CountOrZero = 0
    """Steps at the start in which a critic of its own learns and the policy stays as it is."""
    missing_eos_penalty: Annotated[PositiveOrZero, LIVE] = 0.0
    """Taken from the reward of every completion that the length limit cut."""
    max_unscored: Share = 0.1
    """Share of the last 200 completions for which a reward may fail (an exception, a time-out) before the run stops."""
    prompts_per_step: Annotated[Count, MAIN] = 16
    """Prompts collected per step."""
    num_generations: Annotated[Count, MAIN] = 8
    """Completions per prompt (the group size G)."""
    num_iterations: Annotated[Count, LIVE] = 1
    """Passes over each collected batch."""
    num_minibatches: Annotated[Count, LIVE] = 1
    """Optimiser steps per pass; each takes an equal share of the groups."""
    lag: CountOrZero = 0
    """Train each step on completions that the weights of so many steps ago drew, so that sampling and training can go on at the
    same time; needs a correction (algorithm.correction). 0: on its own."""
    max_refills: Annotated[CountOrZero, LIVE] = 4
    """With dynamic sampling: extra collections per step before going on with the groups that have signal."""
    filter_metric: str = ""
    """With dynamic sampling: the reward function whose values must differ in a group (verl's filter_groups.metric); empty: the
    sum of all but soft_overlong's."""
    router_replay: bool = False
    """Train a model of experts with the experts that each token was sent to when it was sampled, whatever its routers would
    choose now (R3, arXiv:2510.11370, as verl calls it). For the embedded sampler and single completions."""
    keep_activations_gb: Annotated[PositiveOrZero, RECORDED] = 1.0
    """Memory, in 1e9 bytes, for activations that training reuses from sampling (fused decoder only, not with gradient
    checkpointing). With 0, or when they need more, training runs its own forward pass."""
    max_logp_difference: PositiveOrZero = 0.0
    """Stop when sampler and trainer log-probs differ by more than this in the mean; 0: 1e-3 in float32, 0.1 in bfloat16."""
    record_tokens: Annotated[CountOrZero, RECORDED, LIVE] = 4
    """Prompts of each step whose completions are written to rollouts.jsonl token by token: log-probs, entropy, advantage."""
    record_prompts: Annotated[CountOrZero, RECORDED, LIVE] = 0
    """Prompts of each step whose completions are written to rollouts.jsonl at all; 0: every one."""
    record_rows: Annotated[CountOrZero, RECORDED] = 0
    """Keep about so many rows of completions. rollouts.jsonl begins anew at every gigabyte, and the oldest of the files before it
    go while those that stay hold more; 0: all stay."""


@dataclass(frozen=True)
class RewardConfig(PackingSettings):
    """A reward model: a scalar head on a language model, trained on comparisons (or on labelled steps)."""

    model: Annotated[Model, NotRead("router_aux_loss_coef")] = field(default_factory=Model)
    data: _Rows = field(default_factory=Data)
    optim: Optim = field(default_factory=lambda: Optim(learning_rate=1e-4))
    evaluation: Annotated[Evaluation, NotRead("num_generations_eval", "eval_temperature", "metric", "eval_kl")] = field(
        default_factory=Evaluation
    )
    run: Run = field(default_factory=Run)
    placement: Annotated[Placement, NotRead("cluster", "scorers", "scorer_cpus", *_NO_SAMPLERS)] = field(
        default_factory=Placement
    )
    hub: Hub = field(default_factory=Hub)
    process: Annotated[bool, MAIN] = False
    """Train on stepwise rows (prompt, completions, labels): a score for each step instead of one for the whole text."""
    step_separator: Annotated[str, Needs("process")] = "\n"
    """What ends a step, in process reward models."""
    center_rewards_coefficient: PositiveOrZero = 0.0
    """Weight of (r_w + r_l)², which pulls the mean reward to 0."""
    label_smoothing: Annotated[float, Ge(0), Lt(0.5)] = 0.0
    """Share of the comparisons whose label is assumed to be wrong."""
    batch_size: Annotated[Count, MAIN] = 16
    """Pairs per optimiser step."""
    max_length: Annotated[CountOrZero, MAIN] = 1024
    """Pairs with a longer text than this are left out and counted; 0: none."""


@dataclass(frozen=True)
class PreferenceConfig(_SectionsForRows, PackingSettings, RewardSettings):
    """Direct preference optimisation and its relatives, on recorded comparisons.

    Rewards only evaluate generated completions; without one, held-out comparisons alone.
    """

    loss: Loss = "dpo"
    """Preset name, or {preset: dpo, beta: 0.3, …}, or a Preference."""
    reference: Annotated[str, PATH, MAIN] = ""
    """Folder or hub name of the reference policy; empty: the model that training starts from."""
    cache_reference: bool = True
    """Keep the reference's log-probs on disk, by content, for the next run on the same model and data."""
    batch_size: Annotated[Count, MAIN] = 16
    """Pairs (KTO: completions) per optimiser step."""
    max_length: Annotated[CountOrZero, MAIN] = 1024
    """Pairs with a longer text than this are left out and counted; 0: none."""


@dataclass(frozen=True)
class EvalConfig(PackingSettings, ServerSettings, EpisodeSettings, RewardSettings):
    """Sample held-out prompts from a model and score them."""

    model: _AsItIs = field(default_factory=Model)
    data: _JudgedRows = field(default_factory=lambda: Data(split="test"))
    sampling: _Evaluated = field(default_factory=Sampling)
    evaluation: Annotated[Evaluation, NotRead(*_DURING_A_RUN, **_GROUPS)] = field(
        default_factory=lambda: Evaluation(eval_prompts=0)
    )
    run: _AtOnce = field(default_factory=Run)
    best_of: Annotated[Count, MAIN] = 1
    """Sample this many completions of each prompt and keep the one with the highest reward."""
    benchmark: Annotated[Literal["", "gsm8k", "math", "mmlu"], MAIN] = ""
    """The shape of the rows: they are asked and judged as that benchmark's are, unless a reward is named."""
    num_fewshot: Annotated[CountOrZero, Needs("benchmark")] = 0
    """With a benchmark: worked examples before each question."""
    likelihood: bool = False
    """Answer by the letter of the choice that the model finds likeliest, as lm-eval does, instead of sampling an answer."""
    fewshot_dataset: Annotated[str, PATH, Needs("num_fewshot")] = ""
    """Rows that the examples are taken from, the first ones; empty: the first ones of the dataset, which are then not asked."""
    output: Annotated[str, WRITTEN, MAIN] = ""
    """JSON file for the figures, the settings that made them, and every completion."""


@dataclass(frozen=True)
class SampleConfig(PackingSettings, ServerSettings, EpisodeSettings, RewardSettings):
    """Sample completions from a model and write them as a dataset."""

    model: _AsItIs = field(default_factory=Model)
    data: _JudgedRows = field(default_factory=lambda: Data())
    sampling: _Evaluated = field(default_factory=Sampling)
    evaluation: Annotated[Evaluation, NotRead(*_DURING_A_RUN, "metric", **_GROUPS)] = field(
        default_factory=lambda: Evaluation(eval_prompts=0, num_generations_eval=8)
    )
    run: _AtOnce = field(default_factory=Run)
    keep: Annotated[Literal["all", "best", "pairs"], MAIN] = "all"
    """What is written: every completion, the best of each prompt, or the best against the worst."""
    bradley_terry: Annotated[PositiveOrZero, Needs("keep=pairs")] = 0.0
    """With keep=pairs: compare two completions of each prompt and draw the winner with probability σ(this · difference of
    rewards), like a noisy human judge; 0: the best against the worst, without noise."""
    output: Annotated[str, WRITTEN, MAIN] = ""
    """JSONL file that the rows go to."""


Scored = SFTConfig | OnlineConfig | PreferenceConfig | EvalConfig | SampleConfig
"""Settings with completions that are scored."""
Played = OnlineConfig | EvalConfig | SampleConfig
"""Settings with episodes."""


@dataclass(frozen=True)
class LmEvalConfig(PackingSettings):
    """Tasks of EleutherAI's lm-eval on a model, computed by psigrad's packed forward pass and its sampler; with a baseline also
    the difference of both, paired by document.
    """

    model: Annotated[str, PATH] = ""
    """Folder or hub name of a model or of an adapter of peft, or a GGUF file."""
    baseline: Annotated[str, PATH] = ""
    """Another such model, such as the one that training started from: shows what training has broken."""
    tasks: tuple[str, ...] = ()
    """Names of lm-eval's tasks, YAML files of your own, or everyday: 110 facts and points of grammar that come with psigrad
    and need no network."""
    include_path: Annotated[str, PATH] = ""
    """Folder with YAML files of tasks, which may then be named."""
    num_fewshot: CountOrZero = 0
    """Examples before each question; 0: as the task has it."""
    limit: CountOrZero = 0
    """Only the first so many documents of each task; 0: all."""
    apply_chat_template: bool = False
    """Ask in the form of a conversation."""
    chat_template_kwargs: str | dict[str, Any] = ""
    """Arguments of its chat template, as '{"enable_thinking": false}'. The model of a run is shown the run's date."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the weights and of the forward pass."""
    max_decode_batch: Count = 256
    """Sequences decoded at once."""
    seed: int = 0
    """Of sampled answers and of the choice of examples."""
    threads: CountOrZero = 0
    """CPU threads; 0: OMP_NUM_THREADS where it is set, else one per core."""
    device: str = "auto"
    """auto: cuda where there is one, else cpu."""
    trust_remote_code: bool = False
    """Run the Python code that comes with a model, with all your rights."""
    output: Annotated[str, WRITTEN] = ""
    """JSON file for the figures and every document's result."""
