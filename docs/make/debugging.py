"""Writes docs/debugging.md: what ten typical faults look like, each made on purpose in a run from one model.

python docs/make/debugging.py runs DEMO RUNS    trains the runs from the demo's SFT model, and keeps their curves in debugging.json
python docs/make/debugging.py page              draws docs/images/debugging/ and writes the page out of debugging.json
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1]
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
    """One fault: the settings that make it, the figure that gives it away, and what to say of it."""

    name: str
    title: str
    settings: dict[str, Any]
    figure: str
    """The key of metrics.jsonl that tells it apart."""
    label: str
    seen: str
    cause: str
    remedy: str


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
    Fault("healthy", "A run that learns", {}, "entropy", "entropy, nats",
        "The reward rises, the held-out metric with it, the entropy falls slowly. Most groups are dead in the end: they are solved.", "", ""),
    Fault("rate_high", "The learning rate is too high", {"learning_rate": 2e-2}, "completions/mean_length", "length, tokens",
        "The reward falls to 0 within a few steps and does not come back. Completions run to the limit, and all groups are dead.",
        "One update moves the policy so far that what was sampled says nothing about it any more.",
        "Divide `learning_rate` by 10 and look at the first 20 steps. Full fine-tuning of real models wants 1e-6 to 1e-5, LoRA ten times that."),
    Fault("rate_low", "The learning rate is too low", {"learning_rate": 1e-6}, "entropy", "entropy, nats",
        "Everything is healthy and nothing moves: the reward trembles about its first value, and so does the entropy.",
        "The updates are smaller than what the run's length can add up to. For a model of a million weights, 1e-6 is.",
        "Multiply `learning_rate` by 10 until the reward moves or the gradient's norm leaps; then go back one step."),
    Fault("wrong_gold", "The reward reads the wrong column", {"reward": misread}, "frac_reward_zero_std", "share of dead groups",
        "The reward is 0 for everybody, all groups are dead, the gradient is 0. The held-out metric stays where it was.",
        "The reward compares with something that no completion can match: a wrong column, an answer in another form, a parser that fails.",
        "`psigrad score --reward … --dataset …` runs a reward on rows before any training, and `--attack` on answers that should pass and fail."),
    Fault("too_hard", "The model never succeeds", {"model": "base"}, "frac_reward_zero_std", "share of dead groups",
        "As above, and here the reward is right: a model that was never fine-tuned on the task finds no rewarded answer by chance.",
        "GRPO learns from differences within a group. Where all members fail there is none.",
        "Fine-tune on demonstrations first (`psigrad sft`), begin with easier rows, or give part of the reward for part of the way."),
    Fault("cut", "Completions are cut", {"max_completion_length": 5}, "completions/clipped_ratio", "share cut",
        "A large share of the completions ends at the limit, and the reward has a ceiling that it does not pass.",
        "What is cut cannot be judged right, however well it began.",
        "Raise `max_completion_length` until less than a twentieth is cut. `psigrad check` shows how long answers of the data are."),
    Fault("cold", "The temperature is too low", {"temperature": 0.2}, "frac_reward_zero_std", "share of dead groups",
        "The training reward looks better than the held-out metric, and most groups are dead: their members are the same text.",
        "Without differences there is nothing to learn from. What is learnt holds for the cold distribution.",
        "Train at temperature 1. For evaluation there is `eval_temperature`."),
    Fault("leash", "The KL penalty holds the policy fast", {"algorithm": "grpo", "beta": 20.0}, "kl", "KL, nats per token",
        "The KL stays small and the reward near its first value, at a learning rate at which it should rise.",
        "The penalty outweighs the reward as soon as the policy moves.",
        "Lower `beta`, or leave it out: verifiable rewards need none."),
    Fault("noise", "The reward is noise", {"reward": coin}, "reward_std", "reward spread",
        "The reward stays where it was, the spread within groups grows, and the held-out metric falls to nothing.",
        "The reward does not measure what is wanted: a judge that guesses, labels in the wrong order, a random tie-break.",
        "Score the same rows twice, and rows whose answer you know: `psigrad score --attack`."),
    Fault("hacked", "The reward is exploited", {"reward": letters}, "completions/mean_length", "length, tokens",
        "The reward rises faster than in the healthy run, completions grow, and the held-out metric falls to nothing.",
        "What is rewarded and what is wanted differ, and the policy found where.",
        "Evaluate by a `metric` that is not the reward; that is how it shows here. Mend the reward; a KL penalty only slows the way there."),
    Fault("few_prompts", "Too few prompts", {"rows": 16}, "eval/exact/mean", "held-out accuracy",
        "The training reward reaches 1 sooner than in the healthy run, and the held-out metric stops below it.",
        "The policy has learnt the answers of the few prompts, not the task.",
        "More prompts; fewer epochs; look at the held-out metric, and keep the best checkpoint by it."),
)  # fmt: skip


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


def section(fault: Fault, found: dict[str, Any]) -> str:
    """One fault as Markdown."""
    from psigrad.records.warnings import BY_NAME

    raised = [BY_NAME[rule].title for rule in found["alerts"]]
    titles = [f"[{title}](warnings.md#{title.lower().replace(',', '').replace(' ', '-')})" for title in raised]
    shown = ", ".join(titles) if titles else "none"
    parts = [
        f"## {fault.title}",
        f"![{fault.title}](images/debugging/{fault.name}.png)",
        f"**What it looks like.** {fault.seen}",
        f"**Alerts of the report.** {shown}.",
    ]
    parts += [f"**Why.** {fault.cause}", f"**What to do.** {fault.remedy}"] if fault.cause else []
    if changed := {key: value for key, value in fault.settings.items() if not callable(value)}:
        said = ", ".join(f"`{key}={json.dumps(value) if isinstance(value, str) else value}`" for key, value in changed.items())
        parts.append(f"Made by {said}.")
    return "\n\n".join(parts)


def page() -> str:
    """The text of docs/debugging.md."""
    found = json.loads(CURVES.read_text())
    sections = "\n\n".join(section(fault, found[fault.name]) for fault in FAULTS)
    return f"""# Debugging a run that does not learn

Look at three figures before anything else: the reward, the held-out metric (which need not be the reward), and the spread of rewards
within a group. Then find the picture below that looks like yours. Each is a run of GRPO of {STEPS} steps on the demo's task, spelling a
word backward, from the same fine-tuned model of 1.3 million weights; only what is named was changed. One seed each: they show what a
fault looks like, not how often. In the pictures the healthy run is grey. `python docs/make/debugging.py` makes them.

Before a run: `psigrad check` reads the model, the template, the first rows and calls the reward, the tools and the environment; `psigrad score --attack` tries the
reward on answers that should fail; `psigrad plan` says what fits. In a run: `report.html` and the studio raise the alerts that are
named here; [what each alert means](warnings.md).

{sections}

## None of these

- Look at completions, not at figures: `rollouts.jsonl`, the report's table, or the studio's page of a run show the best and the worst of a step.
- Make the task easier until it learns, then harder again: one prompt, then ten.
- `psigrad explain METHOD` prints what is optimised. Compare methods from one checkpoint and equal samples: `psigrad compare`.
- Loss is no measure of progress in RL: it is about 0 when every group's advantages sum to 0.
"""


def write() -> None:
    """The page and its pictures."""
    found = json.loads(CURVES.read_text())
    for fault in FAULTS:
        draw(fault, found[fault.name]["curves"], found["healthy"]["curves"] if fault.name != "healthy" else {})
    (DOCS / "debugging.md").write_text(page())


if __name__ == "__main__":
    if len(sys.argv) == 4 and sys.argv[1] == "runs":
        run_all(*sys.argv[2:])
    elif sys.argv[1:] == ["page"]:
        write()
    else:
        sys.exit(__doc__)
