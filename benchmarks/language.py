"""psigrad and TRL on the same work, step by step in turn: `python benchmarks/language.py [W0 W1 …] [--dtype …]`.

Each side runs in a process of its own with the same weights, prompts, batch shape and precision. First both compute loss and
gradient norm on one fixed batch, and the run stops unless they are equal. Then they take steps alternately, so that whatever else
the machine does falls on both. One JSON line per workload goes to --json, a table to the screen.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from workloads import WORKLOADS, Workload, build

HERE = Path(__file__).parent


class Side:
    """One side's process."""

    def __init__(self, who: str, work: Workload, folder: Path, dtype: str, threads: int) -> None:
        arguments = [sys.executable, str(HERE / "side.py"), who, work.name, str(folder), dtype, str(threads)]
        self.process = subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.ready: float = self.hear()["ready"]

    def ask(self, what: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        return self.hear()

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None and self.process.stderr is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"a side died:\n{self.process.stderr.read()[-3000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def measure(work: Workload, dtype: str, threads: int) -> dict[str, Any]:
    """One workload: equal results first, then steps in turn."""
    with tempfile.TemporaryDirectory() as folder:
        build(work, Path(folder))
        # psigrad's check is of float32 models as they are; TRL's bf16 is autocast over float32 weights
        sides = {who: Side(who, work, Path(folder), dtype, threads) for who in ("ours", "trl")}
        checks = {who: side.ask("check") for who, side in sides.items()}
        bound = 1e-4 if dtype == "float32" else 5e-2
        for figure in ("loss", "gradient"):
            a, b = checks["ours"][figure], checks["trl"][figure]
            if abs(a - b) > bound * max(abs(b), 1e-3):
                sys.exit(f"{work.name}: the {figure} differs on the same batch: ours {a}, TRL {b}")
        # imports, model and first step, as the process itself measured them
        first = {who: side.ready + whole_batch(work, who, side)["seconds"] for who, side in sides.items()}
        steps: dict[str, list[dict[str, Any]]] = {"ours": [], "trl": []}
        for _ in range(work.steps):
            for who, side in sides.items():
                steps[who].append(whole_batch(work, who, side))
                time.sleep(0.3)  # OpenMP threads spin for a while after their work
        for side in sides.values():
            side.close()
    head = {"workload": work.name, "dtype": dtype, "threads": threads, "check": checks, "to_first_step": first}
    return {**head, **summary(work, steps)}


def whole_batch(work: Workload, who: str, side: Side) -> dict[str, Any]:
    """All passes over one collected batch: one step of ours, as many of TRL's as there are passes."""
    taken = [side.ask("step") for _ in range(work.iterations if who == "trl" else 1)]
    names = {name for s in taken for name in s["phases"]}
    return {
        "seconds": sum(s["seconds"] for s in taken),
        "tokens": sum(s["tokens"] for s in taken),
        "phases": {name: sum(s["phases"].get(name, 0.0) for s in taken) for name in names},
        "peak_mb": max(s["peak_mb"] for s in taken),
    }


def summary(work: Workload, steps: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians, their spread, and the ratio per token (per step where the rows are the same)."""
    found: dict[str, Any] = {}
    cost: dict[str, list[float]] = {}
    for who, taken in steps.items():
        per = [s["seconds"] / s["tokens"] if work.kind == "online" else s["seconds"] for s in taken]
        cost[who] = per
        names = sorted({name for s in taken for name in s["phases"]})
        found[who] = {
            "seconds": statistics.median(s["seconds"] for s in taken),
            "tokens": statistics.median(s["tokens"] for s in taken),
            "ms_per_token": 1e3 * statistics.median(per) if work.kind == "online" else None,
            "phases": {name: statistics.median(s["phases"].get(name, 0.0) for s in taken) for name in names},
            "peak_mb": max(s["peak_mb"] for s in taken),
        }
    ratios = [b / a for a, b in zip(cost["ours"], cost["trl"], strict=True)]
    found["ratio"] = {
        "median": statistics.median(cost["trl"]) / statistics.median(cost["ours"]),
        "low": min(ratios),
        "high": max(ratios),
        "steps": len(ratios),
    }
    found["memory_ratio"] = found["trl"]["peak_mb"] / found["ours"]["peak_mb"]
    return found


def table(results: list[dict[str, Any]]) -> str:
    """The results for people."""
    lines = [f"{'workload':9} {'dtype':9} {'psigrad s':>10} {'TRL s':>8} {'ratio':>22} {'psigrad MB':>11} {'TRL MB':>8}"]
    for r in results:
        ratio = f"{r['ratio']['median']:.2f} [{r['ratio']['low']:.2f}, {r['ratio']['high']:.2f}]"
        lines.append(
            f"{r['workload']:9} {r['dtype']:9} {r['ours']['seconds']:10.3f} {r['trl']['seconds']:8.3f} {ratio:>22} "
            f"{r['ours']['peak_mb']:11.0f} {r['trl']['peak_mb']:8.0f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=list(WORKLOADS))
    parser.add_argument("--dtype", nargs="+", default=["float32"], choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", default=str(HERE / "results" / "language.jsonl"))
    given = parser.parse_args()
    results = []
    Path(given.json).parent.mkdir(parents=True, exist_ok=True)
    with open(given.json, "w") as stream:
        for name in given.workloads or list(WORKLOADS):
            for dtype in given.dtype:
                results.append(measure(WORKLOADS[name], dtype, given.threads))
                stream.write(json.dumps(results[-1]) + "\n")
                stream.flush()
                print(table(results[-1:]), flush=True)
    print("\n" + table(results))


if __name__ == "__main__":
    main()
