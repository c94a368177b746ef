"""One side of the comparison in a process of its own: `python benchmarks/side.py ours|trl WORKLOAD FOLDER DTYPE THREADS`.

Talks in lines: "check" answers with loss and gradient norm on the fixed batch, "step" runs one optimiser step and answers with
its seconds by phase, tokens and peak memory.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import time
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import Any

START = time.perf_counter()
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)


class Phases:
    """Seconds by name within one step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str):
        begin = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin

    def around(self, owner: Any, method: str, name: str) -> None:
        """Time every call of a method."""
        original = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self(name):
                return original(*args, **kwargs)

        setattr(owner, method, timed)


def peak_mb() -> float:
    """The largest resident set of this process."""
    return int(next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line).split()[1]) / 1024


def serve(step, check) -> None:
    """Answer requests until the parent hangs up."""
    say({"ready": time.perf_counter() - START})
    for line in sys.stdin:
        match line.strip():
            case "step":
                begin = time.perf_counter()
                tokens, phases = step()
                say({"seconds": time.perf_counter() - begin, "tokens": tokens, "phases": phases, "peak_mb": peak_mb()})
            case "check":
                say(check())


def say(answer: dict[str, Any]) -> None:
    os.write(CHANNEL, (json.dumps(answer) + "\n").encode())


if __name__ == "__main__":
    # answers go to the real standard output; whatever the libraries print goes to stderr
    CHANNEL = os.dup(1)
    os.dup2(2, 1)
    who, name, folder, dtype, threads = sys.argv[1:6]
    if who == "ours":
        importlib.import_module("psigrad")  # sets how OpenMP's threads wait, before torch is there
    import torch

    torch.set_num_threads(int(threads))
    import workloads

    work = workloads.WORKLOADS[name]
    if who == "ours":
        import side_ours as side
    else:
        import side_trl as side
    serve(*side.build(work, Path(folder), dtype))
