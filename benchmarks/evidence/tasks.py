"""The tasks, sizes and settings of the evidence, all fixed before the first run, and the reward that both libraries call."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from psigrad.language.data.tasks import distinct
from psigrad.language.models.packing import order
from psigrad.language.rewards.builtin import reasoning_gym
from psigrad.language.rollout.scoring import text_of

CANDIDATES: Mapping[str, Mapping[str, Any]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2},
    "leg_counting": {"min_animals": 2, "max_animals": 2, "max_instances": 3},
    "spell_backward": {"min_word_len": 3, "max_word_len": 4},
    "family_relationships": {"min_family_size": 4, "max_family_size": 5},
    "gcd": {"min_value": 2, "max_value": 60},
    "letter_counting": {"min_words": 3, "max_words": 5},
    "fraction_simplification": {"max_value": 20, "max_factor": 5, "styles": ("plain",)},
    "number_sequence": {"min_terms": 4, "max_terms": 5, "max_complexity": 1},
    "products": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
    "lcm": {"min_value": 2, "max_value": 30},
    "simple_equations": {"min_terms": 2, "max_terms": 2, "max_value": 20},
    "count_bits": {"min_n": 1, "max_n": 1000},
}
"""reasoning-gym's tasks with easy settings. The first `TASKS` with LOW ≤ pass@8 ≤ HIGH before training are chosen. If there are
fewer, each candidate below LOW is fine-tuned on `SFT_ROWS` answers of its own and tried again."""
LOW, HIGH, TASKS, SFT_ROWS = 0.05, 0.5, 4, 128
SEEDS = (0, 1, 2)
STEPS, PROMPTS, GROUP, TOKENS, RATE = 40, 4, 8, 16, 3e-5
"""Steps of GRPO, prompts of a step, completions of a prompt, tokens of a completion, and the learning rate, which falls to 0."""
PILOT, HELD_OUT, DRAWS = 32, 100, 8
"""Prompts of the pilot and of the held-out set, and completions of each."""
ROWS_AT_ONCE = 16
"""Rows of a forward pass in TRL. psigrad packs completions by tokens."""
SYSTEM = "Answer with the result alone."
SIZES = {name: value for name, value in dict(vars()).items() if name.isupper() and name != "CANDIDATES"}
DIGEST = sha256(json.dumps([CANDIDATES, SIZES]).encode()).hexdigest()[:12]
"""A hash of everything above, which each record holds."""
PATIENCE = 600.0
"""Seconds that scoring may take: a busy machine loads reasoning-gym slowly. It changes no figure."""


def rows(task: str) -> dict[str, list[dict[str, Any]]]:
    """Return a task's rows, all with different prompts: `held_out`, `train` and `sft`. The pilot uses the first of `train`."""
    made = [
        {
            "prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": row["prompt"].strip()}],
            "answer": row["answer"],
            "task": task,
            "entry": json.dumps(row["metadata"]),  # as text, since Arrow would change it
        }
        for row in distinct(task, HELD_OUT + STEPS * PROMPTS + SFT_ROWS, 1, **CANDIDATES[task])
    ]
    return {"held_out": made[:HELD_OUT], "train": made[HELD_OUT:-SFT_ROWS], "sft": made[-SFT_ROWS:]}


def solved(
    completions: Sequence[Any], answer: Sequence[str], task: Sequence[str], entry: Sequence[str], **columns: Any
) -> list[float]:
    """Return 1 for each completion whose answer has reasoning-gym's full score, and 0 for the others."""
    texts = [read(text_of(completion), gold) for completion, gold in zip(completions, answer, strict=True)]
    scores = reasoning_gym(texts, task, [json.loads(one) for one in entry], answer)
    return [float(isinstance(score, float) and score >= 1.0) for score in scores]


def read(text: str, gold: str) -> str:
    """Return the last number of a text if the right answer is a number, and otherwise the text without its full stop."""
    if not re.fullmatch(r"-?\d+", gold):
        return text.strip().removesuffix(".").strip()
    return (re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", "")) or [""])[-1]


def write_job(folder: Path, model: str, task: str, seed: int, dtype: str = "bfloat16") -> None:
    """Write the settings and rows of one run for both sides: psigrad.json and rows.jsonl, and trl.json.

    TRL reads the rows in the order in which psigrad's run visits them. Its mixed precision is autocast over float32 weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    train = rows(task)["train"]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in train))
    ours = {
        "algorithm": {"preset": "grpo", "kl": None}, "reward": [f"{Path(__file__).resolve()}:solved"], "reward_timeout": PATIENCE,
        "prompts_per_step": PROMPTS, "num_generations": GROUP, "sampling": {"max_completion_length": TOKENS},
        "model": {"path": model, "dtype": dtype}, "data": {"dataset": str(folder / "rows.jsonl")},
        "optim": {"learning_rate": RATE}, "evaluation": {"eval_prompts": 0},
        "run": {"max_steps": STEPS, "seed": seed, "device": "cpu", "save_minutes": 0, "report": False, "progress": False,
                "output_dir": str(folder / "psigrad")},
    }  # fmt: skip
    theirs = {
        "loss_type": "grpo", "beta": 0.0, "num_generations": GROUP, "max_completion_length": TOKENS,
        "per_device_train_batch_size": ROWS_AT_ONCE, "gradient_accumulation_steps": PROMPTS * GROUP // ROWS_AT_ONCE,
        "bf16": dtype == "bfloat16", "shuffle_dataset": False, "learning_rate": RATE, "max_steps": STEPS, "seed": seed,
        "use_cpu": True, "gradient_checkpointing": False, "save_strategy": "no", "logging_steps": 1, "report_to": [],
        "disable_tqdm": True, "output_dir": str(folder / "trl"),
    }  # fmt: skip
    (folder / "psigrad.json").write_text(json.dumps(ours))
    in_order = [train[place] for place in order(len(train), seed, 0)]
    (folder / "trl.json").write_text(json.dumps({"model": model, "settings": theirs, "rows": in_order}))
