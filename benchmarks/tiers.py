"""bfloat16 beside float32 on each tier of processors that this one can stand in for: `python benchmarks/tiers.py [W0 W1 SFT]`.

A tier is forced: psigrad sees a processor without the higher ones' instructions and compiles its kernels for it, and PyTorch,
oneDNN and MKL are told to take no others. The two precisions take steps in turn, in processes of their own. bfloat16 is to be
never slower nor larger: the exit status is 1 where all of the 95 % interval says that it is slower, or its peak is more than 2 %
higher.

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
from psigrad.kernels import build, processor

# What tells the libraries which instructions they may take.
LIBRARIES = {
    "x86-64-v3": {"ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
    "x86-64-v4": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI", "MKL_ENABLE_INSTRUCTIONS": "AVX512"},
    "x86-64-v4-bf16": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", "MKL_ENABLE_INSTRUCTIONS": "AVX512"},
    "x86-64-v4-amx": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_AMX", "MKL_ENABLE_INSTRUCTIONS": "AVX512"},
}
LARGER = 1.02


def force(tier: str) -> None:
    """Let psigrad see a processor of this tier, and compile for it."""
    flags, needed = processor.LEVELS["x86_64"][tier]
    gone = {word for _, words in processor.LEVELS["x86_64"].values() for word in words.split()} - set(needed.split())
    gone |= {"avx512f"} if tier == "x86-64-v3" else set()
    seen = tuple(" ".join(word for word in line.split(" ") if word not in gone) for line in processor._described())
    processor._described = lambda: seen  # type: ignore[assignment]
    build.FLAGS = (*flags.split(), *build.PORTABLE, "-shared")


def take_steps(*given: Any) -> None:
    """The process that is timed; what it imports may look at the processor."""
    from timed import timed_run

    timed_run.take_steps(*given)


def beside(work: Workload, tier: str, pairs: int, threads: int) -> dict[str, Any]:
    """The cost of bfloat16 over float32's in each pair of steps, and both peaks in MiB."""
    sides: dict[str, WorkerProcess] = {}
    os.environ.update(LIBRARIES[tier])
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
            for name in LIBRARIES[tier]:
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
    parser.add_argument("--tiers", nargs="+", default=processor.levels(), choices=list(LIBRARIES))
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
    if len(sys.argv) > 1 and sys.argv[1] in LIBRARIES:
        force(sys.argv[1])
        serve(take_steps, sys.argv[2:])
    else:
        sys.exit(main())
