"""A model in shards on several processes, each with a stand-in for vLLM's engine that gets its weights out of them."""

from __future__ import annotations

import json
import os
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
from engine_stand_in import completion

from psigrad.config import Model, Run
from psigrad.language.loading.load_model import load_model
from psigrad.language.models import sharded
from psigrad.language.rollout.types import Request, SamplingParams
from psigrad.processes.parallel.world import World
from psigrad_extras.cluster.ray_broadcast import Broadcasts
from psigrad_extras.cluster.ray_sampler import RaySampler
from psigrad_extras.vllm import vllm_probe, vllm_setup, vllm_weights
from psigrad_extras.vllm.broadcast import unpack
from psigrad_extras.vllm.vllm_backend import VLLMSampler

REQUESTS = [Request((5, 6, 7), (1, 2)), Request((8, 9), (3,))]
PARAMS = SamplingParams(max_tokens=6)


def samples(world: World, folder: str, rank: str, out: str) -> None:
    """Write `out`: whether what is sampled comes of the weights of now, before and after they changed, on every process."""
    settings, run = Model(path=folder, lora_rank=int(rank)), Run(threads=1)
    find = vllm_setup.importlib.util.find_spec
    there = lambda name, *more: True if name == "vllm" else find(name, *more)  # noqa: E731
    vllm_setup.importlib.util.find_spec = there  # type: ignore[assignment]
    zeros = lambda model, probe: torch.zeros(sum(map(len, probe)) - len(probe))  # noqa: E731
    vllm_probe.log_probs = zeros  # type: ignore[assignment]
    vllm_weights.BUCKET = 1
    model, loaded = load_model(settings, run, None, world), []

    def whole():
        loaded.append(world.rank)
        return load_model(settings, replace(run, device="cpu"), None)

    os.environ |= {"PSIGRAD_TEST_ENGINE": "", "PSIGRAD_TEST_ONCE": f"{out}.once"}
    found = []
    with closing(VLLMSampler(model, 4, whole=whole, service="engine_stand_in:service")) as sampler:
        for change in (0.0, 0.5):
            with torch.no_grad():
                for parameter in model.trainable().values() if change else ():
                    parameter.add_(change * (world.rank == 0))  # a shard of one process alone
            drawn = sampler.snapshot().sample(REQUESTS, PARAMS)
            held = {name.replace(".base_layer.", "."): w.numpy() for name, w in sharded.gather(model)}
            held = {n if ".lora_" not in n else f"base_model.model.{n.replace('.default', '')}": w for n, w in held.items()}
            wanted = [[completion(held, r.prompt_ids, seed, PARAMS.max_tokens) for seed in r.seeds] for r in REQUESTS]
            found.append([[c.ids for c in group] for group in drawn] == wanted and sampler.version == len(found) + 1)
            sampler.snapshot()
            found[-1] &= sampler.version == len(found)  # nothing changed, nothing was sent
    said = world.all_gather((found, loaded))
    if world.rank == 0:
        Path(out).write_text(json.dumps(said))


def publishes(world: World, folder: str, out: str) -> None:
    """Write `out`: how many buckets each process holds of a published version, and whether they are the weights in shards."""
    vllm_weights.BUCKET = 1
    model = load_model(Model(path=folder), Run(threads=1), None, world)
    ends = Broadcasts("gloo", str, 2, torch.device("cpu"), ("load",), [], lambda *said, **fields: None)
    first = world.rank == 0
    pool = SimpleNamespace(ray=SimpleNamespace(put=lambda told: told)) if first else None
    weights = lambda: vllm_weights.outgoing(model)  # noqa: E731
    sampler = RaySampler(
        pool,
        weights,
        lambda: None,
        exact=False,
        prompts_per_task=1,
        broadcasts=ends if first else None,  # type: ignore[arg-type]
    )
    version = sampler.snapshot().version
    held = {name: weight for contents, buffer in version.buckets for name, weight in unpack(contents, buffer).items()}
    whole = dict(sharded.gather(model))
    same = held.keys() == whole.keys() and all(torch.equal(held[name], whole[name]) for name in whole)
    said = world.all_gather((len(version.buckets), same))
    if first:
        Path(out).write_text(json.dumps(said))
