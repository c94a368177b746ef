"""The prediction of a run's plan from its settings: peak memory, arithmetic, speed, and changes that would make it fit."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from psigrad.config import Model, OnlineConfig, PreferenceConfig, RewardConfig, SFTConfig
from psigrad.errors import UserError
from psigrad.language.data import pairs
from psigrad.language.data.dataset_layouts import to_model_rows
from psigrad.language.data.dataset_rows import Row
from psigrad.language.data.sources import read_rows
from psigrad.language.data.templates import examples, prompt_ids
from psigrad.language.examples import Example, LabelledAnswer, Pair
from psigrad.language.loading.load_model import configure_chat
from psigrad.language.loading.model_source import load_tokenizer, resolve_for_plan, tokenizer_path
from psigrad.language.models.backbone import DTYPES
from psigrad.language.models.fused import loader
from psigrad.language.models.fused.caches import HEAD_LIMIT, LIMIT
from psigrad.language.recipes.row_limits import dataset_form
from psigrad.language.rollout.samplers.cuda_graph import SHARE
from psigrad.optim.rules import adamw_kernels
from psigrad_extras.preflight.plan import arithmetic, memory
from psigrad_extras.preflight.plan.activations import Terms, terms
from psigrad_extras.preflight.plan.arithmetic import Config, Lengths, StepCost, Work
from psigrad_extras.preflight.plan.hardware import Machine
from psigrad_extras.preflight.plan.memory import MemoryItem, ModelRole, PeakMemory
from psigrad_extras.preflight.plan.shape import Shape, config_of, shape_of

# The error of predictions, as a share of the measured peak. A run with a smaller margin does not count as fitting.
MARGIN = 0.15
# The number of rows of a dataset that are read for their lengths.
_ROWS = 256
# The ratio of the quick estimate, which is for plain PyTorch, to the bytes that the fused decoder keeps.
PLAIN = 2


@dataclass(frozen=True)
class Plan:
    """The predicted memory and time of a run.

    `work` is the work of a step, and `share` the part that one process does. `memory` is the peak of a process, `cost` its FLOPs
    per step, and `memory_per_token` the bytes of one more token in the policy's largest forward pass.
    """

    config: Config
    policy: Shape
    work: Work
    share: Work
    memory: PeakMemory
    cost: StepCost
    memory_per_token: float
    machine: Machine
    quick: bool = False
    starved: float = 0.0
    """The bytes that vLLM's share of the memory lacks."""

    @property
    def fits(self) -> bool:
        """True if the predicted peak fits in memory, with a margin for the prediction's error, and vLLM has enough memory."""
        return self.memory.peak * (1 + MARGIN) <= self.machine.memory and not self.starved

    @property
    def seconds(self) -> float:
        """The seconds of a step; 0 if the machine's speed is unknown."""
        return self.cost.seconds(self.machine) if self.machine.peak else 0.0

    @property
    def phases(self) -> dict[str, float]:
        """Phase of a step -> seconds; empty if the machine's speed is unknown."""
        return self.cost.phases(self.machine) if self.machine.peak else {}

    @property
    def tokens_per_second(self) -> float:
        """The completion tokens per second."""
        return self.work.completion_tokens / self.seconds if self.seconds else 0.0

    @cached_property
    def ways(self) -> list[tuple[str, Plan]]:
        """Return changes of the settings that take less memory, the least intrusive first, each with its plan."""
        found = []
        for name, config in _changes(self):
            other = predict(config, self.work.lengths, self.machine, dataset=self.work.dataset, quick=self.quick)
            if other.memory.peak < 0.98 * self.memory.peak or other.starved < self.starved:
                found.append((name, other))
        return found


def predict(config: Config, lengths: Lengths, machine: Machine, *, dataset: int = 0, quick: bool = False) -> Plan:
    """Return the plan of a run.

    The memory of activations is counted on a small twin of the model, which takes about a second. With `quick`, a formula is
    used, and only configurations on this machine are read.
    """
    config = replace(config, model=resolve_for_plan(config.model, local=quick))
    shaped = partial(shape_of, local=quick)
    policy, whole = shaped(config.model.path), arithmetic.work_of(_keeping(config, machine), lengths, dataset)
    work = arithmetic.share_of(config, whole)
    rank = config.model.lora_rank
    adapter = policy.lora_parameters(rank, config.model.lora_target_modules) if rank else 0
    width = DTYPES[config.model.dtype].itemsize
    coded = policy.layer_matrices if adapter and config.model.quantize_base else 0
    learns, head = (0, False) if adapter else (policy.parameters - policy.beside, True)
    critic_path = getattr(config, "critic", "") or config.model.path
    critic = shaped(critic_path) if work.critic else None

    def count_terms(path: str, shape: Shape, lora: bool) -> Terms:
        return Terms.estimate(shape, width) if quick else terms(config_of(path), config.model.dtype, lora, machine.device)

    kept = count_terms(config.model.path, policy, bool(rank))
    learning = None if critic is None else (critic, count_terms(critic_path, critic, False))
    recompute = config.model.gradient_checkpointing

    def count_recomputed(shape: Shape, kept: Terms, head: bool) -> tuple[int, int]:
        wanted = recompute and width == 4 and not adapter
        return memory.recomputed_gradients(work, shape, bool(kept.fused), head=head) if wanted else (0, 0)

    again = count_recomputed(policy, kept, head=not isinstance(config, RewardConfig))
    role = ModelRole("policy", policy.parameters, learns, width, adapter, 0, sum(again), *_summing(config, machine, work))
    parts = memory.roles_of(
        replace(role, **_frugal(config, policy, machine, adapter or learns, coded)),
        _reference(config, work, shaped),
        learning and (learning[0], sum(count_recomputed(*learning, head=False))),
        [(Path(path).name, shaped(path)) for path in getattr(config, "reward_model", ())],
    )
    items = _models(config, parts, policy, work)
    items += memory.passing(work, policy, kept, machine.kind, width=width, recompute=recompute, learns_head=head, critic=learning)
    engine, starved = _engine(config, work, policy, machine)
    cpu = machine.kind == "cpu"
    items += [*(memory.load_items(parts) if cpu else ()), *engine]  # on a GPU, the mapped file is not in the device's memory
    items = _with_codes(items, policy, width, coded, _packs(config, machine)) if coded else items
    done = _as_kept(config, work, items, memory.kept_size(work, policy, kept) / PLAIN if quick and cpu else 0.0)
    cost = _cost(config, done, policy, memory.cache_bytes(work, policy, kept, width, machine.kind), coded if cpu else 0, machine)
    cost = cost if cpu else cost.on_gpu(done, policy, frozen=bool(rank), recompute=recompute, learns=adapter or learns)
    gives_back = recompute and cpu
    beside_head = memory.head_slack(work, policy, width, machine.kind) if head and not gives_back else 0.0
    return Plan(
        config,
        policy,
        whole,
        work,
        PeakMemory(tuple(items), "returned" if gives_back else machine.kind, machine.kind, beside_head),
        cost.with_head_again(work, policy) if again[0] else cost,
        sum(memory.forward_and_back(work, policy, kept, recompute)) / work.micro_tokens,
        machine,
        quick,
        starved,
    )


def _keeping(config: Config, machine: Machine) -> Config:
    """Return the settings with `keep_activations_gb`; by default, it is a quarter of the machine's memory."""
    if not isinstance(config, OnlineConfig) or config.keep_activations_gb is not None:
        return config
    return replace(config, keep_activations_gb=machine.memory / 4e9)


def _as_kept(config: Config, work: Work, items: list[MemoryItem], estimated: float) -> Work:
    """Return the work, with reuse of activations from sampling only if all of them are kept.

    Their size is in the items, or is `estimated` if the fused decoder was not evaluated.
    """
    kept = any(item.name == memory.KEPT and item.phase == "held" for item in items)
    if estimated and loader.suits(config_of(config.model.path, local=True), DTYPES[config.model.dtype]):
        kept = estimated <= work.keeps
    return work if kept else replace(work, keeps=0.0)


def _engine(config: Config, work: Work, policy: Shape, machine: Machine) -> tuple[list[MemoryItem], float]:
    """Return (the items of vLLM on the trainer's device, the bytes that it lacks)."""
    if not (isinstance(config, OnlineConfig) and work.samples and work.engine):
        return [], 0.0
    width, taken = DTYPES[config.model.dtype].itemsize, work.engine * machine.memory
    item, starved = memory.engine_item(work, policy, width, taken, config.sampling.vllm_sleep)
    return [item], starved


def _models(config: Config, parts: list[ModelRole], policy: Shape, work: Work) -> list[MemoryItem]:
    """Return the items of the models in one process, and of exchanges with other processes."""
    placement = config.placement
    if placement.processes == 1:
        return [item for part in parts for item in part.items()]
    if placement.strategy == "fsdp":
        # vLLM takes weights from shards, but the policy's log-probs of a filtered sample need a full copy.
        filtered = isinstance(config, OnlineConfig) and config.sampling.filtered
        copied = work.samples and (filtered or not work.engine)
        ranks = placement.processes // placement.dp_replicate_size
        items = list(memory.sharded_items(parts, policy, ranks, copied, placement.reduce_once))
    else:
        items = [item for part in parts for item in part.items()]
    others = memory.AMONG_OTHERS[placement.strategy]
    return [*items, MemoryItem("other processes", others, "weights", "torch.distributed's code and buffers")]


def _summing(config: Config, machine: Machine, work: Work) -> tuple[bool, bool]:
    """Return (True if half-precision gradients are copied before the step, True if several passes are summed)."""
    several = work.micro_batches > 1 or config.placement.processes > 1
    kernels = adamw_kernels(DTYPES[config.model.dtype], machine.device) is not None
    adamw = config.optim.optimizer in ("adamw", "adamw_8bit")
    return not (adamw and (kernels or machine.kind == "cuda" or config.optim.bf16_stochastic_round)), several


def _cost(config: Config, done: Work, policy: Shape, caching: float, coded: int, machine: Machine) -> StepCost:
    """Return the cost of a step that reads `caching` bytes of keys and values. A CPU dequantises `coded` weights."""
    model = config.model
    weights, frozen = DTYPES[model.dtype].itemsize * policy.parameters, bool(model.lora_rank)
    recompute = model.gradient_checkpointing
    cost = arithmetic.cost_of(done, policy, frozen=frozen, recompute=recompute, weight_bytes=weights, cache_bytes=caching)
    if not coded:
        return cost
    packed = min(1.0, LIMIT / (DTYPES[model.dtype].itemsize * coded)) if _packs(config, machine) else 0.0
    return cost.with_codes(done, coded * arithmetic.UNPACKED[model.quantize_base], packed)


# The bytes of a quantised weight, including scales. A GGUF file has about half Q4_K and half Q6_K.
CODED = {"nf4": 0.5625, "int8": 1.125, "gguf": 1.0}


def _packs(config: Config, machine: Machine) -> bool:
    """Return True if sampling packs dequantised layers (`PackedWeights`)."""
    return machine.memory >= 4 * LIMIT and not config.run.max_memory


def _with_codes(items: list[MemoryItem], policy: Shape, width: int, coded: int, packs: bool) -> list[MemoryItem]:
    """Return the items if the layers are quantised, with `coded` weights in all.

    Then there is no mapped file, but a float32 embedding while loading, and one dequantised layer at a time in training. For
    `packs` see `_packs`.
    """
    if not packs:
        items = [_head_alone(item, width * policy.head) for item in items]
    whole = 4 * policy.vocabulary * policy.hidden * (1 if policy.tied else 2)
    return [
        *(item for item in items if item.name != "weights file" and item.bytes),
        MemoryItem("embedding", whole, "load", "in float32, while kernels are compared"),
        MemoryItem("unpacked layer", width * coded / policy.layers, "train", "one at a time"),
    ]


def _head_alone(item: MemoryItem, head: int) -> MemoryItem:
    if item.name != "packed weights":
        return item
    return MemoryItem("packed head", head * (head <= HEAD_LIMIT), "sample", "packed for decoding")


def _frugal(config: Config, policy: Shape, machine: Machine, learns: int, coded: int) -> dict[str, Any]:
    """Return the fields of a `ModelRole` for memory savings: 8-bit moments (not for embeddings), float32 masters stored in two
    parts or not at all, and `coded` quantised weights.
    """
    model, optim = config.model, config.optim
    coarse = learns - (0 if model.lora_rank else policy.vocabulary * policy.hidden) if optim.optimizer == "adamw_8bit" else 0
    saved = coded * (DTYPES[model.dtype].itemsize - CODED.get(model.quantize_base, 0.0))
    masters = 2 if machine.kind == "cuda" and optim.optimizer in ("adamw", "adamw_8bit") and not model.lora_rank else 4
    return {"coarse": coarse, "masters": 0 if optim.bf16_stochastic_round and not model.lora_rank else masters, "saved": saved}


def _reference(config: Config, work: Work, shaped: Callable[[str], Shape]) -> Shape | None:
    """Return the shape of the reference model that is in memory, or None.

    With LoRA, the reference is the policy without its adapter, which takes no memory.
    """
    named = config.reference if isinstance(config, PreferenceConfig) else ""
    if named:
        return shaped(named)
    evaluates = isinstance(config, OnlineConfig | PreferenceConfig) and config.evaluation.eval_kl
    return shaped(config.model.path) if (work.reference or evaluates) and not config.model.lora_rank else None


def lengths_of(config: Config, prompt: int = 0, completion: int = 0, *, read: bool = True) -> tuple[Lengths, int, str]:
    """Return (lengths, number of training rows or 0, a text on their source).

    Lengths are the given numbers, else those of the dataset's first rows, else guesses.
    """
    limit = _limit(config)
    sizes, rows = _measure_rows(config) if config.data.dataset and read else ([], 0)
    prompts = [p for p, _ in sizes]
    answers = [a for _, answers in sizes for a in answers]
    mean_prompt = prompt or (
        round(statistics.fmean(prompts))
        if prompts
        else min(arithmetic.GUESSED, config.data.max_prompt_length or arithmetic.GUESSED)
    )
    longest_prompt = max([prompt, *prompts]) if prompt or prompts else config.data.max_prompt_length or mean_prompt
    if isinstance(config, OnlineConfig):
        mean, longest = min(completion or limit, limit), limit
    else:
        room = max(1, limit - mean_prompt) if limit else arithmetic.GUESSED
        mean = completion or (round(statistics.fmean(answers)) if answers else min(arithmetic.GUESSED, room))
        longest = max([mean, *answers]) if answers or completion else room
    source = f"the first {len(sizes)} rows" if sizes else "given" if prompt else f"a guess of {mean_prompt} tokens per prompt"
    return Lengths(max(1, mean_prompt), max(1, mean), max(1, longest_prompt), max(1, longest)), rows, source


def _limit(config: Config) -> int:
    return config.sampling.max_completion_length if isinstance(config, OnlineConfig) else config.max_length


def _measure_rows(config: Config) -> tuple[list[tuple[int, list[int]]], int]:
    """Return ([tokens of a prompt, of its answers] for the dataset's first rows, number of all training rows)."""
    tokenizer = _tokenizer(tokenizer_path(config.model))
    configure_chat(tokenizer, config.model)
    lengths = _reader(config)
    train, _ = read_rows(config.data, dataset_form(config), config.evaluation.eval_prompts, config.run.seed)
    (first,) = to_model_rows(tokenizer, [train[:_ROWS]], config.data.plain_prompts)
    return [lengths(tokenizer, row) for row in first], len(train)


def _reader(config: Config) -> Callable[[Any, Row], tuple[int, list[int]]]:
    """Return a function (tokenizer, row) -> (tokens of the prompt, tokens of each answer)."""
    if isinstance(config, OnlineConfig):
        return lambda tokenizer, row: (len(prompt_ids(tokenizer, row)), [])
    if isinstance(config, SFTConfig):
        return lambda tokenizer, row: _split_lengths(
            examples(tokenizer, row, config.max_length, empty_thinking=config.train_empty_thinking)
        )
    if isinstance(config, RewardConfig) and config.process:
        return lambda tokenizer, row: (1, [pairs.encode_steps(tokenizer, row, config.step_separator).tokens])
    if dataset_form(config) == "unpaired-preference":
        return lambda tokenizer, row: _judged_lengths(pairs.encode_labelled(tokenizer, row))
    return lambda tokenizer, row: _pair_lengths(pairs.encode_pair(tokenizer, row))


def _split_lengths(texts: list[Example]) -> tuple[int, list[int]]:
    before = [text.mask.index(True) if any(text.mask) else len(text.ids) for text in texts]
    return sum(before), [sum(len(text.ids) for text in texts) - sum(before)]


def _judged_lengths(made: LabelledAnswer) -> tuple[int, list[int]]:
    return len(made.prompt), [made.answer.tokens]


def _pair_lengths(made: Pair) -> tuple[int, list[int]]:
    return len(made.prompt), [made.chosen.tokens, made.rejected.tokens]


def _tokenizer(path: str) -> Any:
    try:
        return load_tokenizer(path)
    except UserError as error:
        raise UserError(f"{error} Alternatively, remove the dataset and give --prompt-length.") from error


def _changes(plan: Plan) -> Iterator[tuple[str, Config]]:
    """Yield (name of a change, the settings with it), the least intrusive first, and last all changes at once."""
    config, everything, names = plan.config, plan.config, []
    for name, change in _steps(plan):
        yield name, change(config)
        everything = change(everything)
        names.append(name)
    if len(names) > 1:
        yield ALL, everything


def _steps(plan: Plan) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """Yield (name of a change, function that applies it to settings), one by one."""
    config, work = plan.config, plan.work
    budget = max(work.lengths.longest_prompt + work.lengths.longest_completion, config.micro_batch_tokens // 4)
    if budget < work.micro_tokens:
        yield f"micro_batch_tokens={budget}", lambda c: replace(c, micro_batch_tokens=budget)
    if plan.starved:
        more = round(min(0.9, work.engine + plan.starved / plan.machine.memory + 0.05), 2)
        for name, value in (("tensor_parallel_size", 2 * work.tensor), ("vllm_memory", more)):
            yield f"sampling.{name}={value}", partial(_with_sampling, **{name: value})
    width = DTYPES[config.model.dtype].itemsize
    if share := memory.share_asleep(plan.memory, work, plan.policy, width, plan.machine.memory, MARGIN):
        settings: dict[str, Any] = {"vllm_sleep": True, "vllm_memory": share}
        yield f"sampling.vllm_sleep=true sampling.vllm_memory={share}", partial(_with_sampling, **settings)
    if any(item.name == memory.COPY for item in plan.memory.items):
        yield "sampling.sampler=vllm", partial(_with_sampling, sampler="vllm")
    if work.slots > 32 and not work.engine:
        yield "sampling.max_decode_batch=32", partial(_with_sampling, max_decode_batch=32)
    if not config.model.gradient_checkpointing:
        yield "model.gradient_checkpointing=true", lambda c: _with(c, gradient_checkpointing=True)
    if work.critic:
        yield "critic_shared=true", lambda c: replace(c, critic_shared=True, critic="", critic_learning_rate=0.0)
    if config.model.dtype == "float32":
        yield "model.dtype=bfloat16", lambda c: _with(c, dtype="bfloat16")
    whole = config.placement.strategy == "ddp"  # shards support neither 8-bit moments nor quantised weights
    if config.optim.optimizer == "adamw" and whole:
        yield "optim.optimizer=adamw_8bit", lambda c: replace(c, optim=replace(c.optim, optimizer="adamw_8bit"))
    if not config.model.lora_rank:
        yield "model.lora_rank=16", lambda c: _with(c, lora_rank=16)
    if not config.model.quantize_base and whole:
        yield (
            "model.lora_rank=16 model.quantize_base=nf4",
            lambda c: _with(c, lora_rank=c.model.lora_rank or 16, quantize_base="nf4"),
        )


def _with_sampling(config: Any, **settings: Any) -> Any:
    """Return the settings with these changes in their section `sampling`."""
    return replace(config, sampling=replace(config.sampling, **settings))


def _with(config: Config, **settings: Any) -> Config:
    """Return the settings with these changes in their section `model`."""
    model: Model = replace(config.model, **settings)
    return replace(config, model=model)


ALL = "all of these"  # changes, at once
# The largest and the smallest micro-batches to try, in tokens, if the settings do not give the size.
MOST, LEAST = 1 << 16, 1 << 10
SIZES = (MOST // LEAST).bit_length()
# The smallest number of sequences decoded at once to try.
FEWEST = 8


def filling(config: Any, here: Machine) -> Any:
    """Return the settings with the largest micro-batches that fit on a machine.

    On a GPU, the number of sequences decoded at once is halved, down to 8, until the smallest micro-batches fit and the KV cache
    takes at most half of the memory that the run does not hold otherwise. Gradient checkpointing is switched off if training is
    then faster, even in smaller micro-batches. The size of micro-batches is a power of two, so that a resumed run gets the same
    one if nearly as much memory is free.
    """
    lengths, rows, _ = lengths_of(config)
    anew = config.model.gradient_checkpointing
    while here.kind == "cuda" and arithmetic.samples_itself(config) and (slots := config.sampling.max_decode_batch) > FEWEST:
        least = predict(replace(config, micro_batch_tokens=LEAST), lengths, here, dataset=rows)
        cache = sum(item.bytes for item in least.memory.items if item.name == memory.CACHE)
        taken = sum(item.bytes for item in least.memory.items if item.phase in ("weights", "held"))
        if cache <= SHARE * (here.memory - taken + cache) and least.fits:
            break
        config = _with_sampling(config, max_decode_batch=slots // 2)
    found = []
    for recompute in dict.fromkeys((anew and not here.peak, anew)):
        tried = (replace(_with(config, gradient_checkpointing=recompute), micro_batch_tokens=MOST >> n) for n in range(SIZES))
        plans = (predict(one, lengths, here, dataset=rows) for one in tried)
        found += [next((plan for plan in plans if plan.fits), None)]
    fitting = [plan for plan in found if plan is not None]
    fastest = min(fitting, key=lambda plan: plan.cost.phases(here)["training"] if here.peak else 0.0, default=None)
    return replace(config, micro_batch_tokens=LEAST) if fastest is None else fastest.config
