"""The engine gives each request what the sampler gives it alone, whoever else is there, and lets go of who has left."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch
from timing import until

from psigrad.errors import UserError
from psigrad.language.models import tiny
from psigrad.language.models.language_model import prepare
from psigrad.language.rollout.samplers.embedded import EmbeddedSampler
from psigrad.language.rollout.samplers.transformers_backend import TransformersSampler
from psigrad.language.rollout.types import Request, SamplingParams
from psigrad_serve.engine.engine import SamplingEngine
from psigrad_serve.engine.live_batch import SamplerBatch, StepwiseBatch

PARAMS = (
    SamplingParams(max_tokens=20),
    SamplingParams(max_tokens=9, temperature=0.7, top_k=50, top_p=0.9),
    SamplingParams(max_tokens=14, min_p=0.05),
    SamplingParams(max_tokens=11, temperature=0),
    SamplingParams(max_tokens=30, stop_token_ids=tuple(range(40))),
)


@pytest.fixture(scope="module")
def models():
    tokenizer = tiny.tokenizer(["hello world 123"] * 5, 280)
    made = {name: prepare(tiny.model(name, len(tokenizer)), tokenizer) for name in ("qwen3", "gpt2")}
    with torch.no_grad():  # twice the initial weights: distributions that differ between prompts and tokens
        for model in made.values():
            for p in model.network.parameters():
                p.mul_(2)
    return made


@pytest.fixture(params=["qwen3", "gpt2"])
def engine(request, models):
    made = SamplingEngine(models[request.param], max_batch=5)
    yield made
    made.close()


def asked():
    """(prompt, distribution, seed) of 23 requests: more than there are places, some with one prompt."""
    rng = random.Random(0)
    prompts = [tuple(rng.randrange(4, 270) for _ in range(rng.randrange(1, 40))) for _ in range(12)]
    return [(prompts[i // 2], PARAMS[i % len(PARAMS)], 100 + i) for i in range(23)]


def alone(model, prompt, params, seed):
    return EmbeddedSampler(model).sample([Request(prompt, (seed,))], params)[0][0]


def test_each_of_many_gets_the_tokens_that_it_gets_alone(engine):
    streams = [engine.submit(*each) for each in asked()]
    for stream, each in zip(streams, asked(), strict=True):
        got, want = stream.result(), alone(engine.model, *each)
        assert (got.ids, got.finish_reason, got.seed) == (want.ids, want.finish_reason, want.seed)
        assert torch.allclose(torch.tensor(got.logprobs), torch.tensor(want.logprobs), atol=1e-5)
        assert torch.allclose(torch.tensor(got.sampling_logprobs), torch.tensor(want.sampling_logprobs), atol=1e-5)
    assert len({len(stream.tokens) for stream in streams}) > 3, "they end at different times"
    assert not engine.active and not engine.waiting


def test_another_seed_gives_other_tokens(engine):
    prompt, params, seed = asked()[0]
    first, second = (engine.submit(prompt, params, s).result().ids for s in (seed, seed + 1))
    assert first != second


def test_an_event_loop_reads_many_at_once_and_token_by_token(models):
    async def read(engine, each):
        stream = engine.submit(*each)
        return [token.id async for token in stream]

    async def all_of_them():
        engine = SamplingEngine(models["qwen3"], max_batch=5)
        try:
            return await asyncio.gather(*(read(engine, each) for each in asked()))
        finally:
            engine.close()

    found = asyncio.run(all_of_them())
    assert [tuple(ids) for ids in found] == [alone(models["qwen3"], *each).ids for each in asked()]


def test_who_leaves_frees_the_place(engine):
    forever = SamplingParams(max_tokens=200)
    hold = [engine.submit((5, 6, 7), forever, seed) for seed in range(5)]
    last = engine.submit((5, 6, 7, 8), PARAMS[0], 1)
    until(lambda: all(stream.tokens for stream in hold))
    assert engine.waiting == 1 and not last.tokens
    hold[2].cancel()
    assert last.result().ids == alone(engine.model, (5, 6, 7, 8), PARAMS[0], 1).ids
    assert hold[2].ended and hold[2].finish_reason is None and len(hold[2].tokens) < 200
    rest = [stream.result() for i, stream in enumerate(hold) if i != 2]
    assert [c.ids for c in rest] == [alone(engine.model, (5, 6, 7), forever, seed).ids for seed in (0, 1, 3, 4)]
    waits = engine.submit((5,), forever, 3)
    waits.cancel()
    until(lambda: waits.ended)
    assert not engine.active and not engine.waiting


def test_the_most_probable_tokens_come_with_their_log_probs(engine):
    prompt, _, seed = asked()[3]
    stream = engine.submit(prompt, SamplingParams(max_tokens=5, temperature=0.5), seed, top=3)
    plain = engine.submit(prompt, SamplingParams(max_tokens=5, temperature=0.5), seed)
    stream.result()
    for token in stream.tokens:
        assert len(token.top) == 3 and [x for _, x in token.top] == sorted((x for _, x in token.top), reverse=True)
        assert dict(token.top).get(token.id, token.logprob) == pytest.approx(token.logprob, abs=1e-5)
        assert token.top[0][1] >= token.logprob - 1e-5
    assert plain.result().ids == tuple(token.id for token in stream.tokens) and not plain.tokens[0].top


def test_a_step_that_fails_fails_those_under_way_and_nobody_else(engine, monkeypatch):
    hold = engine.submit((5, 6, 7), SamplingParams(max_tokens=200), 0)
    until(lambda: hold.tokens)

    def broken(self):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr("psigrad_serve.engine.live_batch.LiveBatch.step", broken)
        with pytest.raises(RuntimeError, match="out of memory"):
            hold.result()
    assert engine.submit((5, 6), PARAMS[0], 4).result().ids == alone(engine.model, (5, 6), PARAMS[0], 4).ids


def test_a_held_engine_takes_no_step_and_goes_on_with_the_weights_of_now(models):
    engine = SamplingEngine(models["qwen3"], max_batch=5)
    with engine.held():
        stream = engine.submit(*asked()[0])
        assert not stream.tokens and engine.waiting == 1
        weight = models["qwen3"].trainable()["model.norm.weight"]
        with torch.no_grad():
            weight.mul_(1.5)
    now = stream.result().ids
    assert now == alone(models["qwen3"], *asked()[0]).ids
    with engine.held(), torch.no_grad():
        weight.div_(1.5)
    assert engine.submit(*asked()[0]).result().ids == alone(models["qwen3"], *asked()[0]).ids != now
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.submit(*asked()[0])


@pytest.mark.parametrize("batch", [StepwiseBatch, SamplerBatch])
def test_any_sampler_may_decode(models, batch):
    sampler = TransformersSampler(models["gpt2"])
    engine = SamplingEngine(models["gpt2"], 8, sampler)
    engine._batch = batch(sampler, 8)
    streams = [engine.submit(*each) for each in asked()[:9]]
    assert [s.result().ids for s in streams] == [alone(models["gpt2"], *each).ids for each in asked()[:9]]
    engine.close()


def test_a_prompt_without_room_is_refused_at_once(engine):
    with pytest.raises(UserError, match="exceed the model's 256 positions"):
        engine.submit((5,) * 250, PARAMS[0], 0)
    with pytest.raises(UserError, match="no tokens"):
        engine.submit((), PARAMS[0], 0)
