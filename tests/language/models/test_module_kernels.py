"""Kernels inside transformers' modules give the numbers and gradients of these modules."""

from __future__ import annotations

import pytest
import torch
from hybrid_models import network, packed
from torch.nn import functional as F

from psigrad.kernels.kernels import Kernels, kernels
from psigrad.kernels.state_kernels import Trees
from psigrad.language.models.fused import module_kernels
from psigrad.language.models.fused.module_kernels import ModuleKernels
from psigrad.language.models.hf_state import DeltaRule, Mamba2
from psigrad.language.models.language_model import Lora, prepare

pytestmark = pytest.mark.needs("compiler")
FAMILIES = ["gemma2", "gemma4_text", "ernie4_5", "glm4", "granitemoe", "lfm3", "qwen3_5_text", "nemotron_h", "gpt2"]
# psigrad computes in them a linear layer, an RMS norm by its weight or by 1 + weight, and a feed-forward part with SiLU.
RUNS = {"ernie4_5": {"_linear", "_norm.0", "_feed_forward"}, "gemma2": {"_linear", "_norm.1"}, "gpt2": set()}


def kinds(model):
    """The kinds of modules that run in kernels."""
    found = set()
    for module in model.network.modules():
        run = vars(module).get("forward")
        if run is not None and run.__func__.__module__ == ModuleKernels.__module__:
            made, own = run.__func__.__qualname__.split(".")[1], run.__func__.__closure__
            offset = next((f".{cell.cell_contents:.0f}" for cell in own or () if isinstance(cell.cell_contents, float)), "")
            found.add(made + offset)
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_log_probs_and_gradients_are_those_of_the_modules(name, tokenizer, groups):
    model = packed(network(name), tokenizer)
    parameters = list(model.network.parameters())
    found = []
    switches = [module.has_state for module in model.network.modules() if hasattr(module, "has_state")]
    for on in (True, False):
        model.module_kernels.on = on
        for switch in switches:
            assert switch.native is not None or not on
            switch.native = switch.native if on else None
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
    model = prepare(network("ernie4_5"), tokenizer, lora=Lora(2))
    copy = prepare(network("ernie4_5"), tokenizer).frozen_copy()
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
    monkeypatch.setattr(module_kernels, "norm_offset", lambda module, norm: 0.0 if "RMSNorm" in type(module).__name__ else None)
    assert prepare(network("ernie4_5"), tokenizer).module_kernels is not None
    monkeypatch.setattr(Kernels, "rms_norm", lambda self, x, weight, eps, offset=0.0: right(self, x, weight, eps + 0.1, offset))
    model = prepare(network("ernie4_5"), tokenizer)
    assert model.module_kernels is None and not model.why_padded


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


def recurrence(trees, delta, states, q, k, v, g, beta):
    """The outputs and states of a packed row, token by token in float64."""
    out, states = [None] * len(v), list(states)
    if delta:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        q = q * q.shape[-1] ** -0.5
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q, k))
    for start, length, before, after in trees.segments.tolist():
        state = q.new_zeros(v.shape[1], q.shape[2], v.shape[2]) if before < 0 else states[before]
        for i in range(start, start + length):
            state = state * g[i].exp()[:, None, None]
            change = v[i] - (k[i][:, None] @ state)[:, 0] if delta else v[i]
            state = state + k[i][:, :, None] * (beta[i][:, None] * change)[:, None]
            out[i] = (q[i][:, None] @ state)[:, 0]
        if after >= 0:
            states[after] = state
    return torch.stack(out), torch.stack(states)


# A segment of 35 tokens from a given state, two that continue it, one of none, and a tree of its own of 70.
TREES = Trees(
    torch.tensor([[0, 35, 0, 1], [35, 3, 1, 2], [38, 33, 1, -1], [0, 0, 1, 3], [71, 70, -1, 4]]), torch.tensor([0, 4, 5]), 5
)
TINY = Trees(torch.tensor([[0, 2, 0, 1], [2, 1, 1, -1], [3, 2, 1, 2]]), torch.tensor([0, 3]), 3)


def chunked(trees, rows, heads, key_heads, width, values, delta, dtype=torch.float32):
    """Inputs of a scan, what the kernel computes from them, and the gradients of a random sum of its outputs and states."""
    inputs = [draw(rows, key_heads, width), draw(key_heads, rows, width).transpose(0, 1), draw(rows, heads, values)]
    inputs = [x.contiguous().to(dtype) for x in inputs] + [-F.softplus(draw(rows, heads)), draw(rows, heads).sigmoid()]
    states = torch.zeros(trees.states, heads, width, values)
    states[0] = draw(heads, width, values)
    mine = (states if delta else states.mT).clone(memory_format=torch.contiguous_format)
    out = kernels().states.chunks(tuple(inputs), mine, trees, delta)
    dout, slopes = draw(*out.shape), draw(*states.shape)
    slopes[0] = 0  # of the given state, which no segment writes
    added = (slopes if delta else slopes.mT).clone(memory_format=torch.contiguous_format)
    found = kernels().states.chunks_gradient(dout, added, tuple(inputs), mine, trees, delta)
    turn = (lambda x: x) if delta else (lambda x: x.mT)
    return (states, *inputs), (out, turn(mine)), (dout, slopes), [turn(added)[0], *found]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("delta", [True, False], ids=["the delta rule", "Mamba-2"])
@pytest.mark.parametrize(("heads", "key_heads", "width", "values"), [(2, 2, 16, 16), (6, 2, 24, 40), (16, 1, 5, 3)])
def test_chunks_and_their_gradients_are_those_of_the_recurrence(heads, key_heads, width, values, delta, dtype):
    given, (out, after), (dout, slopes), found = chunked(TREES, 141, heads, key_heads, width, values, delta, dtype)
    states, *inputs = (x.double().requires_grad_() for x in given)
    right, states_after = recurrence(TREES, delta, states, *inputs)
    assert float((out - right).detach().abs().max()) < 1e-5 * float(right.detach().abs().max())
    assert float((after - states_after).detach().abs().max()) < 1e-5 * float(states_after.detach().abs().max())
    wanted = torch.autograd.grad((right * dout).sum() + (states_after * slopes).sum(), (states, *inputs))
    for ours, theirs in zip(found, (wanted[0][0], *wanted[1:]), strict=True):
        assert float((ours - theirs).abs().max()) < 1e-5 * float(theirs.abs().max())


@pytest.mark.parametrize("delta", [True, False], ids=["the delta rule", "Mamba-2"])
def test_gradients_of_chunks_are_those_of_finite_differences(delta):
    given, _, (dout, slopes), found = chunked(TINY, 5, 2, 1, 3, 2, delta)
    given = [x.double() for x in given]

    def total():
        out, after = recurrence(TINY, delta, *given)
        return float((out * dout).sum() + (after * slopes).sum())

    for x, gradient in zip((given[0][0], *given[1:]), found, strict=True):
        for at in range(x.numel()):
            flat, sums = x.view(-1), []
            for step in (1e-6, -2e-6):
                flat[at] += step
                sums.append(total())
            flat[at] += 1e-6
            assert float(gradient.flatten()[at]) == pytest.approx((sums[0] - sums[1]) / 2e-6, rel=1e-4, abs=1e-5)


def test_chunks_have_the_same_bits_with_any_number_of_threads():
    found, before = [], torch.get_num_threads()
    for threads in (1, 3):
        torch.set_num_threads(threads)
        found.append(chunked(TREES, 141, 6, 1, 16, 16, True))
    torch.set_num_threads(before)
    (_, ours, _, grads), (_, others, _, other_grads) = found
    assert all(torch.equal(a, b) for a, b in zip((*ours, *grads), (*others, *other_grads), strict=True))


@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize("channels", [5, 300])
def test_a_convolution_and_its_gradient_are_those_of_torch(channels, silu):
    """Rows 0 to 5 are a prompt; rows 6 and 7 continue its first four tokens, and 8 all of it but the last."""
    x, weight, bias, dout = draw(9, channels), draw(channels, 3), draw(channels), draw(9, channels).flip(0)
    windows = torch.tensor([[-1, -1, 0], [-1, 0, 1], *([i - 2, i - 1, i] for i in range(2, 6)), [2, 3, 6], [3, 6, 7], [3, 4, 8]])
    given = [t.double().requires_grad_() for t in (x, weight, bias)]
    seen = torch.cat([given[0], given[0].new_zeros(1, channels)])[windows]
    right = (seen * given[1].t()).sum(1) + given[2]
    right = F.silu(right) if silu else right
    wanted = torch.autograd.grad(right, given, dout.double())
    mine = (x, weight.t().contiguous(), bias, windows, silu)
    dx, dweight, dbias = kernels().states.convolve_gradient(dout, *mine)
    for ours, theirs in zip((kernels().states.convolve(*mine), dx, dweight.t(), dbias), (right, *wanted), strict=True):
        assert torch.allclose(ours, theirs.float(), atol=1e-5)


def test_a_norm_with_an_offset_and_its_gradient_are_those_of_torch():
    x, w, dy, native = draw(7, 20), draw(20), draw(7, 20).flip(0), kernels()
    a, b = x.double().requires_grad_(), w.double().requires_grad_()
    right = a * torch.rsqrt(a.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + b)
    right.backward(dy.double())
    dx = torch.zeros_like(x)
    dw = native.gradients.rms_norm(dx, x, w, dy, 1e-6, 1.0)
    assert torch.allclose(native.rms_norm(x, w, 1e-6, 1.0), right.detach().float(), atol=1e-5)
    assert torch.allclose(dx, a.grad.float(), atol=1e-5) and torch.allclose(dw, b.grad.float(), atol=1e-5)
