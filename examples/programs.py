"""A small model learns to write programs by GRPO on a CPU: python examples/programs.py [FOLDER]

A prompt lists three arithmetic steps, such as "plus 3, times 2, minus 5". The answer is a Python function that applies them in
this order. In 60 % of the demonstrations two steps are swapped, and supervised fine-tuning copies this mistake. GRPO with the
reward `code`, which runs each task's tests in the sandbox, removes it. No held-out task occurs in the training data. The sandbox
needs bubblewrap: `psigrad doctor` checks whether it works.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from pathlib import Path

import psigrad
from psigrad.language.models import tiny

OPERATORS = {"plus": "+", "minus": "-", "times": "*"}
HELD_OUT, WRONG = 200, 0.6


def program(steps: list[tuple[str, int]]) -> str:
    """Return the source of a function that applies the steps in order."""
    body = "".join(f" x = x {OPERATORS[word]} {n}\n" for word, n in steps)
    return f"def f(x):\n{body} return x\n"


def row(steps: list[tuple[str, int]], rng: random.Random) -> dict[str, object]:
    """Return a task: its prompt, its tests, and a demonstration that is wrong in 60 % of the tasks."""
    made: dict[str, object] = {}
    exec(program(steps), made)  # trusted code: it computes the values that the tests expect
    shown = list(steps)
    if rng.random() < WRONG:
        i = rng.randrange(2)
        shown[i], shown[i + 1] = shown[i + 1], shown[i]
    return {
        "prompt": ", ".join(f"{word} {n}" for word, n in steps) + ":\n",
        "completion": program(shown),
        "tests": [f"assert f({x}) == {made['f'](x)}" for x in (-7, 2, 13)],
    }


def prepare(folder: Path, seed: int = 0) -> None:
    """Write the rows and an untrained model."""
    rng = random.Random(seed)
    steps = list(itertools.product(OPERATORS, range(2, 10)))
    tasks = [list(task) for task in itertools.product(steps, repeat=3)]
    rng.shuffle(tasks)
    rows = [row(task, rng) for task in tasks]
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("held_out", rows[:HELD_OUT]), ("train", rows[HELD_OUT:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in part))
    tokenizer = tiny.tokenizer([f"{r['prompt']}{r['completion']}" for r in rows[:2000]], 320)
    tiny.model("qwen3", len(tokenizer), hidden=128, layers=4, heads=4, seed=seed).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")


def main(folder: Path, seed: int = 0, sft_steps: int = 500, rl_steps: int = 80) -> None:
    """Fine-tune, train by GRPO, and print the share of held-out tasks whose tests all pass."""
    prepare(folder, seed)
    held_out = str(folder / "held_out.jsonl")
    shared = {
        "dataset": str(folder / "train.jsonl"),
        "eval_dataset": held_out,
        "eval_prompts": HELD_OUT,
        "max_completion_length": 48,
        "reward_workers": 2,
        "seed": seed,
    }
    tuned = psigrad.train(
        "sft",
        model=folder / "base",
        batch_size=64,
        max_steps=sft_steps,
        learning_rate=3e-3,
        output_dir=str(folder / "sft"),
        **shared,
    )
    trained = psigrad.train(
        {"preset": "grpo", "kl": None},
        model=tuned.model,
        reward="code",
        max_steps=rl_steps,
        learning_rate=5e-4,
        prompts_per_step=8,
        num_generations=8,
        output_dir=str(folder / "grpo"),
        **shared,
    )
    for when, figures in (("after SFT ", trained.before), ("after GRPO", trained.after)):
        mean, low, high = (figures[f"eval/code/{part}"] for part in ("mean", "low", "high"))
        print(f"{when}  {mean:.3f} of the held-out programs pass their tests [{low:.3f}, {high:.3f}]")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/programs"))
