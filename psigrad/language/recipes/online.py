"""Online reinforcement learning from settings to a model on disk."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from pathlib import Path

from psigrad.config import OnlineConfig
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.recipes import loading, setup
from psigrad.language.recipes.conversation import episodes_for, rows_for
from psigrad.language.recipes.given_model import GivenModel
from psigrad.language.recipes.online_settings import check, check_following, correct, method
from psigrad.language.recipes.pinned import pinned
from psigrad.language.recipes.sampling import parcels, sampler_of
from psigrad.language.recipes.scorers import completion_room, evaluator_for, judge_for
from psigrad.language.rollout.types import Sampler
from psigrad.language.training.memory_check import check_online
from psigrad.language.training.online.online_rl import train
from psigrad.language.training.online.online_run import Online, ValueModel
from psigrad.objective import PolicyGradient
from psigrad.objective.preferences.online_preference import OnlinePreference
from psigrad.processes.parallel.world import World
from psigrad.runs import session
from psigrad.runs.result import Result
from psigrad.runs.state import Follower, Learner, State


def run(config: OnlineConfig, given: GivenModel | None = None) -> Result:
    """Train `config.model` on the prompts of `config.data` against `config.reward` by `config.algorithm`.

    Goes on from the newest checkpoint of the run folder where there is one. Raises `UserError` on mistakes of the user,
    `ValueError` where the algorithm's parts do not fit.
    """
    algorithm = method(config)
    check(config, algorithm)
    with session.open_run(config, "online") as journal, contextlib.ExitStack() as stack:
        if (done := session.finished(config, journal)) is not None:
            return done
        found = session.newest_checkpoint(journal)
        model = _policy(config, algorithm, found, journal.world, given)
        episodes = stack.enter_context(episodes_for(config, journal))
        rows, held = rows_for(config, episodes)
        wants_reference = algorithm.needs_reference or (held and config.evaluation.eval_kl)
        reference = loading.load_own_reference(config, model, found, journal.world) if wants_reference else None
        reward = stack.enter_context(judge_for(config, model.tokenizer, journal=journal))
        evaluator = None
        if held:
            metric = config.evaluation.metric
            judge = stack.enter_context(judge_for(config, model.tokenizer, [metric], journal)) if metric else reward
            evaluator = evaluator_for(config.evaluation, config, model, judge, held, reference, episodes, world=journal.world)
        prompts = setup.prompts_of(rows, model, config.data, completion_room(config, episodes), journal)
        if config.teacher_prompt and reference is not None:
            room = config.sampling.max_completion_length
            prompts = setup.with_teacher_prompts(prompts, config.teacher_prompt, model, reference, room)
        sampler = stack.enter_context(sampler_of(config, model, journal))
        collector = stack.enter_context(_collector(config, sampler, journal.world))
        algorithm = correct(algorithm, config, sampler, model, journal)
        critic = _critic(config, model, found, journal.world) if algorithm.needs_critic and not config.critic_shared else None
        policy = Learner(model, setup.optimizer_of(model, config, journal.world))
        learners: list[Learner | Follower] = [policy, *([Learner(critic.model, critic.optimizer, "critic")] if critic else [])]
        if reference is not None and config.ref_model_sync_steps:
            learners.append(Follower(reference, "reference"))
        fresh, counted = State(algorithm=algorithm.initial_state()), (len(rows), len(held))
        begun = session.begin(config, journal, learners, pinned(config, model.tokenizer, rows, held), found, fresh, counted)
        job = Online(
            config=config,
            algorithm=algorithm,
            model=model,
            reference=reference,
            sampler=sampler,
            scorer=reward.scorer,
            optimizer=policy.optimizer,
            prompts=prompts,
            params=setup.sampling_params(config.sampling, model, rows),
            total_steps=config.run.steps(len(prompts), config.prompts_per_step),
            journal=journal,
            evaluate=None if evaluator is None else partial(evaluator.record, model, sampler, journal=journal),
            critic=critic,
            episodes=episodes,
            reward_weights=reward.weights,
            collector=collector,
        )
        if config.optim.rehearse:
            check_online(job)
        after = train(job, begun.state, begun.save)
        return setup.finish(config, journal, model, ledger=after.ledger, **parcels(sampler))


def _policy(
    config: OnlineConfig, algorithm: PolicyGradient | OnlinePreference, found: Path | None, world: World, given: GivenModel | None
) -> LanguageModel:
    """The model that trains, with a value head where it is its own critic."""
    shared = algorithm.needs_critic and config.critic_shared
    model = loading.load_model(config.model, config.run, found, world, shared, given)
    check_following(config, model.adapter is not None)
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


def _critic(config: OnlineConfig, model: LanguageModel, found: Path | None, world: World) -> ValueModel:
    critic = loading.load_critic(config, model, found, world)
    return ValueModel(
        critic, setup.optimizer_of(critic, config, world), config.critic_learning_rate or config.optim.learning_rate
    )
