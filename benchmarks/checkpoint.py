"""What a checkpoint costs beside the plain write of its files: `python benchmarks/checkpoint.py [--mb 192] [--pairs 9] [FOLDER]`.

In turn, the plain write (every file written and on the disk) and `checkpoint.save` (the same, summed and sealed). Printed are the
ratios of their seconds, and of their seconds of processor time, each as the geometric mean with its 95 % interval; and how long
the sums alone take. The exit status is 1 where all of the interval by the clock lies above the goal.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from psigrad.intervals import over_seeds
from psigrad.records import checkpoint

GOAL = 1.5
Taken = tuple[float, float]
"""Seconds by the clock, and of the processor."""


def timed(work: Callable[[], object]) -> Taken:
    """What one call takes; the disk has nothing else to write when it begins."""
    os.sync()
    clock, processor = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - clock, time.process_time() - processor


def measure(folder: Path, mb: int, pairs: int) -> list[tuple[Taken, Taken, Taken]]:
    """(plain write, save, sums alone) of each pair; the first pair, which makes the kernel's room, is left out."""
    tensors = {str(i): torch.randn(mb * (1 << 20) // 16) for i in range(4)}
    plain = folder / "plain.safetensors"

    def write() -> None:
        checkpoint.save_tensors(plain, tensors)
        checkpoint.sync(plain)

    def save(step: int) -> None:
        checkpoint.save(folder, step, lambda into: checkpoint.save_tensors(into / "model.safetensors", tensors), meta={})

    found = []
    for step in range(1 + pairs):
        written, saved = timed(write), timed(lambda step=step: save(step))  # type: ignore[misc]
        found.append((written, saved, timed(lambda: checkpoint.sha256(plain))))
        plain.unlink()
        checkpoint.prune(folder, 1)
    return found[1:]


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """Geometric mean of ratios, and its 95 % interval."""
    mean, low, high = over_seeds(map(math.log, ratios))
    return math.exp(mean), math.exp(low), math.exp(high)


def main() -> int:
    """Measure and print; 1 where the goal is missed for certain."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="where to write; a temporary folder if it is left out")
    parser.add_argument("--mb", type=int, default=192, help="size of the checkpoint, in MiB")
    parser.add_argument("--pairs", type=int, default=9)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as made:
        found = measure(Path(made), given.mb, given.pairs)
    clock = interval([saved[0] / plain[0] for plain, saved, _ in found])
    processor = interval([saved[1] / plain[1] for plain, saved, _ in found])
    beyond = interval([max(1e-9, saved[1] - plain[1]) / sums[1] for plain, saved, sums in found])
    verdict = "missed" if clock[1] > GOAL else "holds" if clock[2] <= GOAL else "not shown"
    for what, (mean, low, high) in (
        (f"seconds of a save / of the plain write (goal {GOAL:g}, {verdict})", clock),
        ("processor time of a save / of the plain write", processor),
        ("processor time of a save beyond the plain write / of one sum of the bytes", beyond),
    ):
        print(f"{mean:6.2f} [{low:.2f}, {high:.2f}]  {what}")
    return int(verdict == "missed")


if __name__ == "__main__":
    sys.exit(main())
