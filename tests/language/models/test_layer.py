"""A fused layer: the type of its products, the casts of its weights, and its gradient."""

from __future__ import annotations

import pytest
import torch
from fused_models import CONFIGS, both, made, some_groups
from kernel_choices import multiply_bfloat16

from psigrad.kernels.kernels import kernels
from psigrad.language.models.fused.layer import compute_dtype

pytestmark = pytest.mark.needs("compiler")


def test_half_precision_weights_are_cast_again_after_they_change(tokenizer, monkeypatch):
    multiply_bfloat16(monkeypatch, fast=False)
    model = made(CONFIGS["qwen3"], tokenizer, torch.bfloat16)
    before = model.evaluate(some_groups()).logp.detach()
    with torch.no_grad():
        for p in model.network.model.layers.parameters():
            p.mul_(1.5)
    ours, theirs = both(model, lambda: model.evaluate(some_groups()).logp.detach())
    assert float((ours - before).abs().max()) > 0.1
    assert float((ours - theirs).abs().max()) < 0.25


def test_the_type_of_the_products_follows_the_processor(monkeypatch):
    for fast, expected in ((True, torch.bfloat16), (False, torch.float32)):
        multiply_bfloat16(monkeypatch, fast)
        assert compute_dtype(torch.bfloat16) == expected
        assert compute_dtype(torch.float32) == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("width", [3, 16, 37])
def test_the_gradient_of_a_gate_in_place_is_the_gradient(width, gelu, dtype):
    native = kernels()
    both, dy = torch.randn(50, 2 * width).to(dtype), torch.randn(50, width).to(dtype)
    given = both.clone(), dy.clone()
    gradient, again = native.gradients.gated(both, dy, gelu)
    assert torch.equal(both, given[0]) and torch.equal(dy, given[1]), "left alone unless it is in place"
    found = native.gradients.gated(both, dy, gelu, in_place=True)
    assert found[0] is both and found[1] is dy
    assert torch.equal(both, gradient) and torch.equal(dy, again)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_graph_that_is_kept_gives_its_gradient_twice(recompute, tokenizer):
    model = made(CONFIGS["qwen3"], tokenizer)
    model.decoder.recompute = recompute
    loss = model.evaluate(some_groups()).logp.sum()
    loss.backward(retain_graph=True)
    once = {name: p.grad.clone() for name, p in model.trainable().items()}
    loss.backward()
    for name, p in model.trainable().items():
        assert torch.allclose(p.grad, 2 * once[name], rtol=1e-5, atol=1e-7), name
