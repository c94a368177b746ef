"""TRL's half of a run: python trl_side.py FOLDER trains by FOLDER/trl.json, and writes FOLDER/trl with its model and history."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from tasks import solved
from transformers import AutoModelForCausalLM, AutoTokenizer

ASKED: list[str] = []


def reward(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
    """Return `solved`, and record the prompts in `ASKED`."""
    ASKED.extend(prompt[-1]["content"] for prompt in prompts)
    return solved(completions, **columns)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    given = json.loads((folder / "trl.json").read_text())
    trainer = trl.GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(given["model"], dtype=torch.float32),
        reward_funcs=reward,
        args=trl.GRPOConfig(**given["settings"]),
        train_dataset=Dataset.from_list(given["rows"]),
        processing_class=AutoTokenizer.from_pretrained(given["model"], padding_side="left"),
    )
    trainer.train()
    trainer.save_model(str(folder / "trl" / "model"))
    (folder / "trl" / "history.json").write_text(json.dumps([trainer.state.log_history, ASKED]))
