"""Measures and draws the scaling curves of docs/performance.md.

python docs/make/performance.py run FILE [THREADS]    every point of every axis in a process of its own, as JSON lines (about ten
minutes; what is there stays)
python docs/make/performance.py draw FILE             docs/images/performance.json and performance.png
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from psigrad.config import Model, OnlineConfig, Run, Sampling
from psigrad_extras.preflight import plan

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))
from timed.inputs import build  # noqa: E402
from timed.timing import alone  # noqa: E402
from timed.workload import Workload  # noqa: E402

IMAGES = ROOT / "docs" / "images"
BASE = Workload(
    "base",
    "4 prompts x 8 completions of at most 32 tokens",
    layers=4,
    vocabulary=512,
    prompts=4,
    prompt_tokens=16,
    completion_tokens=32,
    steps=3,
)
# axis -> (field of the workload, its values, what it is called)
AXES: dict[str, tuple[str, tuple[int, ...], str]] = {
    "model": ("hidden", (64, 128, 256, 512), "parameters"),
    "group": ("generations", (2, 4, 8, 16, 32), "completions per prompt"),
    "prompt": ("prompt_tokens", (16, 64, 256, 512), "prompt tokens"),
    "completion": ("completion_tokens", (8, 16, 32, 64, 128), "longest completion, tokens"),
    "vocabulary": ("vocabulary", (512, 4096, 32768, 131072), "vocabulary"),
}
PHASES = ("sample", "score", "log-probs", "forward-backward", "optimizer", "rest")


def run(file: Path, threads: int = 2) -> None:
    """Whatever is not in the file yet."""
    done = {(line["axis"], line["value"]) for line in _read(file)}
    for axis, (field, values, _) in AXES.items():
        for value in values:
            if (axis, value) in done:
                continue
            work = replace(BASE, name=f"{axis} {value}", **{field: value})
            found = alone(work, "float32", threads)
            line = {"axis": axis, "value": value, **planned(work), **found}
            with file.open("a") as stream:
                stream.write(json.dumps(line) + "\n")
            print(f"{work.name:18} {found['ours']['seconds']:8.3f} s  {found['ours']['peak_mb']:7.0f} MB", flush=True)


def planned(work: Workload) -> dict[str, float]:
    """Parameters, and the peak that `psigrad plan` predicts."""
    chance = 1 - 1 / work.vocabulary  # random weights sample nearly uniformly: one token of the vocabulary ends
    mean = (1 - chance**work.completion_tokens) / (1 - chance)
    lengths = plan.Lengths(work.prompt_tokens, round(mean), work.prompt_tokens, work.completion_tokens)
    with tempfile.TemporaryDirectory() as folder:
        build(work, Path(folder))
        config = OnlineConfig(
            model=Model(path=f"{folder}/model"),
            sampling=Sampling(max_completion_length=work.completion_tokens),
            run=Run(max_steps=1, device="cpu"),
            algorithm={"preset": "grpo", "kl": {"coefficient": work.beta} if work.beta else None},
            prompts_per_step=work.prompts,
            num_generations=work.generations,
            num_iterations=work.iterations,
        )
        made = plan.predict(config, lengths, plan.Machine("cpu", 1 << 40))
    return {"parameters": made.policy.parameters, "planned_mb": made.memory.peak / 2**20}


def _read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def draw(file: Path) -> None:
    """performance.json and performance.png."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    lines = _read(file)
    machine = {"torch": torch.__version__, "threads": lines[0]["threads"]}
    (IMAGES / "performance.json").write_text(
        json.dumps({"machine": machine, "base": asdict(BASE), "lines": lines}, indent=1) + "\n"
    )
    figure, grid = plt.subplots(2, len(AXES), figsize=(15, 5.6), sharex="col", layout="constrained")
    colours = plt.get_cmap("viridis")
    for column, (axis, (_, _, label)) in enumerate(AXES.items()):
        own = [line for line in lines if line["axis"] == axis]
        x = [line["parameters"] if axis == "model" else line["value"] for line in own]
        above, below = grid[0][column], grid[1][column]
        bottom = [0.0] * len(own)
        for k, phase in enumerate(PHASES):
            top = [b + line["ours"]["phases"].get(phase, 0.0) for b, line in zip(bottom, own, strict=True)]
            above.fill_between(x, bottom, top, color=colours(k / len(PHASES)), alpha=0.85, linewidth=0, label=phase)
            bottom = top
        below.plot(x, [line["ours"]["peak_mb"] for line in own], "o-", color="#1f4e79", label="measured")
        below.plot(x, [line["planned_mb"] for line in own], "x--", color="#c0504d", label="psigrad plan")
        above.set_xscale("log", base=10 if axis == "model" else 2)
        above.set_ylim(bottom=0)
        below.set_ylim(bottom=0)
        below.set_xlabel(label)
        for part in (above, below):
            part.grid(alpha=0.25)
            part.spines[["top", "right"]].set_visible(False)
        if axis != "model":
            below.set_xticks(x, [f"{v:,}" if v < 10000 else f"{v // 1024}k" for v in x])
            below.minorticks_off()
    grid[0][0].set_ylabel("seconds per step")
    grid[1][0].set_ylabel("peak memory, MB")
    grid[0][0].legend(fontsize=8, frameon=False, loc="upper left")
    grid[1][0].legend(fontsize=8, frameon=False, loc="lower right")
    figure.savefig(IMAGES / "performance.png", dpi=110)


if __name__ == "__main__":
    command, file, *threads = sys.argv[1:]
    if command == "run":
        run(Path(file), *map(int, threads))
    else:
        draw(Path(file))
