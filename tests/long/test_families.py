"""The walk-through of docs/tools.md: a tool over several turns, in the words of three families' templates."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import trl

import psigrad

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import families


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "gptoss"])
def test_a_tool_is_used_more_often_and_rightly(name, tmp_path):
    families.prepare(Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja", tmp_path)
    quiet = {"progress": False, "report": False}
    tuned = psigrad.train(
        "sft",
        model=tmp_path / "base",
        dataset=str(tmp_path / "demonstrations.jsonl"),
        output_dir=str(tmp_path / "sft"),
        max_steps=400,
        batch_size=16,
        learning_rate=3e-3,
        warmup_steps=10,
        eval_prompts=0,
        **quiet,
    )
    trained = psigrad.train(
        "grpo",
        model=tuned.model,
        dataset=str(tmp_path / "prompts.jsonl"),
        eval_dataset=str(tmp_path / "held_out.jsonl"),
        tools=[families.price],
        reward=families.right_price,
        output_dir=str(tmp_path / "grpo"),
        max_turns=2,
        max_completion_length=40,
        max_steps=40,
        prompts_per_step=8,
        num_generations=8,
        learning_rate=1e-3,
        eval_prompts=40,
        **quiet,
    )
    before, after = (figures["eval/reward/mean"] for figures in (trained.before, trained.after))
    assert trained.after["eval/reward/low"] > trained.before["eval/reward/high"], (before, after)
    said = [json.loads(line) for line in (tmp_path / "grpo" / "rollouts.jsonl").read_text().splitlines()]
    assert any(row["turns"] == 2 and row["reward"] == 1 for row in said)
