"""Run folders as trainers write them, without a trainer."""

from __future__ import annotations

import json
import math
import os
import socket
import time
from pathlib import Path
from typing import Any

from psigrad.records.run_folder import to_line

GIF = bytes.fromhex("47494638396101000100800000000000ffffff21f90401000000002c00000000010001000002024401003b")
CURATED = (
    *("reward", "reward_std", "frac_reward_zero_std", "completions/mean_length", "completions/clipped_ratio", "loss", "kl"),
    *("entropy", "clip_ratio/region_mean", "sampling/sampling_logp_difference/mean", "grad_norm", "learning_rate"),
)


def append(path: Path, *rows: dict[str, Any]) -> None:
    """Rows at the end of a file."""
    with path.open("ab") as stream:
        stream.write(b"".join(map(to_line, rows)))


def figures(step: int, **other: Any) -> dict[str, Any]:
    """A row of a run that goes well."""
    return {
        "step": step,
        "reward": 0.2 + step / 100,
        "reward_std": 0.3,
        "frac_reward_zero_std": 0.1,
        "completions/mean_length": 20.0 + step % 3,
        "completions/clipped_ratio": 0.02,
        "entropy": 1.0 + 0.5 * math.exp(-step / 100),
        "grad_norm": 1.0 + 0.1 * math.sin(step),
        "learning_rate": 1e-5,
        "num_tokens": 1000 * step,
        "rewards/exact/mean": 0.5,
        "samples": 8,
        "unscored": 0,
        **other,
    }


def rollout(step: int, row: int, k: int, **other: Any) -> dict[str, Any]:
    """A row of rollouts.jsonl, its names in the order in which training writes them."""
    reward = other.pop("reward", float(k % 2))
    ids = other.pop("completion_ids", [5, 6, 7, 8])
    return {
        "step": step,
        "kind": other.pop("kind", "train"),
        "row": row,
        "k": k,
        "prompt": other.pop("prompt", f"Prompt {row}: say “reward”: 5, please"),
        "completion": other.pop("completion", f"answer {k} of step {step}"),
        "completion_ids": ids,
        "reward": reward,
        "parts": other.pop("parts", {"exact": reward}),
        "status": other.pop("status", "scored"),
        "reason": other.pop("reason", ""),
        "advantage": other.pop("advantage", 1.0 if k % 2 else -1.0),
        "finish_reason": other.pop("finish_reason", "stop"),
        "seed": 11,
        "version": step - 1,
        **other,
    }


def make_run(
    path: Path,
    steps: int = 20,
    *,
    seed: int = 0,
    algorithm: str = "grpo",
    state: str = "finished",
    rollouts: int = 4,
    **config: Any,
) -> Path:
    """A whole run folder: figures, seconds, a prompt with `rollouts` completions in each step, and its story."""
    path.mkdir(parents=True)
    settings = {
        "algorithm": algorithm,
        "model": {"path": "tiny/model"},
        "run": {"seed": seed, "max_steps": steps, "output_dir": str(path)},
    }
    (path / "config.json").write_text(json.dumps(settings | config))
    append(path / "metrics.jsonl", *(figures(step, reward=0.2 + step / 100 + seed / 10) for step in range(1, steps + 1)))
    append(
        path / "timings.jsonl",
        *({"step": s, "step_time": 0.5, "tokens": 160, "tokens_per_second": 320.0} for s in range(1, steps + 1)),
    )
    append(path / "rollouts.jsonl", *(rollout(s, s, k, **TOKENS) for s in range(1, steps + 1) for k in range(rollouts)))
    append(path / "events.jsonl", {"time": time.time(), "kind": "started", "step": 0})
    (path / ".lock").write_text(f"process {os.getpid()} on elsewhere-{socket.gethostname()}, since now")
    if state != "running":
        append(path / "events.jsonl", {"time": time.time(), "kind": state, "step": steps})
    return path


TOKENS: dict[str, Any] = {
    "logprobs": [-0.1, -2.0, -0.5, -0.01],
    "trained_logprobs": [-0.1, -1.9, -0.7, -0.01],
    "ref_logprobs": [-0.2, -2.5, -0.5, -0.02],
    "entropy": [0.4, 1.2, 0.8, 0.05],
}


def words(folder: Path) -> None:
    """A tokenizer of ten words, as a model's folder has one."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    folder.mkdir(parents=True)
    Tokenizer(WordLevel({f"word{i}": i for i in range(10)}, unk_token="word0")).save(str(folder / "tokenizer.json"))
