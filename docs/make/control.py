"""Measures and draws the learning curves of docs/control.md.

    python docs/make/control.py run FOLDER [SET]      every algorithm and environment of the page over several seeds

goes on where it was stopped. The set `control`, which is meant where none is named, takes hours. `minigrid` takes ten minutes,
and needs `pip install minigrid`.

    python docs/make/control.py draw FOLDER [SET]     docs/images/SET.json and SET.png from the run folders
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Set:
    """Runs that are one picture: environment -> algorithms, the steps of each environment (0: the tuned ones), and what all are
    given beside.
    """

    cases: dict[str, tuple[str, ...]]
    seeds: range
    steps: dict[str, int] = field(default_factory=dict)
    module: str = ""
    arguments: tuple[str, ...] = ()
    digits: int = 1


CARTPOLE = "CartPole-v1"
# the command of docs/control.md
_IMAGES = (
    *("--wrappers", "minigrid.wrappers:ImgObsWrapper", "--n-envs", "16", "--n-steps", "64", "--batch-size", "256"),
    *("--n-epochs", "4", "--learning-rate", "1e-3", "--normalize-observations"),
)
SETS = {
    "control": Set(
        {
            CARTPOLE: ("reinforce", "a2c", "ppo", "ppo_penalty", "trpo", "dqn"),
            "LunarLander-v3": ("ppo",),
            "Acrobot-v1": ("ppo", "a2c", "trpo", "dqn"),
            "Pendulum-v1": ("ppo", "trpo"),
        },
        range(5),
    ),
    "minigrid": Set(
        dict.fromkeys(("MiniGrid-Empty-5x5-v0", "MiniGrid-Empty-Random-6x6-v0", "MiniGrid-DoorKey-5x5-v0"), ("ppo",)),
        range(3),
        {"MiniGrid-Empty-5x5-v0": 40_000, "MiniGrid-Empty-Random-6x6-v0": 100_000, "MiniGrid-DoorKey-5x5-v0": 200_000},
        "minigrid:",
        _IMAGES,
        digits=3,
    ),
}


def run(folder: Path, chosen: Set) -> None:
    """Whatever has not been run."""
    for env, algorithms in chosen.cases.items():
        for algorithm in algorithms:
            for seed in chosen.seeds:
                out = folder / f"{env}-{algorithm}-{seed}"
                if (out / "model").exists():
                    continue
                command = [sys.executable, "-m", "psigrad", "control", algorithm, "--env", chosen.module + env]
                more = ("--total-timesteps", str(chosen.steps[env])) if env in chosen.steps else ()
                own = ("--seed", str(seed), "--output-dir", str(out), "--no-report")
                subprocess.run([*command, *chosen.arguments, *more, *own], check=True)


def gather(folder: Path, chosen: Set) -> list[dict[str, Any]]:
    """Final scores and training curves of the runs that are there."""
    found = []

    def rounded(values: Any) -> list[float]:
        return [round(float(x), chosen.digits) for x in values]

    for env, algorithms in chosen.cases.items():
        for algorithm in algorithms:
            runs = [folder / f"{env}-{algorithm}-{seed}" for seed in chosen.seeds]
            rows = [
                [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
                for path in runs
                if (path / "model").exists()
            ]
            if len(rows) < len(chosen.seeds):
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
                    "scores": rounded(last),
                    "curve": {
                        "steps": [int(x) for x in grid],
                        "low": rounded(np.min(curves, 0)),
                        "high": rounded(np.max(curves, 0)),
                    }
                    | {"mean": rounded(np.mean(curves, 0))},
                }
            )
    return found


def draw(found: list[dict[str, Any]], path: Path) -> None:
    """One panel for each environment: mean over seeds of the training return, with the range over seeds as a band."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from psigrad.records.report.plots import COLOURS

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
        if env == CARTPOLE:
            axis.set_xscale("log")
    axes[0][0].set_ylabel("return, mean of the last 100 training episodes", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    name = sys.argv[3] if len(sys.argv) == 4 else "control"
    if len(sys.argv) not in (3, 4) or sys.argv[1] not in ("run", "draw") or name not in SETS:
        raise SystemExit(__doc__)
    if sys.argv[1] == "run":
        run(Path(sys.argv[2]), SETS[name])
    else:
        cases = gather(Path(sys.argv[2]), SETS[name])
        (ROOT / "docs" / "images" / f"{name}.json").write_text(json.dumps(cases, indent=1) + "\n")
        draw(cases, ROOT / "docs" / "images" / f"{name}.png")
        for case in cases:
            print(case["env"], case["algorithm"], case["steps"], case["scores"], round(float(np.mean(case["scores"])), 3))
