"""Recorded decoding steps, by a recorder that runs again what a GPU would replay, on the same tensors."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cases import slow
from fake_gpu import gpu_memory
from hybrid_models import HYBRID, network, packed
from recordings import PARAMS, again, texts, watch
from transformers import Qwen3Config

from psigrad import seeds
from psigrad.language.models import tiny
from psigrad.language.models.language_model import Lora, prepare
from psigrad.language.rollout.samplers import cache, cuda_graph
from psigrad.language.rollout.samplers.cuda_graph import CudaGraphDecoding, Room
from psigrad.language.rollout.samplers.embedded import EmbeddedSampler
from psigrad.language.rollout.types import Request, SamplingParams


def frozen(run):
    """A recording that draws nothing more."""
    run()
    return lambda: None


@pytest.fixture(scope="module", params=["gpt2", pytest.param("gpt_neox", marks=pytest.mark.slow), "qwen3_5_text"])
def model(request):
    tokenizer = tiny.tokenizer(["hello world 123"] * 5, 280)
    hybrid = request.param in HYBRID
    made = packed(network(request.param) if hybrid else tiny.model(request.param, len(tokenizer)), tokenizer)
    with torch.no_grad():
        for p in made.network.parameters():
            p.mul_(2)
    return made


@pytest.mark.parametrize(
    ("max_batch", "filtered"),
    [
        *((5, {}), (256, {"top_k": 9})),
        *slow((5, {"top_k": 9}), (256, {}), (5, {"temperature": 0.0}), (256, {"temperature": 0.0})),
    ],
)
def test_recorded_steps_write_what_steps_write(model, requests_, monkeypatch, max_batch, filtered):
    params = replace(PARAMS, **filtered)
    plain = EmbeddedSampler(model, max_batch).sample(requests_, params)
    shapes = watch(monkeypatch, again)
    sampler = EmbeddedSampler(model, max_batch)
    for _ in range(2):  # the second call finds the recordings of the first
        found = sampler.sample(requests_, params)
        assert texts(found) == texts(plain)
        pairs = [(a, b) for ours, theirs in zip(found, plain, strict=True) for a, b in zip(ours, theirs, strict=True)]
        assert all(a.logprobs == pytest.approx(b.logprobs, abs=1e-4) for a, b in pairs)
        drawn_from = [(x, y) for a, b in pairs for x, y in zip(a.sampling_logprobs, b.sampling_logprobs, strict=True)]
        # a product of another width rounds otherwise, and a filter may then keep one token more
        assert sum(x != pytest.approx(y, abs=1e-4) for x, y in drawn_from) <= len(drawn_from) // 50
    (made,) = shapes
    # steps of half as many rows are recorded once 16 or fewer sequences are left
    halves = sum(len(c.ids) > 20 for group in plain for c in group) <= 16
    assert len(made) > halves and all(size == max_batch or size & (size - 1) == 0 for size, _ in made)


def test_a_long_sequence_reads_more_columns_when_it_needs_them(model, monkeypatch):
    request = Request(tuple(range(5, 120)), (7, 8))
    params = SamplingParams(max_tokens=60)
    plain = EmbeddedSampler(model).sample([request], params)
    shapes = watch(monkeypatch, again)
    assert texts(EmbeddedSampler(model).sample([request], params)) == texts(plain)
    assert {columns for _, columns in shapes[0]} == {128, 192}


def test_a_recorded_step_reads_less_than_one_and_a_half_times_the_keys_that_are_there(model, monkeypatch):
    """Counted where attention is given keys: from 129 tokens on, at most the next of 192, 256, 384, 512, … columns."""
    read = [(wanted, CudaGraphDecoding._columns(wanted, 4096)) for wanted in range(1, 4097)]
    assert all(max(wanted, 128) <= columns < max(129, 1.5 * wanted) for wanted, columns in read)
    assert sorted({columns for _, columns in read}) == [128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096]
    given = []
    attend = cache.Decode.attend

    def watched(self, layer, q, k, v, scale, window, how=cache.SDPA):
        return attend(
            self, layer, q, k, v, scale, window, lambda q, keys, v, **named: given.append(keys.shape) or how(q, keys, v, **named)
        )

    monkeypatch.setattr(cache.Decode, "attend", watched)
    watch(monkeypatch, again)
    EmbeddedSampler(model).sample([Request(tuple(range(5, 135)), (7, 8))], SamplingParams(max_tokens=20))
    assert given and {shape[2] for shape in given} == {192} and {shape[0] for shape in given} <= {1, 2}


def counting(made):
    """As `again`, and each recording joins `made`."""
    return lambda run: again(made.append(run) or run)


def test_evaluation_at_another_temperature_keeps_the_recordings_of_training(model, requests_, monkeypatch):
    others = [replace(PARAMS, temperature=0.5), replace(PARAMS, temperature=0.0)]
    plain = [texts(EmbeddedSampler(model).sample(requests_, params)) for params in (PARAMS, *others)]
    made = []
    shapes = watch(monkeypatch, counting(made))
    sampler = EmbeddedSampler(model)
    for params, expected in zip((PARAMS, *others), plain, strict=True):
        assert texts(sampler.sample(requests_, params)) == expected
    counted = len(made)
    assert counted >= 6, "each distribution has its own"
    sampler.sample(requests_, replace(PARAMS, max_tokens=20))
    for params, expected in zip((PARAMS, *others), plain, strict=True):
        assert texts(sampler.sample(requests_, params)) == expected
    assert len(made) == counted and len(shapes) == 1, "a recording serves any number of tokens, and again"
    for temperature in (0.6, 0.7, 0.8, 0.9):
        sampler.sample(requests_, replace(PARAMS, temperature=temperature))
    before = len(made)
    sampler.sample(requests_, PARAMS)
    assert len(made) > before, "four distributions are kept"


def test_a_longer_evaluation_of_fewer_makes_room_once(requests_, monkeypatch):
    tokenizer = tiny.tokenizer(["hello world 123"] * 5, 280)
    shapes = watch(monkeypatch, again)
    sampler = EmbeddedSampler(prepare(tiny.model("gpt2", len(tokenizer), max_length=512), tokenizer))
    for _ in range(3):
        sampler.sample(requests_, PARAMS)
        sampler.sample([Request(tuple(range(5, 255)), (7, 8))], PARAMS)
    assert len(shapes) == 2


def test_other_weights_are_recorded_anew(model, requests_, monkeypatch):
    shapes = watch(monkeypatch, again)
    sampler = EmbeddedSampler(model)
    sampler.sample(requests_, PARAMS)
    weight = next(iter(model.network.parameters()))
    weight.data = weight.data.clone()
    sampler.sample(requests_, PARAMS)
    assert len(shapes) == 2


def test_without_its_adapter_a_model_is_recorded_anew(requests_, monkeypatch):
    tokenizer = tiny.tokenizer(["hello world 123"] * 5, 280)
    adapted = prepare(tiny.model("gpt2", len(tokenizer)), tokenizer, lora=Lora(4))
    made = []
    watch(monkeypatch, counting(made))
    sampler = EmbeddedSampler(adapted)
    sampler.sample(requests_, PARAMS)
    counted = len(made)
    with adapted.without_adapter():
        sampler.sample(requests_, PARAMS)
    assert len(made) == 2 * counted
    sampler.sample(requests_, PARAMS)
    assert len(made) == 2 * counted


def test_negative_control_a_recording_that_reads_nothing_new_differs(model, requests_, monkeypatch):
    plain = EmbeddedSampler(model).sample(requests_, PARAMS)
    watch(monkeypatch, frozen)
    assert texts(EmbeddedSampler(model).sample(requests_, PARAMS)) != texts(plain)


def test_fewer_slots_than_asked_for_are_recorded_once_and_write_the_same(model, requests_, monkeypatch):
    plain = EmbeddedSampler(model).sample(requests_, PARAMS)
    shapes = watch(monkeypatch, again, most=2)
    sampler = EmbeddedSampler(model)
    for _ in range(2):
        assert texts(sampler.sample(requests_, PARAMS)) == texts(plain)
    assert len(shapes) == 1 and {size for size, _ in shapes[0]} <= {1, 2}


def test_on_a_cpu_nothing_is_recorded(model):
    assert not cuda_graph.fitting(model, Room(1, 1)).slots


# Qwen3's sizes: layers, key heads of 128, and billions of weights.
QWEN3 = {"0.6B": (28, 8, 0.6), "1.7B": (28, 8, 1.7), "4B": (36, 8, 4.0), "8B": (36, 8, 8.2)}


@pytest.mark.parametrize("gigabytes", [24, 40, 80])
def test_decoding_is_recorded_in_as_many_slots_as_half_of_the_free_memory_holds(gigabytes, monkeypatch):
    """Weights take 2 bytes, or 16 with their training. 8 billion of them leave 7.6 of 24 GB; full training of 4 needs more."""
    tried, held = 0, {"reserved": 3 << 30, "allocated": 1 << 30}
    for (layers, heads, billions), each, longest in itertools.product(QWEN3.values(), (2, 16), (256, 768, 1280, 2304, 4352)):
        sizes = {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads, "hidden_size": 1024}
        network = SimpleNamespace(config=Qwen3Config(head_dim=128, **sizes), dtype=torch.bfloat16)
        model = SimpleNamespace(device=torch.device("cuda"), network=network)
        free = int(gigabytes * 1e9 - billions * 1e9 * each)
        if free < 2 << 30:
            continue
        gpu_memory(monkeypatch, free - (2 << 30), **held)
        slots, slot = cuda_graph.fitting(model, Room(256, longest)).slots, 2 * 2 * layers * heads * 128 * longest
        assert slots in (1, 2, 4, 8, 16, 32, 64, 128, 256) and slots * slot <= free / 2
        assert slots == 256 or 2 * slots * slot > free / 2
        tried += 1
    assert tried >= 20
    network.config = Qwen3Config(head_dim=128, num_hidden_layers=28, num_key_value_heads=8, hidden_size=1024)
    gpu_memory(monkeypatch, 30 << 30, **held)
    # 256 slots of 1,280 tokens of the smallest model are 35 GiB: the sizes that a fifth of 80 GB refused as a whole
    assert [cuda_graph.fitting(model, Room(256, longest)).slots for longest in (1280, 1 << 20)] == [64, 0]


@pytest.mark.parametrize(("tokens", "slots", "prompts"), [(129_000, 128, 65), (65_000, 64, 33), (64_999, 32, 17), (1499, 0, 1)])
def test_prompts_are_halved_with_the_slots_until_both_fit(tokens, slots, prompts, monkeypatch):
    """128 slots of 500 tokens and 65 prompts of 1,000 are 129,000 tokens; 64 and 33 are 65,000, and 1 and 1 are 1,500."""
    config = Qwen3Config(head_dim=128, num_hidden_layers=28, num_key_value_heads=8, hidden_size=1024)
    model = SimpleNamespace(device=torch.device("cuda"), network=SimpleNamespace(config=config, dtype=torch.bfloat16))
    monkeypatch.setattr(cuda_graph, "free_memory", lambda device: 2 * tokens * 2 * 2 * 28 * 8 * 128)
    assert cuda_graph.fitting(model, Room(128, 500, 65, 1000)) == (slots, 500, prompts, 1000)


@pytest.mark.parametrize(("gigabytes", "tokens"), [(80, 32768), (6, 18310), (0, 0)])
def test_a_prefill_takes_at_most_half_of_the_free_memory(gigabytes, tokens, monkeypatch):
    """Qwen3-8B: 8 · 4,096 + 4 · 12,288 numbers of 2 bytes are 163,840 bytes a token, and 18,310 tokens of them 3 GB."""
    config = Qwen3Config(hidden_size=4096, intermediate_size=12288)
    model = SimpleNamespace(device=torch.device("cuda"), network=SimpleNamespace(config=config, dtype=torch.bfloat16))
    gpu_memory(monkeypatch, gigabytes * 10**9)
    assert cuda_graph.prefill_limit(model) == tokens


def test_uniform_numbers_on_the_device_are_those_of_the_host():
    rng = np.random.default_rng(0)
    words = rng.integers(0, 1 << 64, 2000, dtype=np.uint64, endpoint=False)
    counts = rng.integers(0, 5000, 2000)
    on_device = seeds.uniform_on_device(torch.from_numpy(words.view(np.int64)), torch.from_numpy(counts))
    assert on_device.numpy().tolist() == seeds.uniform(words, counts).tolist()
