"""Measures and draws the demo's learning curves, for README.md and docs/performance.md.

    python docs/make/demo.py run FOLDER     `psigrad demo` over five seeds, then GRPO in bfloat16 from the same fine-tuned models

takes an hour on a laptop, and goes on where it was stopped;

    python docs/make/demo.py draw FOLDER    docs/images/demo.json, demo.png (float32) and precision.png from it
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
SEEDS = range(5)
STEPS = 500
DTYPES = {"float32": "grpo", "bfloat16": "grpo_bfloat16"}
# One process for each run, as a user has it.
_BFLOAT16 = """
import sys
from pathlib import Path
from psigrad.config import Run
from psigrad.language.recipes import online
from psigrad.runs import machine
folder, seed = Path(sys.argv[1]), int(sys.argv[2])
machine.prepare_torch(Run())
files = demo.prepare(folder, seed, False)
online.run(demo.reinforcing(folder / "sft" / "model", files, folder / "grpo_bfloat16", seed, max_steps=int(sys.argv[3]),
                            progress=False, dtype="bfloat16"))
"""


def run(folder: Path) -> None:
    """Whatever has not been run."""
    for seed in SEEDS:
        out = folder / str(seed)
        if not (out / "grpo" / "model").exists():
            command = [sys.executable, "-m", "psigrad", "demo", "--seed", str(seed), "--output-dir", str(out), "--no-progress"]
            subprocess.run(command, check=True)
    for seed in SEEDS:
        out = folder / str(seed)
        if not (out / "grpo_bfloat16" / "model").exists():
            subprocess.run([sys.executable, "-c", _BFLOAT16, str(out), str(seed), str(STEPS)], check=True)


def gather(folder: Path) -> dict[str, Any]:
    """Held-out accuracy over steps for each precision and seed, and the demo's final figures by seed."""
    found: dict[str, Any] = {"steps": [], "curves": {}, "final": {}}
    for dtype, name in DTYPES.items():
        if not all((folder / str(seed) / name / "model").exists() for seed in SEEDS):
            continue  # the pictures show whole sets of seeds
        rows = [[json.loads(line) for line in _metrics(folder, seed, name)] for seed in SEEDS]
        curves = [[(r["step"], r["eval/exact/mean"]) for r in own if "eval/exact/mean" in r] for own in rows]
        found["steps"] = [step for step, _ in curves[0]]
        found["curves"][dtype] = [[round(y, 4) for _, y in curve] for curve in curves]
    for seed in SEEDS:
        summary = json.loads((folder / str(seed) / "grpo" / "summary.json").read_text())
        found["final"][str(seed)] = {row["name"]: round(row["value"], 4) for row in summary["rows"]}
    return found


def _metrics(folder: Path, seed: int, name: str) -> list[str]:
    return (folder / str(seed) / name / "metrics.jsonl").read_text().splitlines()


def draw(found: dict[str, Any]) -> None:
    """The two pictures."""
    plain = {"": found["curves"]["float32"]}
    _picture(plain, found["steps"], ROOT / "docs" / "images" / "demo.png", each=True)
    if len(found["curves"]) == len(DTYPES):
        _picture(found["curves"], found["steps"], ROOT / "docs" / "images" / "precision.png", each=False)


def _picture(sets: dict[str, Sequence[Sequence[float]]], steps: Sequence[int], path: Path, each: bool) -> None:
    """Held-out accuracy: every seed, or the mean over seeds with their range as a band."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from psigrad.records.report.plots import COLOURS

    figure, axis = pyplot.subplots(figsize=(7, 3.4))
    for colour, (name, curves) in zip(COLOURS, sets.items(), strict=False):
        values = np.array(curves)
        axis.plot(steps, values.mean(0), color=colour, linewidth=2, label=name or f"mean of {len(curves)} seeds")
        if each:
            axis.plot(steps, values.T, color=colour, linewidth=0.8, alpha=0.5)
        else:
            axis.fill_between(steps, values.min(0), values.max(0), color=colour, alpha=0.15, linewidth=0)
    axis.axhline(0.4, color="grey", linewidth=0.8, linestyle="--")
    axis.annotate("share of right demonstrations", (steps[-1], 0.41), ha="right", fontsize=8, color="grey")
    axis.set_xlabel("GRPO steps of 16 prompts × 8 completions", fontsize=9)
    axis.set_ylabel("accuracy on 400 held-out words", fontsize=9)
    axis.set_ylim(0, 1)
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8, frameon=False, loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    what, folder = sys.argv[1], Path(sys.argv[2])
    if what == "run":
        run(folder)
    else:
        found = gather(folder)
        (ROOT / "docs" / "images" / "demo.json").write_text(json.dumps(found, indent=1) + "\n")
        draw(found)


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("run", "draw"):
        sys.exit(__doc__)
    main()
