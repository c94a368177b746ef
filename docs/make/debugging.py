"""Update docs/debugging.md, which shows ten typical faults, each made on purpose in a run from one model.

python docs/make/debugging.py runs DEMO RUNS    trains the runs from the demo's SFT model, and keeps their curves in debugging.json
python docs/make/debugging.py page              draws docs/images/debugging/ and updates the warnings that the page names
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1]
PAGE = DOCS / "debugging.md"
CURVES = Path(__file__).with_suffix(".json")
IMAGES = DOCS / "images" / "debugging"
STEPS = 80
COMMON: dict[str, Any] = {
    "reward": "exact",
    "metric": "exact",
    "algorithm": {"preset": "grpo", "kl": None, "name": "grpo"},
    "learning_rate": 5e-4,
    "adam_beta2": 0.99,
    "warmup_steps": 5,
    "prompts_per_step": 16,
    "num_generations": 8,
    "max_completion_length": 12,
    "eval_prompts": 150,
    "eval_steps": 20,
}


@dataclass(frozen=True)
class Fault:
    """One fault of docs/debugging.md: the settings that cause it, and the figure that gives it away."""

    name: str
    settings: dict[str, Any]
    figure: str
    """The key of metrics.jsonl that tells it apart."""
    label: str


def letters(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """A flawed reward: the share of the answer's letters that occur, and a little for every further letter."""
    return [
        sum(letter in text for letter in gold) / len(gold) + 0.05 * len(text)
        for text, gold in zip(completions, answer, strict=True)
    ]


def coin(completions: list[str], **columns: Any) -> list[float]:
    """A reward that has nothing to do with the completion's worth."""
    return [float(sum(map(ord, text)) * 2654435761 % 1000 < 500) for text in completions]


def misread(completions: list[str], task: list[str], **columns: Any) -> list[float]:
    """A reward that compares with the wrong column."""
    return [float(text.strip() == name) for text, name in zip(completions, task, strict=True)]


FAULTS = (
    Fault("healthy", {}, "entropy", "entropy, nats"),
    Fault("rate_high", {"learning_rate": 0.02}, "completions/mean_length", "length, tokens"),
    Fault("rate_low", {"learning_rate": 1e-06}, "entropy", "entropy, nats"),
    Fault("wrong_gold", {"reward": misread}, "frac_reward_zero_std", "share of dead groups"),
    Fault("too_hard", {"model": "base"}, "frac_reward_zero_std", "share of dead groups"),
    Fault("cut", {"max_completion_length": 5}, "completions/clipped_ratio", "share cut"),
    Fault("cold", {"temperature": 0.2}, "frac_reward_zero_std", "share of dead groups"),
    Fault("leash", {"algorithm": "grpo", "beta": 20.0}, "kl", "KL, nats per token"),
    Fault("noise", {"reward": coin}, "reward_std", "reward spread"),
    Fault("hacked", {"reward": letters}, "completions/mean_length", "length, tokens"),
    Fault("few_prompts", {"rows": 16}, "eval/exact/mean", "held-out accuracy"),
)


def run_all(demo: str, runs: str) -> None:
    """Train every run and keep its curves, and the alerts that its report shows."""
    import psigrad
    from psigrad.records.read import load
    from psigrad.records.report.verdict import watched

    found = {}
    for fault in FAULTS:
        settings = {**COMMON, **fault.settings}
        # beside each spoilt run stands the healthy one
        shown = dict.fromkeys(other.figure for other in FAULTS) if fault.name == "healthy" else [fault.figure]
        model = Path(demo) / ("base" if settings.pop("model", "") == "base" else "sft/model")
        rows = [json.loads(line) for line in (Path(demo) / "data" / "prompts.jsonl").read_text().splitlines()]
        folder = Path(runs) / fault.name
        psigrad.train(
            "grpo",
            model=str(model),
            dataset=rows[: settings.pop("rows", len(rows))],
            eval_dataset=f"{demo}/data/held_out.jsonl",
            output_dir=str(folder),
            max_steps=STEPS,
            report=False,
            progress=False,
            **settings,
        )
        found[fault.name] = {
            "curves": {key: curve(folder, key) for key in ("reward", "eval/exact/mean", *shown)},
            "alerts": sorted({alert.rule for alert in watched(load(folder)).alerts()}),
        }
        CURVES.write_text(json.dumps(found, indent=1) + "\n")


def curve(folder: Path, key: str) -> list[list[float]]:
    """[steps, values] of a figure in a run's metrics."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    points = [(row["step"], row[key]) for row in rows if isinstance(row.get(key), int | float)]
    return [[step for step, _ in points], [float(f"{value:.4g}") for _, value in points]]


def draw(fault: Fault, curves: dict[str, list[list[float]]], healthy: dict[str, list[list[float]]]) -> None:
    """Reward and held-out accuracy of the run on the left, the telling figure on the right; the healthy run in grey."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 2.3), layout="constrained")
    panels = (("reward", "reward (line), held-out accuracy (dots)"), (fault.figure, fault.label))
    for axes, (key, title) in zip(figure.subplots(1, 2), panels, strict=True):
        if key in healthy:
            axes.plot(*healthy[key], color="#8a8f98", linewidth=1.0, alpha=0.8)
        dots = "o" if key.startswith("eval/") else None
        axes.plot(
            *curves[key], color="#D55E00" if fault.name != "healthy" else "#0072B2", linewidth=1.6, marker=dots, markersize=3
        )
        if key == "reward":
            axes.plot(*curves["eval/exact/mean"], "o", color="#222222", markersize=3)
            axes.set_ylim(bottom=min(0.0, *curves[key][1]) - 0.02)
        axes.set_title(title, loc="left", fontsize=8, color="#222222")
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.grid(axis="y", color="#8a8f98", alpha=0.25, linewidth=0.6)
        axes.tick_params(colors="#333333", labelsize=7, length=0)
    IMAGES.mkdir(parents=True, exist_ok=True)
    figure.savefig(IMAGES / f"{fault.name}.png", dpi=120, metadata={"Software": None})


def page() -> str:
    """Return docs/debugging.md, with the warnings that each run raised."""
    from psigrad.records.warnings import BY_NAME

    text = PAGE.read_text()
    for name, run in json.loads(CURVES.read_text()).items():
        titles = [BY_NAME[rule].title for rule in run["alerts"]]
        links = [f"[{title}](#{title.lower().replace(',', '').replace(' ', '-')})" for title in titles]
        before, picture, rest = text.partition(f"(images/debugging/{name}.png)")
        rest = re.sub(r"(\*\*Warnings\.\*\*) .*", rf"\1 {', '.join(links) or 'none'}.", rest, count=1)
        text = before + picture + rest
    return text


def write() -> None:
    """Write the page and its pictures."""
    found = json.loads(CURVES.read_text())
    for fault in FAULTS:
        draw(fault, found[fault.name]["curves"], found["healthy"]["curves"] if fault.name != "healthy" else {})
    PAGE.write_text(page())


if __name__ == "__main__":
    if len(sys.argv) == 4 and sys.argv[1] == "runs":
        run_all(*sys.argv[2:])
    elif sys.argv[1:] == ["page"]:
        write()
    else:
        sys.exit(__doc__)
