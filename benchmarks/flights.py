"""What it buys that tasks join an engine's flight: `python benchmarks/flights.py [--samplers 2] [--steps 2]`.

As `overlap.py`, whose parts it uses: psigrad's scheduler, sampler and pool, on engines that sleep. These decode all of their
tasks together. A decoding step takes a millisecond, and a 64th of that more for each completion that is being written. Without a
lag and with a trainer that takes no time, a step is what its sampling takes: 64 prompts for each engine, 8 completions each, of
log-normal lengths, of which an engine has at most 128 at once: a task of 16 prompts, or 16 tasks of one.
"""

from __future__ import annotations

import argparse
import threading
import time
from dataclasses import dataclass, replace
from typing import Any

import overlap
from overlap import Shape, digest, length

from psigrad.language.rollout.types import Request, SamplingParams
from psigrad_extras.cluster.ray_sampler import Version

# Completions that cost as much as reading the weights does.
KNEE = 64


@dataclass
class Task:
    """The lengths of its completions, and how many tokens each has."""

    lengths: list[int]
    done: threading.Event
    tokens: int = 0

    @property
    def alive(self) -> int:
        """How many are being written."""
        return sum(n > self.tokens for n in self.lengths)


class FlightEngine(overlap.Engine):
    """A sampler of the cluster whose tasks are decoded together, token by token, whenever they came."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.flight: list[Task] = []
        self.changed = threading.Condition()
        threading.Thread(target=self._decode, daemon=True).start()

    def sample(self, version: Version, requests: list[Request], params: SamplingParams) -> tuple[int, Any]:
        """See `RolloutWorker`."""
        task = Task([length(self.shape, seed) for request in requests for seed in request.seeds], threading.Event())
        with self.changed:
            self.flight.append(task)
            self.changed.notify()
        task.done.wait()
        return version.number, overlap.written(self.shape, version, requests)

    def _decode(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: bool(self.flight))
                at = list(self.flight)
            time.sleep(self.shape.token * (1 + sum(task.alive for task in at) / KNEE))
            for task in at:
                task.tokens += 1
            with self.changed:
                self.flight = [task for task in self.flight if task.alive]
            for task in at:
                if not task.alive:
                    task.done.set()


def run(shape: Shape, depth: int, parcel: int) -> tuple[float, str]:
    """Seconds of a run, and the sum of what it trained on."""
    kept, overlap.Engine = overlap.Engine, FlightEngine  # type: ignore[misc]
    try:
        seconds, trained = overlap.run(replace(shape, depth=depth, parcel=parcel, trains=0.0), 0)
    finally:
        overlap.Engine = kept  # type: ignore[misc]
    return seconds, digest(trained)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--samplers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    shape = Shape(samplers=given.samplers, prompts=64 * given.samplers, generations=8, steps=given.steps, mean_tokens=50.0)
    ways = [(1, 2), (1, 16), (16, 1), (8, 2)]
    for turn in range(given.rounds):
        for depth, parcel in ways:
            seconds, sum_of = run(shape, depth, parcel)
            print(f"round {turn}  {depth:3} tasks of {parcel:2} prompts at once  {seconds:6.2f} s  {sum_of}", flush=True)


if __name__ == "__main__":
    main()
