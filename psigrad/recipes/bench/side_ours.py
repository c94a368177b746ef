"""psigrad's side: the library's own loops on the workload, without a run folder."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from psigrad.config import Evaluation, OnlineConfig, Optim, PreferenceConfig, RewardConfig, Run, SFTConfig
from psigrad.data import pairs
from psigrad.data.rows import Row, validate
from psigrad.data.templates import example
from psigrad.models import language_model, scalar_model
from psigrad.models.language_model import LanguageModel
from psigrad.models.packing import Groups
from psigrad.models.scalar_model import ScalarModel
from psigrad.objective import Batch, PolicyGradient, resolve, terminal
from psigrad.objective.preference_catalog import DPO
from psigrad.objective.reward_model import BradleyTerry
from psigrad.recipes.bench.phases import Phases
from psigrad.recipes.bench.workload import Workload, fixed_batch, read, reward
from psigrad.recipes.setup import keep_freed_memory
from psigrad.rewards import InlineScorer
from psigrad.rewards import resolve as named
from psigrad.rollout.embedded import EmbeddedSampler
from psigrad.rollout.types import SamplingParams
from psigrad.training import learn, loop, offline
from psigrad.training.collect import Prompt
from psigrad.training.lessons import Lesson
from psigrad.training.lessons.preference import Preferring, reference_logps
from psigrad.training.lessons.reward import Comparing
from psigrad.training.lessons.supervised import Supervised
from psigrad.training.online import Critic, Online
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


Step = Callable[[], tuple[int, dict[str, float]]]
Check = Callable[[], dict[str, float]]


def build(folder: Path, dtype: str, device: str) -> tuple[Step, Check]:
    """(step, check) of the workload in `folder`."""
    keep_freed_memory()  # as every run of the library does
    work, rows = read(folder)
    path = str(folder / "model")
    return _online(work, path, rows, dtype, device) if work.online else _offline(work, path, rows, dtype, device)


def _online(work: Workload, path: str, rows: list[dict[str, Any]], dtype: str, device: str) -> tuple[Step, Check]:
    model = language_model.load(path, dtype=dtype, device=device)
    algorithm = _algorithm(work.kind, work.beta)
    config = OnlineConfig(
        optim=RATE,
        run=Run(progress=False),
        prompts_per_step=work.prompts,
        num_generations=work.generations,
        num_iterations=work.iterations,
        max_logp_difference=10.0,
    )
    critic = None
    if algorithm.needs_critic:
        values = scalar_model.load(path, dtype=dtype, device=device, fresh_head="zero")
        critic = Critic(values, Optimizer(values.trainable(), RATE), RATE.learning_rate)
    prompts = [Prompt(i, tuple(model.tokenizer(r["prompt"]).input_ids), Row("x", prompt=r["prompt"])) for i, r in enumerate(rows)]
    journal: Any = Journal()
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
        journal=journal,
        exact_sampling=dtype == "float32",
        critic=critic,
    )
    return _stepping(run, State(algorithm=algorithm.initial_state())), lambda: _check(work, model)


def _algorithm(kind: str, beta: float) -> PolicyGradient:
    """The method with TRL's defaults."""
    spec: dict[str, Any] = {"preset": kind} | ({"aggregate": "token_mean"} if kind == "grpo" else {})
    return resolve(spec | {"kl": {"coefficient": beta} if beta else None})


def _stepping(run: Online, state: State) -> Step:
    """One step of the loop at each call, with its seconds: sample, score, log-probs, forward-backward, optimizer, rest."""
    phases = Phases()
    for name in ("log_probs", "values"):
        phases.around(learn, name, "log-probs")
    phases.around(learn, "step_together", "forward-backward")
    for optimizer in (run.optimizer, *([run.critic.optimizer] if run.critic else [])):
        for method in ("norm", "apply"):
            phases.around(optimizer, method, "optimizer")
    now = [state]

    def step() -> tuple[int, dict[str, float]]:
        phases.seconds = {}
        begin = time.perf_counter()
        now[0], _ = loop.step(run, now[0])
        seconds = time.perf_counter() - begin
        journal: Any = run.journal
        found = {name: journal.phases.get(name, 0.0) for name in ("sample", "score")} | phases.seconds
        found["forward-backward"] = found.get("forward-backward", 0.0) - found.get("optimizer", 0.0)
        return journal.tokens, {**found, "rest": seconds - sum(found.values())}

    return step


def _check(work: Workload, model: LanguageModel) -> dict[str, float]:
    """Loss and gradient norm of the method without its KL on the fixed batch, with old log-probs a little off."""
    given = fixed_batch(work)
    evaluation = model.evaluate(Groups(given["prompts"], given["completions"]))
    device = evaluation.logp.device
    lengths = torch.tensor([len(c) for group in given["completions"] for c in group], device=device)
    mask = torch.arange(int(lengths.max()), device=device) < lengths[:, None]
    nothing = torch.zeros(len(lengths), device=device)
    batch = Batch(mask, terminal(nothing, mask), evaluation.logp.detach() - 0.05, nothing)
    algorithm = _algorithm(work.kind, 0.0)
    prepared = algorithm.prepare(batch, {})
    advantage = torch.tensor(given["advantages"], device=device)[:, None].expand(mask.shape)
    prepared = replace(prepared, advantage=advantage, needs_gradient=torch.ones_like(lengths, dtype=torch.bool))
    loss = algorithm.loss(prepared, evaluation, algorithm.totals(prepared), {})
    loss.value.backward()
    return {"loss": float(loss.value.detach()), "gradient": _norm(model)}


def _norm(model: LanguageModel | ScalarModel) -> float:
    """The norm of the gradient, which is then forgotten."""
    found = [p.grad for p in model.trainable().values() if p.grad is not None]
    norm = float(torch.nn.utils.get_total_norm(found))
    for p in model.trainable().values():
        p.grad = None
    return norm


def _offline(work: Workload, path: str, rows: list[dict[str, Any]], dtype: str, device: str) -> tuple[Step, Check]:
    common: dict[str, Any] = {"optim": RATE, "run": Run(progress=False), "evaluation": Evaluation(eval_prompts=0)}
    common["batch_size"] = work.prompts
    model: LanguageModel | ScalarModel
    lesson: Lesson
    config: RewardConfig | PreferenceConfig | SFTConfig
    if work.kind == "reward":
        torch.manual_seed(0)
        model = scalar = scalar_model.load(path, dtype=dtype, device=device)
        made = [pairs.pair(model.tokenizer, validate(row, "preference", "x")) for row in rows]
        lesson, config = Comparing(scalar, BradleyTerry(), made), RewardConfig(**common)
    else:
        model = policy = language_model.load(path, dtype=dtype, device=device)
        if work.kind == "dpo":
            made = [pairs.pair(model.tokenizer, validate(row, "preference", "x")) for row in rows]
            known = reference_logps(policy, [p.prompt for p in made], [[p.chosen, p.rejected] for p in made], 4096)
            lesson, config = Preferring(policy, DPO, made, known), PreferenceConfig(**common)
        else:
            texts = [example(model.tokenizer, validate(row, "prompt-completion", "x")) for row in rows]
            lesson, config = Supervised(policy, texts), SFTConfig(**common)
    journal: Any = Journal()
    run = offline.Offline(config, lesson, None, Optimizer(model.trainable(), RATE), 100000, journal)
    now = [State()]
    phases = Phases()
    for method in ("norm", "apply"):
        phases.around(run.optimizer, method, "optimizer")

    def step() -> tuple[int, dict[str, float]]:
        phases.seconds = {}
        begin = time.perf_counter()
        now[0], _ = offline.step(run, now[0])
        optimizer = phases.seconds.get("optimizer", 0.0)
        update = journal.phases.get("update", 0.0)
        found = {"forward-backward": update - optimizer, "optimizer": optimizer}
        return journal.tokens, {**found, "rest": time.perf_counter() - begin - update}

    def check() -> dict[str, float]:
        total = 0.0
        for share in lesson.shares(range(work.prompts), 4096):
            loss = share()
            loss.value.backward()
            total += float(loss.value.detach())
        return {"loss": total, "gradient": _norm(model)}

    return step, check
