"""Online reinforcement learning, from settings to a trained model on disk."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from psigrad.config import OnlineConfig
from psigrad.language.data.dataset_layouts import Log
from psigrad.language.data.reward_view import reward_view
from psigrad.language.data.row_cache import PreparedRows
from psigrad.language.episodes.players import Player, collector_of
from psigrad.language.episodes.seats import Games
from psigrad.language.episodes.tools import schemas
from psigrad.language.loading.load_model import load_critic, load_model, load_online_reference, load_start, part_of
from psigrad.language.loading.model_object import ModelObject
from psigrad.language.loading.samplers import sampling_params
from psigrad.language.loading.teacher import Teacher, TeacherReference
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.models.scalar_model import ScalarModel
from psigrad.language.models.sizes import size
from psigrad.language.recipes import row_limits
from psigrad.language.recipes.conversation import episodes_for, list_tools, read_episode_rows
from psigrad.language.recipes.evaluator import Evaluator
from psigrad.language.recipes.finish import finish, note_rows, optimizer_of, sampler_of
from psigrad.language.recipes.learners import CheckpointWriter, Follower, Learner, begin
from psigrad.language.recipes.loops import train_online
from psigrad.language.recipes.memory_check import check_online
from psigrad.language.recipes.online_settings import (
    check,
    check_reference_sync,
    check_teacher,
    correct,
    method,
    record_experts,
    set_activation_memory,
)
from psigrad.language.recipes.row_encoding import prepare
from psigrad.language.recipes.run_pins import collect_pins, static_pins
from psigrad.language.recipes.scorers import RewardSetup, evaluator_for, reserved_tokens
from psigrad.language.rollout.collectors import ScoredRollout
from psigrad.language.rollout.scoring import Scorer
from psigrad.language.rollout.types import Prompts, Sampler, State
from psigrad.language.training.online.annotators.old_log_probs import OldEntropy, OldLogProbs
from psigrad.language.training.online.annotators.past_policies import PastPolicies
from psigrad.language.training.online.annotators.reference import Reference
from psigrad.language.training.online.annotators.values import Values
from psigrad.language.training.online.online_run import Annotator, OnlineRun, ValueModel
from psigrad.objective import PolicyGradient
from psigrad.objective.preferences.preference_loss import OnlinePreference
from psigrad.optim import Optimizer
from psigrad.processes.parallel.world import ALONE, World
from psigrad.records.pins import hash_code
from psigrad.runs import session
from psigrad.runs.journal import Journal
from psigrad.runs.result import Result


@dataclass(frozen=True)
class Job:
    """An online run that is ready to start: its parts, its state, and the functions that save and evaluate it."""

    run: OnlineRun
    state: State
    save: CheckpointWriter
    evaluate: Callable[[int], None] | None


Setup = tuple[RewardSetup, RewardSetup | None]
"""(the reward, the held-out metric); the metric is None if it is the reward."""


def run(config: OnlineConfig, given: ModelObject | None = None) -> Result:
    """Start or resume a run that trains `config.model`, or the object `given`, by `config.algorithm` on prompts."""
    check(config, method(config))
    config = set_activation_memory(config)
    setup = (RewardSetup.of(config), RewardSetup.of_metric(config))
    with session.open_run(config, "online") as journal:
        # each process has measured the free memory, which changes; all use the number of the one that writes the settings
        config = replace(config, keep_activations_gb=journal.world.broadcast(config.keep_activations_gb))
        if (done := session.load_finished(config, journal, static_pins(config, setup))) is not None:
            return done
        with open_job(config, journal, session.newest_checkpoint(journal), setup, given) as job:
            if config.optim.rehearse:
                check_online(job.run)
            after = train_online(job.run, job.state, job.save, journal, job.evaluate)
            return finish(config, journal, job.run.model, given, ledger=after.ledger, **job.run.sampler.count())


@contextlib.contextmanager
def open_job(
    config: OnlineConfig,
    journal: Journal,
    checkpoint: Path | None,
    setup: Setup,
    given: ModelObject | None = None,
    *,
    scores: bool = True,
    reference: bool = False,
) -> Iterator[Job]:
    """Load the parts of a new or resumed run.

    Without `scores`, nothing is scored or evaluated. With `reference`, load a reference even if the algorithm needs none.
    """
    algorithm, (rewards, metric), evaluator = method(config), setup, None
    with contextlib.ExitStack() as stack:
        value_head = algorithm.needs_critic and config.critic_shared
        model = load_model(config.model, config.run, checkpoint, journal.world, value_head, given)
        check_reference_sync(config, model.adapter is not None)
        player = stack.enter_context(episodes_for(config, model.tokenizer, journal))
        prepared = _prepare_rows(config, model, journal, player, setup)
        rows, held_out, evaluates = prepared.rows, prepared.held_out, bool(prepared.held_out) and scores
        wants_reference = algorithm.needs_reference or reference or (evaluates and config.evaluation.eval_kl)
        own_reference = load_online_reference(config, model, checkpoint, journal.world) if wants_reference else None
        check_teacher(own_reference, config, algorithm)
        scorer = stack.enter_context(rewards.scorer(model.tokenizer, journal)) if scores else None
        if evaluates:
            judge = stack.enter_context(metric.scorer(model.tokenizer, journal)) if metric else scorer
            by = metric or rewards
            evaluator = evaluator_for(config, model, by, judge, held_out, own_reference, player, world=journal.world)
        prompts = row_limits.add_teacher_prompts(Prompts(rows, prepared.items), config, model, own_reference)
        note_rows(config, model, rows, journal, checkpoint)
        sampler = stack.enter_context(sampler_of(config, model, journal, longest := longest_of(config, prepared, evaluator)))
        algorithm = correct(algorithm, config, record_experts(config, model, sampler), model, journal)
        critic = _critic(config, model, checkpoint, journal.world) if algorithm.needs_critic and not value_head else None
        row_limits.check_positions(longest or model.max_length, reference=own_reference, critic=critic and critic.model)
        optimizer, world = optimizer_of(model, config, journal.world), journal.world
        past = _past_policies(config, model, checkpoint, journal.world)
        learners = _learners(config, model, optimizer, critic, own_reference, past)
        fresh, pins = State(algorithm=algorithm.initial_state()), collect_pins(config, model.tokenizer, prepared, setup)
        pins |= {"engine": sampler.engine} if sampler.engine else {}
        begun = begin(config, journal, learners, pins, checkpoint, fresh, (len(rows), len(held_out)))
        run = OnlineRun(
            config=config,
            algorithm=algorithm,
            model=model,
            optimizer=optimizer,
            prompts=prompts,
            params=sampling_params(config.sampling, model, (prompt.row for prompt in prompts)),
            total_steps=config.run.steps(len(prompts), config.prompts_per_step),
            rollout=_rollout(config, model, sampler, scorer, player, world, past),
            annotators=annotators_of(algorithm, own_reference, past),
            critic=critic,
            executor=stack.enter_context(executor_of(config, sampler, world)),
            world=world,
            watch=journal.watch,
            reward_weights=rewards.weights,
        )
        evaluate = None if evaluator is None else partial(evaluator.record, model, sampler, journal=journal)
        yield Job(run, begun.state, begun.save, evaluate)


def _learners(
    config: OnlineConfig,
    model: LanguageModel,
    optimizer: Optimizer,
    critic: ValueModel | None,
    reference: LanguageModel | Teacher | None,
    past: PastPolicies | None,
) -> list[Learner | Follower]:
    """Return the models in a checkpoint: policy, critic, a reference that follows the policy, and the opponents in `past`."""
    learners: list[Learner | Follower] = [Learner(model, optimizer)]
    if critic is not None:
        learners.append(Learner(critic.model, critic.optimizer, "critic"))
    if isinstance(reference, LanguageModel) and config.ref_model_sync_steps:
        learners.append(Follower(reference, "reference"))
    return learners + [Follower(one, f"past-{n}") for n, one in enumerate(past.models if past else ())]


def _past_policies(config: OnlineConfig, model: LanguageModel, checkpoint: Path | None, world: World) -> PastPolicies | None:
    """Return frozen copies of the policy as game opponents, read from `checkpoint` if given; None without `past_opponents`."""
    if not config.past_opponents:
        return None
    places = [part_of(checkpoint, f"past-{n}") for n in range(config.past_kept)]
    models = [load_start(config, model, checkpoint, world, saved=place) for place in places]
    return PastPolicies(models, config.past_every, config.past_opponents, config.sampling.max_decode_batch)


def _rollout(
    config: OnlineConfig,
    model: LanguageModel,
    sampler: Sampler,
    scorer: Scorer | None,
    player: Player | None,
    world: World,
    past: PastPolicies | None,
) -> ScoredRollout:
    if isinstance(player, Games):  # evaluations play without past selves
        player = replace(player, opponents=past)
    collector = collector_of(sampler, model, player, needs_reward=scorer is None)
    return ScoredRollout(
        collector,
        scorer,
        reward_view(model.tokenizer, collector.plays, config.skip_special_tokens),
        world=ALONE if sampler.central else world,
        complete=config.lag > 0,  # a checkpoint stores the collections that are not trained on yet
    )


def annotators_of(
    algorithm: PolicyGradient | OnlinePreference, reference: LanguageModel | Teacher | None, past: PastPolicies | None = None
) -> list[Annotator]:
    """Return the annotators, which add to a run's batches what the algorithm needs. `past` are a game's earlier policies."""
    if reference is None:
        first: list[Annotator] = []
    else:
        first = [TeacherReference(reference) if isinstance(reference, Teacher) else Reference(reference)]
    critic: list[Annotator] = [Values()] if algorithm.needs_critic else []
    return [*first, OldLogProbs(), OldEntropy(), *critic, *([] if past is None else [past])]


@contextlib.contextmanager
def executor_of(config: OnlineConfig, sampler: Sampler, world: World) -> Iterator[Executor | None]:
    """Yield an executor that samples during training, in threads; None on ranks above 0, or if the two must take turns."""
    # Several processes would communicate in two threads. With a filter, the sampling thread would use the model in training.
    beside = sampler.overlaps and world.size == 1 and not config.sampling.filtered
    if not ((sampler.central or beside) and config.lag and world.rank == 0):
        yield None
        return
    threads = ThreadPoolExecutor(1 if config.plays or beside else config.lag + 1, "collector")
    try:
        yield threads
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


def _prepare_rows(
    config: OnlineConfig, model: LanguageModel, journal: Journal, episodes: Player | None, setup: Setup
) -> PreparedRows[Any]:
    """Return the training and held-out rows that the rewards of `setup` can score, and the tokens of the training prompts."""
    rewards, metric = setup

    def make(log: Log) -> PreparedRows[Any]:
        given, held = read_episode_rows(config, episodes, model.tokenizer, log)
        rows, held_out = rewards.judgeable(given, log), (metric or rewards).judgeable(held, log)
        row_limits.check_images(config, model, rows)
        prompts = row_limits.encode_prompts(rows, model, config.data, reserved_tokens(config), log)
        return PreparedRows(rows, held_out, prompts.encoded, [])

    asked = [one for judge in setup if judge for one in judge.functions if hasattr(one, "check_row")]
    judges = [(type(one).__qualname__, repr(vars(one)), hash_code(one)) for one in asked]
    needs = [(judge.needs, [*judge.weights.values()]) for judge in setup if judge]
    tools = schemas(list_tools(config))
    room = model.max_length, reserved_tokens(config)
    settings = ["online", *room, config.evaluation.eval_prompts, config.run.seed, tools, judges, needs]
    found = prepare(config.data, model.tokenizer, settings, journal, make)
    row_limits.check_features(model, (*found.rows, *found.held_out))
    return found


def longest_of(config: OnlineConfig, prepared: PreparedRows[Any], evaluator: Evaluator | None) -> int:
    """Return the maximum number of tokens in a prompt plus its completion. For episodes it is 0: the model's limit."""
    if config.plays:
        return 0
    lengths = [len(ids) for _, ids in prepared.items] + [len(p.ids) for p in (evaluator.prompts if evaluator else ())]
    return max(lengths, default=0) + config.sampling.max_completion_length


def _critic(config: OnlineConfig, model: LanguageModel, checkpoint: Path | None, world: World) -> ValueModel:
    critic = load_critic(config, model, checkpoint, world)
    own = config.critic_learning_rate or max(config.optim.learning_rate, critic_rate(critic))
    return ValueModel(critic, optimizer_of(critic, config, world), own)


def critic_rate(critic: ScalarModel) -> float:
    """Return a learning rate at which the critic's zero-initialised head learns: 0.05 / width of the model.

    A step of Adam then changes a value by up to 0.05, since the entries of a hidden state have a magnitude of about 1.
    """
    return 0.05 / size(critic.network.config, "hidden")
