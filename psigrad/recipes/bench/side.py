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
    parts = side.build(Path(folder), dtype, device)
    _say({"ready": time.time() - float(start)})
    _serve(*parts, device)


def _serve(step: Callable[[], tuple[int, dict[str, float]]], check: Callable[[], dict[str, float]], device: str) -> None:
    from psigrad.recipes.bench.phases import peak_mb

    for line in sys.stdin:
        match line.strip():
            case "step":
                begin = time.perf_counter()
                tokens, phases = step()
                answer = {"seconds": time.perf_counter() - begin, "tokens": tokens, "phases": phases, "peak_mb": peak_mb()}
                _say(answer | _on_device(device))
            case "check":
                _say(check())


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
