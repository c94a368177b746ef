"""What a pool of actors on Ray costs beside the sampling itself: `python benchmarks/actor_pool.py [--hidden 256 1024]`.

On one machine, with one worker whose sampler has nothing to do: the time of a task (a request, an answer, and what the driver
does between), and of a publication (a model's weights copied, put into Ray's store, fetched and loaded by the worker). Needs Ray.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from timed.inputs import build
from workloads import WORKLOADS

from psigrad.language.models import language_model
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.rollout.types import Completion, Request, Sampler, SamplingParams
from psigrad_extras.cluster.actor_pool import ActorPool
from psigrad_extras.cluster.ray_sampler import RaySampler, RolloutWorker

TOKENS = 64


class Instant(Sampler):
    """The same completion for everybody, at once."""

    exact = True

    def steps(self, requests: list[Request], params: SamplingParams, cache: Any = None) -> Iterator[Any]:
        """See `Sampler`."""
        logps = (-1.0,) * TOKENS
        yield [(i, [Completion((5,) * TOKENS, logps, logps, "stop", seed) for seed in r.seeds]) for i, r in enumerate(requests)]


def worker(folder: str) -> tuple[LanguageModel, Sampler]:
    """What the worker runs."""
    return language_model.load(folder), Instant()


def seconds(work: Callable[[], Any]) -> float:
    """How long it takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 1024], help="widths of the models whose weights travel")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    params = SamplingParams(TOKENS)
    requests = [Request((7,) * 32, tuple(range(8))) for _ in range(64)]
    for hidden in given.hidden:
        with tempfile.TemporaryDirectory() as place:
            build(replace(WORKLOADS["W1"], hidden=hidden), Path(place))
            model = language_model.load(f"{place}/model")
            size = sum(4 * p.numel() for p in model.trainable().values())
            tell = lambda *arguments, **fields: None  # noqa: E731
            make = partial(worker, f"{place}/model")
            pool = ActorPool(RolloutWorker, (make, 1), name="sampler", address="auto", count=1, cpus=1, minutes=10.0, tell=tell)
            version = itertools.count()
            weights = lambda: iter(model.trainable().items())  # noqa: E731, B023
            sampler = RaySampler(pool, weights, lambda: next(version), exact=True, prompts_per_task=2)  # noqa: B023
            sampler.sample(requests[:2], params)  # the worker has started
            at = sampler.snapshot()
            at.sample(requests[:2], params)
            tasks = [seconds(lambda: at.sample(requests, params)) / 32 for _ in range(given.rounds)]  # noqa: B023
            published = [seconds(lambda: sampler.sample(requests[:2], params)) for _ in range(given.rounds)]  # noqa: B023
            pool.close()
        task, publication = statistics.median(tasks), statistics.median(published)
        print(
            f"{size / 1e6:.0f} MB of weights: a task of 2 x 8 completions {1e3 * task:.1f} ms ({1e3 * min(tasks):.1f} to "
            f"{1e3 * max(tasks):.1f}); a publication {publication:.2f} s, {size / publication / 1e6:.0f} MB/s"
        )


if __name__ == "__main__":
    main()
