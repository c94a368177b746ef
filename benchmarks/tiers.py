"""bfloat16 beside float32 on each tier of processors that this one can stand in for: `python benchmarks/tiers.py [W0 W1 SFT]`.

`processor.environment_of` forces a tier, for the kernels and for PyTorch. The two precisions take steps in turn, in processes of
their own. bfloat16 is to be never slower nor larger: the exit status is 1 where all of the 95 % interval says that it is slower,
or its peak is more than 2 % higher.

What cannot be forced is told by nothing here: a tier above this processor's, as AMX may be.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from timed import inputs
from timed.timing import WorkerProcess, costs
from timed.workload import Workload, serve
from workloads import WORKLOADS

from psigrad.intervals import over_seeds
from psigrad.kernels import processor

LARGER = 1.02


def take_steps(*given: Any) -> None:
    """The process that is timed; what it imports may look at the processor."""
    from timed import timed_run

    timed_run.take_steps(*given)


def beside(work: Workload, tier: str, pairs: int, threads: int) -> dict[str, Any]:
    """The cost of bfloat16 over float32's in each pair of steps, and both peaks in MiB."""
    sides: dict[str, WorkerProcess] = {}
    forced = processor.environment_of(tier)
    os.environ.update(forced)
    with tempfile.TemporaryDirectory() as folder:
        inputs.build(work, Path(folder))
        try:
            for dtype in ("float32", "bfloat16"):
                sides[dtype] = WorkerProcess(Path(folder), dtype, threads, program=(__file__, tier))
            for side in sides.values():
                side.step()
            taken = [{dtype: side.step() for dtype, side in sides.items()} for _ in range(pairs)]
        finally:
            for side in sides.values():
                side.close()
            for name in forced:
                del os.environ[name]
    ratios = [costs(work, [one["bfloat16"]])[0] / costs(work, [one["float32"]])[0] for one in taken]
    return {"ratios": ratios, "mb": {dtype: taken[-1][dtype]["peak_mb"] for dtype in sides}}


def judge(name: str, tier: str, found: dict[str, Any]) -> tuple[str, bool]:
    """A line for people, and whether bfloat16 is slower or larger for certain."""
    mean, low, high = (math.exp(x) for x in over_seeds(map(math.log, found["ratios"])))
    wide, narrow = (found["mb"][dtype] for dtype in ("float32", "bfloat16"))
    bad = ["slower"] if low > 1 else []
    bad += ["larger"] if narrow > LARGER * wide else []
    verdict = f"  {' and '.join(bad)}" if bad else ""
    return (
        f"{tier:15} {name:4} {mean:5.2f} [{low:.2f}, {high:.2f}] of the time  {narrow:5.0f} for {wide:5.0f} MiB{verdict}",
        bool(bad),
    )


def main() -> int:
    """Measure what was asked for; 1 where bfloat16 is slower or larger."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=["W0", "W1", "SFT"], help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument("--tiers", nargs="+", default=processor.levels(), choices=processor.levels())
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    missed = False
    for tier in given.tiers:
        for name in given.workloads:
            found = beside(replace(WORKLOADS[name]), tier, given.pairs, given.threads)
            line, bad = judge(name, tier, found)
            print(line, flush=True)
            missed |= bad
    return int(missed)


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] in processor.LEVELS["x86_64"]:
        serve(take_steps, sys.argv[2:])
    else:
        sys.exit(main())
