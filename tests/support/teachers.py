"""Small teachers of the tiny job's model, and runs that learn from one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tiny_jobs import online_config
from transformers import AutoTokenizer

from psigrad.config import Evaluation
from psigrad.language.models import tiny
from psigrad.language.recipes import online

BY_TEXT = {"preset": "distill", "kl": {"estimator": "span", "where": "loss", "coefficient": 1.0}}


def _save(model: Any, tokenizer: Any, folder: Path, times: int) -> str:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(times)  # it has opinions
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def make_same(job: Path, folder: Path) -> str:
    """A teacher with the tokens of the job's model."""
    tokenizer = AutoTokenizer.from_pretrained(job / "base")
    return _save(tiny.model("qwen3", len(tokenizer), hidden=32, layers=1, heads=2, max_length=64, seed=5), tokenizer, folder, 2)


def make_foreign(folder: Path) -> str:
    """A teacher that cuts the same texts otherwise."""
    tokenizer = tiny.tokenizer(["say a: a b c d e f g h"], 262)
    return _save(tiny.model("qwen3", len(tokenizer), hidden=32, layers=1, heads=2, max_length=64, seed=6), tokenizer, folder, 3)


def metrics(folder: Path, name: str) -> list[float]:
    """A figure of each step."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row[name] for row in rows if name in row]


def distil(job: Path, folder: Path, steps: int, **changes: Any) -> Path:
    """The folder of a run of so many steps."""
    made = replace(online_config(job, folder, "distill", max_steps=steps), reward=(), num_minibatches=1)
    made = replace(made, evaluation=Evaluation(eval_kl=False), **changes)
    return online.run(made).folder
