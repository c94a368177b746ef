"""The process in which psigrad is timed. It runs the library's own loops on the workload, without a run folder."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timed.workload import Parent, Phases, Workload, answer, read, reward, serve

from psigrad.config import Evaluation, Model, OnlineConfig, Optim, PreferenceConfig, RewardConfig, Run, SFTConfig
from psigrad.config.algorithms import resolve
from psigrad.language.data import pairs
from psigrad.language.data.dataset_rows import Row, validate
from psigrad.language.data.image_rows import insert_marks
from psigrad.language.data.reward_view import reward_view
from psigrad.language.data.templates import example, prompt_ids
from psigrad.language.episodes.environments import InProcess
from psigrad.language.episodes.episodes import Episodes
from psigrad.language.episodes.players import collector_of
from psigrad.language.models import language_model, scalar_model
from psigrad.language.models.experts import balance_of
from psigrad.language.models.free_memory import ADAPTER, WHOLE, share_for_activations
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.models.lora import Lora
from psigrad.language.models.scalar_model import ScalarModel
from psigrad.language.recipes.online import annotators_of
from psigrad.language.rewards import Result, Samples, Scored, Scoring
from psigrad.language.rollout.collectors import ScoredRollout
from psigrad.language.rollout.samplers.embedded import EmbeddedSampler
from psigrad.language.rollout.types import Prompt, SamplingParams, State
from psigrad.language.training.offline import offline
from psigrad.language.training.offline.offline import Task
from psigrad.language.training.offline.preference_task import PreferenceTask, reference_logps
from psigrad.language.training.offline.reward_task import RewardTask
from psigrad.language.training.offline.sft_task import SFTTask
from psigrad.language.training.online import online_rl as online
from psigrad.language.training.online.online_run import OnlineRun, ValueModel
from psigrad.objective import PolicyGradient
from psigrad.objective.preferences.preference_catalog import DPO
from psigrad.objective.preferences.reward_model import BradleyTerry
from psigrad.optim import Optimizer
from psigrad.runs.machine import prepare_torch

RATE = Optim(learning_rate=1e-6)


class Inline:
    """A scorer that calls the reward function in this process, as TRL does."""

    def begin(self) -> Scoring:
        """See `Scorer`."""
        return Scoring(self._scored)

    @staticmethod
    def _scored(groups: Sequence[Samples]) -> list[Result]:
        return [Scored(value, {"reward": value}) for group in groups for value in _call_reward(group)]


def _call_reward(group: Samples) -> list[float]:
    given: dict[str, Any] = group.arguments
    return reward(**given)


class Answering:
    """An environment that answers every turn except the last one of `turns`. The reward comes from the reward function."""

    def __init__(self, turns: int) -> None:
        self._turns, self._said = turns, 0

    def reset(self, row: Mapping[str, Any]) -> None:
        """See `Environment`."""
        self._prompt = str(row["prompt"])

    def step(self, completion: str) -> tuple[str, float, bool]:
        """See `Environment`."""
        self._said += 1
        return answer(self._prompt, self._said), 0.0, self._said == self._turns


Step = Callable[[], tuple[int, dict[str, float]]]


@dataclass(frozen=True)
class TimedRun:
    """A run to time. `step()` takes one step, and returns its tokens and its seconds by phase."""

    work: Workload
    model: LanguageModel | ScalarModel
    optimizer: Optimizer
    step: Step
    task: Task | None = None
    """Offline: the task that trains on recorded rows."""
    prompts: Sequence[Prompt] = ()
    """Online: the prompts in order."""


def build(folder: Path, dtype: str, device: str) -> TimedRun:
    """Load the workload in `folder`, ready for its first step."""
    work, rows = read(folder)
    prepare_torch(Run(threads=torch.get_num_threads()), recompute=work.gradient_checkpointing)
    make = _online if work.online else _offline
    return make(work, str(folder / "model"), rows, dtype, device)


def _online(work: Workload, path: str, rows: list[dict[str, Any]], dtype: str, device: str) -> TimedRun:
    again = work.gradient_checkpointing
    model = _policy(work, path, dtype, device)
    model.attend(work.attention)
    algorithm = method(work.kind, work.beta)
    config = OnlineConfig(
        optim=RATE,
        model=Model(gradient_checkpointing=again),
        run=Run(progress=False),
        prompts_per_step=work.prompts,
        num_generations=work.generations,
        num_iterations=work.iterations,
        micro_batch_tokens=work.micro_tokens,
        max_logp_difference=10.0,
        keep_activations_gb=share_for_activations(path, ADAPTER if work.lora_rank else WHOLE),
    )
    critic = None
    if algorithm.needs_critic:
        values = scalar_model.load(path, dtype=dtype, device=device, gradient_checkpointing=again, fresh_head="zero")
        critic = ValueModel(values, Optimizer(values.trainable(), RATE, recompute=again), RATE.learning_rate)
    prompts = prompts_of(model, rows)
    reference = (model if work.lora_rank else model.frozen_copy()) if work.beta else None
    player = Episodes(InProcess(partial(Answering, work.turns)), work.turns) if work.turns > 1 else None
    collector = collector_of(EmbeddedSampler(model, cuda_graphs=work.cuda_graphs), model, player)
    run = OnlineRun(
        config=config,
        algorithm=algorithm,
        model=model,
        optimizer=Optimizer(model.trainable(), RATE, recompute=again),
        prompts=prompts,
        params=SamplingParams(max_tokens=work.completion_tokens),
        rollout=ScoredRollout(collector, Inline(), reward_view(model.tokenizer, collector.plays)),
        annotators=annotators_of(algorithm, reference),
        total_steps=100000,
        critic=critic,
    )
    state = State(algorithm=algorithm.initial_state())
    return TimedRun(work, model, run.optimizer, _stepping(run, state), prompts=prompts)


def prompts_of(model: LanguageModel, rows: list[dict[str, Any]]) -> list[Prompt]:
    """Return the prompts of the rows: text without a template, or messages with images."""
    if isinstance(rows[0]["prompt"], str):
        ids = model.tokenizer([row["prompt"] for row in rows]).input_ids
        return [Prompt(i, tuple(own), Row("x", prompt=row["prompt"])) for i, (own, row) in enumerate(zip(ids, rows, strict=True))]
    read = [_read(row, "prompt-only") for row in rows]
    return [Prompt(i, tuple(prompt_ids(model.tokenizer, row)), row) for i, row in enumerate(read)]


def _read(row: dict[str, Any], form: str) -> Row:
    return validate(insert_marks(row, "x", Path())[0], form, "x")


def _policy(work: Workload, path: str, dtype: str, device: str) -> LanguageModel:
    lora = Lora(work.lora_rank) if work.lora_rank else None
    base: Any = work.quantize_base
    torch.manual_seed(0)  # the fresh adapters are equal to those in TRL's process
    again = work.gradient_checkpointing
    model = language_model.load(path, dtype=dtype, device=device, lora=lora, base=base, gradient_checkpointing=again)
    model.load_balancing = balance_of(model.network, None)
    return model


def method(kind: str, beta: float) -> PolicyGradient:
    """Return the method with TRL's defaults."""
    spec: dict[str, Any] = {"preset": kind} | ({"aggregate": "token_mean"} if kind == "grpo" else {})
    return resolve(spec | {"kl": {"coefficient": beta} if beta else None})


def _stepping(run: OnlineRun, state: State) -> Step:
    """Return a function that takes one step, timed as sample, score, log-probs, forward-backward and optimizer."""
    phases = Phases()
    for annotator in run.annotators:
        phases.around(type(annotator), "columns", "log-probs")
    phases.around(online, "step_together", "forward-backward")
    for optimizer in (run.optimizer, *([run.critic.optimizer] if run.critic else [])):
        for method in ("norm", "apply"):
            phases.around(optimizer, method, "optimizer")
    now = [state]

    def step() -> tuple[int, dict[str, float]]:
        phases.seconds = {}
        outcome = online.step(run, now[0])
        now[0] = outcome.state
        found = {name: outcome.timings.get(f"time/{name}", 0.0) for name in ("sample", "score")} | phases.seconds
        found["forward-backward"] = found.get("forward-backward", 0.0) - found.get("optimizer", 0.0)
        return outcome.tokens, found

    return step


def _offline(work: Workload, path: str, rows: list[dict[str, Any]], dtype: str, device: str) -> TimedRun:
    common: dict[str, Any] = {"optim": RATE, "run": Run(progress=False), "evaluation": Evaluation(eval_prompts=0)}
    common["batch_size"] = work.prompts
    again = work.gradient_checkpointing
    model: LanguageModel | ScalarModel
    task: Task
    config: RewardConfig | PreferenceConfig | SFTConfig
    if work.kind == "reward":
        torch.manual_seed(0)
        model = scalar = scalar_model.load(path, dtype=dtype, device=device, gradient_checkpointing=again)
        made = [pairs.encode_pair(model.tokenizer, validate(row, "preference", "x")) for row in rows]
        task, config = RewardTask(scalar, BradleyTerry(), made), RewardConfig(**common)
    else:
        model = policy = _policy(work, path, dtype, device)
        if work.kind == "dpo":
            made = [pairs.encode_pair(model.tokenizer, validate(row, "preference", "x")) for row in rows]
            known = reference_logps(policy, [p.prompt for p in made], [[p.chosen, p.rejected] for p in made], 4096)
            task, config = PreferenceTask(policy, DPO, made, known), PreferenceConfig(**common)
        else:
            texts = [example(model.tokenizer, _read(row, "prompt-completion")) for row in rows]
            task, config = SFTTask(policy, [[text] for text in texts]), SFTConfig(**common)
    optimizer = Optimizer(model.trainable(), RATE, recompute=again)
    run = offline.OfflineRun(config, task, None, optimizer, 100000)
    now = [State()]
    phases = Phases()
    for method in ("norm", "apply"):
        phases.around(run.optimizer, method, "optimizer")

    def step() -> tuple[int, dict[str, float]]:
        phases.seconds = {}
        outcome = offline.step(run, now[0])
        now[0], stepping = outcome.state, phases.seconds.get("optimizer", 0.0)
        return outcome.tokens, {"forward-backward": outcome.timings["time/update"] - stepping, "optimizer": stepping}

    return TimedRun(work, model, optimizer, step, task)


def take_steps(folder: Path, dtype: str, device: str, parent: Parent) -> None:
    """Take as many steps as the parent requests."""
    run = build(folder, dtype, device)
    parent.ready()
    while parent.wants_a_step():
        parent.got(*run.step())


if __name__ == "__main__":
    serve(take_steps, sys.argv[1:])
