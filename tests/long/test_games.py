"""The environments that come along are learned by a small model on a CPU, from careless demonstrations, over seeds."""

from __future__ import annotations

import pytest

import psigrad
from psigrad.language.data.templates import CHATML
from psigrad.language.models import tiny
from psigrad_extras.games import GAMES

pytestmark = pytest.mark.long
TURNS = {"guess": 8, "calculator": 3, "grid": 12}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", GAMES)
def test_the_game_is_learned(name, seed, tmp_path):
    game = GAMES[name]
    shown = game.demonstrations(4000, 1)
    tokenizer = tiny.tokenizer(
        [m["content"] for row in shown[:500] for m in row["messages"]] + ["user\n", "assistant\n"] * 50, 290
    )
    tokenizer.chat_template = CHATML
    model = tiny.model(
        "qwen3", len(tokenizer), hidden=96, layers=3, max_length=160, seed=seed, eos_token_id=tokenizer.eos_token_id
    )
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    quiet = {"seed": seed, "progress": False, "report": False}
    tuned = psigrad.train(
        "sft",
        model=tmp_path / "base",
        dataset=shown,
        output_dir=str(tmp_path / "sft"),
        max_steps=400,
        batch_size=64,
        learning_rate=3e-3,
        warmup_steps=20,
        eval_prompts=0,
        **quiet,
    )
    trained = psigrad.train(
        {"preset": "reinforce_pp", "kl": None},
        model=tuned.model,
        dataset="",
        environment=name,
        output_dir=str(tmp_path / "rl"),
        max_steps=120,
        learning_rate=5e-4,
        prompts_per_step=16,
        num_generations=8,
        max_turns=TURNS[name],
        max_completion_length=10,
        eval_prompts=200,
        **quiet,
    )
    before, after = (figures["eval/reward/mean"] for figures in (trained.before, trained.after))
    assert trained.after["eval/reward/low"] > trained.before["eval/reward/high"], (before, after)
