"""Online reinforcement learning from settings to a model on disk."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from psigrad import objective
from psigrad.config import OnlineConfig
from psigrad.errors import UserError
from psigrad.models.language_model import LanguageModel
from psigrad.objective.aggregate import fixed_length
from psigrad.recipes import setup
from psigrad.recipes.setup import Result
from psigrad.rewards import resolve
from psigrad.training import loop
from psigrad.training.loop import Online
from psigrad.training.state import State


def run(config: OnlineConfig) -> Result:
    """Train `config.model` on the prompts of `config.data` against `config.reward` by `config.algorithm`.

    Goes on from the newest checkpoint of the run folder where there is one. Raises `UserError` on mistakes of the user,
    `ValueError` where the algorithm's parts do not fit.
    """
    algorithm = method(config)
    check(config, algorithm)
    with setup.open_run(config, "online") as journal, contextlib.ExitStack() as stack:
        found = setup.newest_checkpoint(journal)
        model = setup.load_model(config.model, config.run, found)
        rows, held = setup.read_rows(config, "prompt-only")
        wants_reference = algorithm.needs_reference or (held and config.evaluation.eval_kl)
        reference = _reference(config, model, found) if wants_reference else None
        scorer = stack.enter_context(setup.reward_pool(config.reward, config, config.reward_weights))
        evaluator = None
        if held:
            metric = config.evaluation.metric
            judge = stack.enter_context(setup.reward_pool([metric], config)) if metric else scorer
            evaluator = setup.evaluator_for(config.evaluation, config, model, judge, held, reference)
        prompts = setup.prompts_of(rows, model, config.data.max_prompt_length)
        sampler = setup.sampler_for(config.sampling, model)
        begun = setup.begin(config, journal, model, rows, found, State(algorithm=algorithm.initial_state()))
        job = Online(
            config=config,
            algorithm=algorithm,
            model=model,
            reference=reference,
            sampler=sampler,
            scorer=scorer,
            optimizer=begun.optimizer,
            prompts=prompts,
            params=setup.sampling_params(config.sampling, model, rows),
            total_steps=config.run.max_steps or math.ceil(len(prompts) / config.prompts_per_step),
            journal=journal,
            exact_sampling=not model.why_padded and config.model.dtype == "float32",
            evaluator=evaluator,
        )
        loop.train(job, begun.state, begun.save)
        return setup.finish(config, journal, model)


def method(config: OnlineConfig) -> objective.PolicyGradient:
    """The algorithm asked for. A preset that divides by a constant length divides by max_completion_length, as in TRL."""
    algorithm = objective.resolve(config.algorithm)
    spec = config.algorithm
    named = isinstance(spec, str) or (isinstance(spec, Mapping) and "aggregate" not in spec)
    if named and isinstance(algorithm.aggregate, fixed_length):
        return replace(algorithm, aggregate=fixed_length(config.sampling.max_completion_length))
    return algorithm


def check(config: OnlineConfig, algorithm: objective.PolicyGradient) -> None:
    """Refuse settings that cannot work before anything is loaded."""
    if not config.reward:
        raise UserError("No reward was given; name a built-in or module:function with --reward (reward).")
    for function in (*config.reward, *((config.evaluation.metric,) if config.evaluation.metric else ())):
        resolve(function)
    setup.check_sampling(config.sampling)
    if algorithm.needs_critic:
        raise UserError(
            f"The algorithm {algorithm.name!r} needs a critic, which online training of language models does not have yet."
        )
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


def _reference(config: OnlineConfig, model: LanguageModel, found: Path | None) -> LanguageModel:
    """The model that training started from: under LoRA the model itself without its adapter, else a copy that never learns."""
    if model.adapter is not None:
        return model
    return model.frozen_copy() if found is None else setup.load_model(config.model, config.run, None).frozen_copy()
