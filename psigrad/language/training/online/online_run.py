"""The parts of one online run, and what they make of a step's trajectories: a batch, its forward passes, and what is
computed of it before the first optimiser step.

A batch's `inputs` are the trajectories behind its rows. A micro-batch names rows of one forward pass, and no more: what the model
reads for them is made of their trajectories.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from psigrad import seeds
from psigrad.config import OnlineConfig
from psigrad.errors import UserError
from psigrad.language.loading.teacher import Teacher
from psigrad.language.models.backbone import reshard
from psigrad.language.models.fused.caches import ActivationCache
from psigrad.language.models.language_model import Divergence, LanguageModel
from psigrad.language.models.packing import Groups, pack_groups
from psigrad.language.models.scalar_model import ScalarModel
from psigrad.language.rewards import Scorer
from psigrad.language.rollout.episodes.episodes import Player
from psigrad.language.rollout.spread import bring
from psigrad.language.rollout.types import Prompt, Sampler, SamplingParams, Stretch, Trajectory
from psigrad.language.training.online.figures import Tally, TokenFigures
from psigrad.language.training.online.reward_precision import reward_dtype
from psigrad.language.training.update import Optimizer
from psigrad.objective import Batch, PolicyGradient, PolicyOutputs, Prepared, terminal
from psigrad.objective.preferences.online_preference import OnlinePreference
from psigrad.processes.parallel.world import ALONE, World, shard, shares_of
from psigrad.runs.journal import Journal


@dataclass(frozen=True)
class ValueModel:
    """A critic of its own: a model, its optimiser, and its peak learning rate."""

    model: ScalarModel
    optimizer: Optimizer
    learning_rate: float


@dataclass(frozen=True)
class Online:
    """The parts of one online run.

    `reference` is the frozen model of the KL term (the model itself under LoRA). Where the algorithm needs a critic and `critic`
    is None, the policy's own value head is the critic. With `episodes` a completion is an episode of several turns, and `scorer`
    may be None: the environment rewards.
    """

    config: OnlineConfig
    algorithm: PolicyGradient | OnlinePreference
    model: LanguageModel
    reference: LanguageModel | Teacher | None
    sampler: Sampler
    scorer: Scorer | None
    optimizer: Optimizer
    prompts: Sequence[Prompt]
    params: SamplingParams
    total_steps: int
    journal: Journal
    evaluate: Callable[[int], None] | None = None
    """Evaluates after so many steps, where there are rows for it."""
    critic: ValueModel | None = None
    episodes: Player | None = None
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    """The weight of each part of the rewards, by name; 1 for others."""
    collector: Executor | None = None
    """Threads that collect while steps train; None: collections are made between them."""
    recorded: Callable[[list[Trajectory]], list[Trajectory]] | None = None
    """In a replay: the completions with what was recorded of them, in place of what a scorer gives."""
    token_figures: Callable[[int, Prepared], TokenFigures] = TokenFigures
    """Who looks at the log-probs of a step as they are computed."""

    @property
    def world(self) -> World:
        """The processes that take part."""
        return self.journal.world

    def updates(self) -> int:
        """How often this process has updated weights."""
        return self.optimizer.updates + (self.critic.optimizer.updates if self.critic is not None else 0)

    @property
    def single_pass(self) -> bool:
        """Whether each collection is trained on in a single optimiser step."""
        return self.config.num_iterations * self.config.num_minibatches == 1

    @property
    def max_gap(self) -> float:
        """How far sampler and trainer may disagree in mean log-probability, in nats."""
        rounds = self.model.network.dtype in (torch.bfloat16, torch.float16) or not exact_products(self.model.device)
        return self.config.max_logp_difference or (0.1 if rounds else 1e-3)

    @property
    def exact_sampling(self) -> bool:
        """Whether the sampler's log-probs need not be computed again before several passes over a batch."""
        return is_exact(self.sampler, self.model)


def exact_products(where: torch.device) -> bool:
    """Whether products of float32 have all of its digits on this device."""
    return where.type != "cuda" or not torch.backends.cuda.matmul.allow_tf32


def is_exact(sampler: Sampler, model: LanguageModel) -> bool:
    """Whether a sampler's log-probs are the trainer's, but for the order of sums in float32."""
    return sampler.exact and not model.why_padded and model.network.dtype == torch.float32 and exact_products(model.device)


# Where training reuses what sampling computed, in every so many steps one completion of so many runs forward again.
COMPARE_EVERY, COMPARED = 4, 20

MicroBatch = list[list[int]]
"""Rows of a batch that share one forward pass; those of a group stand together, since they share their prompt."""
LENGTH_PENALTY = "soft_overlong"


def metric_of(trajectory: Trajectory, name: str = "") -> float:
    """What dynamic sampling compares within a group: what the reward function `name` gave, or without a name the rewards of all
    functions but the penalty on length. Raises `UserError` where no function has that name.
    """
    reward = trajectory.reward or 0.0
    if trajectory.status == "unscored" or (trajectory.status == "failed" and not trajectory.parts):
        return reward
    if name:
        if name not in trajectory.parts:
            raise UserError(
                f"filter_metric is {name!r}, and no reward function has this name; expected one of {', '.join(trajectory.parts)}."
            )
        return float(trajectory.parts[name] or 0.0)
    if LENGTH_PENALTY not in trajectory.parts:
        return reward
    return math.fsum(float(part or 0.0) for other, part in trajectory.parts.items() if other != LENGTH_PENALTY)


def to_batch(
    groups: Sequence[Sequence[Trajectory]], filter_metric: str = "", reward_weights: Mapping[str, float] | None = None
) -> Batch:
    """The padded view [N, T] of scored groups, whose trajectories, in order, are its `inputs`.

    An outcome's reward stands on the policy's last token. `reward_weights` are those of the rewards' parts, by name.
    """
    rows = [t for group in groups for t in group]
    lengths = torch.tensor([len(t.completion.ids) for t in rows])
    width = int(lengths.max())
    mask = torch.arange(width)[None] < lengths[:, None]
    for n, trajectory in enumerate(rows):
        if trajectory.mask:
            mask.numpy()[n, : len(trajectory.mask)] = trajectory.mask

    def padded(values: Callable[[Trajectory], Sequence[float]]) -> torch.Tensor:
        out = torch.zeros(mask.shape)
        for row, trajectory in zip(out.numpy(), rows, strict=True):
            row[: len(trajectory.completion.ids)] = values(trajectory)
        return out

    # what was earned on the way stands where it was earned, the rest on the last token
    names = sorted({name for t in rows for name in t.parts})
    metric, parts = [metric_of(t, filter_metric) for t in rows], [[_part(t, name) for name in names] for t in rows]
    precision = reward_dtype([*map(len, groups)], [[t.reward or 0.0 for t in rows], metric, *zip(*parts, strict=True)])
    earned = torch.zeros(mask.shape, dtype=precision)
    rewarded = torch.zeros(mask.shape, dtype=torch.bool)
    for n, trajectory in enumerate(rows):
        for place, reward in trajectory.step_rewards:
            earned[n, place] += reward
            rewarded[n, place] = True
    outcome = torch.tensor([(t.reward or 0.0) - math.fsum(r for _, r in t.step_rewards) for t in rows], dtype=precision)
    whole = (outcome != 0) | ~rewarded.any(1)  # where there are rewards of steps, an outcome of 0 is none
    return Batch(
        mask=mask,
        reward=terminal(outcome, mask) + earned,
        logp_old=padded(lambda t: t.completion.logprobs),
        group=torch.tensor([g for g, group in enumerate(groups) for _ in group]),
        logp_sampler=padded(lambda t: t.completion.sampling_logprobs),
        metric=torch.tensor(metric, dtype=precision),
        truncated=torch.tensor([t.completion.finish_reason == "length" for t in rows]),
        rewarded=rewarded | (terminal(whole.float(), mask) != 0),
        parts=torch.tensor(parts, dtype=precision) if names else None,
        part_weights=tuple((reward_weights or {}).get(name, 1.0) for name in names),
        inputs=rows,
    )


def _part(trajectory: Trajectory, name: str) -> float:
    """What one reward function gave; NaN where it does not apply. A scorer that names no parts of a failed completion gave each
    the whole.
    """
    if trajectory.status == "failed" and name not in trajectory.parts:
        return trajectory.reward or 0.0
    part = trajectory.parts.get(name)
    return math.nan if part is None else float(part)


def micro_batches(batch: Batch, wanted: Tensor, budget: int, ranks: int = 1) -> list[MicroBatch]:
    """Forward passes of at most `budget` tokens over the rows where `wanted` [N] is True; a group's prompt is computed once.

    For several `ranks`, which take turns in taking one, there are about as many tokens in each.
    """
    group = batch.group.tolist()
    rows = [i for i, asked in enumerate(wanted.tolist()) if asked]
    groups = [list(members) for _, members in itertools.groupby(rows, lambda i: group[i])]
    prompts = [batch.inputs[members[0]].prompt_ids for members in groups]
    sizes = [[_size(batch.inputs[i], shared) for i in members] for members, shared in zip(groups, prompts, strict=True)]
    return [[[groups[g][k] for k in ks] for g, ks in parts] for parts in pack_groups([*map(len, prompts)], sizes, budget, ranks)]


def _size(trajectory: Trajectory, shared: Sequence[int]) -> int:
    """Tokens of a forward pass over this trajectory besides a prompt that its group shares."""
    own = sum(len(context.prompt_ids) for context in trajectory.contexts if context.prompt_ids != shared)
    return len(trajectory.completion.ids) + own


def share_of(world: World, batch: Batch, wanted: Tensor, budget: int) -> list[tuple[MicroBatch, float]]:
    """The micro-batches of this process, each with its weight: 0 for one that is only run because others run one. Each process
    has the tokens of its own then.
    """
    micros = micro_batches(batch, wanted, budget, shares_of(world))
    if world.size > 1:
        shares = [shard(world, micros, rank) for rank in range(world.size)]
        bring(world, batch.inputs, [[i for micro, _ in share for members in micro for i in members] for share in shares])
    return shard(world, micros)


def rows_of(micro: MicroBatch) -> Tensor:
    """[n] the rows of a micro-batch, in the order of its forward pass."""
    return torch.tensor([i for members in micro for i in members])


def inputs_of(batch: Batch, micro: MicroBatch) -> Groups:
    """What the model reads for these rows: each prompt with the pieces of completions that were sampled behind it."""
    read = _contexts_of(batch, micro)
    rows = [[batch.inputs[i].completion for i, _ in own] for _, own in read]
    experts = [(own[0].prompt_experts, [one.experts for one in own]) for own in rows]
    recorded = any(prompt for prompt, _ in experts)
    contexts = [[context.ids for _, context in own] for _, own in read]
    return Groups([prompt for prompt, _ in read], contexts, experts=experts if recorded else None)


def teacher_inputs_of(batch: Batch, micro: MicroBatch) -> Groups | None:
    """The same completions behind the prompts of the reference; None where it reads the policy's."""
    own = [batch.inputs[members[0]].teacher_prompt_ids for members in micro]
    if not any(own):
        return None
    prompts = [ids or batch.inputs[members[0]].prompt_ids for ids, members in zip(own, micro, strict=True)]
    return Groups(prompts, [[batch.inputs[i].completion.ids for i in members] for members in micro])


def _contexts_of(batch: Batch, micro: MicroBatch) -> list[tuple[tuple[int, ...], list[tuple[int, Stretch]]]]:
    """Each prompt that was read, with its (row, piece of the row), in the order of the forward pass."""
    read: list[tuple[tuple[int, ...], list[tuple[int, Stretch]]]] = []
    for members in micro:
        behind: dict[tuple[int, ...], list[tuple[int, Stretch]]] = {}
        for i in members:
            for context in batch.inputs[i].contexts:
                behind.setdefault(context.prompt_ids, []).append((i, context))
        read += behind.items()
    return read


def by_row(x: Tensor, batch: Batch, micro: MicroBatch) -> Tensor:
    """[n, T] of the rows of a micro-batch, from what the model finds of the pieces in `inputs_of`, padded with zeros."""
    width, rows = batch.mask.shape[1], rows_of(micro).tolist()
    pieces = [piece for _, own in _contexts_of(batch, micro) for piece in own]
    if [i for i, _ in pieces] == rows:  # a piece for each row, in its order
        return torch.nn.functional.pad(x, (0, width - x.shape[1]))
    place = {i: n for n, i in enumerate(rows)}
    source = torch.full((len(rows), width), x.numel())  # of what is in no piece: the zero behind them all
    for n, (i, context) in enumerate(pieces):
        end = context.start + len(context.ids)
        source[place[i], context.start : end] = torch.arange(len(context.ids)) + n * x.shape[1]
    return torch.cat([x.flatten(), x.new_zeros(1)])[source.to(x.device)]


def minibatches(count: int, shares: int, seed: int, step: int, iteration: int) -> list[Tensor]:
    """The places 0 … count - 1, shuffled, in `shares` nearly equal parts: one for each optimiser step of a pass."""
    order = torch.from_numpy(seeds.permutation(count, seed, "minibatch", step, iteration)) if count else torch.zeros(0)
    return [share for share in order.tensor_split(shares) if len(share)]


@torch.no_grad()
def fill(
    batch: Batch,
    budget: int,
    of: Callable[[Groups], Tensor],
    wanted: Tensor | None = None,
    world: World = ALONE,
    inputs: Callable[[Batch, MicroBatch], Groups] = inputs_of,
) -> Tensor:
    """[N, T] of what `of` finds in each micro-batch of `budget` tokens, over all rows or the `wanted` ones; 0 elsewhere.

    Each process of the world does its share, and all of them get the whole.
    """
    out = torch.zeros_like(batch.logp_old)
    for micro, weight in share_of(world, batch, batch.present.cpu() if wanted is None else wanted, budget):
        part = of(inputs(batch, micro))
        if weight and world.rank % world.division.team == 0:  # who compute together count once
            out[rows_of(micro).to(out.device)] = by_row(part.to(out.dtype), batch, micro)
    return world.all_reduce(out)


def log_probs(
    model: LanguageModel,
    batch: Batch,
    budget: int,
    temperature: float,
    *,
    cache: ActivationCache | None = None,
    wanted: Tensor | None = None,
    world: World = ALONE,
) -> Tensor:
    """[N, T] log-probs under `model` of every row, or of those where `wanted` [N] is True, in passes of `budget` tokens."""
    return fill(batch, budget, lambda x: model.evaluate(x, temperature=temperature, cache=cache).logp, wanted, world)


def entropies(model: LanguageModel, batch: Batch, budget: int, temperature: float, world: World = ALONE) -> Tensor:
    """[N, T] entropy of each step's distribution under `model`, in nats."""

    def of(inputs: Groups) -> Tensor:
        entropy = model.evaluate(inputs, temperature=temperature, entropy=True).entropy
        assert entropy is not None
        return entropy

    return fill(batch, budget, of, world=world)


def values(
    critic: LanguageModel | ScalarModel, batch: Batch, budget: int, cache: ActivationCache | None = None, world: World = ALONE
) -> Tensor:
    """[N, T] the critic's value of the state before each step; a language model's is that of its value head."""

    def of(inputs: Groups) -> Tensor:
        if isinstance(critic, ScalarModel):
            return critic.values(inputs)
        value = critic.evaluate(inputs, value=True, cache=cache).value
        assert value is not None
        return value

    return fill(batch, budget, of, world=world)


def reference_log_probs(
    model: LanguageModel | Teacher, batch: Batch, budget: int, temperature: float, world: World = ALONE
) -> Tensor:
    """[N, T] log-probs under the reference, behind its own prompts where it has them, in passes of `budget` tokens; a LoRA model
    is its own reference, without its adapter.
    """
    if isinstance(model, Teacher):
        return fill(batch, budget, lambda x: model.log_probs(x, temperature), world=world, inputs=read_by_reference)
    with model.without_adapter() if model.is_own_reference else torch.no_grad():
        of = lambda x: model.evaluate(x, temperature=temperature).logp  # noqa: E731
        return fill(batch, budget, of, world=world, inputs=read_by_reference)


def read_by_reference(batch: Batch, micro: MicroBatch) -> Groups:
    """What the reference reads for these rows."""
    return teacher_inputs_of(batch, micro) or replace(inputs_of(batch, micro), experts=None)


def settle_pieces(teacher: Teacher, batch: Batch, budget: int, temperature: float, world: World) -> None:
    """Ask a teacher with another tokenizer what it says of the pieces of text of a batch."""

    def ask(part: int) -> Tensor:
        def of(inputs: Groups) -> Tensor:
            return teacher.pieces(inputs, temperature)[part].float()

        return fill(batch, budget, of, world=world, inputs=read_by_reference)

    ends, theirs = ask(0), ask(1)
    teacher.settle(ends > 0, theirs, batch.logp_old)


def divergence(
    algorithm: PolicyGradient, reference: LanguageModel | Teacher | None, teacher: Groups | None = None, temperature: float = 1.0
) -> Divergence | None:
    """What the algorithm's KL term sums over the vocabulary; None where it does not. The reference may have inputs of its own."""
    if not algorithm.needs_exact_kl or reference is None or algorithm.kl is None:
        return None
    if isinstance(reference, Teacher):
        if algorithm.kl.estimator == "span" or teacher is None:  # then it is no sum over the vocabulary, or nobody asks yet
            return None
        return Divergence(reference.top(teacher, temperature), algorithm.kl.estimator, algorithm.kl.mixture)
    return Divergence(reference, algorithm.kl.estimator, algorithm.kl.mixture, teacher)


@torch.no_grad()
def follow(reference: LanguageModel, model: LanguageModel, share: float) -> None:
    """Move the reference's weights towards the policy's.

    Formula: θ_ref ← share·θ + (1 − share)·θ_ref

    With share 1 it becomes a copy of the policy, with a small one after every step an exponential moving average of it. In half
    precision a change below the last digit is lost: keep such a reference in float32 (reference_dtype).

    Source: TRL sync_ref_model; Gorbatovski et al. 2024, TR-DPO, arXiv:2404.09656.
    """
    reshard(reference)
    learnt = model.trainable()
    for name, parameter in reference.network.named_parameters():
        if name in learnt:
            parameter.lerp_(learnt[name].detach().to(parameter.dtype), share)


def outputs_by_row(evaluation: PolicyOutputs, batch: Batch, micro: MicroBatch) -> PolicyOutputs:
    """The evaluation of the pieces of a micro-batch as that of its rows, [n, T]."""
    return PolicyOutputs(**{name: by_row(x, batch, micro) for name, x in vars(evaluation).items() if x is not None})


def add_teacher_kl(evaluation: PolicyOutputs, reference: LanguageModel | Teacher | None, rows: Tensor) -> PolicyOutputs:
    """The evaluation of these rows with the KL by pieces of text, where a teacher of another tokenizer is the reference."""
    return reference.add_kl(evaluation, rows) if isinstance(reference, Teacher) else evaluation


def add_old_values(
    run: Online, algorithm: PolicyGradient, batch: Batch, step: int, tally: Tally, cache: ActivationCache | None
) -> Batch:
    """The batch with what is computed before the first optimiser step: log-probs of the reference and, where the sampler's will
    not do, of the policy; values of the critic.
    """
    model, budget, temperature, world = run.model, run.config.micro_batch_tokens, run.params.temperature, run.world
    if isinstance(run.reference, Teacher):
        run.reference.forget()
        if algorithm.kl is not None and algorithm.kl.estimator == "span":
            settle_pieces(run.reference, batch, budget, temperature, world)
    if algorithm.needs_reference and not algorithm.needs_exact_kl:
        if run.reference is None:
            raise UserError("This algorithm's KL term needs a reference model; none was loaded.")
        batch = replace(batch, logp_ref=reference_log_probs(run.reference, batch, budget, temperature, world))
    reuses = cache is not None and bool(cache.slabs)  # then the log-probs that are trained on are the sampler's own
    stale = any(t.version != step for t in batch.inputs)
    enough = (run.exact_sampling or run.single_pass) and not stale
    drops = run.config.model.lora_dropout > 0  # what is trained on then differs from what was sampled by the dropout
    tally.compares = enough and not reuses and not drops
    if (reuses or drops) and not stale and step % COMPARE_EVERY == 0 and len(present := batch.present.cpu().nonzero()[:, 0]):
        # other completions each time, run forward without the cache
        size, count = math.ceil(len(present) / COMPARED), step // COMPARE_EVERY
        some = torch.zeros(len(batch.mask), dtype=torch.bool)
        some[present[(torch.arange(size) + count * size) % len(present)]] = True
        rows = some.to(batch.mask.device)
        tally.compare(log_probs(model, batch, budget, temperature, wanted=some, world=world)[rows], batch.select(rows))
    if not enough:
        again = log_probs(model, batch, budget, temperature, cache=cache, world=world)
        if not reuses and not stale:  # older weights gave other log-probs
            tally.compare(again, batch)
        batch = replace(batch, logp_old=again)
    if algorithm.needs_old_entropy:
        batch = replace(batch, entropy=entropies(model, batch, budget, temperature, world))
    if algorithm.needs_critic:
        batch = replace(batch, value=values(model if run.critic is None else run.critic.model, batch, budget, cache, world))
    return batch
