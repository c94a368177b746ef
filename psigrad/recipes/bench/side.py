"""One side of the comparison in a process of its own.

Its arguments are ours|trl FOLDER DTYPE THREADS DEVICE START, where START is the time of day at which the process was begun.
Talks in lines: "check" answers with loss and gradient norm on the fixed batch, "step" runs one optimiser step and answers with
its seconds by phase, tokens and peak memory.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from psigrad.recipes.quick import quick_imports

# Where answers go; whatever the libraries print goes to stderr.
_CHANNEL = 1


def main(who: str, folder: str, dtype: str, threads: str, device: str, start: str) -> None:
    """Build the side, then answer requests until the parent hangs up."""
    global _CHANNEL
    _CHANNEL = os.dup(1)
    os.dup2(2, 1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    with quick_imports():  # as the commands do
        side = import_module(f"psigrad.recipes.bench.side_{who}")
    import torch

    torch.set_num_threads(int(threads) or len(os.sched_getaffinity(0)))
    take_steps, check = side.build(Path(folder), dtype, device)
    _say({"ready": time.time() - float(start)})
    take_steps(Parent(check, device))


class Parent:
    """What asks for steps. All of a side runs in the thread that it runs in: OpenMP keeps a team of threads for each thread that
    ever computed, and lets them wait less eagerly where there are more of them than cores.
    """

    def __init__(self, check: Callable[[], dict[str, float]], device: str) -> None:
        self._check, self._device = check, device
        self._begin = 0.0

    def wants_a_step(self) -> bool:
        """Waits until it wants one, and answers other requests meanwhile; False where it has hung up."""
        while line := sys.stdin.readline():
            if line.strip() == "step":
                self._begin = time.perf_counter()
                return True
            _say(self._check())
        return False

    def got(self, tokens: int, phases: dict[str, float]) -> None:
        """The step was taken, with that many tokens and these seconds by phase; what they leave out is `rest`."""
        from psigrad.recipes.bench.phases import peak_mb

        seconds = time.perf_counter() - self._begin
        phases = {**phases, "rest": seconds - sum(phases.values())}
        _say({"seconds": seconds, "tokens": tokens, "phases": phases, "peak_mb": peak_mb()} | _on_device(self._device))


def _on_device(device: str) -> dict[str, float]:
    """The GPU's peak, where the side runs on one."""
    if device == "cpu":
        return {}
    import torch

    return {"gpu_peak_mb": torch.cuda.max_memory_allocated() / (1 << 20)}


def _say(answer: dict[str, Any]) -> None:
    os.write(_CHANNEL, (json.dumps(answer) + "\n").encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
