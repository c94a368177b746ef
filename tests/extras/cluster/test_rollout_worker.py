"""A sampler on the cluster that is given several tasks at once, on weights that are versions alone."""

from __future__ import annotations

import contextlib
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from psigrad.config import OnlineConfig, Placement
from psigrad.config.sections import Sampling
from psigrad.errors import UserError
from psigrad.language.recipes import finish
from psigrad.language.rollout.types import Request, SamplingParams
from psigrad.processes.parallel.world import ALONE
from psigrad_extras.cluster import ray_placement
from psigrad_extras.cluster.ray_sampler import RolloutWorker, Version

PARAMS = SamplingParams(max_tokens=3)


class Writing:
    """Tells which weights were there when it began and when it ended, which it does when it is let go."""

    def __init__(self):
        self.worker, self.taken = None, []
        self.begun, self.go = threading.Semaphore(0), threading.Semaphore(0)

    def snapshot(self):
        self.taken = [*self.taken, self.worker.version]
        return self

    def sample(self, requests, params):
        held = self.worker.version
        self.begun.release()
        assert self.go.acquire(timeout=10.0)
        return [held, self.worker.version]


@pytest.fixture
def worker(monkeypatch):
    made = RolloutWorker(lambda: (SimpleNamespace(trainable=dict), Writing()), 1)
    made.sampler.worker = made
    monkeypatch.setitem(__import__("sys").modules, "ray", SimpleNamespace(get=lambda place: place))
    return made


def test_tasks_of_one_version_are_written_together_and_another_one_waits(worker):
    with ThreadPoolExecutor(4) as threads:
        ask = lambda number: threads.submit(worker.sample, Version(number, [{}]), [Request((1,), (2,))], PARAMS)  # noqa: E731
        old = [ask(0), ask(0)]
        for _ in old:
            assert worker.sampler.begun.acquire(timeout=10.0), "both are at work at once"
        new = ask(1)
        assert not worker.sampler.begun.acquire(timeout=0.2), "weights stay while completions are written by them"
        worker.sampler.go.release(2)
        assert [task.result(10.0) for task in old] == [(0, [0, 0])] * 2
        assert worker.sampler.begun.acquire(timeout=10.0)
        worker.sampler.go.release()
        assert new.result(10.0) == (1, [1, 1])
    assert len(worker.sampler.taken) == 2, "it takes weights over once for each version"


def test_a_weight_that_is_missing_or_new_is_a_sentence():
    own = {"a": torch.zeros(2), "b": torch.zeros(2)}
    made = RolloutWorker(lambda: (SimpleNamespace(trainable=lambda: own), Writing()), 1)
    made._load({"a": np.ones(2, np.float32), "b": np.ones(2, np.float32)})
    assert all(bool((weight == 1).all()) for weight in own.values())
    for names in ("a", "abc"):
        with pytest.raises(UserError, match="weights have other names than the worker's"):
            made._load({name: np.zeros(2, np.float32) for name in names})
    assert all(bool((weight == 1).all()) for weight in own.values()), "they arrive whole or not at all"


def test_an_engine_on_the_cluster_has_room_for_the_runs_longest_text(monkeypatch):
    """And not for the model's, whose pages may take more than there is; and nearly all of the GPU, which it has alone."""
    made = []
    monkeypatch.setattr(ray_placement, "load_model", lambda model, run, checkpoint: run.device)
    note = lambda sampling, model, **how: made.append((model, sampling.vllm_memory, how))  # noqa: E731
    monkeypatch.setattr(ray_placement.samplers, "make", note)
    monkeypatch.setattr(ray_placement, "RaySampler", lambda *given, **settings: None)

    @contextlib.contextmanager
    def actors(placement, journal, kind, arguments, name, **wants):
        pickle.loads(pickle.dumps(arguments[0]))()
        yield None

    monkeypatch.setattr(ray_placement, "open_actors", actors)
    monkeypatch.setattr(ray_placement, "agreed_transfer", lambda config, model, world: None)
    for gpus, given, share in ((1.0, 0.4, 0.8), (0.5, 0.4, 0.4), (1.0, 0.6, 0.6)):
        sampling, placement = Sampling(sampler="vllm", vllm_memory=given), Placement(cluster="auto", sampler_gpus=gpus)
        config, journal = OnlineConfig(sampling=sampling, placement=placement), SimpleNamespace(world=ALONE)
        with finish.sampler_of(config, SimpleNamespace(shard_root=None), journal, longest=321):
            assert made.pop() == ("cpu", share, {"longest": 321})


@pytest.mark.parametrize(("sampler", "parcel", "depth"), [("embedded", 2, 1), ("vllm", 2, 16), ("vllm", 3, 11), ("vllm", 99, 1)])
def test_as_many_tasks_go_to_an_engine_as_fill_its_batch(sampler, parcel, depth):
    sampling, placement = Sampling(sampler=sampler, max_decode_batch=256), Placement(cluster="auto", parcel_prompts=parcel)
    config = OnlineConfig(sampling=sampling, placement=placement, num_generations=8)
    assert ray_placement._tasks_at_once(config) == depth
