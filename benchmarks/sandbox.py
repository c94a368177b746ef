"""Programs per second and latency of the sandbox, beside a bare subprocess: python benchmarks/sandbox.py [PROGRAMS]

Both run the same programs in turn, in the same batches; results are compared before anything is timed.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from psigrad.processes.sandbox import Limits, Program, executor_for, tier_of_this_machine

ROUNDS = 5


def bare(programs: Sequence[Program]) -> list[str]:
    """What the programs print, each in a Python process of its own with no limit at all."""
    command = [sys.executable, "-s", "-P", "-B", "-c"]
    return [
        subprocess.run([*command, p.source], input=p.stdin, capture_output=True, text=True, timeout=10).stdout for p in programs
    ]


def seconds(work: Callable[[], object]) -> float:
    """Of one call."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def main(count: int) -> None:
    """Print the table."""
    executor, limits = executor_for(), Limits(seconds=5.0)
    programs = [Program("print(sum(map(int, input().split())))", f"{i} {i + 1}") for i in range(count)]
    assert [outcome.stdout for outcome in executor.run(programs, limits)] == bare(programs)
    print(tier_of_this_machine().sentence())
    rows = {"sandbox, a batch": [], "sandbox, one by one": [], "bare subprocess, one by one": []}  # type: dict[str, list[float]]
    for _ in range(ROUNDS):
        rows["sandbox, a batch"].append(seconds(lambda: executor.run(programs, limits)))
        rows["sandbox, one by one"].append(seconds(lambda: [executor.run([p], limits) for p in programs]))
        rows["bare subprocess, one by one"].append(seconds(lambda: bare(programs)))
    for name, found in rows.items():
        middle = statistics.median(found) / count
        print(f"{name:<28} {1 / middle:6.1f} programs/s   {1e3 * middle:6.1f} ms each (median of {ROUNDS} rounds in turn)")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 40)
