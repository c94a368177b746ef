"""A step of decoding through all layers at once, against the same layers one by one, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cached import sample
from cases import slow
from fused_models import COMMON, CONFIGS, FORMS, adapted, made, some_groups
from kernel_choices import multiply_bfloat16, own_products, pretend_processor
from transformers import LlamaConfig, Qwen3Config

from psigrad.kernels.kernels import Kernels, kernels
from psigrad.kernels.products import Products
from psigrad.language.models.coded_linear import code_linears
from psigrad.language.models.fused.caches import ActivationCache, PackedWeights
from psigrad.language.models.fused.families import LayerWeights
from psigrad.language.models.fused.layer import RANKS, Layer
from psigrad.language.models.language_model import prepare
from psigrad.language.models.lora import Lora
from psigrad.language.models.packing import Groups
from psigrad.language.rollout.samplers.embedded import EmbeddedSampler
from psigrad.language.rollout.types import Request, SamplingParams

pytestmark = pytest.mark.needs("compiler")

# CONFIGS' Llama has a bias of attention's output, which is left to the layers. "lora" has one rank too few for pairs.
MODELS = {name: config for name, config in {**CONFIGS, **FORMS}.items() if name != "llama"}
MODELS["llama"] = LlamaConfig(**COMMON, hidden_size=64)
ADAPTED = {"lora": {}, "lora in places": {"target_modules": ("k_proj", "up_proj", "down_proj")}}
REQUESTS = [Request(tuple(p), tuple(range(5 * i, 5 * i + 5))) for i, p in enumerate(some_groups().prompts)]
LONG = SamplingParams(max_tokens=90)


@pytest.fixture
def steps(monkeypatch):
    """How many rows went through how many layers at once."""
    taken, together = [], Kernels.decode_layers

    def noted(self, x, weights, *given, **sizes):
        taken.append((len(x), len(weights)))
        return together(self, x, weights, *given, **sizes)

    monkeypatch.setattr(Kernels, "decode_layers", noted)
    return taken


def some_model(name, tokenizer, kind=torch.float32):
    """A model of `MODELS`, Qwen2 with its biases and the adapters of `ADAPTED`, or one with an adapter over codes."""
    if name == "nf4":
        config = Qwen3Config(**COMMON | {"intermediate_size": 128}, hidden_size=64, head_dim=16)  # of whole blocks
        hf = made(config, tokenizer, kind).network
        code_linears(hf, name)
        return prepare(hf, tokenizer, lora=Lora(4))
    if name in ADAPTED:
        return adapted(MODELS["qwen2"], tokenizer, kind, **ADAPTED[name])
    return made(MODELS[name], tokenizer, kind)


def drawn(model, *, keep=False, max_batch=256):
    """Completions, and the rows that were kept: of each slab and layer all parts."""
    cache = ActivationCache(float("inf")) if keep else None
    found = [c for group in sample(EmbeddedSampler(model, max_batch), REQUESTS, LONG, cache) for c in group]
    slabs = enumerate(cache.slabs if keep else [])
    return found, [x[: cache._taken[i]] for i, slab in slabs for layer in slab.layers() for x in layer]


@pytest.mark.parametrize(
    ("kind", "max_batch", "keep"),
    [*((torch.float32, 9, True), (torch.bfloat16, 256, False)), *slow((torch.float32, 256, False), (torch.bfloat16, 9, True))],
)
@pytest.mark.parametrize("name", [*MODELS, *ADAPTED])
def test_all_layers_at_once_are_the_layers_one_by_one(name, max_batch, keep, kind, tokenizer, steps, monkeypatch):
    multiply_bfloat16(monkeypatch, fast=True), own_products(monkeypatch)
    model = some_model(name, tokenizer, kind)
    assert model.decoder.dtype == kind
    together = drawn(model, keep=keep, max_batch=max_batch)
    assert len(steps) > 60 and {layers for _, layers in steps} == {len(model.decoder.layers)}
    assert len({rows for rows, _ in steps}) > 1, "sequences end on the way"
    steps.clear()
    model.decoder.at_once = False
    alone = drawn(model, keep=keep, max_batch=max_batch)
    assert not steps
    assert together[0] == alone[0]
    assert len(together[1]) == len(alone[1]) and bool(alone[1]) == keep
    assert all(torch.equal(a, b) for a, b in zip(together[1], alone[1], strict=True))


@pytest.mark.parametrize("name", ["qwen3", "qwen2", *ADAPTED, "nf4"])
def test_where_amx_multiplies_sampling_is_one_call_and_training_by_pytorch(name, tokenizer, steps, monkeypatch):
    """On a processor that says it has AMX; whichever bfloat16 kernels this one has stand in for tiles. What sampling keeps is
    what training goes on from: the same gradient but for rounding.
    """
    pretend_processor(monkeypatch, "vendor_id: GenuineIntel", "flags : avx512f avx512_bf16 amx_bf16")
    products = own_products(monkeypatch, like=Products(kernels().products._call))
    by_kernels = []
    for each in ("product", "product_bf16"):
        monkeypatch.setattr(products._call, each, lambda *given: by_kernels.append(given))
    model = some_model(name, tokenizer, torch.bfloat16)
    assert model.decoder.dtype == torch.bfloat16
    cache = ActivationCache(float("inf"))
    drawn = [[c.ids for c in group] for group in sample(EmbeddedSampler(model), REQUESTS, LONG, cache)]
    assert len(steps) > 60 and {layers for _, layers in steps} == {len(model.decoder.layers)}
    found = {}
    for kept in (cache, None):
        outputs = model.evaluate(Groups(some_groups().prompts, drawn), cache=kept)
        gradients = torch.autograd.grad(outputs.logp.sum(), list(model.trainable().values()), allow_unused=True)
        found[kept is None] = outputs.logp.detach(), torch.cat([g.flatten().float() for g in gradients if g is not None])
    assert not by_kernels, "training's products are PyTorch's"
    assert (found[True][0] - found[False][0]).abs().max() < 0.1 and found[True][0].any()
    assert torch.cosine_similarity(found[True][1], found[False][1], dim=0) > 0.99


def test_negative_control_norms_in_each_others_place_are_noticed(tokenizer, steps, monkeypatch):
    model = made(MODELS["qwen3"], tokenizer)
    with torch.no_grad():
        model.decoder.layers[0].weights.given[7].mul_(1.5)
    right, addresses = drawn(model), Layer.addresses

    def wrong(*given):
        first, second, *others = addresses(*given)
        return [second, first, *others]

    monkeypatch.setattr(Layer, "addresses", wrong)
    assert drawn(model) != right and steps


def test_negative_control_a_scale_that_is_left_out_is_noticed(tokenizer, steps, monkeypatch):
    model = some_model("lora", tokenizer)
    right, factors = drawn(model), LayerWeights.factors

    def wrong(self, group):
        a, b = (made := factors(self, group)).low
        return replace(made, low=(a, b / self.lora[6].scale))

    monkeypatch.setattr(LayerWeights, "factors", wrong)
    assert drawn(model) != right and steps


def test_adapters_that_are_off_or_have_changed_are_not_those_that_were_packed(tokenizer, steps):
    """Packed once with the adapters, once without, and again after a step: as the layers one by one each time."""
    model = some_model("lora", tokenizer)
    packed, on = PackedWeights(), model.decoder.layers[0]
    first = on.addresses(packed, True)
    off = on.addresses(packed, False)
    assert any(first[RANKS]) and not any(off[RANKS]) and on.addresses(packed, True) == first
    with torch.no_grad():
        on.adapters[0].weights[1].mul_(2)
    assert on.addresses(packed, True) != first


def test_a_bias_of_attention_s_output_goes_layer_by_layer(tokenizer, steps):
    drawn(made(CONFIGS["llama"], tokenizer))
    assert not steps
