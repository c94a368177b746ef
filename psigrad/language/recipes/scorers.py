"""Who scores completions: reward functions in worker processes, reward models, or both; and held-out evaluation by them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from psigrad.config import Evaluation, Placement, Reward
from psigrad.config.language import EpisodeSettings, Scored
from psigrad.errors import UserError
from psigrad.language.data.dataset_rows import Row
from psigrad.language.loading.load_model import load_trained_scalar_model
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.recipes.fleets import fleet
from psigrad.language.recipes.row_limits import encode_prompts
from psigrad.language.rewards import RewardPool, RewardSpec, Scorer, resolve
from psigrad.language.rewards.builtin import Length, SoftOverlong
from psigrad.language.rewards.code import Code
from psigrad.language.rewards.pool import unique
from psigrad.language.rollout.episodes.episodes import Episodes
from psigrad.language.rollout.samplers.samplers import sampling_params
from psigrad.language.training.evaluator import Evaluator
from psigrad.language.training.ray_scorer import RayScorer, RewardWorker
from psigrad.language.training.scoring import Mixture, ModelScorer
from psigrad.processes.parallel.world import ALONE, World
from psigrad.processes.sandbox import tier_of_this_machine
from psigrad.runs.journal import Journal


@dataclass(frozen=True)
class Judge:
    """A scorer (None: the environment alone rewards), the name of what it measures, which is that of its only part or "reward",
    and the weight of each part by name.
    """

    scorer: Scorer | None
    metric: str
    weights: Mapping[str, float]


@contextlib.contextmanager
def judge_for(
    config: Scored,
    tokenizer: PreTrainedTokenizerBase | None,
    functions: Sequence[Reward] | None = None,
    journal: Journal | None = None,
) -> Iterator[Judge]:
    """The scorer that `config.reward` and `config.reward_model` describe, or one of these `functions` alone.

    `config.reward_weights` weigh the reward functions first, then the reward models. `tokenizer` is the policy's; None where
    only text is known of it.
    """
    paths, weights = (config.reward_model, config.reward_weights) if functions is None else ((), ())
    functions = config.reward if functions is None else functions  # (): nobody scores
    count = len(functions) + len(paths)
    if weights and len(weights) != count:
        raise UserError(f"There are {len(weights)} reward_weights for {count} reward functions and models; give one for each.")
    weights = tuple(weights) or (1.0,) * count
    with contextlib.ExitStack() as stack:
        scorers: list[Scorer] = []
        names: list[str] = []
        if functions:
            specs = [_for_length(resolve(function), function, config.sampling.max_completion_length) for function in functions]
            if journal is not None and any(_unsafe(spec.function) for spec in specs):
                text = "Programs that the model writes run without a sandbox, with your rights: allow_unsafe_code is set."
                journal.tell("unsafe_code", text)
            names += [spec.name for spec in unique(specs)]
            make = partial(_pool, functions, weights[: len(functions)], config)
            placement: Placement | None = getattr(config, "placement", None)
            if placement is not None and placement.scorers and journal is not None and journal.world.rank == 0:
                wants: Any = {"count": placement.scorers, "cpus": placement.scorer_cpus}
                workers = fleet(placement, journal, RewardWorker, (make,), name="scorer", **wants)
                scorers.append(RayScorer(stack.enter_context(workers)))
            else:
                scorers.append(stack.enter_context(make()))
        scorers += [_reward_model(path, config, tokenizer, names) for path in paths]
        plays = isinstance(config, EpisodeSettings) and bool(config.environment)
        metric = names[0] if len(names) == 1 and not plays else "reward"
        scorer: Scorer | None = scorers[0] if scorers else None
        if scorers and (len(scorers) > 1 or not functions):
            scorer = Mixture(scorers, [*([1.0] if functions else []), *weights[len(functions) :]])
        yield Judge(scorer, metric, dict(zip(names, weights, strict=True)))


def _pool(functions: Sequence[Reward], weights: Sequence[float], config: Scored) -> RewardPool:
    return RewardPool(
        [_for_length(resolve(function), function, config.sampling.max_completion_length) for function in functions],
        weights=weights,
        timeout=config.reward_timeout,
        workers=config.reward_workers,
        memory_gb=config.worker_memory_gb,
        variables=config.worker_env,
    )


def _unsafe(function: Any) -> bool:
    """Whether a reward runs the model's programs with nothing around them."""
    return (
        isinstance(function, Code)
        and function.allow_unsafe_code
        and not function.service
        and tier_of_this_machine().name == "none"
    )


def _reward_model(path: str, config: Scored, tokenizer: PreTrainedTokenizerBase | None, names: list[str]) -> ModelScorer:
    """A reward model that never learns, under a name that no other has."""
    model = load_trained_scalar_model(replace(config.model, path=path, revision=""), config.run)
    model.network.requires_grad_(False)
    name = base = Path(path).name if Path(path).name not in ("model", "") else Path(path).parent.name or "reward_model"
    for count in range(2, len(names) + 2):
        if name in names:
            name = f"{base}_{count}"
    names.append(name)
    own = model.tokenizer
    same = tokenizer is not None and own.get_vocab() == tokenizer.get_vocab() and own.chat_template == tokenizer.chat_template
    return ModelScorer(name, model, same, config.micro_batch_tokens)


def _for_length(spec: RewardSpec, given: Any, tokens: int) -> RewardSpec:
    """A length reward that was given by its bare name counts against the run's own max_completion_length."""
    match spec.function if isinstance(given, str) else None:
        case SoftOverlong():
            return replace(spec, function=SoftOverlong(tokens, max(1, tokens // 4)))
        case Length(penalty=penalty):
            return replace(spec, function=Length(tokens, penalty))
    return spec


def completion_room(config: Scored, episodes: Episodes | None) -> int:
    """Tokens that a prompt must leave free: a whole completion's; an episode ends by itself where its room does."""
    return config.sampling.max_completion_length if episodes is None else 1


def evaluator_for(
    settings: Evaluation,
    config: Scored,
    model: LanguageModel,
    judge: Judge,
    rows: Sequence[Row],
    reference: LanguageModel | None,
    episodes: Episodes | None = None,
    size: int | None = None,
    world: World = ALONE,
) -> Evaluator:
    """Held-out evaluation by what the judge measures."""
    return Evaluator(
        prompts=encode_prompts(rows, model, config.data, completion_room(config, episodes)),
        scorer=judge.scorer,
        metric=judge.metric,
        params=sampling_params(config.sampling, model, rows, settings.eval_temperature),
        seed=config.run.seed,
        num_generations=size or settings.num_generations_eval,
        reference=reference if settings.eval_kl else None,
        micro_batch_tokens=config.micro_batch_tokens,
        episodes=episodes,
        world=world,
    )
