"""Where a run samples and plays, as its section `placement` says: here, in a whole copy of a model in shards, or on Ray."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from psigrad import extras
from psigrad.config import OnlineConfig, PreferenceConfig, SFTConfig
from psigrad.language.loading.load_model import load_model
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.rollout.samplers import samplers
from psigrad.language.rollout.types import ReplicaSampler, Sampler
from psigrad.processes.parallel import sharded
from psigrad.processes.parallel.world import World
from psigrad.runs.journal import Journal


@contextlib.contextmanager
def sampler_of(
    config: SFTConfig | OnlineConfig | PreferenceConfig,
    model: LanguageModel,
    journal: Journal | None = None,
    longest: int = 0,
) -> Iterator[Sampler]:
    """The sampler that the settings ask for: on a cluster, or here; of a model in shards it samples from a whole copy, unless it
    is vLLM's. `longest` bounds prompt and completion together, where that is known.
    """
    if config.placement.cluster and journal is not None:
        with extras.load("cluster").open_sampler(config, model, journal) as sampler:
            yield sampler
        return
    tell = None if journal is None else journal.tell
    drawn = config.sampling
    # vLLM takes weights out of shards; the policy's log-probs of a filtered draw come of a whole copy
    itself = model.root is None or (drawn.sampler == "vllm" and not (drawn.top_p < 1 or drawn.top_k or drawn.min_p))
    twin = model if itself else load_model(config.model, config.run, None)
    whole = partial(load_model, config.model, replace(config.run, device="cpu"), None)
    with contextlib.closing(samplers.make(drawn, twin, tell, longest, whole)) as sampler:
        yield sampler if twin is model else ReplicaSampler(sampler, sharded.Replica(model, twin).refresh)


@contextlib.contextmanager
def collector_of(config: OnlineConfig, sampler: Sampler, world: World) -> Iterator[Executor | None]:
    """Threads that collect while steps train, where others sample and a lag gives them the time: one for each collection that is
    under way, but only one where environments play.
    """
    if not (sampler.central and config.lag and world.rank == 0):
        yield None
        return
    threads = ThreadPoolExecutor(1 if config.plays else config.lag + 1, "collector")
    try:
        yield threads
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
