"""The same run with several placements, compared: `python benchmarks/cluster.py [W1] [--processes 1 2 4] [--strategies ddp fsdp]
[--samplers 0 1 2 --cluster auto] [--lag 0 1] [--rounds 3]`, or `make bench-cluster`.

Each run is `psigrad grpo` (or `sft`) on the workload's model and rows. Without lag, its metrics must equal those of one process,
except for rounding. The table compares the median seconds per step with one process that has all threads, and the peak memory of
the largest process with its plan. results/cluster.json has the results. `--cluster ADDRESS` measures a Ray cluster's samplers.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plan import planned
from timed.inputs import build
from timed.workload import Workload
from workloads import WORKLOADS

from psigrad.config import Placement
from psigrad.runs.machine import provenance
from psigrad_extras.preflight import plan

RESULTS = Path(__file__).parent / "results" / "cluster.json"
REWARD = f"{Path(__file__).parent / 'timed' / 'workload.py'}:reward"
# Metrics that all placements must agree on, and the allowed relative difference: samplers' float32 log-probs differ by rounding.
COMPARED, BOUND = ("reward", "grad_norm", "entropy"), 1e-3


@dataclass(frozen=True)
class Placed:
    """One placement. `threads` is the number of threads per process."""

    processes: int
    strategy: str
    threads: int
    samplers: int = 0
    cluster: str = ""
    lag: int = 0

    @property
    def name(self) -> str:
        """The name, such as "2 × 1 ddp"."""
        samplers = f", {self.samplers} samplers" if self.samplers else ""
        return f"{self.processes} × {self.threads} {self.strategy}{samplers}" + (f", lag {self.lag}" if self.lag else "")


def command(work: Workload, folder: Path, out: Path, placed: Placed, steps: int) -> list[str]:
    """Return the arguments of `psigrad`."""
    common = [f"--model={folder}/model", f"--dataset={folder}/rows.jsonl", f"--output-dir={out}", "--eval-prompts=0"]
    common += [f"--max-steps={steps}", f"--threads={placed.threads}", "--no-progress", "--no-report", "--learning-rate=1e-6"]
    common += [f"--processes={placed.processes}", f"--strategy={placed.strategy}", "--logging-steps=0", "--save-minutes=0"]
    if work.kind == "sft":
        return ["sft", *common, f"--batch-size={work.prompts}"]
    online = [f"--reward={REWARD}", f"--prompts-per-step={work.prompts}"]
    online += [f"--num-generations={work.generations}", f"--max-completion-length={work.completion_tokens}"]
    online += [f"--lag={placed.lag}", "--max-logp-difference=10"]
    if placed.samplers:
        online += [f"--cluster={placed.cluster}", f"--samplers={placed.samplers}"]
    return [work.kind, *common, *online]


def once(work: Workload, folder: Path, placed: Placed, steps: int) -> dict[str, Any]:
    """Make one run. Return the seconds of each step but the first, the steps' metrics, and a process's largest peak in MiB."""
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "run"
        arguments = [sys.executable, "-m", "psigrad", *command(work, folder, out, placed, steps)]
        process = subprocess.Popen(
            arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True, text=True
        )
        peaks: dict[int, float] = {}
        watch = threading.Thread(target=_watch, args=(process, peaks), daemon=True)
        watch.start()
        _, said = process.communicate()
        watch.join()
        if process.returncode:
            raise SystemExit(f"{placed.name} ended with status {process.returncode}:\n{said[-3000:]}")
        timings, metrics = (
            [json.loads(line) for line in (out / name).read_text().splitlines()] for name in ("timings.jsonl", "metrics.jsonl")
        )
        seconds = [row["step_time"] for row in timings if "time/eval" not in row]
        figures = [{k: v for k, v in row.items() if k in COMPARED} for row in metrics if "grad_norm" in row]
    return {"seconds": seconds[1:steps], "figures": figures, "peak_mb": max(peaks.values(), default=0.0)}


def _watch(process: subprocess.Popen[str], peaks: dict[int, float]) -> None:
    """Record the peak resident memory in MiB of each process of the session, until `process` ends."""
    while process.poll() is None:
        for status in Path("/proc").glob("[0-9]*/status"):
            pid = int(status.parent.name)
            try:
                if os.getsid(pid) == process.pid:
                    text = status.read_text()
                    peaks[pid] = int(text.split("VmHWM:")[1].split()[0]) / 1024
            except (OSError, IndexError):
                continue
        time.sleep(0.05)


def farthest(figures: list[dict[str, float]], others: list[dict[str, float]]) -> float:
    """Return the largest difference of a metric, relative to the metric's largest absolute value in the run."""
    sizes = {name: max(abs(row[name]) for row in others) or 1.0 for name in others[0]}
    pairs = zip(figures, others, strict=True)
    return max(abs(a[name] - b[name]) / sizes[name] for a, b in pairs for name in sizes)


def predict_peak(work: Workload, folder: Path, placed: Placed) -> float:
    """Return the planned peak of a process in MiB."""
    placement = Placement(processes=placed.processes, strategy=placed.strategy, cluster=placed.cluster)  # type: ignore[arg-type]
    made = planned(work, folder, "float32", plan.machine("cpu", "float32", placed.threads), placement, placed.lag)
    return made.memory.peak / 2**20


def main() -> None:
    """Measure the requested placements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "workload", nargs="?", default="W1", choices=[n for n, w in WORKLOADS.items() if w.kind in ("grpo", "sft")]
    )
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--strategies", nargs="+", default=["ddp", "fsdp"], choices=["ddp", "fsdp"])
    parser.add_argument("--samplers", type=int, nargs="+", default=[0])
    parser.add_argument("--lag", type=int, nargs="+", default=[0])
    parser.add_argument("--cluster", default="auto")
    parser.add_argument("--threads", type=int, default=0, help="threads of each process; 0: cores divided by processes")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", default=str(RESULTS))
    given = parser.parse_args()
    cores, work = len(os.sched_getaffinity(0)), WORKLOADS[given.workload]
    placements = [Placed(1, "ddp", given.threads or cores)]
    for processes in given.processes:
        for strategy in given.strategies if processes > 1 else ["ddp"]:
            for samplers in given.samplers:
                for lag in given.lag if work.kind != "sft" else [0]:
                    threads = given.threads or max(1, cores // processes)
                    cluster = given.cluster if samplers else ""
                    placed = Placed(processes, strategy, threads, samplers, cluster, lag)
                    placements += [placed] if placed not in placements else []
    found: dict[Placed, list[dict[str, Any]]] = {placed: [] for placed in placements}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        build(work, folder)
        for _ in range(given.rounds):
            for placed in placements:
                found[placed].append(once(work, folder, placed, given.steps))
        lines = [_line(work, folder, placed, runs, found[placements[0]]) for placed, runs in found.items()]
    for line in lines:
        print(
            f"{line['placement']:28} {line['seconds']:7.3f} s per step, {line['speed']:5.2f} × as fast as one; difference "
            f"{line['difference']:.1e}; {line['peak_mb']:6.0f} MB, predicted {line['predicted_mb']:6.0f} "
            f"({line['predicted_mb'] / line['peak_mb'] - 1:+.1%})"
        )
    Path(given.json).write_text(json.dumps({"workload": work.name, **provenance("cpu"), "placements": lines}, indent=1) + "\n")


def _line(
    work: Workload, folder: Path, placed: Placed, runs: list[dict[str, Any]], alone: list[dict[str, Any]]
) -> dict[str, Any]:
    difference = farthest(runs[0]["figures"], alone[0]["figures"])
    if not placed.lag and difference > BOUND:
        raise SystemExit(f"{placed.name} differs from one process: a metric is off by {difference:.1e} of its size.")
    ratios = [statistics.median(a["seconds"]) / statistics.median(b["seconds"]) for a, b in zip(alone, runs, strict=True)]
    return {
        "placement": placed.name,
        "seconds": statistics.median(x for run in runs for x in run["seconds"]),
        "speed": statistics.median(ratios),
        "difference": difference,
        "peak_mb": statistics.median(run["peak_mb"] for run in runs),
        "predicted_mb": predict_peak(work, folder, placed),
    }


if __name__ == "__main__":
    main()
