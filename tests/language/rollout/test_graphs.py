"""Recorded decoding steps, by a recorder that runs again what a GPU would replay, on the same tensors."""

from __future__ import annotations

import random

import pytest
import torch

from psigrad.config import Sampling
from psigrad.errors import UserError
from psigrad.language.models import tiny
from psigrad.language.models.language_model import prepare
from psigrad.language.rollout.samplers import embedded, samplers
from psigrad.language.rollout.samplers.cache import Recorded
from psigrad.language.rollout.samplers.embedded import EmbeddedSampler
from psigrad.language.rollout.types import Request, SamplingParams

PARAMS = SamplingParams(max_tokens=24, stop_token_ids=tuple(range(40)))  # some end early


def again(run):
    """Replays by running; a graph's outputs stay where they are, and so do these."""
    run()
    out = run()

    def replay():
        out.copy_(run())

    return replay, out


def frozen(run):
    """A recording that replays its first step for ever."""
    return (lambda: None), run()


@pytest.fixture(scope="module", params=["gpt2", "gpt_neox"])
def model(request):
    tokenizer = tiny.tokenizer(["hello world 123"] * 5, 280)
    made = prepare(tiny.model(request.param, len(tokenizer)), tokenizer)
    with torch.no_grad():
        for p in made.as_transformers().parameters():
            p.mul_(2)
    return made


@pytest.fixture(scope="module")
def requests_():
    rng = random.Random(0)
    lengths = [(rng.randint(1, 20), rng.randint(1, 6)) for _ in range(9)]
    return [
        Request(tuple(rng.randrange(5, 260) for _ in range(n)), tuple(rng.getrandbits(63) for _ in range(m))) for n, m in lengths
    ]


def sampled(model, requests_, monkeypatch, recorder, max_batch: int):
    sizes = []

    class Watched(Recorded):
        def __init__(self, model, cache):
            super().__init__(model, cache, recorder)

        def _record(self, size):
            sizes.append(size)
            return super()._record(size)

    monkeypatch.setattr(embedded, "Recorded", Watched)
    return EmbeddedSampler(model, max_batch, cuda_graphs=True).sample(requests_, PARAMS), sizes


@pytest.mark.parametrize("max_batch", [5, 256])
def test_recorded_steps_write_what_steps_write(model, requests_, monkeypatch, max_batch):
    plain = EmbeddedSampler(model, max_batch).sample(requests_, PARAMS)
    recorded, sizes = sampled(model, requests_, monkeypatch, again, max_batch)
    for ours, theirs in zip(recorded, plain, strict=True):
        assert [(c.ids, c.finish_reason) for c in ours] == [(c.ids, c.finish_reason) for c in theirs]
        for a, b in zip(ours, theirs, strict=True):
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
    slots = min(max_batch, sum(len(r.seeds) for r in requests_))
    assert len(sizes) == len(set(sizes)) > 2 and max(sizes) <= slots, "each shape once"
    assert all(size == slots or size & (size - 1) == 0 for size in sizes)


def test_negative_control_a_recording_that_reads_nothing_new_differs(model, requests_, monkeypatch):
    plain = EmbeddedSampler(model).sample(requests_, PARAMS)
    stale, _ = sampled(model, requests_, monkeypatch, frozen, 256)
    assert [[c.ids for c in group] for group in stale] != [[c.ids for c in group] for group in plain]


def test_recording_is_refused_where_there_is_no_gpu(model):
    with pytest.raises(UserError, match="cuda_graphs is for GPUs and the model is on cpu"):
        samplers.make(Sampling(cuda_graphs=True), model)
