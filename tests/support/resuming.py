"""What the tests of resuming share: the recipes, digests of run folders."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

from hybrid_models import network
from tiny_jobs import (
    agent_config,
    episodes_config,
    forked,
    online_config,
    ppo_config,
    preference_config,
    reward_config,
    sft_config,
)
from transformers import AutoTokenizer

from psigrad.config import Data
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.models.scalar_model import ScalarModel
from psigrad.language.recipes import online, preference, reward, sft
from psigrad.language.rollout.samplers.embedded import EmbeddedSampler
from psigrad.optim import Optimizer
from psigrad.records import checkpoint
from psigrad.runs.journal import Journal

# Every one of these calls is an event at which the process may die, before or after the call.
EVENTS = (
    (EmbeddedSampler, "sample"),
    (LanguageModel, "evaluate"),
    (ScalarModel, "values"),
    (Optimizer, "apply"),
    (Journal, "metrics"),
    (Journal, "rollouts"),
    (Journal, "timings"),
    (checkpoint, "save"),
    (checkpoint, "prune"),
    (checkpoint, "save_tensors"),
)


def dying_at(count: int, seen: list[str] | None = None) -> None:
    """Make event number `count` (from 1) the last thing this process does; `seen` collects the events' names instead."""
    state = {"n": 0}

    def tick(name: str) -> None:
        state["n"] += 1
        if seen is not None:
            seen.append(name)
        if state["n"] == count:
            os.kill(os.getpid(), signal.SIGKILL)

    def wrap(owner, name):
        original = getattr(owner, name)

        def wrapped(*args, **kwargs):
            tick(f"before {name}")
            result = original(*args, **kwargs)
            tick(f"after {name}")
            return result

        setattr(owner, name, wrapped)

    for owner, name in EVENTS:
        wrap(owner, name)


def following_config(job: Path, output: Path, **run):
    """A reference that moves after every second step."""
    return replace(online_config(job, output, **run), ref_model_sync_steps=2, ref_model_mixup_alpha=0.3)


def lagging_config(job: Path, output: Path, **run):
    """Two steps' completions are always sampled ahead."""
    return replace(online_config(job, output, **run), lag=2)


def family_config(family: str, job: Path, output: Path, **run):
    """A fused model of another family than Llama's, such as one with layers that have a state, experts or shared keys."""
    made = online_config(job, output, **run)
    if not (folder := job / family).exists():
        tokenizer = AutoTokenizer.from_pretrained(job / "base")
        network(family, len(tokenizer)).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return replace(made, model=replace(made.model, path=str(folder)))


def past_config(job: Path, output: Path, **run):
    """A game of two seats against three past selves, a new one after every second step."""
    made = replace(online_config(job, output, **run), environment="kuhn", data=Data(), prompts_per_step=2, num_generations=3)
    return replace(made, past_opponents=0.5, past_every=2, past_kept=3)


def dropping(config, job: Path, output: Path, **run):
    """An adapter whose dropout draws in every layer, and whose policy gradient passes twice over what was sampled."""
    made = config(job, output, **run)
    made = replace(made, model=replace(made.model, lora_rank=4, lora_dropout=0.3, use_dora=True))
    return replace(made, num_iterations=2) if hasattr(made, "num_iterations") else made


RECIPES = {"sft": (sft.run, sft_config), "grpo": (online.run, online_config)}
MORE_RECIPES = {
    "ppo": (online.run, ppo_config),
    "ppo shared": (online.run, partial(ppo_config, critic_shared=True)),
    "grpo hybrid": (online.run, partial(family_config, "qwen3_5_text")),
    "grpo one part": (online.run, partial(family_config, "nemotron_h")),
    "grpo experts": (online.run, partial(family_config, "qwen3_moe")),
    "grpo shared keys": (online.run, partial(family_config, "gemma4_text")),
    "following reference": (online.run, following_config),
    "episodes": (online.run, episodes_config),
    "past selves": (online.run, past_config),
    "lag": (online.run, lagging_config),
    "agent": (online.run, agent_config),
    "dpo": (preference.run, preference_config),
    "kto": (preference.run, partial(preference_config, loss="kto")),
    "reward": (reward.run, reward_config),
    "sft dropout": (sft.run, partial(dropping, sft_config)),
    "grpo dropout": (online.run, partial(dropping, online_config)),
    "ppo dropout": (online.run, partial(dropping, ppo_config)),
    "ppo shared dropout": (online.run, partial(dropping, partial(ppo_config, critic_shared=True))),
    "lag dropout": (online.run, partial(dropping, lagging_config)),
    "online dpo dropout": (online.run, partial(dropping, partial(online_config, algorithm="online_dpo"))),
    "kto dropout": (preference.run, partial(dropping, partial(preference_config, loss="kto"))),
    "reward dropout": (reward.run, partial(dropping, reward_config)),
}


def digest(folder: Path) -> dict[str, str]:
    """SHA-256 of everything that must not depend on being killed."""
    newest = checkpoint.latest(folder / "checkpoints").path
    files = {
        "metrics": folder / "metrics.jsonl",
        "rollouts": folder / "rollouts.jsonl",
        "weights": folder / "model" / "model.safetensors",
        "checkpoint weights": newest / "model.safetensors",
        "checkpoint adapter": newest / "adapter_model.safetensors",
        "optimizer": newest / "optimizer.safetensors",
        "state": newest / "state.json",
        "critic": newest / "critic" / "model.safetensors",
        "critic's optimizer": newest / "critic" / "optimizer.safetensors",
        "reference": newest / "reference" / "model.safetensors",
        "past self": newest / "past-1" / "model.safetensors",
        "other past self": newest / "past-2" / "model.safetensors",
        "sampled ahead": newest / "pending.jsonl",
        "value head": newest / "value_head.safetensors",
    }
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items() if path.exists()}


def events_of(folder: Path) -> list[str]:
    """The kinds of events of a run, in order."""
    return [json.loads(line)["kind"] for line in (folder / "events.jsonl").read_text().splitlines()]


def run_to_end(run, config, job: Path, output: Path) -> int:
    """The wait status of a fork that runs to the end."""
    return forked(lambda: run(config(job, output)))
