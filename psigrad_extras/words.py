"""The task of the course from chapter 5 on: spell words of four letters backwards, after imitating careless teachers (chapter 4).

In six of ten demonstrations the last two letters of the answer are swapped.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import psigrad
from psigrad.language.data import tasks
from psigrad.language.models import tiny
from psigrad.runs.result import Result

LENGTH = 4
HELD_OUT = 200
SETTINGS: dict[str, Any] = {"progress": False, "report": False, "threads": 1, "adam_beta2": 0.99}
"""The settings of every run of a chapter."""


def rows() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the held-out words, and those to train on, each with its `prompt` and `answer`."""
    words = ["".join(word) for word in itertools.product("abcdefgh", repeat=LENGTH)]
    random.Random(0).shuffle(words)
    made = [{"prompt": f"{word}>", "answer": word[::-1]} for word in words]
    return made[:HELD_OUT], made[HELD_OUT:]


def imitate(prompts: list[dict[str, Any]], folder: Path, steps: int) -> Result:
    """Fine-tune a small Qwen3 with a token for each character on the teachers' answers to the prompts."""
    shown = tasks.demonstrations(prompts, 0.6, tasks.swap_ending, seed=0)
    tiny.model("qwen3", 260, hidden=64, layers=2).save_pretrained(folder / "base")
    tiny.tokenizer([shown[0]["prompt"]], 260).save_pretrained(folder / "base")
    given = {"max_steps": steps, "batch_size": 64, "learning_rate": 5e-3, "output_dir": str(folder / "sft")}
    return psigrad.train("sft", model=folder / "base", dataset=shown, **given, **SETTINGS)
