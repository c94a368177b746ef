"""psigrad and TRL on the same workloads, in alternating steps: `python benchmarks/language.py [W0 W1 …] [--dtype …]`.

Each side runs in a separate process with the same weights, prompts, batch shape and precision. First both compute loss and
gradient norm on one fixed batch, and the benchmark stops unless they are equal. Then their steps alternate, so that other load on
the machine slows down both. PPO is timed alone, since TRL 1.16 has no trainer for it. A JSON line for each workload is appended
to --json, and a table is printed.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from beside_trl import PEERS, beside, table
from timed.timing import alone
from workloads import WORKLOADS

from psigrad.errors import UserError

HERE = Path(__file__).parent


def main() -> None:
    """Measure the requested workloads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=list(WORKLOADS))
    parser.add_argument("--dtype", nargs="+", default=["float32"], choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--attention", default="auto", choices=["auto", "sdpa", "varlen", "flex"])
    parser.add_argument("--no-cuda-graphs", dest="cuda_graphs", action="store_false")
    parser.add_argument("--json", default=str(HERE / "results" / "language.jsonl"))
    given = parser.parse_args()
    if given.device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"device is {given.device} and torch finds no CUDA device; choose --device cpu.")
    results = []
    Path(given.json).parent.mkdir(parents=True, exist_ok=True)
    with open(given.json, "a") as stream:
        for name in given.workloads or list(WORKLOADS):
            for dtype in given.dtype:
                work = replace(WORKLOADS[name], attention=given.attention, cuda_graphs=given.cuda_graphs)
                measure = beside if work.kind in PEERS else alone
                results.append(measure(work, dtype, given.threads, device=given.device))
                stream.write(json.dumps(results[-1]) + "\n")
                stream.flush()
                print(table(results[-1:]), flush=True)
    print("\n" + table(results))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(str(error))
