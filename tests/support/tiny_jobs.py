"""A tiny job that SFT and GRPO finish in a second, and forks to kill while they run it."""

from __future__ import annotations

import gc
import itertools
import json
import os
import random
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from sample_agents import helpers
from tiny_rewards import Echo, early_letters

from psigrad.config import Data, Evaluation, Model, OnlineConfig, Optim, PreferenceConfig, RewardConfig, Run, Sampling, SFTConfig
from psigrad.language.data.templates import CHATML
from psigrad.language.models import tiny
from psigrad.language.rollout.samplers.embedded import EmbeddedSampler


def make_job(folder: Path) -> Path:
    """base/ (a 30k-parameter model), train.jsonl and held_out.jsonl: repeat the letter you see."""
    rng = random.Random(0)
    rows = [{"prompt": f"say {c}:", "completion": f" {c}", "answer": c} for c in (rng.choice("abcdefgh") for _ in range(40))]
    tokenizer = tiny.tokenizer([r["prompt"] + r["completion"] for r in rows], 270)
    model = tiny.model("qwen3", len(tokenizer), hidden=32, layers=1, heads=2, max_length=64)
    model.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    pairs = [{"prompt": r["prompt"], "chosen": r["completion"], "rejected": f" {other(r['answer'])}"} for r in rows]
    judged = [
        {"prompt": p["prompt"], "completion": p["chosen" if i % 2 else "rejected"], "label": bool(i % 2)}
        for i, p in enumerate(pairs)
    ]
    parts = {"train": rows[:32], "held_out": rows[32:], "pairs": pairs, "judged": judged}
    for name, part in parts.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in part))
    return folder


def other(letter: str) -> str:
    """A wrong answer."""
    return "abcdefgh"["abcdefgh".index(letter) - 1]


def run_settings(output: Path, **run) -> Run:
    """Six steps, a checkpoint every second."""
    defaults = {"output_dir": str(output), "max_steps": 6, "save_steps": 2, "threads": 1, "progress": False, "report": False}
    return Run(**{**defaults, **run})


def ppo_config(job: Path, output: Path, *, critic_shared: bool = False, **run) -> OnlineConfig:
    made = online_config(job, output, algorithm="ppo", **run)
    return replace(made, num_generations=2, num_iterations=2, critic_shared=critic_shared)


def episodes_config(job: Path, output: Path, **run) -> OnlineConfig:
    made = online_config(job, output, **run)
    return replace(made, reward=(), environment=Echo, max_turns=2, data=Data(dataset=str(job / "train.jsonl")))


def agent_config(job: Path, output: Path, **run) -> OnlineConfig:
    """Sub-agents that ask at once, and the policy itself with what they said."""
    (job / "chatml.jinja").write_text(CHATML)
    made = online_config(job, output, **run)
    model = replace(made.model, chat_template_path=str(job / "chatml.jinja"))
    return replace(made, model=model, agent=helpers, agent_workers=2)


def preference_config(job: Path, output: Path, loss: str = "dpo", **run) -> PreferenceConfig:
    return PreferenceConfig(
        model=Model(path=str(job / "base")),
        data=Data(dataset=str(job / ("judged.jsonl" if loss == "kto" else "pairs.jsonl"))),
        optim=Optim(learning_rate=1e-2),
        evaluation=Evaluation(eval_prompts=8, eval_steps=3),
        run=run_settings(output, **run),
        loss=loss,
        cache_reference=False,
        batch_size=4,
        micro_batch_tokens=24,
    )


def reward_config(job: Path, output: Path, **run) -> RewardConfig:
    return RewardConfig(
        model=Model(path=str(job / "base")),
        data=Data(dataset=str(job / "pairs.jsonl")),
        optim=Optim(learning_rate=1e-2),
        evaluation=Evaluation(eval_prompts=8, eval_steps=3),
        run=run_settings(output, **run),
        batch_size=4,
        micro_batch_tokens=24,
    )


def sft_config(job: Path, output: Path, **run) -> SFTConfig:
    return SFTConfig(
        model=Model(path=str(job / "base")),
        data=Data(dataset=str(job / "train.jsonl"), eval_dataset=str(job / "held_out.jsonl")),
        optim=Optim(learning_rate=1e-2),
        sampling=Sampling(max_completion_length=4),
        evaluation=Evaluation(eval_prompts=4, eval_steps=3, metric="exact"),
        run=run_settings(output, **run),
        batch_size=4,
        micro_batch_tokens=24,
    )


def online_config(job: Path, output: Path, algorithm="grpo", **run) -> OnlineConfig:
    return OnlineConfig(
        model=Model(path=str(job / "base")),
        data=Data(dataset=str(job / "train.jsonl"), eval_dataset=str(job / "held_out.jsonl")),
        optim=Optim(learning_rate=1e-2),
        sampling=Sampling(max_completion_length=4, max_decode_batch=8),
        evaluation=Evaluation(eval_prompts=4, eval_steps=3, eval_kl=True),
        run=run_settings(output, **run),
        algorithm=algorithm,
        reward=(early_letters,),
        reward_timeout=120.0,  # what scores in no time is late on no machine
        environment_timeout=120.0,
        prompts_per_step=4,
        num_generations=4,
        num_minibatches=2,
        micro_batch_tokens=48,
    )


def misreport(monkeypatch, by: float, after: int = 0) -> None:
    """Let the sampler report log-probs that are off by `by`, from its call number `after` on."""
    steps, calls = EmbeddedSampler.steps, itertools.count()

    def shifted(self, requests, params, cache=None):
        off = by * (next(calls) >= after)
        for step in steps(self, requests, params, cache):
            yield [(i, [replace(c, logprobs=tuple(x + off for x in c.logprobs)) for c in group]) for i, group in step]

    monkeypatch.setattr(EmbeddedSampler, "steps", shifted)


def forked(work: Callable[[], None]) -> int:
    """Run `work` in a fork, on one thread, and give the wait status; a traceback goes to stderr and makes the status 1.

    Where this process has once computed on several, OpenMP's threads are missing in the fork, and who calls them waits forever.
    """
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            gc.freeze()  # what is looked through for garbage is copied
            torch.set_num_threads(1)
            torch.set_num_threads = lambda threads: None
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1]
