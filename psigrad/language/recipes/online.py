"""Online reinforcement learning from settings to a model on disk."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from psigrad.config import OnlineConfig
from psigrad.config.algorithms import resolve_online
from psigrad.errors import UserError
from psigrad.language.loading import model_source
from psigrad.language.loading.given_model import GivenModel
from psigrad.language.loading.load_model import attend, load_model, load_reference, settle
from psigrad.language.models import scalar_model
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.recipes import row_limits
from psigrad.language.recipes.conversation import episodes_for, rows_for
from psigrad.language.recipes.finish import finish, optimizer_of
from psigrad.language.recipes.pinned import pinned
from psigrad.language.recipes.sampling import parcels, sampler_of
from psigrad.language.recipes.scorers import completion_room, evaluator_for, judge_for
from psigrad.language.rewards import resolve
from psigrad.language.rollout.samplers.samplers import check_sampling, sampling_params
from psigrad.language.rollout.types import Sampler
from psigrad.language.training import rehearsal
from psigrad.language.training.learners import Follower, Learner, State, begin
from psigrad.language.training.online.online_rl import train
from psigrad.language.training.online.online_run import Online, ValueModel, is_exact
from psigrad.objective import PolicyGradient
from psigrad.objective.explain import label
from psigrad.objective.parts.aggregate import fixed_length
from psigrad.objective.parts.correction import truncated_importance
from psigrad.objective.parts.surrogate import kl_penalty
from psigrad.objective.preferences.online_preference import OnlinePreference
from psigrad.processes.parallel import shards
from psigrad.processes.parallel.world import World
from psigrad.runs import machine, session
from psigrad.runs.journal import Journal
from psigrad.runs.result import Result


def run(config: OnlineConfig, given: GivenModel | None = None) -> Result:
    """Train `config.model` on the prompts of `config.data` against `config.reward` by `config.algorithm`.

    Goes on from the newest checkpoint of the run folder where there is one. Raises `UserError` on mistakes of the user,
    `ValueError` where the algorithm's parts do not fit.
    """
    algorithm = method(config)
    check(config, algorithm)
    with session.open_run(config, "online") as journal, contextlib.ExitStack() as stack:
        if (done := session.load_finished(config, journal)) is not None:
            return done
        found = session.newest_checkpoint(journal)
        model = _policy(config, algorithm, found, journal.world, given)
        episodes = stack.enter_context(episodes_for(config, journal))
        rows, held = rows_for(config, episodes)
        wants_reference = algorithm.needs_reference or (held and config.evaluation.eval_kl)
        reference = _reference(config, model, found, journal.world) if wants_reference else None
        reward = stack.enter_context(judge_for(config, model.tokenizer, journal=journal))
        evaluator = None
        if held:
            metric = config.evaluation.metric
            judge = stack.enter_context(judge_for(config, model.tokenizer, [metric], journal)) if metric else reward
            evaluator = evaluator_for(config.evaluation, config, model, judge, held, reference, episodes, world=journal.world)
        prompts = row_limits.encode_prompts(rows, model, config.data, completion_room(config, episodes), journal)
        if config.teacher_prompt and reference is not None:
            room = config.sampling.max_completion_length
            prompts = row_limits.add_teacher_prompts(prompts, config.teacher_prompt, model, reference, room)
        sampler = stack.enter_context(sampler_of(config, model, journal))
        collector = stack.enter_context(_collector(config, sampler, journal.world))
        algorithm = corrected(algorithm, config, sampler, model, journal)
        critic = _critic(config, model, found, journal.world) if algorithm.needs_critic and not config.critic_shared else None
        policy = Learner(model, optimizer_of(model, config, journal.world))
        learners: list[Learner | Follower] = [policy, *([Learner(critic.model, critic.optimizer, "critic")] if critic else [])]
        if reference is not None and config.ref_model_sync_steps:
            learners.append(Follower(reference, "reference"))
        fresh, counted = State(algorithm=algorithm.initial_state()), (len(rows), len(held))
        begun = begin(config, journal, learners, pinned(config, model.tokenizer, rows, held), found, fresh, counted)
        job = Online(
            config=config,
            algorithm=algorithm,
            model=model,
            reference=reference,
            sampler=sampler,
            scorer=reward.scorer,
            optimizer=policy.optimizer,
            prompts=prompts,
            params=sampling_params(config.sampling, model, rows),
            total_steps=config.run.steps(len(prompts), config.prompts_per_step),
            journal=journal,
            evaluator=evaluator,
            critic=critic,
            episodes=episodes,
            reward_weights=reward.weights,
            collector=collector,
        )
        if config.optim.rehearse:
            rehearsal.online(job)
        after = train(job, begun.state, begun.save)
        return finish(config, journal, model, ledger=after.ledger, **parcels(sampler))


def _policy(
    config: OnlineConfig, algorithm: PolicyGradient | OnlinePreference, found: Path | None, world: World, given: GivenModel | None
) -> LanguageModel:
    """The model that trains, with a value head where it is its own critic."""
    shared = algorithm.needs_critic and config.critic_shared
    model = load_model(config.model, config.run, found, world, shared, given)
    _check_following(config, model.adapter is not None)
    return model


@contextlib.contextmanager
def _collector(config: OnlineConfig, sampler: Sampler, world: World) -> Iterator[Executor | None]:
    """A thread that collects while steps train, where others sample and a lag gives them the time."""
    if not (sampler.central and config.lag and world.rank == 0):
        yield None
        return
    thread = ThreadPoolExecutor(1, "collector")
    try:
        yield thread
    finally:
        thread.shutdown(wait=False, cancel_futures=True)


def method(config: OnlineConfig) -> PolicyGradient | OnlinePreference:
    """The algorithm asked for. A preset that divides by a constant length divides by max_completion_length, as in TRL."""
    algorithm, spec = resolve_online(config.algorithm), config.algorithm
    if isinstance(algorithm, OnlinePreference):
        return algorithm
    named = isinstance(spec, str) or (isinstance(spec, Mapping) and spec.get("aggregate", "fixed_length") == "fixed_length")
    if named and isinstance(algorithm.aggregate, fixed_length):
        return replace(algorithm, aggregate=fixed_length(config.sampling.max_completion_length))
    return algorithm


def corrected(
    algorithm: PolicyGradient | OnlinePreference, config: OnlineConfig, sampler: Sampler, model: LanguageModel, journal: Journal
) -> PolicyGradient | OnlinePreference:
    """The algorithm, with truncated importance weights where the sampler's log-probs are not exactly the trainer's and the
    settings say nothing about the correction slot.
    """
    stated = not isinstance(config.algorithm, str | Mapping) or (
        isinstance(config.algorithm, Mapping) and "correction" in config.algorithm
    )
    if not isinstance(algorithm, PolicyGradient) or algorithm.correction is not None:
        return algorithm
    if stated and config.lag:
        raise UserError(
            f"lag is {config.lag} and the algorithm corrects for nothing, so it would take older weights' completions for its "
            "own; give algorithm.correction a part such as truncated_importance, or leave it out to get that."
        )
    if stated or (is_exact(sampler, model) and not config.lag):
        return algorithm
    part = truncated_importance()
    why = f"Completions are {config.lag} steps old" if config.lag else "The sampler rounds otherwise than the trainer"
    text = f"{why}; {label(part)} corrects for it, unless algorithm.correction says otherwise."
    journal.tell("correction", text, correction=label(part))
    return replace(algorithm, correction=part)


def check(config: OnlineConfig, algorithm: PolicyGradient | OnlinePreference) -> None:
    """Refuse settings that cannot work before anything is loaded."""
    needs_reward = isinstance(algorithm, OnlinePreference) or algorithm.needs_reward
    if needs_reward and not (config.reward or config.reward_model or config.environment):
        raise UserError(
            "No reward was given; name a built-in or module:function with --reward (reward), or a reward model with "
            "--reward-model."
        )
    for function in (*config.reward, *((config.evaluation.metric,) if config.evaluation.metric else ())):
        resolve(function)
    check_sampling(config.sampling)
    _check_reference(config, algorithm, needs_reward)
    _check_critic(config, algorithm)
    if config.num_generations < algorithm.min_group_size:
        raise UserError(
            f"num_generations is {config.num_generations} and {algorithm.name or 'the algorithm'} compares completions of one "
            f"prompt; give at least {algorithm.min_group_size}."
        )
    if config.sampling.temperature == 0:
        raise UserError(
            "temperature is 0: greedy completions of a prompt are all the same and teach nothing; give a value above 0."
        )
    for name in ("prompts_per_step", "num_generations", "num_iterations", "num_minibatches", "micro_batch_tokens"):
        if getattr(config, name) < 1:
            raise UserError(f"{name} is {getattr(config, name)}; it must be at least 1.")
    if config.num_minibatches > config.prompts_per_step:
        raise UserError(
            f"num_minibatches is {config.num_minibatches} and a step has {config.prompts_per_step} groups; a minibatch takes "
            "whole groups, so give at most as many minibatches as prompts_per_step."
        )


def _check_reference(config: OnlineConfig, algorithm: PolicyGradient | OnlinePreference, needs_reward: bool) -> None:
    name = algorithm.name or "the algorithm"
    if config.reference and not (algorithm.needs_reference or config.evaluation.eval_kl):
        raise UserError(f"The settings name a reference model, but {name} has no KL term; set algorithm.kl, or remove it.")
    if not needs_reward and not (config.reference or config.teacher_prompt):
        raise UserError(
            f"{name} learns from a teacher and none was given; name a model with --reference, or with --teacher-prompt the "
            "column with what the model itself is told when it is the teacher."
        )
    if config.teacher_prompt and (isinstance(algorithm, OnlinePreference) or not algorithm.needs_reference):
        raise UserError(f"The settings name a teacher_prompt, but {name} has no KL term to a reference; set algorithm.kl.")
    if config.teacher_prompt and (config.environment or config.tools):
        raise UserError("teacher_prompt is for single completions and the settings have episodes; remove one of them.")
    _check_following(config, config.model.lora_rank > 0)
    if config.ref_model_sync_steps and config.reference:
        raise UserError(
            "ref_model_sync_steps lets the reference follow the policy, and the settings name another model as reference; "
            "remove one."
        )
    if config.reference_dtype and config.model.lora_rank and not config.reference:
        raise UserError("reference_dtype is set and with LoRA the reference is the model itself; remove it.")


def _check_following(config: OnlineConfig, adapter: bool) -> None:
    if config.ref_model_sync_steps and adapter:
        raise UserError(
            "ref_model_sync_steps moves the reference's weights, and with LoRA the reference is the model without its adapter; "
            "train without LoRA (lora_rank 0), or leave the reference as it is."
        )


def _check_critic(config: OnlineConfig, algorithm: PolicyGradient | OnlinePreference) -> None:
    asked = config.critic or config.critic_shared or config.critic_learning_rate or config.critic_warmup_steps
    if asked and not algorithm.needs_critic:
        raise UserError(
            f"The settings configure a critic, but {algorithm.name or 'the algorithm'} has none; remove these settings."
        )
    if config.critic_shared and (config.critic or config.critic_learning_rate):
        raise UserError(
            "critic_shared puts the critic on the policy's own backbone, so it has no model (critic) or critic_learning_rate of "
            "its own; take them out or set critic_shared to false."
        )
    if config.critic_shared and config.critic_warmup_steps:
        raise UserError(
            "critic_warmup_steps lets the critic learn before the policy moves, and with critic_shared the two are one model; "
            "take one of them out."
        )
    surrogate = algorithm.surrogate if isinstance(algorithm, PolicyGradient) else None
    adapts = isinstance(surrogate, kl_penalty) and surrogate.target is not None
    if adapts and config.num_iterations * config.num_minibatches == 1:
        raise UserError(
            f"{algorithm.name or 'The algorithm'} adapts its penalty to how far several optimiser steps move the policy, and a "
            "single one is taken per batch; give num_iterations or num_minibatches above 1."
        )


def _critic(config: OnlineConfig, model: LanguageModel, found: Path | None, world: World) -> ValueModel:
    """A critic of its own, from its checkpoint, from `critic.path`, or from the policy's starting weights with a zero head."""
    place = found / "critic" if found is not None else None
    in_shards = place is not None and shards.written_in(place)
    start = replace(config.model, path=config.critic, revision="") if config.critic else config.model
    made = scalar_model.load(
        str(place) if place is not None and not in_shards else model_source.located(start),
        dtype=config.model.dtype,
        device=machine.device(config.run),
        gradient_checkpointing=config.model.gradient_checkpointing,
        fresh_head="zero" if found is None or in_shards else "refuse",
        trust_remote_code=config.model.trust_remote_code,
        for_shards=world.lockstep,
    )
    attend(config.model, made)
    if not made.per_token:
        raise UserError(f"{config.critic!r} gives no score for every token, which a critic needs; give a causal language model.")
    if made.tokenizer.get_vocab() != model.tokenizer.get_vocab():
        raise UserError(
            f"The critic {config.critic!r} and the policy have different tokenizers; give a critic of the same model family."
        )
    settle(made, world, machine.device(config.run), place if in_shards else None)
    return ValueModel(made, optimizer_of(made, config, world), config.critic_learning_rate or config.optim.learning_rate)


def _reference(config: OnlineConfig, model: LanguageModel, found: Path | None, world: World) -> LanguageModel:
    """The model that `config.reference` names, or the one that training started from: under LoRA the model itself without its
    adapter, else a copy that never learns.
    """
    dtype = config.reference_dtype or config.model.dtype
    if config.reference:
        return load_reference(config.reference, model, config, dtype, world)
    if model.is_own_reference:
        return model
    if found is None and dtype == config.model.dtype and not world.lockstep:
        return model.frozen_copy()
    saved = found / "reference" if found is not None and config.ref_model_sync_steps else None
    loaded = load_model(replace(config.model, dtype=dtype), config.run, saved, world)
    if not world.lockstep:
        return loaded.frozen_copy()
    loaded.network.requires_grad_(False)
    return loaded
