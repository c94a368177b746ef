"""Seconds of a step by phase, and the peak memory of a process."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Phases:
    """Seconds by name within one step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the seconds spent inside the `with` block to the phase `name`."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin

    def around(self, owner: Any, method: str, name: str) -> None:
        """Time every call of a method."""
        original = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self(name):
                return original(*args, **kwargs)

        setattr(owner, method, timed)


def peak_mb() -> float:
    """The largest resident set of this process so far, in MiB."""
    try:
        status = Path("/proc/self/status").read_text()
        return int(next(line for line in status.splitlines() if "VmHWM" in line).split()[1]) / 1024
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / (1 << 20 if sys.platform == "darwin" else 1 << 10)


class Parent:
    """The parent process, which asks for steps over stdin; answers go to the file descriptor `answers`.

    Steps run in the main thread: OpenMP keeps a team of threads for each thread that ever computed, and with more of them than
    cores they no longer spin while they wait.
    """

    def __init__(self, answers: int, check: Callable[[], dict[str, float]], device: str) -> None:
        self._answers, self._check, self._device = answers, check, device
        self._begin = 0.0

    def wants_a_step(self) -> bool:
        """Wait until it wants one, and answer other requests meanwhile; False once it has closed the pipe."""
        while line := sys.stdin.readline():
            if line.strip() == "step":
                self._begin = time.perf_counter()
                return True
            self.say(self._check())
        return False

    def got(self, tokens: int, phases: dict[str, float]) -> None:
        """The step was taken, with that many tokens and these seconds by phase; what they leave out is `rest`."""
        seconds = time.perf_counter() - self._begin
        phases = {**phases, "rest": seconds - sum(phases.values())}
        self.say({"seconds": seconds, "tokens": tokens, "phases": phases, "peak_mb": peak_mb()} | _on_device(self._device))

    def say(self, answer: dict[str, Any]) -> None:
        """One line of JSON."""
        os.write(self._answers, (json.dumps(answer) + "\n").encode())


def _on_device(device: str) -> dict[str, float]:
    """The GPU's peak, where the steps run on one."""
    if device == "cpu":
        return {}
    import torch

    return {"gpu_peak_mb": torch.cuda.max_memory_allocated() / (1 << 20)}
