"""What new weights for vLLM's engine on a cluster cost, by Ray's object store and by a broadcast.

`python benchmarks/weight_transfer.py`, on one machine with one engine, in an environment with vLLM and Ray: the time from new
weights of the trainer to the first completion by them, with what the engine then computes with compared and without. Rounds
alternate.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
from timed.inputs import build
from workloads import WORKLOADS

from psigrad.language.models import language_model
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.rollout.types import Request, Sampler, SamplingParams
from psigrad_extras.cluster.actor_pool import ActorPool
from psigrad_extras.cluster.ray_broadcast import Broadcasts
from psigrad_extras.cluster.ray_sampler import RaySampler, RolloutWorker
from psigrad_extras.vllm import vllm_weights
from psigrad_extras.vllm.vllm_backend import VLLMSampler


def worker(folder: str, readback: bool) -> tuple[LanguageModel, Sampler]:
    """What the sampler runs."""
    model = language_model.load(folder)
    return model, VLLMSampler(model, 4, longest=160, readback=readback)


def nothing(*arguments: Any, **fields: Any) -> None:
    """Nobody listens."""


def sampler_of(model: LanguageModel, folder: str, kind: str, readback: bool) -> tuple[RaySampler, Callable[[], None]]:
    """One on the cluster, and what ends it."""
    passes = ("choose", "load", "compare") if readback else ("load",)
    ends = None
    if kind == "gloo":
        ends = Broadcasts("gloo", ray.util.get_node_ip_address, 2, torch.device("cpu"), passes, [], nothing)
    wants: dict[str, Any] = {"name": "sampler", "address": "auto", "count": 1, "cpus": 1, "minutes": 10.0, "tell": nothing}
    made = (partial(worker, folder, readback), 1)
    pool = ActorPool(RolloutWorker, made, greet=None if ends is None else ends.meet, **wants)
    version = itertools.count()
    weights = lambda: iter(model.trainable().items()) if ends is None else vllm_weights.outgoing(model)  # noqa: E731
    return RaySampler(pool, weights, lambda: next(version), exact=False, prompts_per_task=1, broadcasts=ends), pool.close


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1024, help="width of the model whose weights travel")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    request, params = [Request((7,) * 8, (1,))], SamplingParams(1)
    with tempfile.TemporaryDirectory() as place:
        build(replace(WORKLOADS["W1"], hidden=given.hidden), Path(place))
        model = language_model.load(f"{place}/model")
        size = sum(p.numel() * p.element_size() for p in model.trainable().values())
        for readback in (False, True):
            samplers = {kind: sampler_of(model, f"{place}/model", kind, readback) for kind in ("object store", "gloo")}
            found: dict[str, list[float]] = {kind: [] for kind in samplers}
            for number in range(given.rounds + 1):
                for kind, (sampler, _) in samplers.items():
                    with torch.no_grad():
                        for weight in model.trainable().values():
                            weight.mul_(1.0001)
                    begin = time.perf_counter()
                    sampler.sample(request, params)
                    if number:  # the first waits for the engine
                        found[kind].append(time.perf_counter() - begin)
            for kind, seconds in found.items():
                middle = statistics.median(seconds)
                print(
                    f"{size / 1e6:.0f} MB by {kind}, {'compared' if readback else 'not compared'}: {middle:.2f} s "
                    f"({min(seconds):.2f} to {max(seconds):.2f}), {size / middle / 1e6:.0f} MB/s",
                    flush=True,
                )
                samplers[kind][1]()


if __name__ == "__main__":
    main()
