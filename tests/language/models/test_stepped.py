"""A step of decoding through all layers at once, against the same layers one by one, bit for bit."""

from __future__ import annotations

import pytest
import torch
from cached import sample
from fused_models import COMMON, CONFIGS, adapted, made, some_groups
from transformers import LlamaConfig

from psigrad.language.models.fused.activation_cache import ActivationCache
from psigrad.language.models.fused.decoder import Decoder
from psigrad.language.models.fused.layer import Layer
from psigrad.language.models.native.kernels import Kernels, kernels
from psigrad.language.rollout.samplers.embedded import EmbeddedSampler
from psigrad.language.rollout.types import Request, SamplingParams

pytestmark = pytest.mark.needs("compiler")

# Biases are left to the layers: Qwen2 has them, and CONFIGS' Llama.
PLAIN = {name: CONFIGS[name] for name in CONFIGS if name not in ("qwen2", "llama")}
PLAIN["llama"] = LlamaConfig(**COMMON, hidden_size=64)
REQUESTS = [Request(tuple(p), tuple(range(5 * i, 5 * i + 5))) for i, p in enumerate(some_groups().prompts)]
LONG = SamplingParams(max_tokens=90)


@pytest.fixture
def steps(monkeypatch):
    """How many rows went through how many layers at once."""
    taken, together = [], Kernels.decode_layers

    def noted(self, x, weights, *given):
        taken.append((len(x), len(weights)))
        return together(self, x, weights, *given)

    monkeypatch.setattr(Kernels, "decode_layers", noted)
    return taken


def drawn(model, *, keep=False, max_batch=256):
    """Completions, and the rows that were kept: of each slab and layer all parts."""
    cache = ActivationCache(float("inf")) if keep else None
    found = [c for group in sample(EmbeddedSampler(model, max_batch), REQUESTS, LONG, cache) for c in group]
    slabs = enumerate(cache.slabs if keep else [])
    return found, [x[: cache._taken[i]] for i, slab in slabs for layer in slab.layers() for x in layer]


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("max_batch", [256, 9])
@pytest.mark.parametrize("name", PLAIN)
def test_all_layers_at_once_are_the_layers_one_by_one(name, max_batch, keep, kind, tokenizer, steps, monkeypatch):
    monkeypatch.setattr("psigrad.language.models.fused.layer.fast_bfloat16", lambda: True)
    monkeypatch.setattr(kernels().products, "bfloat16", True)
    model = made(PLAIN[name], tokenizer, kind)
    assert model.decoder.dtype == kind
    together = drawn(model, keep=keep, max_batch=max_batch)
    assert len(steps) > 60 and {layers for _, layers in steps} == {len(model.decoder.layers)}
    assert len({rows for rows, _ in steps}) > 1, "sequences end on the way"
    steps.clear()
    monkeypatch.setattr(Decoder, "_step", lambda *given: None)
    alone = drawn(model, keep=keep, max_batch=max_batch)
    assert not steps
    assert together[0] == alone[0]
    assert len(together[1]) == len(alone[1]) and bool(alone[1]) == keep
    assert all(torch.equal(a, b) for a, b in zip(together[1], alone[1], strict=True))


def test_negative_control_norms_in_each_others_place_are_noticed(tokenizer, steps, monkeypatch):
    model = made(PLAIN["qwen3"], tokenizer)
    with torch.no_grad():
        model.decoder.layers[0].weights.given[7].mul_(1.5)
    right, addresses = drawn(model), Layer.addresses

    def wrong(*given):
        first, second, *others = addresses(*given)
        return [second, first, *others]

    monkeypatch.setattr(Layer, "addresses", wrong)
    assert drawn(model) != right and steps


def test_biases_and_adapters_go_layer_by_layer(tokenizer, steps):
    drawn(made(CONFIGS["qwen2"], tokenizer))
    drawn(made(CONFIGS["llama"], tokenizer))
    drawn(adapted(PLAIN["qwen3"], tokenizer))
    assert not steps
