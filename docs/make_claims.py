"""Writes docs/claims.md out of the figures in docs/images/experiments/ and the words below.

python docs/make_claims.py
"""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import TypeAdapter
from rich.console import Console

from psigrad.config.load import load
from psigrad.experiments.declarations import EXPERIMENTS

DOCS = Path(__file__).parent
IMAGES = DOCS / "images" / "experiments"

# name: (title, source, minutes on one core, what it means)
CLAIMS: dict[str, tuple[str, str, int, str]] = {
    "methods": (
        "Methods at equal samples",
        "Ahmadian et al. 2024, arXiv:2402.14740",
        12,
        "REINFORCE, RLOO, GRPO and RAFT cannot be told apart here by more than a hundredth. PPO with its usual four passes over each batch "
        "learns more from as many samples, since it takes four times as many optimiser steps; the arm with one pass shows what the critic "
        "alone is worth. The paper's order was found on models of 7 billion parameters with learned rewards, where sampling is what costs; "
        "there, passes over stale samples and a critic to train are worth less.",
    ),
    "lambda": (
        "PPO's λ",
        "Ahmadian et al. 2024, arXiv:2402.14740, section 5.1; Schulman et al. 2016, arXiv:1506.02438",
        25,
        "On words the reward comes at the end of some six tokens: a λ below 1 hands it back through a critic that is still wrong, "
        "and with λ = 0 the policy unlearns. On CartPole rewards come at every step and the episode is long; there 0.9 and 0.95 reach the full 500 "
        "with every seed and λ = 1 does not, while the area over the whole run cannot tell them apart.",
    ),
    "noise": (
        "Noise in the reward, and β",
        "Ahmadian et al. 2024, arXiv:2402.14740, section 5.3",
        15,
        "The noise is a function of the answer, as a learned reward model's error is. Measured with `--seeds 4`. RAFT and RLOO have no rate of "
        "their own here, and PPO at this rate shakes. RAFT's β is a KL in the loss, which leaves its ranking of the completions alone: it does "
        "not lose by a larger β.",
    ),
    "memory": (
        "Memory and time",
        "Huang and Ahmadian 2024, Putting RL back in RLHF (Hugging Face)",
        2,
        "By weights alone a critic as large as the policy, with its optimiser, is 16 of 36 bytes per parameter in float32: RLOO does without "
        "44 % at most, plus the critic's activations. The reward is a function here; a reward model would be in both. With one pass PPO's "
        "critic adds a forward and a backward pass; with its usual four passes over each batch the whole update is repeated.",
    ),
    "action_space": (
        "The effective action space",
        "Ahmadian et al. 2024, arXiv:2402.14740, section 3",
        1,
        "`psigrad experiment action_space --model NAME --dataset prompts.jsonl` looks at a model of yours.",
    ),
    "clip_higher": (
        "Clip-higher",
        "Yu et al. 2025, DAPO, arXiv:2503.14476, section 3.1",
        8,
        "Four passes over each batch. Even so at most 3 in 100 steps lie above the clip of 0.2, so there is little for a higher one to free; the "
        "entropy falls because the task is learnt. The claim is about long runs of large models.",
    ),
    "dynamic_sampling": (
        "Dynamic sampling",
        "Yu et al. 2025, DAPO, arXiv:2503.14476, section 3.2",
        4,
        "Three fifths of the groups carry no signal in this run. Replacing them makes each update worth more, and costs nearly three times as "
        "many samples. By samples the gain is small.",
    ),
    "dpo": (
        "Preferences, offline and online",
        "Rafailov et al. 2024, arXiv:2404.12358; Pal et al. 2024, arXiv:2402.13228; Tang et al. 2024, arXiv:2405.08448",
        12,
        "All start from one model; the pairs are the best and the worst of eight of its own samples, as many samples in all as the online methods "
        "draw. Each method's rate was chosen on a seed of its own.",
    ),
    "loopholes": (
        "Rewards with a loophole",
        "Amodei et al. 2016, arXiv:1606.06565; Gao et al. 2023, arXiv:2210.10760",
        20,
        "The warnings compare the reward of training with a metric on held-out prompts (`evaluation.metric`): without a metric of its own that "
        "is the truth, a run cannot notice. The honest runs have three learning rates; at the largest, training shakes, and all alarms are there. The "
        "patience of the rule (three evaluations in a row) was set on length, format, copy and honest RLOO; before, with two, 13 of 120 honest "
        "runs raised an alarm.",
    ),
}


def stored(name: str) -> Any:
    """The result of an experiment, from its figures."""
    found = json.loads((IMAGES / f"{name}.json").read_text())
    one = EXPERIMENTS[name]
    result = TypeAdapter(get_type_hints(one.module.run)["return"]).validate_python(found)
    return replace(result, settings=load(one.settings, flags=found["settings"]))


def printed(name: str) -> str:
    """What the command printed, in 80 columns."""
    console = Console(file=io.StringIO(), width=80)
    for part in EXPERIMENTS[name].module.tables(stored(name)):
        console.print(part)
    return "\n".join(line.rstrip() for line in console.file.getvalue().strip("\n").splitlines())  # type: ignore[attr-defined]


def anchor(title: str) -> str:
    """The name of a heading in links."""
    return "".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c == "-")


def page() -> str:
    """The text of docs/claims.md."""
    rows, sections = [], []
    for name, (title, source, minutes, meaning) in CLAIMS.items():
        if not (IMAGES / f"{name}.json").exists():
            continue
        result = stored(name)
        for f in result.findings:
            d = f.difference
            figure = f"{d.mean:.3g}" if d.low == d.high else f"{d.mean:+.3g} [{d.low:+.3g}, {d.high:+.3g}]"
            rows.append(f"| {f.claim} | {f.verdict} | {figure} | [{name}](#{anchor(title)}) |")
        sections.append(
            f"## {title}\n\nSource: {source}. `psigrad experiment {name}`: some {minutes} minutes on one core.\n\n"
            f"![{title}](images/experiments/{name}.png)\n\n```text\n{printed(name)}\n```\n"
            + (f"\n{meaning}\n" if meaning else "")
        )
    return f"""# Claims, re-run

The literature on reinforcement learning for language models makes claims. Each row is one of them, run with psigrad on a task that is
small enough for everyone: spelling words of three to five letters backwards, from a model that was fine-tuned on careless demonstrations.
Whether a claim holds was decided by a test that was stated before: the 95 % interval (Student's t) of the difference of runs with the same
seed lies above 0 (holds), below 0 (does not hold), or around it (undecided).

A model of 0.4 million parameters is no model of 7 billion. "Does not hold" means: not on this task at this size, for the reason that the
section gives where one was found.

| claim | verdict | difference and interval | experiment |
|---|---|---|---|
{chr(10).join(rows)}

Every experiment is one command. `--seeds`, `--steps` and the other settings are flags (`--help`); `--processes` says how many runs go on
at a time. Runs that are finished are not run again: a stopped experiment goes on where it was. The small forms
(`--seeds 2 --steps 3 --sft-steps 20 --words 300 --held-out 20`) are run by `make test-long`. Baselines and reward-to-go (variance), the
clip and the biases of the estimators are on the page [Experiments](experiments.md), where they are computed exactly.

{chr(10).join(sections)}"""


if __name__ == "__main__":
    (DOCS / "claims.md").write_text(page())
