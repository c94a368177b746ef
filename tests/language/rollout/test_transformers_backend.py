"""transformers' generate as a sampler: its stream, and nothing of the model's own configuration."""

from __future__ import annotations

import pytest
from transformers import GenerationConfig

from psigrad.language.rollout.samplers.embedded import EmbeddedSampler
from psigrad.language.rollout.samplers.transformers_backend import TransformersSampler
from psigrad.language.rollout.types import Request, SamplingParams

EOS = 0


# What a model's generation_config.json may hold, each of which changes what generate writes.
OF_THE_MODEL = [
    {"repetition_penalty": 1.3},
    {"do_sample": True, "temperature": 0.3, "top_k": 2, "top_p": 0.5},
    {"no_repeat_ngram_size": 1},
    {"bad_words_ids": [[i] for i in range(5, 130)]},
    {"suppress_tokens": list(range(5, 130))},
    {"begin_suppress_tokens": list(range(5, 130))},
    {"sequence_bias": [[[i], 9.0] for i in range(5, 30)]},
    {"min_length": 60},
    {"min_new_tokens": 20},
    {"forced_bos_token_id": 7},
    {"forced_eos_token_id": 7},
    {"exponential_decay_length_penalty": (2, 5.0)},
    {"max_length": 3},
    {"num_beams": 2},
    {"num_return_sequences": 2, "do_sample": True},
    {"guidance_scale": 3.0},
    {"max_time": 1e-9},
    {"cache_implementation": "static"},
    {"return_dict_in_generate": True, "output_scores": True},
    {"renormalize_logits": True, "remove_invalid_values": True, "watermarking_config": {"bias": 9.0}},
]


@pytest.mark.parametrize("own", OF_THE_MODEL, ids=lambda own: next(iter(own)))
def test_nothing_of_the_models_generation_config_acts_on_what_is_sampled(own, models, requests_, monkeypatch):
    model, params = models["gpt2"], SamplingParams(max_tokens=10, stop_token_ids=tuple(range(200, 260)))
    network, some = model.network, requests_[:3]
    expected = EmbeddedSampler(model).sample(some, params)
    monkeypatch.setattr(network, "generation_config", GenerationConfig(eos_token_id=EOS, **own))
    found = TransformersSampler(model).sample(some, params)
    assert [[c.ids for c in g] for g in found] == [[c.ids for c in g] for g in expected]
    for mine, theirs in ((a, b) for x, y in zip(found, expected, strict=True) for a, b in zip(x, y, strict=True)):
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
    assert network.generation_config.eos_token_id == EOS, "the model keeps its own, which goes with it into its folder"


@pytest.mark.parametrize(("given", "sizes"), [({}, [256, 44]), ({"max_batch": 100}, [100] * 3), ({"max_batch": 299}, [299, 1])])
def test_batches_have_at_most_max_batch_sequences_and_256_by_default(given, sizes, models, monkeypatch):
    """Of 300 sequences of two prompts; their completions come back in order."""
    sampler, seen = TransformersSampler(models["gpt2"], **given), []
    monkeypatch.setattr(sampler, "_generate", lambda flat, params: seen.append(len(flat)) or flat)
    requests = [Request((5,), tuple(range(7))), Request((6,), tuple(range(7, 300)))]
    found = sampler.sample(requests, SamplingParams(max_tokens=1))
    assert seen == sizes and found == [[(one.prompt_ids, seed) for seed in one.seeds] for one in requests]


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])
@pytest.mark.parametrize("given", [{"temperature": 0.7, "top_k": 50, "top_p": 0.9}, {"min_p": 0.05}, {"temperature": 0}], ids=str)
def test_a_stream_gives_the_tokens_of_sample_one_by_one(architecture, given, models, requests_):
    params = SamplingParams(max_tokens=24, **given)
    made = TransformersSampler(models[architecture])
    first = Request(requests_[0].prompt_ids, requests_[0].seeds[:1])
    other = Request(requests_[1].prompt_ids, requests_[1].seeds[:1])
    # two streams that take turns do not disturb each other
    streams = [made.stream(request, params) for request in (first, other)]
    taken = [[], []]
    while live := [i for i in range(2) if streams[i] is not None]:
        for i in live:
            token = next(streams[i], None)
            if token is None:
                streams[i] = None
            else:
                taken[i].append(token)
    for request, tokens in zip((first, other), taken, strict=True):
        want = made.sample([request], params)[0][0]
        assert tuple(token.id for token in tokens) == want.ids
        assert [token.logprob for token in tokens] == pytest.approx(want.logprobs, abs=1e-5)
