"""A run of the tiny job that samples on Ray: `python cluster_runs.py JOB OUT SETTINGS`, SETTINGS being JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import tiny_jobs

from psigrad.config import Placement
from psigrad.config.sections import Sampling
from psigrad.language.recipes import dispatch
from psigrad_extras.cluster import actor_pool


def main(job: str, out: str, given: str) -> None:
    settings = json.loads(given)
    actor_pool.PATIENCE = settings.pop("patience", actor_pool.PATIENCE)
    if cpus := settings.pop("cpus", 0):
        import ray

        ray.init(num_cpus=cpus, include_dashboard=False, logging_level="ERROR")
    lag, steps, tokens = settings.pop("lag", 0), settings.pop("steps", 6), settings.pop("tokens", 12)
    own = settings.pop("config", {})
    kind = {"completions": tiny_jobs.online_config, "episodes": tiny_jobs.episodes_config}[settings.pop("kind", "completions")]
    made = kind(Path(job), Path(out), max_steps=steps)
    sampling = Sampling(max_completion_length=tokens, max_decode_batch=8, sampler=settings.pop("sampler", "embedded"))
    placement = Placement(**{"cluster": "auto", "samplers": 2, "parcel_prompts": 1, "timeout_minutes": 5.0, **settings})
    optim = replace(made.optim, learning_rate=1e-3)
    dispatch.run(replace(made, placement=placement, lag=lag, sampling=sampling, optim=optim, num_minibatches=1, **own))


if __name__ == "__main__":
    main(*sys.argv[1:])
