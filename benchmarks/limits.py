"""Runs on real shapes held to a limit of memory: `python benchmarks/limits.py [R1 R2 …]`.

Each workload of real.py is trained as a user would, by the command line: once as it is, then with --max-memory at shares of the
peak it had, and where that is refused at the least that psigrad says it needs. A line for each run: the limit, the peak of the
process, and what was chosen for it. The exit status is 1 where a peak is more than 1.1 of its limit.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from cluster import REWARD
from real import WORKS, Real
from timed.inputs import prepare
from timed.workload import Workload

SHARES = (0.85, 0.7)
STEPS = 2


def command(work: Workload, folder: Path) -> list[str]:
    """The run of a workload that was made in `folder`."""
    told = {
        "model": folder / "model",
        "dataset": folder / "rows.jsonl",
        "output-dir": folder / "run",
        "max-steps": STEPS,
        "eval-steps": 0,
        "eval-prompts": 0,
        "dtype": "bfloat16",
        "threads": 2,
        "lora-rank": work.lora_rank,
        "quantize-base": work.quantize_base,
    }
    if work.online:
        told |= {
            "reward": REWARD,
            "prompts-per-step": work.prompts,
            "num-generations": work.generations,
            "max-completion-length": work.completion_tokens,
        }
    else:
        told["batch-size"] = work.prompts
    flags = [str(part) for name, value in told.items() if value not in (0, "") or "eval" in name for part in (f"--{name}", value)]
    return [sys.executable, "-m", "psigrad", work.kind, *flags]


def peak(real: Real, limit: float) -> tuple[float, str]:
    """(bytes that the process had at most, what it says of the limit) of a few steps; `limit` in bytes, 0 for none."""
    with tempfile.TemporaryDirectory() as place:
        folder, source = Path(place), Path(place) / "source"
        source.mkdir()
        (source / "config.json").write_text(json.dumps(real.config))
        prepare(real.work, str(source), folder)
        held = ["--max-memory", f"{limit / 1e9:.3f}GB"] if limit else []
        done = subprocess.run([*command(real.work, folder), *held], capture_output=True, text=True)
        if done.returncode:
            return float("nan"), done.stderr.strip().splitlines()[-1]
        rows = map(json.loads, (folder / "run" / "timings.jsonl").read_text().splitlines())
        said = [line for line in done.stderr.splitlines() if "micro-batches of" in line]
        return max(row["peak_memory_bytes"] for row in rows), " ".join(said)


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=["R1", "R2", "R2L", "R6", "R7"])
    status = 0
    for name in parser.parse_args().workloads:
        free, _ = peak(WORKS[name], 0)
        print(f"{name}: {free / 1e9:.2f} GB without a limit", flush=True)
        limits = [share * free for share in SHARES]
        while limits:
            most, said = peak(WORKS[name], limit := limits.pop(0))
            status |= most > 1.1 * limit
            held = "did not run" if math.isnan(most) else f"{most / 1e9:.2f}, {most / limit:.2f} of it"
            print(f"  {limit / 1e9:.2f} GB: {held}. {said}", flush=True)
            if least := re.search(r"needs about ([\d.]+) GB", said):
                limits = [float(least[1]) * 1.01e9]  # the sentence rounds it
    return status


if __name__ == "__main__":
    sys.exit(main())
