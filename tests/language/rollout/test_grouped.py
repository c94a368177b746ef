"""Prompts that are stored once for their groups in recorded decoding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hybrid_models import HYBRID, network
from recordings import PARAMS, again, texts, watch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma2Config, Gemma2ForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig, Qwen3Config, Qwen3ForCausalLM

from psigrad.language.models import tiny
from psigrad.language.models.language_model import prepare
from psigrad.language.rollout.samplers import cache, embedded
from psigrad.language.rollout.samplers.embedded import EmbeddedSampler
from psigrad.language.rollout.samplers.grouped import GroupedCache, GroupedDecode
from psigrad.language.rollout.types import Request, SamplingParams

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
    monkeypatch.setattr(GroupedCache, "seats", lambda *given: (made := seats(*given))._replace(seat=made.seat[::-1].copy()))
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
