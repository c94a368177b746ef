"""What the tests of resuming share: the recipes, digests of run folders."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from tiny_jobs import forked, online_config, sft_config

from psigrad.recipes import online, sft
from psigrad.training import checkpoint

RECIPES = {"sft": (sft.run, sft_config), "grpo": (online.run, online_config)}


def digest(folder: Path) -> dict[str, str]:
    """SHA-256 of everything that must not depend on being killed."""
    newest = checkpoint.latest(folder / "checkpoints").path
    files = {
        "metrics": folder / "metrics.jsonl",
        "rollouts": folder / "rollouts.jsonl",
        "weights": folder / "model" / "model.safetensors",
        "checkpoint weights": newest / "model.safetensors",
        "optimizer": newest / "optimizer.safetensors",
        "state": newest / "state.json",
    }
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}


def events_of(folder: Path) -> list[str]:
    """The kinds of events of a run, in order."""
    return [json.loads(line)["kind"] for line in (folder / "events.jsonl").read_text().splitlines()]


def run_to_end(run, config, job: Path, output: Path) -> int:
    """The wait status of a fork that runs to the end."""
    return forked(lambda: run(config(job, output)))
