"""Online runs in memory: no folder, no processes."""

from __future__ import annotations

import weakref
from dataclasses import replace

import torch
from inline_scorer import InlineScorer
from prepared import prepared
from tiny_rewards import early_letters

from psigrad.config import OnlineConfig, Optim, Run
from psigrad.config.algorithms import resolve_online
from psigrad.language.data.dataset_rows import Row
from psigrad.language.data.reward_view import reward_view
from psigrad.language.episodes.players import collector_of
from psigrad.language.models import tiny
from psigrad.language.models.language_model import LanguageModel, prepare
from psigrad.language.recipes.online import annotators_of
from psigrad.language.rewards import resolve as reward
from psigrad.language.rollout.collectors import ScoredRollout
from psigrad.language.rollout.samplers.embedded import EmbeddedSampler
from psigrad.language.rollout.types import Completion, Prompt, SamplingParams, Trajectory
from psigrad.language.training.online import online_rl
from psigrad.language.training.online.online_run import OnlineRun
from psigrad.objective import PolicyGradient
from psigrad.optim import Optimizer


class Log:
    """The rows of metrics and of completions that a run's steps have returned."""

    def __init__(self):
        self.rows, self.lines, self.notes = [], [], {}


_LOGS = weakref.WeakKeyDictionary()


def log_of(run) -> Log:
    """The log of a run and of all variants that share its optimiser."""
    return _LOGS.setdefault(run.optimizer, Log())


def advance(run, state, step=online_rl.step):
    """Take a step, keep what it returned in the run's log, and return the state."""
    outcome, log = step(run, state), log_of(run)
    log.rows.append({"step": outcome.state.step, **outcome.metrics})
    log.lines += outcome.rows
    log.notes |= outcome.notes
    return outcome.state


def rollout_of(sampler, model, scorer, player=None):
    """A rollout by this sampler, of single completions or of what a player makes."""
    collector = collector_of(sampler, model, player, needs_reward=scorer is None)
    return ScoredRollout(collector, scorer, reward_view(model.tokenizer, collector.plays))


def annotate(run, batch, step=0, cache=None):
    """The batch with the columns of all annotators."""
    for annotator in run.annotators:
        batch = annotator.columns(run, batch, step, cache)
    return batch


def with_sampler(run, sampler):
    """The run with another sampler."""
    return replace(run, rollout=replace(run.rollout, collector=replace(run.rollout.collector, sampler=sampler)))


def with_scorer(run, scorer):
    """The run with another scorer."""
    return replace(run, rollout=replace(run.rollout, scorer=scorer))


def with_player(run, player):
    """The run whose completions are what a player makes."""
    return replace(run, rollout=rollout_of(run.sampler, run.model, run.rollout.scorer, player))


def with_reference(run, reference):
    """The run with another reference, or none."""
    return replace(run, annotators=annotators_of(run.algorithm, reference))


def make(tokenizer, algorithm="grpo", *, function=early_letters, seed=3, steps=4, **settings) -> OnlineRun:
    """A run of a 30k-parameter model on eight prompts; `lora`, `dtype` and `device` are the model's, all else are settings."""
    lora, dtype = settings.pop("lora", None), settings.pop("dtype", torch.float32)
    device, max_length = settings.pop("device", "cpu"), settings.pop("max_length", 64)
    settings = {"prompts_per_step": 4, "num_generations": 4, "optim": Optim(learning_rate=1e-2), **settings}
    config = OnlineConfig(algorithm=algorithm, run=Run(seed=seed, max_steps=steps, progress=False), **settings)

    def fresh() -> LanguageModel:
        hf = tiny.model("qwen3", len(tokenizer), hidden=32, layers=1, heads=2, max_length=max_length).to(device, dtype)
        torch.manual_seed(0)
        return prepare(hf, tokenizer, lora=lora)

    model = fresh() if lora else prepared(("in memory", tokenizer, dtype, device, max_length), fresh)
    texts = [f"say {c}:" for c in "abcdefgh"]
    prompts = [Prompt(i, tuple(tokenizer(t).input_ids), Row("x", prompt=t)) for i, t in enumerate(texts)]
    method = resolve_online(algorithm)
    if method.needs_critic:
        model.add_value_head()
    reference = (model if lora else model.frozen_copy()) if method.needs_reference else None
    if isinstance(method, PolicyGradient) and not method.needs_reward:  # it learns from a teacher
        other = tiny.model("qwen3", len(tokenizer), hidden=32, layers=1, heads=2, max_length=64, seed=7)
        reference = prepare(other.to(device, dtype), tokenizer).frozen_copy()
    return OnlineRun(
        config=config,
        algorithm=method,
        model=model,
        rollout=rollout_of(EmbeddedSampler(model), model, InlineScorer([reward(function)])),
        annotators=annotators_of(method, reference),
        optimizer=Optimizer(model.trainable(), config.optim),
        prompts=prompts,
        params=SamplingParams(max_tokens=6),
        total_steps=steps,
    )


def trajectory(reward: float | None = 1.0, status: str = "scored", **parts: float | None) -> Trajectory:
    """A completion of one token and its reward."""
    return Trajectory(0, 0, (1,), Completion((2,), (0.0,), (0.0,), "stop", 0), 0, reward=reward, status=status, parts=parts)
