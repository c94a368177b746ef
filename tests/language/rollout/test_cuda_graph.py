"""Recorded decoding steps, by a recorder that runs again what a GPU would replay, on the same tensors."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cases import slow
from hybrid_models import HYBRID, network, packed
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma2Config, Gemma2ForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig, Qwen3Config, Qwen3ForCausalLM

from psigrad import seeds
from psigrad.language.models import tiny
from psigrad.language.models.language_model import Lora, prepare
from psigrad.language.rollout.samplers import cache, cuda_graph, embedded
from psigrad.language.rollout.samplers.cuda_graph import CudaGraphDecoding, Room
from psigrad.language.rollout.samplers.embedded import EmbeddedSampler
from psigrad.language.rollout.samplers.grouped import GroupedCache, GroupedDecode
from psigrad.language.rollout.types import Request, SamplingParams

PARAMS = SamplingParams(max_tokens=24, stop_token_ids=tuple(range(40)))  # some end early


def again(run):
    """Replays by running, after a first run of which nothing may be left."""
    run()
    return run


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


@pytest.fixture(scope="module")
def requests_():
    rng = random.Random(0)
    lengths = [(rng.randint(1, 20), rng.randint(1, 6)) for _ in range(9)]
    return [
        Request(tuple(rng.randrange(5, 260) for _ in range(n)), tuple(rng.getrandbits(63) for _ in range(m))) for n, m in lengths
    ]


def watch(monkeypatch, recorder, most=256):
    """Record on the CPU too, in at most so many slots; returns the shapes that are recorded, one list for each set of
    recordings.
    """
    shapes = []

    class Watched(CudaGraphDecoding):
        def __init__(self, *given):
            shapes.append([])
            super().__init__(*given, record=recorder)

        def _step(self, params, *shape):
            if shape not in shapes[-1]:
                shapes[-1].append(shape)
            super()._step(params, *shape)

    monkeypatch.setattr(embedded, "CudaGraphDecoding", Watched)
    monkeypatch.setattr(embedded, "fitting", lambda model, room: room._replace(slots=min(room.slots, most)))
    return shapes


def texts(groups):
    return [[(c.ids, c.finish_reason) for c in group] for group in groups]


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
    assert len(made) > 1 and all(size == max_batch or size & (size - 1) == 0 for size, _ in made)


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


SMALL = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
}


def grouped(name):
    """A model in transformers' modules with weights twice as large, so that its distributions are no longer flat."""
    tokenizer = tiny.tokenizer(["hello world 123"] * 5, 280)
    torch.manual_seed(0)
    if name in HYBRID:
        hf = network(name)
    elif name == "gemma2":  # windows, and scores that are capped
        hf = Gemma2ForCausalLM(Gemma2Config(**SMALL, vocab_size=len(tokenizer), sliding_window=8, attn_logit_softcapping=2.0))
    elif name == "gemma3":
        hf = Gemma3ForCausalLM(Gemma3TextConfig(**SMALL, vocab_size=len(tokenizer), sliding_window=8))
    else:
        hf = tiny.model(name, len(tokenizer))
    made = prepare(hf, tokenizer)
    made.decoder = None
    with torch.no_grad():
        for p in made.network.parameters():
            p.mul_(2)
    return made


@pytest.mark.parametrize("name", ["gpt_neox", "qwen3", "gemma2", "gemma3", "qwen3_5_text"])
@pytest.mark.parametrize(("max_batch", "prompts"), [(256, 2), *(pytest.param(n, 256, marks=pytest.mark.slow) for n in (5, 256))])
def test_a_prompt_that_is_stored_once_for_its_group_gives_the_same_tokens(name, max_batch, prompts, requests_, monkeypatch):
    """With keys and values, windows, capped scores and states; prompts wait for room, and move when others have ended."""
    model = grouped(name)
    plain = EmbeddedSampler(model, max_batch).sample(requests_, PARAMS)
    shapes, seen = watch(monkeypatch, again), []
    monkeypatch.setattr(embedded, "SHORTEST", 1)
    monkeypatch.setattr(embedded, "fitting", lambda model, room: room._replace(prompts=min(room.prompts, prompts)))
    remove = GroupedCache.remove
    monkeypatch.setattr(GroupedCache, "remove", lambda self, ended: (remove(self, ended), seen.append(self.count))[0])
    sampler = EmbeddedSampler(model, max_batch)
    for _ in range(2):
        found = sampler.sample(requests_, PARAMS)
        assert texts(found) == texts(plain)
        pairs = [(a, b) for ours, theirs in zip(found, plain, strict=True) for a, b in zip(ours, theirs, strict=True)]
        assert all(a.logprobs == pytest.approx(b.logprobs, abs=1e-4) for a, b in pairs)
    assert len(shapes) == 1 and all(len(shape) == 5 for shape in shapes[0])
    assert seen[-1] == 0 and max(seen) <= prompts and max(seen) > (prompts > 2)


def test_single_completions_and_short_prompts_make_room_once(requests_, monkeypatch):
    model = grouped("qwen3")
    shapes = watch(monkeypatch, again)
    monkeypatch.setattr(embedded, "SHORTEST", 8)
    alone = [replace(request, seeds=request.seeds[:1]) for request in requests_]
    others = [alone, [request for request in requests_ if len(request.prompt_ids) < 8]]
    plain = [texts(EmbeddedSampler(model, cuda_graphs=False).sample(one, PARAMS)) for one in others]
    sampler = EmbeddedSampler(model)
    for _ in range(3):
        sampler.sample(requests_, PARAMS)
        assert others[1] and [texts(sampler.sample(one, PARAMS)) for one in others] == plain
    assert len(shapes) <= 2


def test_negative_control_a_prompt_in_anothers_place_gives_other_tokens(requests_, monkeypatch):
    model = grouped("qwen3")
    plain = EmbeddedSampler(model).sample(requests_, PARAMS)
    watch(monkeypatch, again)
    monkeypatch.setattr(embedded, "SHORTEST", 1)
    seats = GroupedCache.seats
    monkeypatch.setattr(
        GroupedCache, "seats", lambda self, size: (made := seats(self, size))._replace(seat=made.seat[::-1].copy())
    )
    assert texts(EmbeddedSampler(model).sample(requests_, PARAMS)) != texts(plain)


class Moved(TorchDispatchMode):
    """The bytes that operations read and write, views apart."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in pytree.tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)]
        if len({x.untyped_storage().data_ptr() for x in tensors}) > 1:
            self.total += sum(x.numel() * x.element_size() for x in tensors)
        return out


def test_a_group_of_eight_reads_a_third_of_the_bytes_for_a_token(monkeypatch):
    """Counted in attention, for a prompt of 768 tokens and 4 key heads of 64."""
    sizes = {
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "hidden_size": 64,
        "intermediate_size": 8,
    }
    tokenizer = tiny.tokenizer(["hello world 123"] * 5, 280)
    model = prepare(Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=64, vocab_size=len(tokenizer))), tokenizer)
    model.decoder, found = None, []
    watch(monkeypatch, again)
    requests = [Request(tuple(3 + (i + n) % 200 for i in range(760)), tuple(range(8))) for n in range(2)]
    for shortest, kind in ((1, GroupedDecode), (1 << 20, cache.Decode)):
        monkeypatch.setattr(embedded, "SHORTEST", shortest)
        attend, total = kind.attend, Moved()

        def counted(self, *given, attend=attend, total=total):
            with total:
                return attend(self, *given)

        with monkeypatch.context() as patch:
            patch.setattr(kind, "attend", counted)
            done = EmbeddedSampler(model).sample(requests, SamplingParams(max_tokens=9))
        found.append((total.total, [c.ids for group in done for c in group]))
    (once, ids), (each, others) = found
    print(once, each)
    assert ids == others and 0 < 3 * once < each


def test_on_a_cpu_nothing_is_recorded(model):
    assert not cuda_graph.fitting(model, Room(1, 1)).slots


# Qwen3's sizes: layers, key heads of 128, and billions of weights.
QWEN3 = {"0.6B": (28, 8, 0.6), "1.7B": (28, 8, 1.7), "4B": (36, 8, 4.0), "8B": (36, 8, 8.2)}


@pytest.mark.parametrize("gigabytes", [24, 40, 80])
def test_decoding_is_recorded_in_as_many_slots_as_half_of_the_free_memory_holds(gigabytes, monkeypatch):
    """Weights take 2 bytes, or 16 with their training. 8 billion of them leave 7.6 of 24 GB; full training of 4 needs more."""
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 << 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1 << 30)
    tried = 0
    for (layers, heads, billions), each, longest in itertools.product(QWEN3.values(), (2, 16), (256, 768, 1280, 2304, 4352)):
        sizes = {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads, "hidden_size": 1024}
        network = SimpleNamespace(config=Qwen3Config(head_dim=128, **sizes), dtype=torch.bfloat16)
        model = SimpleNamespace(device=torch.device("cuda"), network=network)
        free = int(gigabytes * 1e9 - billions * 1e9 * each)
        if free < 2 << 30:
            continue
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free - (2 << 30), None))
        slots, slot = cuda_graph.fitting(model, Room(256, longest)).slots, 2 * 2 * layers * heads * 128 * longest
        assert slots in (1, 2, 4, 8, 16, 32, 64, 128, 256) and slots * slot <= free / 2
        assert slots == 256 or 2 * slots * slot > free / 2
        tried += 1
    assert tried >= 20
    network.config = Qwen3Config(head_dim=128, num_hidden_layers=28, num_key_value_heads=8, hidden_size=1024)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30 << 30, None))
    # 256 slots of 1,280 tokens of the smallest model are 35 GiB: the sizes that a fifth of 80 GB refused as a whole
    assert [cuda_graph.fitting(model, Room(256, longest)).slots for longest in (1280, 1 << 20)] == [64, 0]


@pytest.mark.parametrize(("gigabytes", "tokens"), [(80, 32768), (6, 18310), (0, 0)])
def test_a_prefill_takes_at_most_half_of_the_free_memory(gigabytes, tokens, monkeypatch):
    """Qwen3-8B: 8 · 4,096 + 4 · 12,288 numbers of 2 bytes are 163,840 bytes a token, and 18,310 tokens of them 3 GB."""
    config = Qwen3Config(hidden_size=4096, intermediate_size=12288)
    model = SimpleNamespace(device=torch.device("cuda"), network=SimpleNamespace(config=config, dtype=torch.bfloat16))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (gigabytes * 10**9, None))
    assert cuda_graph.prefill_limit(model) == tokens


def test_uniform_numbers_on_the_device_are_those_of_the_host():
    rng = np.random.default_rng(0)
    words = rng.integers(0, 1 << 64, 2000, dtype=np.uint64, endpoint=False)
    counts = rng.integers(0, 5000, 2000)
    on_device = seeds.uniform_on_device(torch.from_numpy(words.view(np.int64)), torch.from_numpy(counts))
    assert on_device.numpy().tolist() == seeds.uniform(words, counts).tolist()
