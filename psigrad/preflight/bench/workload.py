"""What psigrad and TRL are timed on: the same weights, prompts, batch shape, lengths, rewards and precision."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Workload:
    """One shape of work. `kind` is the method: grpo, rloo, ppo, or offline dpo, reward, sft. The sizes of the model are those of
    one that is made (`inputs.build`); one that is given (`inputs.prepare`) has its own.
    """

    name: str
    says: str
    kind: str = "grpo"
    hidden: int = 256
    layers: int = 6
    vocabulary: int = 64
    prompts: int = 16
    generations: int = 8
    prompt_tokens: int = 12
    completion_tokens: int = 64
    beta: float = 0.0
    iterations: int = 1
    gradient_checkpointing: bool = False
    attention: str = "sdpa"
    cuda_graphs: bool = False
    steps: int = 5

    @property
    def online(self) -> bool:
        """Whether completions are sampled."""
        return self.kind in ("grpo", "rloo", "ppo")


def read(folder: Path) -> tuple[Workload, list[dict[str, Any]]]:
    """The workload and its rows."""
    lines = (folder / "rows.jsonl").read_text().splitlines()
    return Workload(**json.loads((folder / "work.json").read_text())), [json.loads(line) for line in lines]


def reward(completions: list[str], **columns: Any) -> list[float]:
    """A number in [0, 1) out of the text alone: every group has signal, and scoring costs nothing."""
    return [int(hashlib.md5(text.encode()).hexdigest()[:6], 16) / 16**6 for text in completions]


def fixed_batch(work: Workload) -> dict[str, Any]:
    """Token ids and advantages that both sides compute the loss and its gradient on, before anything is timed."""
    rng = random.Random(1)
    longest, letters = min(24, work.completion_tokens), min(64, work.vocabulary)

    def completion() -> list[int]:
        return [rng.randrange(2, letters) for _ in range(rng.randint(2, longest))]

    groups = 3
    completions = [[completion() for _ in range(4)] for _ in range(groups)]
    prompts = [[rng.randrange(2, letters) for _ in range(min(12, work.prompt_tokens))] for _ in range(groups)]
    # mostly of one sign: a loss whose terms cancel is all rounding. Below 0, where the clip lets the gradient through
    advantages = [rng.gauss(-1, 1) for _ in range(4 * groups)]
    return {"prompts": prompts, "completions": completions, "advantages": advantages}
