"""DPO, IPO and SimPO on recorded pairs against online DPO and RLOO, all from the samples of one model and the same judge.

There are two claims. DPO raises the margin between chosen and rejected while it lowers the log-probability of the chosen
(Rafailov et al. 2024, From r to Q*, arXiv:2404.12358; Pal et al. 2024, Smaug, arXiv:2402.13228). Online methods reach more with
the same number of samples (Ahmadian et al. 2024, arXiv:2402.14740; Tang et al. 2024, arXiv:2405.08448).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from psigrad.config import Data, Evaluation, Model, PreferenceConfig, Run, SampleConfig
from psigrad.language.data import tasks
from psigrad_extras import demo
from psigrad_extras.datasets import sample
from studies import trials
from studies.settings import TrialSettings
from studies.trials import TrialResult

OFFLINE = {"DPO": "dpo", "IPO": "ipo", "SimPO": "simpo"}
ONLINE = {"online DPO": "online_dpo", "RLOO": "rloo"}
RATES = {"offline": (1e-5, 3e-5, 1e-4, 3e-4), "online": (1e-4, 3e-4, 1e-3)}
"""The learning rates that each method tries on a separate seed."""

check = trials.check


def run(s: TrialSettings) -> TrialResult:
    """Build pairs from as many samples as the online methods draw; then run every arm."""
    where = trials.files(s)
    train, held = pairs(s, where)
    offline = PreferenceConfig(
        model=Model(path=str(where["model"])),
        data=Data(dataset=str(train), eval_dataset=str(held)),
        optim=trials.online(s, where, "rloo").optim,
        run=Run(max_steps=s.steps, progress=False, report=False, threads=1),
        reward=("exact",),
        sampling=demo.SAMPLING,
        evaluation=Evaluation(eval_prompts=s.held_out, eval_steps=max(1, s.steps // 10)),
        batch_size=s.prompts * s.generations // 4,
    )
    recorded: dict[str, tuple[str, Any]] = {name: (loss, replace(offline, loss=loss)) for name, loss in OFFLINE.items()}
    sampled = {name: (method, trials.online(s, where, method, reward=("exact",))) for name, method in ONLINE.items()}
    rates = trials.tune(s, "dpo", recorded, RATES["offline"]) | trials.tune(s, "dpo", sampled, RATES["online"])
    figures = {
        "area": trials.area,
        "at the end": trials.last,
        "margin": lambda r: change(r, "eval/rewards/margins"),
        "chosen": lambda r: change(r, "eval/logps/chosen"),
        "rejected": lambda r: change(r, "eval/logps/rejected"),
    }
    arms = trials.run_arms(s, "dpo", recorded | sampled, figures, rates=rates)
    still = (0.0,) * s.seeds
    findings = []
    for name in OFFLINE:
        own = arms[name].each
        findings.append(trials.compare_pairs(f"{name} raises the margin", f"margin: {name} > 0", own["margin"], still))
        claim = f"{name} lowers the log-probability of the chosen answers"
        findings.append(trials.compare_pairs(claim, f"chosen: {name} < 0", still, own["chosen"]))
    for name in ONLINE:
        findings.append(
            trials.compare(f"{name} learns more than DPO from as many samples", arms[name], arms["DPO"], "at the end")
        )
    return TrialResult(s, tuple(arms.values()), tuple(findings))


def pairs(s: TrialSettings, where: Mapping[str, Path]) -> tuple[Path, Path]:
    """Return the files of (training pairs, held-out pairs).

    A training pair is the best against the worst of the model's own samples, from as many as an online run draws. A held-out pair
    is the correct answer against the demonstrations' mistake.
    """
    folder = Path(s.out) / "start" / f"pairs-{s.words}-{s.sft_steps}-{s.steps}-{s.prompts}-{s.generations}"
    train, held = folder / "pairs.jsonl", folder / "held_out.jsonl"
    if not train.exists():
        asked = SampleConfig(
            model=Model(path=str(where["model"])),
            data=Data(dataset=str(where["prompts"])),
            sampling=demo.SAMPLING,
            evaluation=Evaluation(eval_prompts=s.steps * s.prompts, num_generations_eval=s.generations),
            run=Run(progress=False, threads=1),
            reward=("exact",),
            keep="pairs",
            output=str(folder / "sampled.jsonl"),
        )
        folder.mkdir(parents=True, exist_ok=True)
        trials.pairs(asked, train)
    rows = [json.loads(line) for line in where["held_out"].read_text().splitlines()]
    wrong = tasks.demonstrations(rows, 1.0, tasks.swap_ending, 0)
    made = [
        {**row, "chosen": row["completion"], "rejected": other["completion"]}
        for row, other in zip(rows, wrong, strict=True)
        if other["completion"].strip() != row["completion"].strip()
    ]
    sample.write_jsonl(held, made)
    return train, held


def change(rows: Any, key: str) -> float:
    """Return the last figure minus the first."""
    found = list(trials.curve(rows, key).values())
    return found[-1] - found[0] if found else float("nan")


tables = trials.shown(
    "Preferences, offline and online",
    "margin: change of the implicit reward of held-out right answers less that of the mistake, in units of β·nats",
    "chosen, rejected: change of their log-probabilities, in nats per completion",
    form=".2f",
)
picture = trials.curves(
    ("Held-out accuracy", (*OFFLINE, *ONLINE)),
    beside=[("Change of log-probabilities, nats per completion", ("chosen", "rejected"))],
)
