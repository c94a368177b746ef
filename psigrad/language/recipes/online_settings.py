"""Checks of the settings of an online run, and settings that follow from others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from psigrad import paths
from psigrad.config import OnlineConfig
from psigrad.config.algorithms import resolve_online
from psigrad.config.part_trial import try_parts
from psigrad.errors import UserError, kind_of
from psigrad.language.loading.samplers import check_sampling
from psigrad.language.loading.teacher import Teacher, is_address
from psigrad.language.models.experts import replay_routers
from psigrad.language.models.free_memory import ADAPTER, WHOLE, share_for_activations
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.recipes.conversation import count_seats
from psigrad.language.rollout.samplers.embedded import EmbeddedSampler
from psigrad.language.rollout.types import Sampler
from psigrad.language.training.online.online_run import is_exact_sampler
from psigrad.objective import PolicyGradient
from psigrad.objective.explain import label
from psigrad.objective.parts.aggregate import fixed_length
from psigrad.objective.parts.ratio import truncated_importance
from psigrad.objective.preferences.preference_loss import OnlinePreference
from psigrad.records.run_folder import settings_before
from psigrad.runs.journal import Journal


def method(config: OnlineConfig) -> PolicyGradient | OnlinePreference:
    """Return the algorithm of the settings.

    If the settings give no `n` for a `fixed_length` aggregate, n is max_completion_length, as in TRL.
    """
    algorithm, spec = resolve_online(config.algorithm), config.algorithm
    if isinstance(algorithm, OnlinePreference):
        return algorithm
    named = isinstance(spec, str) or (isinstance(spec, Mapping) and spec.get("aggregate", "fixed_length") == "fixed_length")
    if named and isinstance(algorithm.aggregate, fixed_length):
        return replace(algorithm, aggregate=fixed_length(config.sampling.max_completion_length))
    return algorithm


def set_activation_memory(config: OnlineConfig) -> OnlineConfig:
    """Return the settings with a value for `keep_activations_gb`.

    If it is not set, a resumed run keeps its earlier value, and a new run chooses it by the free memory.
    """
    if config.keep_activations_gb is not None:
        return config
    before = settings_before(paths.absolute(config.run.output_dir)) if config.run.output_dir else None
    known = (before or {}).get("keep_activations_gb")
    if known is None:
        known = share_for_activations(config.model.path, ADAPTER if config.model.lora_rank else WHOLE)
    return replace(config, keep_activations_gb=known)


def correct(
    algorithm: PolicyGradient | OnlinePreference, config: OnlineConfig, sampler: Sampler, model: LanguageModel, journal: Journal
) -> PolicyGradient | OnlinePreference:
    """Return the algorithm, with truncated importance weights if they are needed and the settings do not set a correction.

    The weights are needed if the sampler's log-probs may differ from the trainer's, or if `lag` is above 0.
    """
    _log_unused(config, algorithm, journal)
    stated = not isinstance(config.algorithm, str | Mapping) or (
        isinstance(config.algorithm, Mapping) and "correction" in config.algorithm
    )
    if not isinstance(algorithm, PolicyGradient) or algorithm.correction is not None or algorithm.corrects:
        return algorithm
    if stated and config.lag:
        raise UserError(
            f"lag is {config.lag}, but the algorithm does not correct for completions sampled with older weights; set "
            "algorithm.correction to truncated_importance, or use lag=0."
        )
    if stated or (is_exact_sampler(sampler, model) and not config.lag):
        return algorithm
    part = truncated_importance()
    why = f"Completions are {config.lag} steps old" if config.lag else "The sampler may round differently from the trainer"
    text = (
        f"{why}; {label(part)} corrects for this, unless algorithm.correction is set. The figure "
        "sampling/importance_sampling_ratio/mean is the mean weight of the correction; it is 1 if there is nothing to correct."
    )
    journal.log("correction", text, correction=label(part))
    return replace(algorithm, correction=part)


def check(config: OnlineConfig, algorithm: PolicyGradient | OnlinePreference) -> None:
    """Raise `UserError` for settings that cannot work, before anything is loaded."""
    needs_reward = isinstance(algorithm, OnlinePreference) or algorithm.needs_reward
    if needs_reward and not (config.reward or config.reward_model or config.environment or config.asks):
        raise UserError(
            "No reward was given; name a built-in reward or a module:function with --reward, or a reward model with "
            "--reward-model."
        )
    if isinstance(algorithm, PolicyGradient):
        try_parts(algorithm)
    if config.asks and isinstance(algorithm, OnlinePreference):
        raise UserError(
            f"{algorithm.name or 'The algorithm'} compares two completions of one prompt, but an agent writes its own "
            "prompts; choose a policy gradient, such as grpo."
        )
    check_sampling(config.sampling)
    _check_seats(config, algorithm)
    if config.router_replay:
        _check_replay(config, algorithm)
    _check_reference(config, algorithm, needs_reward)
    _check_critic(config, algorithm)
    if config.num_generations < algorithm.min_group_size:
        raise UserError(
            f"num_generations is {config.num_generations}, but {algorithm.name or 'the algorithm'} compares completions of one "
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
            f"num_minibatches is {config.num_minibatches}, but prompts_per_step is {config.prompts_per_step}, and a minibatch "
            "takes all completions of a prompt; lower num_minibatches, or raise prompts_per_step."
        )


def _check_seats(config: OnlineConfig, algorithm: PolicyGradient | OnlinePreference) -> None:
    if isinstance(algorithm, OnlinePreference) and count_seats(config) > 1:
        raise UserError(
            f"{algorithm.name or 'The algorithm'} compares two completions of one prompt, but the players of a game read "
            "different prompts; choose a policy gradient, such as rloo."
        )
    if not config.past_opponents:
        return
    reasons = {
        "an environment with one seat": count_seats(config) == 1,
        "LoRA (lora_rank above 0)": config.model.lora_rank > 0,
        f"sampling.sampler={config.sampling.sampler} (use embedded)": config.sampling.sampler != "embedded",
        "placement.strategy=fsdp": config.placement.strategy == "fsdp",  # samples from a copy
        "placement.cluster": bool(config.placement.cluster),
        "lag above 0": config.lag > 0,  # the earlier policies would be older than their recorded step
    }
    if why := next((why for why, holds in reasons.items() if holds), ""):
        raise UserError(f"past_opponents does not work with {why}; change this, or remove past_opponents.")


def _check_replay(config: OnlineConfig, algorithm: PolicyGradient | OnlinePreference) -> None:
    reasons = {
        f"{algorithm.name}, which trains on pairs": isinstance(algorithm, OnlinePreference),
        "environments, tools or agents": config.plays,  # their completions are not sampled in one piece
        f"sampling.sampler={config.sampling.sampler}": config.sampling.sampler != "embedded",  # records no experts
        "placement.strategy=fsdp": config.placement.strategy == "fsdp",  # samples from a copy
        "placement.cluster": bool(config.placement.cluster),
    }
    if why := next((why for why, holds in reasons.items() if holds), ""):
        raise UserError(f"router_replay does not work with {why}; remove router_replay.")


def record_experts(config: OnlineConfig, model: LanguageModel, sampler: Sampler) -> Sampler:
    """Return the sampler. With `router_replay`, make it record each token's experts, which training then uses again."""
    if not config.router_replay:
        return sampler
    if not isinstance(sampler, EmbeddedSampler):
        raise UserError(f"router_replay needs the embedded sampler, but this run has {kind_of(sampler)}; remove router_replay.")
    replay_routers(model)
    return sampler


def _log_unused(config: OnlineConfig, algorithm: PolicyGradient | OnlinePreference, journal: Journal) -> None:
    """Log the settings that were set but do not affect this algorithm."""
    needs = {}  # `fields.idle` checks settings with a `Needs` note
    if not (isinstance(algorithm, PolicyGradient) and algorithm.dynamic_sampling):
        needs = dict.fromkeys(("max_refills", "filter_metric"), "dynamic_sampling")
    if not (algorithm.needs_reference or config.evaluation.eval_kl):
        needs |= dict.fromkeys(("reference_dtype", "ref_model_sync_steps"), "a KL term (algorithm.kl)")
    defaults = OnlineConfig()
    if unused := [name for name in needs if getattr(config, name) != getattr(defaults, name)]:
        texts = [f"{name} is {getattr(config, name)!r} and has no effect without {needs[name]}; remove it." for name in unused]
        journal.log("no_effect", " ".join(texts), settings=unused)


def _check_reference(config: OnlineConfig, algorithm: PolicyGradient | OnlinePreference, needs_reward: bool) -> None:
    name = algorithm.name or "the algorithm"
    if config.reference and not (algorithm.needs_reference or config.evaluation.eval_kl):
        raise UserError(f"The settings name a reference model, but {name} has no KL term; set algorithm.kl, or remove reference.")
    if not needs_reward and not (config.reference or config.teacher_prompt):
        raise UserError(
            f"{name} learns from a teacher, but none was given; name a model with --reference, or the column of the "
            "teacher's prompts with --teacher-prompt."
        )
    if config.teacher_prompt and (isinstance(algorithm, OnlinePreference) or not algorithm.needs_reference):
        raise UserError(f"teacher_prompt is given, but {name} has no KL term; set algorithm.kl, or remove teacher_prompt.")
    if config.teacher_prompt and config.plays:
        raise UserError("teacher_prompt needs single-turn completions; remove it, or remove environment, tools and agent.")
    if (config.agent or config.agent_command) and config.placement.environment_actors:
        raise UserError("placement.environment_actors are for environments and tools; for agents set agent_workers.")
    served, plain = ("reference_model", "reference_tokenizer", "reference_top_k"), OnlineConfig()
    away = [setting for setting in served if getattr(config, setting) != getattr(plain, setting)]
    if away and not is_address(config.reference):
        raise UserError(
            f"{' and '.join(away)} {'is' if len(away) == 1 else 'are'} for a reference server, but reference is "
            f"{config.reference!r}; give the server's address, such as http://localhost:8000/v1, or remove {' and '.join(away)}."
        )
    if is_address(config.reference) and config.sampling.temperature != 1:
        raise UserError(
            f"temperature is {config.sampling.temperature:g}, but the server {config.reference} returns log-probs at "
            "temperature 1; set temperature to 1."
        )
    check_reference_sync(config, config.model.lora_rank > 0)
    if config.ref_model_sync_steps and config.reference:
        raise UserError(
            "ref_model_sync_steps lets the reference follow the policy, but the settings name another model as reference; "
            "remove ref_model_sync_steps or reference."
        )
    if config.reference_dtype and config.model.lora_rank and not config.reference:
        raise UserError("With LoRA the reference is the model without its adapter, so reference_dtype has no effect; remove it.")


def check_teacher(reference: object, config: OnlineConfig, algorithm: PolicyGradient | OnlinePreference) -> None:
    """Raise `UserError` if these settings do not work with this reference."""
    spans = isinstance(algorithm, PolicyGradient) and algorithm.kl is not None and algorithm.kl.estimator == "span"
    if not isinstance(reference, Teacher):
        if spans and reference is not None:
            raise UserError(
                "algorithm.kl.estimator is span, which is for a reference with another tokenizer, but this reference has the "
                "model's tokenizer; set algorithm.kl.estimator to exact or k1+."
            )
        return
    if isinstance(algorithm, OnlinePreference) or config.plays or config.evaluation.eval_kl:
        what = "eval_kl" if config.evaluation.eval_kl else "an environment or agent" if config.plays else "a preference method"
        raise UserError(
            f"The reference {reference.name} is a server, or its tokenizer differs from the model's, but {what} needs a local "
            "reference with the model's tokenizer; give one."
        )
    reference.check(algorithm)


def check_reference_sync(config: OnlineConfig, adapter: bool) -> None:
    """Raise `UserError` if `ref_model_sync_steps` is set with an `adapter`. Only full fine-tuning supports the setting."""
    if config.ref_model_sync_steps and adapter:
        raise UserError(
            "ref_model_sync_steps moves the reference's weights, but with LoRA the reference is the model without its adapter; "
            "train without LoRA (lora_rank 0), or remove ref_model_sync_steps."
        )


def _check_critic(config: OnlineConfig, algorithm: PolicyGradient | OnlinePreference) -> None:
    own = ("critic", "critic_shared", "critic_learning_rate", "critic_warmup_steps")
    if (asked := [name for name in own if getattr(config, name)]) and not algorithm.needs_critic:
        raise UserError(
            f"The settings configure a critic, but {algorithm.name or 'the algorithm'} has none; remove {', '.join(asked)}."
        )
    if config.critic_shared and (config.critic or config.critic_learning_rate):
        raise UserError(
            "critic_shared puts the critic on the policy's backbone, so critic and critic_learning_rate have no effect; remove "
            "them, or set critic_shared to false."
        )
    if config.critic_shared and config.critic_warmup_steps:
        raise UserError(
            "critic_warmup_steps trains the critic before the policy, but with critic_shared the two are one model; remove "
            "critic_warmup_steps or critic_shared."
        )
    adapts = isinstance(algorithm, PolicyGradient) and algorithm.adapts
    if adapts and config.num_iterations * config.num_minibatches == 1:
        raise UserError(
            f"{algorithm.name or 'The algorithm'} penalises how far the policy moves while it trains on one batch, so a batch "
            "needs several optimiser steps; set num_iterations or num_minibatches above 1."
        )
