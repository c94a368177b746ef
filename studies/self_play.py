"""Self-play of a tiny language model in Kuhn poker, from random weights: which rule reaches the equilibrium?

`python -m studies.self_play` plays five seeds of each rule, resumes where it stopped, and draws docs/images/self_play.png.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import psigrad
from psigrad.language.models import tiny
from psigrad.language.models.language_model import load
from psigrad.language.rollout.types import SamplingParams
from psigrad.paths import claim
from psigrad.records.report.plots import COLOURS, GREY
from psigrad.tabular.extensive_form import GameTree, KuhnPoker, fictitious_play, self_play
from psigrad_extras.text_games import Kuhn, exploitability
from studies import drawing

ALGORITHM = {"preset": "rloo", "ratio": "none", "surrogate": "score", "aggregate": "sequence_sum"}
KL = {"where": "loss", "estimator": "exact", "coefficient": 0.5}
RULES: dict[str, dict[str, Any]] = {
    "moving reference": {
        "algorithm": {**ALGORITHM, "kl": KL},
        "ref_model_sync_steps": 1,
        "ref_model_mixup_alpha": 0.03,
    },
    "plain": {"algorithm": {**ALGORITHM, "kl": None}, "max_steps": 200},
}
EVERY = 50


def letters(text: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each of these characters, after <eos> and <pad>."""
    vocabulary = {token: n for n, token in enumerate(["<eos>", "<pad>", *text])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", pad_token="<pad>")


def write_start(folder: Path, seed: int, text: str = ":JQKpb") -> Path:
    """Write a model of one layer with random weights of standard deviation 0.1, and its tokenizer."""
    tokenizer = letters(text)
    model = tiny.model("qwen3", len(tokenizer), hidden=32, layers=1, max_length=32, seed=seed, tied=False)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data *= 5  # with the usual 0.02 the card hardly influences the output
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def train(rule: str, seed: int, folder: Path, steps: int = 500, games: int = 32) -> list[tuple[int, float]]:
    """Train by a rule, and return (step, exploitability) of the start and of every `EVERY` steps."""
    start, output = folder / f"start-{seed}", folder / f"{rule.replace(' ', '-')}-{seed}"
    if not start.exists():
        write_start(start, seed)
    given: dict[str, Any] = {
        "dataset": [{"prompt": ":", "nature": [deal]} for deal in KuhnPoker.deals],
        "environment": "kuhn",
        "max_completion_length": 1,
        "prompts_per_step": 6,
        "num_generations": games,
        "learning_rate": 0.01,
        "max_steps": steps,
        "seed": seed,
        "eval_prompts": 0,
        "record_prompts": 1,
        "save_steps": EVERY,
        "save_total_limit": 1000,
        "progress": False,
        "report": False,
        "output_dir": str(output),
        **RULES[rule],
    }
    psigrad.train(given.pop("algorithm"), model=start, **given)
    saved = {int(path.name[5:]): path for path in (output / "checkpoints").glob("step-*")} | {0: start}
    return [(n, exploitability(load(str(path)), Kuhn, SamplingParams(1), ":")[0]) for n, path in sorted(saved.items())]


def exact(updates: int = 1000) -> dict[str, list[float]]:
    """Return the exploitability after each tenth update of the exact rules, each on the tables of Kuhn poker."""
    tree = GameTree(KuhnPoker())
    plays = {
        "plain, last": (self_play(tree, rate=3.0), False),
        "plain, average": (self_play(tree, rate=3.0), True),
        "fixed reference, last": (self_play(tree, rate=3.0, kl=0.2), False),
        "moving reference, last": (self_play(tree, rate=3.0, kl=0.2, reset_every=30), False),
        "fictitious, average": (fictitious_play(tree), True),
    }
    return {
        name: [tree.exploitability(play.average if average else play.last) for play in itertools.islice(made, 9, updates, 10)]
        for name, (made, average) in plays.items()
    }


def draw(found: dict[str, dict[str, list[tuple[int, float]]]], tables: dict[str, list[float]], path: Path) -> None:
    """Draw the exact rules on tables, and the language model's curves of every seed."""
    figure, (left, right) = drawing.new_figure(9.5, 3.4, 1, 2, sharey=True)
    for colour, (name, values) in zip(COLOURS, tables.items(), strict=False):
        left.plot([10 * (n + 1) for n in range(len(values))], values, color=colour, label=name)
    for colour, (name, seeds) in zip(COLOURS, found.items(), strict=False):
        for n, curve in enumerate(seeds.values()):
            right.plot(*zip(*curve, strict=True), color=colour, label=name if not n else None)
    for axes, title in ((left, "exact updates of tables"), (right, "language model, games sampled")):
        axes.set_yscale("log")
        axes.axhline(0.05, color=GREY, linewidth=0.8)
        axes.legend(frameon=False, fontsize=7)
        drawing.tidy(axes, f"Exploitability: {title}", "y")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Run the study, write its figures, and print the last ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/self_play"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rules", nargs="+", default=[*RULES], choices=[*RULES])
    given = parser.parse_args()
    claim(given.folder, "self_play", "--folder")
    found: dict[str, dict[str, list[tuple[int, float]]]] = {rule: {} for rule in given.rules}
    for seed, rule in itertools.product(range(given.seeds), given.rules):
        found[rule][str(seed)] = train(rule, seed, given.folder, given.steps)
        print(f"{rule:18} seed {seed}  exploitability {found[rule][str(seed)][-1][1]:.3f}", flush=True)
    (given.folder / "figures.json").write_text(json.dumps(found, indent=1) + "\n")
    draw(found, exact(), Path("docs/images/self_play.png"))


if __name__ == "__main__":
    main()
