"""What a lag costs in learning: `python benchmarks/lag.py FOLDER [--lags 0 1 2 4] [--seeds 5] [--steps 100]`.

FOLDER is that of `psigrad demo`, whose fine-tuned model goes on by GRPO on its task: with lags, with the truncated importance
weights that a run takes by itself and, which a run refuses, without a correction. Held-out reward before and after, over seeds;
the table goes to the screen and to results/lag.json.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from psigrad.intervals import over_seeds
from psigrad.language.recipes import online
from psigrad.runs.machine import provenance
from psigrad_extras import demo

RESULTS = Path(__file__).parent / "results" / "lag.json"
METRIC, WEIGHT = "eval/exact/mean", "sampling/importance_sampling_ratio/mean"


def once(folder: Path, lag: int, seed: int, steps: int, corrects: bool) -> dict[str, Any]:
    """One run: held-out reward before and after, the largest gradient norm, and the mean weight of the last steps."""
    with tempfile.TemporaryDirectory() as place:
        files, out = demo.prepare(folder, 0, False), Path(place) / "run"
        made = demo.reinforcing(folder / "sft" / "model", files, out, seed, max_steps=steps, progress=False)
        run = replace(made.run, threads=1, report=False, logging_steps=0, save_steps=0)
        config = replace(made, lag=lag, run=run, evaluation=replace(made.evaluation, eval_steps=0, eval_kl=False))
        before = online.correct
        if not corrects:
            online.correct = lambda algorithm, *rest: algorithm
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                online.run(config)
        finally:
            online.correct = before
        rows = [json.loads(line) for line in (Path(place) / "run" / "metrics.jsonl").read_text().splitlines()]
    held_out = [row[METRIC] for row in rows if METRIC in row]
    trained = [row for row in rows if "grad_norm" in row]
    weights = [row[WEIGHT] for row in trained if WEIGHT in row]
    return {
        "before": held_out[0],
        "after": held_out[-1],
        "rewards": [row["reward"] for row in trained],
        "grad_norm": max(row["grad_norm"] for row in trained),
        "weight": statistics.fmean(weights[-10:]) if weights else 1.0,
    }


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--json", default=str(RESULTS))
    given = parser.parse_args()
    lines: list[dict[str, Any]] = []
    for lag in given.lags:
        for corrects in (True, False) if lag else (True,):
            runs = [once(given.folder, lag, seed, given.steps, corrects) for seed in range(given.seeds)]
            found = over_seeds(run["after"] for run in runs)
            lines.append({"lag": lag, "corrects": corrects, "after": list(found), "runs": runs})
            how = "" if not lag else ", truncated weights" if corrects else ", no correction"
            halves = statistics.fmean(statistics.fmean(run["rewards"][: given.steps // 2]) for run in runs)
            print(
                f"lag {lag}{how:20} {runs[0]['before']:.3f} -> {found.mean:.3f} ({found.low:.3f} to {found.high:.3f}); mean "
                f"reward of the first half {halves:.3f}; largest gradient {max(run['grad_norm'] for run in runs):.2f}",
                flush=True,
            )
            Path(given.json).write_text(json.dumps({"steps": given.steps, **provenance("cpu"), "lines": lines}, indent=1) + "\n")


if __name__ == "__main__":
    main()
