"""Draws how much PPO's critic explains of the returns, over five seeds: its own rate by default, beside the policy's.

    python docs/make/critic.py FOLDER       a minute; docs/images/critic.json and critic.png

A model of 32 numbers a layer writes two letters behind "say a:"; the reward is 1 where that letter is one of the first four.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from psigrad.config import Data, Evaluation, Model, OnlineConfig, Optim, Run, Sampling
from psigrad.language.models import tiny
from psigrad.language.recipes import online

IMAGES = Path(__file__).parents[1] / "images"
SEEDS, STEPS = range(5), 60
RATES = {"by default": 0.0, "the policy's (1e-6)": 1e-6}


def early_prompts(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
    """Says nothing of the completion: what there is to know stands in the prompt."""
    return [float(prompt[4] in "abcd") for prompt in prompts]


def job(folder: Path) -> OnlineConfig:
    """A fresh model, its rows and PPO's settings."""
    rows = [{"prompt": f"say {random.Random(i).choice('abcdefgh')}:"} for i in range(64)]
    tokenizer = tiny.tokenizer([row["prompt"] for row in rows], 270)
    tiny.model("qwen3", len(tokenizer), hidden=32, layers=1, heads=2, max_length=64).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return OnlineConfig(
        model=Model(path=str(folder / "base")),
        data=Data(dataset=str(folder / "train.jsonl")),
        optim=Optim(),
        sampling=Sampling(max_completion_length=2),
        evaluation=Evaluation(eval_prompts=0),
        run=Run(max_steps=STEPS, threads=1, progress=False, report=False),
        algorithm="ppo",
        reward=(early_prompts,),
        num_generations=1,
    )


def curve(config: OnlineConfig, place: Path, rate: float, seed: int) -> list[float]:
    """The explained variance of each step; a run that has ended is not run again."""
    if not (place / "report.html").exists():
        run = replace(config.run, output_dir=str(place), seed=seed, report=True)
        online.run(replace(config, run=run, critic_learning_rate=rate))
    rows = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    return [row["explained_variance"] for row in rows if "explained_variance" in row]


def main(folder: Path) -> None:
    """Run, write the figures down, draw them."""
    folder.mkdir(parents=True, exist_ok=True)
    config = job(folder)
    found = {name: [curve(config, folder / f"{rate}-{seed}", rate, seed) for seed in SEEDS] for name, rate in RATES.items()}
    (IMAGES / "critic.json").write_text(json.dumps({n: np.round(c, 3).tolist() for n, c in found.items()}) + "\n")
    figure, axes = plt.subplots(figsize=(6, 3))
    for name, curves in found.items():
        (line,) = axes.plot(range(1, STEPS + 1), np.median(curves, axis=0), label=name)
        axes.fill_between(range(1, STEPS + 1), np.min(curves, axis=0), np.max(curves, axis=0), alpha=0.2, color=line.get_color())
    axes.set(xlabel="step", ylabel="explained variance", ylim=(-0.1, 1.05))
    axes.legend(title="critic's learning rate", loc="center right")
    figure.savefig(IMAGES / "critic.png", dpi=150, bbox_inches="tight")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
