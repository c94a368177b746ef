"""Matrices packed for decoding, against the matrices themselves."""

from __future__ import annotations

import pytest
import torch
from fused_models import CONFIGS, adapted, both, made, some_groups
from kernel_choices import multiply_bfloat16, own_products

from psigrad.kernels.kernels import kernels
from psigrad.kernels.products import Products
from psigrad.language.models.fused import caches
from psigrad.language.models.fused.caches import PackedWeights
from psigrad.language.rollout.samplers.embedded import EmbeddedSampler
from psigrad.language.rollout.types import Request, SamplingParams

pytestmark = pytest.mark.needs("compiler")

REQUESTS = [Request(tuple(p), tuple(range(5 * i, 5 * i + 5))) for i, p in enumerate(some_groups().prompts)]
LONG = SamplingParams(max_tokens=90)


@pytest.fixture(params=[*CONFIGS, "adapted"])
def model(request, tokenizer):
    return adapted(CONFIGS["qwen2"], tokenizer) if request.param == "adapted" else made(CONFIGS[request.param], tokenizer)


@pytest.fixture
def packings(monkeypatch):
    """The shapes of the matrices that are packed."""
    shapes, packed = [], Products.pack

    def noted(self, weight):
        shapes.append(tuple(weight.shape))
        return packed(self, weight)

    monkeypatch.setattr(Products, "pack", noted)
    return shapes


def drawn(model, max_batch=256):
    return [c for group in EmbeddedSampler(model, max_batch).sample(REQUESTS, LONG) for c in group]


@pytest.mark.parametrize("base", ["none", "bias", "residual"])
@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 13, 64, 150])
def test_a_product_through_panels_equals_one_in_float64(rows, base):
    """On rows that lie apart, for heights that fill a part of a panel, widths that are no multiple of a register or more than are
    read at once.
    """
    native = kernels()
    for width, height in ((3, 1), (16, 64), (67, 50), (256, 200), (300, 257), (1100, 130)):
        x, weight = torch.randn(rows, width + 5)[:, :width], torch.randn(height, width)
        added = {"none": None, "bias": torch.randn(height), "residual": torch.randn(rows, height + 2)[:, :height]}[base]
        out = torch.full((rows, height + 3), 7.0)
        native.products.multiply_packed(x, native.products.pack(weight), out[:, :height], added)
        expected = x.double() @ weight.double().t() + (0 if added is None else added.double())
        assert (out[:, :height] - expected).abs().max() < 1e-6 * width
        assert (out[:, height:] == 7).all()  # and touches nothing else


def test_a_row_through_panels_depends_neither_on_the_others_nor_on_the_threads():
    native = kernels()
    x, weight = torch.randn(40, 300), torch.randn(331, 300)
    packed = native.products.pack(weight)
    whole = native.products.multiply_packed(x, packed, torch.empty(40, 331))
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            for rows in range(1, 40):
                assert torch.equal(native.products.multiply_packed(x[:rows], packed, torch.empty(rows, 331)), whole[:rows])
    finally:
        torch.set_num_threads(threads)
    # the control: sums in another order differ in their last bits
    assert not torch.equal(native.products.linear(x[:4], weight, torch.empty(4, 331)), whole[:4])


def test_what_is_not_finite_stays_so_and_where_it_is():
    native = kernels()
    weight = torch.ones(70, 20)
    weight[2, 19], weight[69, 0] = torch.nan, torch.inf
    out = native.products.multiply_packed(torch.ones(9, 20), native.products.pack(weight), torch.empty(9, 70))
    assert out[:, 2].isnan().all() and out[:, 69].isposinf().all()
    assert (out[:, [i for i in range(70) if i not in (2, 69)]] == 20).all()


def test_what_does_not_fit_is_refused():
    native = kernels()
    packed, x, out = native.products.pack(torch.randn(9, 20)), torch.randn(4, 20), torch.empty(4, 9)
    for wrong in [
        (x[:, :19], out),
        (x, out[:, :8]),
        (x, out[:3]),
        (x, out, torch.zeros(1, 9)),
        (x.double(), out),
        (x[:, ::2], out),
    ]:
        with pytest.raises(ValueError, match=r"\(9, 20\)"):
            native.products.multiply_packed(wrong[0], packed, *wrong[1:])


def test_the_sampler_draws_the_same_tokens_through_packed_weights(model, packings):
    ours, theirs = both(model, lambda: drawn(model))
    parts = 3 if model.adapter is not None else 1
    head = int(kernels().products.float32 and type(model.output_head()) is torch.nn.Linear)
    assert len(packings) == 4 * 2 * parts + head, "the matrices of each layer that are applied together, and A and B, once"
    for a, b in zip(ours, theirs, strict=True):
        assert a.ids == b.ids
        assert torch.allclose(torch.tensor(a.logprobs), torch.tensor(b.logprobs), atol=1e-4, rtol=0)


def test_large_models_are_decoded_without_and_few_sequences_with(model, packings, monkeypatch):
    whole = drawn(model)
    few = drawn(model, max_batch=2)
    packings.clear()
    monkeypatch.setattr(PackedWeights.__init__, "__defaults__", (100, True))
    monkeypatch.setattr(caches, "HEAD_LIMIT", 100)
    large = drawn(model)
    assert not packings
    assert [c.ids for c in whole] == [c.ids for c in few] == [c.ids for c in large]


def test_panels_take_no_more_than_their_limit(tokenizer):
    model = made(CONFIGS["llama"], tokenizer)
    layers = model.decoder.layers
    size = 4 * sum(w.numel() for w in layers[0].weights.given[:7])
    packed_weights = PackedWeights(limit=size)
    first, second = (layer.current_weights(True, packed_weights).packed for layer in layers)
    assert first is not None and second is None and packed_weights.bytes == size
    assert layers[0].current_weights(True, packed_weights).packed is first


def test_a_changed_weight_is_packed_again(tokenizer, packings):
    model = made(CONFIGS["llama"], tokenizer)
    layer, packed_weights = model.decoder.layers[0], PackedWeights()
    before = layer.current_weights(True, packed_weights).packed
    assert layer.current_weights(True, packed_weights).packed is before and len(packings) == 4
    with torch.no_grad():
        layer.weights.given[6].mul_(2)
    after = layer.current_weights(True, packed_weights).packed
    x = torch.randn(9, layer.weights.given[6].shape[1])
    apart = [packed[3].multiply(x, torch.empty(9, 64), None, kernels().products) for packed in (before, after)]
    assert torch.equal(2 * apart[0], apart[1]), "the old ones would have given half of it"


@torch.no_grad()
def test_the_head_is_packed_where_it_pays_and_anew_once_it_changes(tokenizer, monkeypatch):
    products, packed_weights = own_products(monkeypatch), PackedWeights()
    model = made(CONFIGS["llama"], tokenizer)
    weight, hidden = model.network.get_output_embeddings().weight, torch.randn(3, model.network.config.hidden_size)
    for _ in range(2):
        wanted = products.of(hidden, weight.t())  # as training multiplies
        assert [packed_weights.head(weight, products) for _ in range(3)] == [None] * 3
        matrix = packed_weights.head(weight, products)
        assert matrix is packed_weights.head(weight, products)
        assert torch.equal(products.multiply_packed(hidden, matrix, torch.empty_like(wanted)), wanted)
        assert torch.equal(model.head(hidden, True, packed_weights), wanted)
        weight.mul_(2)
    turned, others = weight.t().contiguous().t(), PackedWeights()  # its rows do not lie one behind the other
    matrix = [others.head(turned, products) for _ in range(4)][-1]
    assert torch.equal(products.multiply_packed(hidden, matrix, torch.empty_like(wanted)), products.of(hidden, weight.t()))
    monkeypatch.setattr(caches, "HEAD_LIMIT", weight.nbytes - 1)
    large = PackedWeights()
    assert [large.head(weight, products) for _ in range(9)] == [None] * 9


@pytest.mark.parametrize("base", ["none", "bias", "residual"])
@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 13, 64, 150])
def test_a_bfloat16_product_through_panels_is_rounded_once(rows, base):
    """Half a unit in the last place, of eight bits, away from float64 at most, and what float32 loses in the sum."""
    native = kernels()
    for width, height in ((2, 1), (16, 64), (66, 50), (256, 200), (300, 257), (1100, 130)):
        x, weight = torch.randn(rows, width + 5).bfloat16()[:, :width], torch.randn(height, width).bfloat16()
        residual = torch.randn(rows, height + 2).bfloat16()[:, :height]
        added = {"none": None, "bias": torch.randn(height).bfloat16(), "residual": residual}[base]
        out = torch.full((rows, height + 3), 7.0, dtype=torch.bfloat16)
        native.products.multiply_packed(x, native.products.pack(weight), out[:, :height], added)
        expected = x.double() @ weight.double().t() + (0 if added is None else added.double())
        bound = expected.abs() * 2**-8 + 1e-6 * width
        assert ((out[:, :height] - expected).abs() < bound).all()
        assert (out[:, height:] == 7).all()  # and touches nothing else
        rough = (x @ weight.t()).bfloat16().double() * (1 + 2**-6)  # the control: what is rounded worse is noticed
        assert base != "none" or ((rough - expected).abs() > bound).any()


def test_bfloat16_matrices_are_packed_where_the_kernels_multiply_them(tokenizer, packings, monkeypatch):
    products = kernels().products
    for native, bfloat16 in ((True, True), (True, False), (False, True)):
        multiply_bfloat16(monkeypatch, native)
        monkeypatch.setattr(products, "packs_bfloat16", bfloat16)
        packings.clear()
        drawn(made(CONFIGS["qwen3"], tokenizer, torch.bfloat16))
        assert bool(packings) is (bfloat16 or not native)
    assert products.can_pack(torch.ones(3, 5))
    assert not products.can_pack(torch.ones(3, 5, dtype=torch.bfloat16)), "no pairs"
    assert products.can_pack(torch.ones(4, 3).t())
