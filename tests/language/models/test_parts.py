"""Kernels inside transformers' modules give the numbers and gradients of these modules."""

from __future__ import annotations

import pytest
import torch
from hybrid_models import network
from torch.nn import functional as F

from psigrad.kernels.kernels import Kernels, kernels
from psigrad.language.models.fused.parts import Parts
from psigrad.language.models.hf_state import DeltaRule, Mamba2
from psigrad.language.models.language_model import Lora, prepare

FAMILIES = ["gemma3_text", "gemma4_text", "olmo2", "smollm3", "phi3", "granite", "lfm3", "qwen3_5_text", "nemotron_h", "gpt2"]
# psigrad computes in them a linear layer, an RMS norm by its weight or by 1 + weight, and a feed-forward part with SiLU.
RUNS = {"smollm3": {"_linear", "_norm.0", "_feed_forward"}, "gemma3_text": {"_linear", "_norm.1"}, "gpt2": set()}


def kinds(model):
    """The kinds of modules that run in kernels."""
    found = set()
    for module in model.network.modules():
        run = vars(module).get("forward")
        if run is not None and run.__func__.__module__ == Parts.__module__:
            made, own = run.__func__.__qualname__.split(".")[1], run.__func__.__closure__
            offset = next((f".{cell.cell_contents:.0f}" for cell in own or () if isinstance(cell.cell_contents, float)), "")
            found.add(made + offset)
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_log_probs_and_gradients_are_those_of_the_modules(name, tokenizer, groups):
    model = prepare(network(name), tokenizer)
    parameters = list(model.network.parameters())
    found = []
    for on in (True, False):
        model.parts.on = on
        logp = model.evaluate(groups).logp
        grads = torch.autograd.grad((logp * logp.detach()).sum(), parameters, allow_unused=True)
        found.append((logp.detach(), [torch.zeros(1) if g is None else g for g in grads]))
    (ours, own), (theirs, right) = found
    assert float((ours - theirs).abs().max()) < 1e-5
    whole = torch.cat([g.flatten() for g in right]).norm()
    assert all(float((a - b).norm()) < 1e-5 * float(whole) for a, b in zip(own, right, strict=True))
    if name in RUNS:
        assert kinds(model) >= RUNS[name]


def test_a_copy_and_an_adapter_have_weights_of_their_own(tokenizer, groups):
    model = prepare(network("smollm3"), tokenizer, lora=Lora(2))
    copy = prepare(network("smollm3"), tokenizer).frozen_copy()
    before = copy.evaluate(groups).logp
    assert torch.allclose(model.evaluate(groups).logp, before, atol=1e-5)
    with torch.no_grad():
        for p in model.trainable().values():
            p.normal_(std=0.1)
    assert float((model.evaluate(groups).logp - before).detach().abs().max()) > 1e-2
    with torch.no_grad():
        for p in copy.network.parameters():
            p.add_(0.05)
    assert float((copy.evaluate(groups).logp - before).detach().abs().max()) > 1e-2


def test_negative_control_a_wrong_kernel_is_left_out(tokenizer, monkeypatch):
    right = Kernels.rms_norm
    monkeypatch.setattr(Parts, "_norm_offset", lambda self, module: 0.0 if "RMSNorm" in type(module).__name__ else None)
    assert prepare(network("olmo2"), tokenizer).parts is not None
    monkeypatch.setattr(Kernels, "rms_norm", lambda self, x, weight, eps, offset=0.0: right(self, x, weight, eps + 0.1, offset))
    model = prepare(network("olmo2"), tokenizer)
    assert model.parts is None and not model.why_padded


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("channels", [False, True], ids=["a gate per head", "a gate per channel"])
@pytest.mark.parametrize(("width", "values"), [(16, 16), (24, 40), (5, 3)])
def test_a_step_of_the_delta_rule_is_that_of_torch(width, values, channels):
    rule, rows, heads = DeltaRule(None), 3, 4
    q, k, v = draw(rows, 2, width), draw(rows, 2, width), draw(rows, heads, values)
    g = -F.softplus(draw(rows, heads, *((width,) if channels else ())))
    given, state = (q, k.flip(0), v, g, draw(rows, heads).sigmoid()), draw(5, heads, width, values)
    right, after = rule.step_by_torch(given, state[:rows].clone())
    untouched = state[rows:].clone()
    with torch.no_grad():
        out, left = rule.step(given, state[:rows])
    assert left.data_ptr() == state.data_ptr() and torch.equal(state[rows:], untouched)
    assert torch.allclose(out, right, atol=1e-5) and torch.allclose(state[:rows], after, atol=1e-5)


@pytest.mark.parametrize(("width", "states"), [(16, 16), (5, 3), (8, 20)])
def test_a_step_of_mamba2_is_that_of_torch(width, states):
    rule, rows, heads = Mamba2(None, -draw(4).exp(), 16), 3, 4
    given = (draw(rows, heads, width), F.softplus(draw(rows, heads)), draw(rows, 2, states), draw(rows, 2, states).flip(0))
    state = draw(5, heads, width, states)
    right, after = rule.step_by_torch(given, state[:rows].clone())
    with torch.no_grad():
        out, _ = rule.step(given, state[:rows])
    assert torch.allclose(out, right, atol=1e-5) and torch.allclose(state[:rows], after, atol=1e-5)


def test_a_norm_with_an_offset_and_its_gradient_are_those_of_torch():
    x, w, dy, native = draw(7, 20), draw(20), draw(7, 20).flip(0), kernels()
    a, b = x.double().requires_grad_(), w.double().requires_grad_()
    right = a * torch.rsqrt(a.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + b)
    right.backward(dy.double())
    dx = torch.zeros_like(x)
    dw = native.gradients.rms_norm(dx, x, w, dy, 1e-6, 1.0)
    assert torch.allclose(native.rms_norm(x, w, 1e-6, 1.0), right.detach().float(), atol=1e-5)
    assert torch.allclose(dx, a.grad.float(), atol=1e-5) and torch.allclose(dw, b.grad.float(), atol=1e-5)
