"""Online runs in memory: no folder, no processes."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from inline_scorer import InlineScorer
from prepared import prepared
from tiny_rewards import early_letters

from psigrad.config import OnlineConfig, Optim, Run
from psigrad.config.algorithms import resolve_online
from psigrad.language.data.dataset_rows import Row
from psigrad.language.models import tiny
from psigrad.language.models.language_model import LanguageModel, prepare
from psigrad.language.rewards import resolve as reward
from psigrad.language.rollout.samplers.embedded import EmbeddedSampler
from psigrad.language.rollout.types import Prompt, SamplingParams
from psigrad.language.training.online.online_run import Online
from psigrad.language.training.update import Optimizer
from psigrad.objective import PolicyGradient
from psigrad.processes.parallel.world import ALONE
from psigrad.runs.journal import Clock


class Silent:
    """A journal that keeps its rows in memory."""

    world = ALONE

    def __init__(self):
        self.rows, self.lines = [], []

    def metrics(self, step, figures):
        self.rows.append({"step": step, **figures})

    def timings(self, step, clock, tokens):
        pass

    def rollouts(self, rows):
        self.lines += rows

    def stop_requested(self):
        return False

    def interruptible(self):
        return nullcontext()

    def disk_low(self):
        return ""

    def clock(self):
        return Clock()


def make(tokenizer, algorithm="grpo", *, function=early_letters, seed=3, steps=4, **settings) -> Online:
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
    return Online(
        config=config,
        algorithm=method,
        model=model,
        reference=reference,
        sampler=EmbeddedSampler(model),
        scorer=InlineScorer([reward(function)]),
        optimizer=Optimizer(model.trainable(), config.optim),
        prompts=prompts,
        params=SamplingParams(max_tokens=6),
        total_steps=steps,
        journal=Silent(),
    )
