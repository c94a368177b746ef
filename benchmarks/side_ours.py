"""psigrad's side: the library's own loops on the workload, without a run folder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from workloads import Workload, fixed_batch, reward

from psigrad.config import Evaluation, OnlineConfig, Optim, PreferenceConfig, RewardConfig, Run, SFTConfig
from psigrad.data import pairs
from psigrad.data.rows import Row, validate
from psigrad.data.templates import example
from psigrad.models import language_model, scalar_model
from psigrad.models.packing import Groups
from psigrad.objective import Batch, resolve, terminal
from psigrad.objective.preference_catalog import DPO
from psigrad.objective.reward_model import BradleyTerry
from psigrad.recipes.setup import keep_freed_memory
from psigrad.rewards import InlineScorer
from psigrad.rewards import resolve as named
from psigrad.rollout.embedded import EmbeddedSampler
from psigrad.rollout.types import SamplingParams
from psigrad.training import loop, offline
from psigrad.training.collect import Prompt
from psigrad.training.lessons.preference import Preferring, reference_logps
from psigrad.training.lessons.reward import Comparing
from psigrad.training.lessons.supervised import Supervised
from psigrad.training.online import Online
from psigrad.training.state import State
from psigrad.training.update import Optimizer

RATE = Optim(learning_rate=1e-6)


class Journal:
    """Keeps the last step's seconds."""

    phases: dict[str, float]

    def metrics(self, step: int, figures: Any) -> None:
        """Not kept."""

    def rollouts(self, rows: Any) -> None:
        """Not kept."""

    def timings(self, step: int, clock: Any, tokens: int) -> None:
        self.phases = {name.removeprefix("time/"): seconds for name, seconds in clock.phases.items()}
        self.tokens = tokens

    def stop_requested(self) -> bool:
        """Never."""
        return False


def build(work: Workload, folder: Path, dtype: str):
    """(step, check) of a workload."""
    keep_freed_memory()  # as every run of the library does
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    path = str(folder / "model")
    return _online(work, path, rows, dtype) if work.kind == "online" else _offline(work, path, rows, dtype)


def _online(work: Workload, path: str, rows: list[dict[str, Any]], dtype: str):
    model = language_model.load(path, dtype=dtype)
    spec: dict[str, Any] = {"preset": "grpo", "aggregate": "token_mean"}
    algorithm = resolve(spec | ({"kl": {"coefficient": work.beta}} if work.beta else {"kl": None}))
    config = OnlineConfig(
        optim=RATE,
        run=Run(progress=False),
        prompts_per_step=work.prompts,
        num_generations=work.generations,
        num_iterations=work.iterations,
        max_logp_difference=10.0,
    )
    prompts = [Prompt(i, tuple(model.tokenizer(r["prompt"]).input_ids), Row("x", prompt=r["prompt"])) for i, r in enumerate(rows)]
    run = Online(
        config=config,
        algorithm=algorithm,
        model=model,
        reference=model.frozen_copy() if work.beta else None,
        sampler=EmbeddedSampler(model),
        scorer=InlineScorer([named(reward)]),
        optimizer=Optimizer(model.trainable(), RATE),
        prompts=prompts,
        params=SamplingParams(max_tokens=work.completion_tokens),
        total_steps=100000,
        journal=Journal(),
        exact_sampling=dtype == "float32",
    )
    state = [State(algorithm=algorithm.initial_state())]

    def step():
        state[0], _ = loop.step(run, state[0])
        return run.journal.tokens, run.journal.phases

    return step, lambda: _check(work, model)


def _check(work: Workload, model) -> dict[str, float]:
    """Loss and gradient norm of GRPO (token mean, no KL) on the fixed batch, with old log-probs a little off."""
    given = fixed_batch(work)
    evaluation = model.evaluate(Groups(given["prompts"], given["completions"]))
    lengths = torch.tensor([len(c) for group in given["completions"] for c in group])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    batch = Batch(mask, terminal(torch.zeros(len(lengths)), mask), evaluation.logp.detach() - 0.05, torch.zeros(len(lengths)))
    algorithm = resolve({"preset": "grpo", "kl": None, "aggregate": "token_mean"})
    prepared = algorithm.prepare(batch, {})
    advantage = torch.tensor(given["advantages"])[:, None].expand(mask.shape)
    prepared = replace(prepared, advantage=advantage, needs_gradient=torch.ones(len(lengths), dtype=torch.bool))
    loss = algorithm.loss(prepared, evaluation, algorithm.totals(prepared), {})
    loss.value.backward()
    norm = float(torch.nn.utils.get_total_norm([p.grad for p in model.trainable().values()]))
    for p in model.trainable().values():
        p.grad = None
    return {"loss": float(loss.value.detach()), "gradient": norm}


def _offline(work: Workload, path: str, rows: list[dict[str, Any]], dtype: str):
    common = {"optim": RATE, "run": Run(progress=False), "evaluation": Evaluation(eval_prompts=0), "batch_size": 16}
    if work.kind == "reward":
        torch.manual_seed(0)
        model = scalar_model.load(path, dtype=dtype)
        made = [pairs.pair(model.tokenizer, validate(row, "preference", "x")) for row in rows]
        lesson, config = Comparing(model, BradleyTerry(), made), RewardConfig(**common)
    else:
        model = language_model.load(path, dtype=dtype)
        if work.kind == "dpo":
            made = [pairs.pair(model.tokenizer, validate(row, "preference", "x")) for row in rows]
            known = reference_logps(model, [p.prompt for p in made], [[p.chosen, p.rejected] for p in made], 16384)
            lesson, config = Preferring(model, DPO, made, known), PreferenceConfig(**common)
        else:
            texts = [example(model.tokenizer, validate(row, "prompt-completion", "x")) for row in rows]
            lesson, config = Supervised(model, texts), SFTConfig(**common)
    optimizer = Optimizer(model.trainable(), RATE)
    run = offline.Offline(config, lesson, None, optimizer, 100000, Journal())
    state = [State()]

    def step():
        state[0], _ = offline.step(run, state[0])
        return run.journal.tokens, run.journal.phases

    def check():
        total = 0.0
        for share in lesson.shares(range(16), 16384):
            loss = share()
            loss.value.backward()
            total += float(loss.value.detach())
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in model.trainable().values() if p.grad is not None]))
        for p in model.trainable().values():
            p.grad = None
        return {"loss": total, "gradient": norm}

    return step, check
