"""Measures and draws the learning curves of docs/control.md.

    python docs/make_control.py run FOLDER      every algorithm and environment of the page over five seeds

takes hours, and goes on where it was stopped;

    python docs/make_control.py draw FOLDER     docs/images/control.json and control.png from the run folders
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
SEEDS = range(5)
CASES = {
    "CartPole-v1": ("reinforce", "a2c", "ppo", "ppo_penalty", "trpo", "dqn"),
    "LunarLander-v3": ("ppo",),
    "Acrobot-v1": ("ppo", "a2c", "trpo", "dqn"),
    "Pendulum-v1": ("ppo", "trpo"),
}


def run(folder: Path) -> None:
    """Whatever has not been run."""
    for env, algorithms in CASES.items():
        for algorithm in algorithms:
            for seed in SEEDS:
                out = folder / f"{env}-{algorithm}-{seed}"
                if (out / "model").exists():
                    continue
                command = [sys.executable, "-m", "psigrad", "control", algorithm, "--env", env, "--seed", str(seed)]
                subprocess.run([*command, "--output-dir", str(out), "--no-report"], check=True)


def gather(folder: Path) -> list[dict[str, Any]]:
    """Final scores and training curves of the runs that are there."""
    found = []
    for env, algorithms in CASES.items():
        for algorithm in algorithms:
            runs = [folder / f"{env}-{algorithm}-{seed}" for seed in SEEDS]
            rows = [
                [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
                for path in runs
                if (path / "model").exists()
            ]
            if len(rows) < len(SEEDS):
                continue  # the page shows whole sets of seeds
            last = [next(r["eval/return/mean"] for r in reversed(own) if "eval/return/mean" in r) for own in rows]
            steps = max(r["step"] for own in rows for r in own)
            grid = np.linspace(0, steps, 101)[1:]
            curves = [
                np.interp(
                    grid, *zip(*((r["step"], r["rollout/ep_rew_mean"]) for r in own if "rollout/ep_rew_mean" in r), strict=True)
                )
                for own in rows
            ]
            found.append(
                {
                    "env": env,
                    "algorithm": algorithm,
                    "steps": int(steps),
                    "scores": [round(x, 1) for x in last],
                    "curve": {
                        "steps": [int(x) for x in grid],
                        "low": _round(np.min(curves, 0)),
                        "high": _round(np.max(curves, 0)),
                    }
                    | {"mean": _round(np.mean(curves, 0))},
                }
            )
    return found


def _round(values: Any) -> list[float]:
    return [round(float(x), 1) for x in values]


def draw(found: list[dict[str, Any]], path: Path) -> None:
    """One panel for each environment: mean over seeds of the training return, with the range over seeds as a band."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from psigrad.report.plots import COLOURS

    envs = list(dict.fromkeys(case["env"] for case in found))
    figure, axes = pyplot.subplots(1, len(envs), figsize=(4.6 * len(envs), 3.4), squeeze=False)
    for axis, env in zip(axes[0], envs, strict=True):
        for colour, case in zip(COLOURS, [c for c in found if c["env"] == env], strict=False):
            steps = np.array(case["curve"]["steps"]) / 1000
            axis.plot(steps, case["curve"]["mean"], color=colour, linewidth=1.4, label=case["algorithm"])
            axis.fill_between(steps, case["curve"]["low"], case["curve"]["high"], color=colour, alpha=0.15, linewidth=0)
        axis.set_title(env, fontsize=10)
        axis.set_xlabel("thousand steps", fontsize=9)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(fontsize=7, frameon=False)
        if env == "CartPole-v1":
            axis.set_xscale("log")
    axes[0][0].set_ylabel("return, mean of the last 100 training episodes", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("run", "draw"):
        raise SystemExit(__doc__)
    if sys.argv[1] == "run":
        run(Path(sys.argv[2]))
    else:
        cases = gather(Path(sys.argv[2]))
        (ROOT / "docs" / "images" / "control.json").write_text(json.dumps(cases, indent=1) + "\n")
        draw(cases, ROOT / "docs" / "images" / "control.png")
        for case in cases:
            print(case["env"], case["algorithm"], case["steps"], case["scores"], round(float(np.mean(case["scores"])), 1))
