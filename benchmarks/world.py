"""What the world of one process costs a step: `python benchmarks/world.py [W0] [--steps 100]`.

One run, whose odd steps call the functions of `psigrad/processes/parallel/world.py` and whose even ones call stubs in their
place that do nothing but what one process needs. Printed are the ratio of the steps' times (median over pairs of neighbours, with
the interval of a sign test), and the share of the odd steps' time that is spent inside the functions.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster import Placed, command
from scipy.stats import binom
from timed.inputs import build
from workloads import WORKLOADS

from psigrad.cli import main as psigrad
from psigrad.language.training.online import online_rl
from psigrad.processes.parallel import world

STUBS: dict[str, Callable[..., Any]] = {
    "shard": lambda world, parts: [(part, 1.0) for part in parts],
    "sum_figures": lambda world, figures: figures,
    "each_once": lambda world, parts, of: [of(part) for part in parts],
    "sum_gradients": lambda world, parameters: None,
}
METHODS: dict[str, Callable[..., Any]] = {
    "broadcast": lambda self, value: value,
    "all_gather": lambda self, value: [value],
    "all_reduce": lambda self, x: x,
    "exchange": lambda self, parts: parts,
}


class Alternating:
    """In odd steps the functions of the world, timed; in even ones their stubs."""

    def __init__(self) -> None:
        self.real, self.depth, self.inside, self.calls = True, 0, 0.0, 0

    def either(self, function: Callable[..., Any], stub: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if not self.real:
                return stub(*arguments, **named)
            self.calls += 1
            if self.depth:  # its time is its caller's
                return function(*arguments, **named)
            self.depth, begin = 1, time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                self.inside += time.perf_counter() - begin
                self.depth = 0

        return call

    def install(self) -> None:
        """Put itself in place of the functions, wherever they were imported, and of a step."""
        for name, stub in STUBS.items():
            function = getattr(world, name)
            own = function if name == "each_once" else self.either(function, stub)  # that one computes what it is given
            for module in [m for n, m in sys.modules.items() if n.startswith("psigrad.")]:
                if getattr(module, name, None) is function:
                    setattr(module, name, own)
        for name, stub in METHODS.items():
            setattr(world.Alone, name, self.either(getattr(world.Alone, name), stub))
        step = online_rl.step

        def turn(run: Any, state: Any) -> Any:
            self.real = state.step % 2 == 0
            try:
                return step(run, state)
            finally:
                self.real = True

        online_rl.step = turn


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", nargs="?", default="W0", choices=[n for n, w in WORKLOADS.items() if w.kind == "grpo"])
    parser.add_argument("--steps", type=int, default=100)
    given = parser.parse_args()
    alternating = Alternating()
    alternating.install()
    with tempfile.TemporaryDirectory() as place:
        folder, out = Path(place), Path(place) / "run"
        build(WORKLOADS[given.workload], folder)
        alternating.inside, alternating.calls = 0.0, 0
        psigrad([*command(WORKLOADS[given.workload], folder, out, Placed(1, "ddp", 1), given.steps)])
        rows = [json.loads(line) for line in (out / "timings.jsonl").read_text().splitlines()]
    seconds = [row["step_time"] for row in rows if "time/update" in row][2:]
    pairs = sorted(odd / even for odd, even in zip(seconds[::2], seconds[1::2], strict=False))
    low = int(binom.ppf(0.025, len(pairs), 0.5))
    print(
        f"{given.workload}, {len(pairs)} pairs of steps: with the world / without {pairs[len(pairs) // 2]:.4f} "
        f"[{pairs[low]:.4f}, {pairs[-1 - low]:.4f}]; inside it {alternating.inside / sum(seconds[::2]):.2e} of the time, "
        f"{alternating.calls / max(1, len(seconds[::2])):.0f} calls a step"
    )


if __name__ == "__main__":
    main()
