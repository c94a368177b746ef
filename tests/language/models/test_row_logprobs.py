"""Log-probs under a large head on a GPU: the same code on the CPU against autograd, and its launches on the meta device."""

from __future__ import annotations

import pytest
import torch
from kernel_choices import cut_head
from torch.utils._python_dispatch import TorchDispatchMode

from psigrad.language.models import logprobs
from psigrad.language.models.logprobs import token_stats
from psigrad.language.models.stats import TokenStatsRequest
from psigrad.optim import gradients

# Views and allocations launch nothing.
FREE = {"view", "_unsafe_view", "unsqueeze", "slice", "select", "t", "transpose", "alias", "detach", "expand"}
FREE |= {"empty", "new_empty", "empty_like"}


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    cut_head(monkeypatch, closed=True, on_gpu=True)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
@pytest.mark.parametrize("elements", [49, 350, 5000], ids=["a row at a time", "seven", "all"])
@pytest.mark.parametrize("learns", [True, False], ids=["a head that learns", "a frozen head"])
def test_they_and_their_gradient_are_autograds(elements, temperature, learns, as_on_a_gpu, monkeypatch):
    cut_head(monkeypatch, elements)
    draw = torch.Generator().manual_seed(0)
    head = torch.nn.Linear(12, 50, bias=False).double().requires_grad_(learns)
    hidden = (3 * torch.randn(23, 12, generator=draw, dtype=torch.double)).requires_grad_()
    ids, weights = torch.randint(50, (23,), generator=draw), torch.randn(23, generator=draw, dtype=torch.double)
    with torch.no_grad():
        ids[::3] = head(hidden).argmax(1)[::3]
    stats = token_stats(hidden, ids, head, 50, TokenStatsRequest(temperature, entropy="figure", accuracy=True))
    log_pi = torch.log_softmax(head(hidden) / temperature, -1)
    oracle = log_pi.gather(1, ids[:, None])[:, 0]
    torch.testing.assert_close(stats.logp, oracle, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(stats.entropy, -(log_pi.exp() * log_pi).sum(1), rtol=1e-12, atol=1e-12)
    assert torch.equal(stats.hit, (log_pi.argmax(1) == ids).double()) and 8 <= stats.hit.sum() < 23
    assert not stats.entropy.requires_grad
    inputs = [hidden, head.weight] if learns else [hidden]
    found = torch.autograd.grad((weights * stats.logp).sum(), inputs)
    for a, b in zip(found, torch.autograd.grad((weights * oracle).sum(), inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("recompute", [False, True], ids=["stored", "recomputed"])
def test_sums_in_place_have_the_same_gradient(recompute, as_on_a_gpu, monkeypatch):
    cut_head(monkeypatch, 350)
    draw = torch.Generator().manual_seed(0)
    head = torch.nn.Linear(12, 150, bias=False)
    hidden, ids = torch.randn(23, 12, generator=draw), torch.randint(150, (23,), generator=draw)
    right = torch.autograd.grad(torch.log_softmax(head(hidden), -1).gather(1, ids[:, None]).sum(), head.weight)[0]
    sums = gradients.Sums(recompute=recompute)
    with gradients.in_place(sums):
        token_stats(hidden, ids, head, 150, TokenStatsRequest()).logp.sum().backward()
    found = torch.cat([block.clone() for _, block in sums.blocks(head.weight)]) if recompute else head.weight.grad
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-6)


def test_in_half_precision_the_heads_gradient_is_summed_in_float32(as_on_a_gpu, monkeypatch):
    cut_head(monkeypatch, 250)
    draw = torch.Generator().manual_seed(0)
    exact = torch.nn.Linear(64, 50, bias=False)
    hidden, ids = torch.randn(400, 64, generator=draw), torch.randint(50, (400,), generator=draw)
    right = torch.autograd.grad(torch.log_softmax(exact(hidden), -1).gather(1, ids[:, None]).sum(), exact.weight)[0]
    head = torch.nn.Linear(64, 50, bias=False)
    head.load_state_dict(exact.state_dict())
    head.bfloat16()
    sums = gradients.Sums()
    with gradients.in_place(sums):
        logp = token_stats(hidden.bfloat16(), ids, head, 50, TokenStatsRequest()).logp
        assert logp.dtype == torch.float32
        logp.sum().backward()
    assert head.weight.grad is None and sums.float32[head.weight].dtype == torch.float32
    assert float((sums.float32[head.weight] - right).norm() / right.norm()) < 0.01


def test_an_entropy_that_learns_has_its_gradient(as_on_a_gpu, monkeypatch):
    """It is no figure: autograd has to go through it."""
    monkeypatch.setattr(logprobs, "checkpoint", lambda f, *given, use_reentrant: f(*given))
    cut_head(monkeypatch, chunk=100)
    head, hidden = torch.nn.Linear(4, 50, bias=False), torch.randn(8, 4)
    stats = token_stats(hidden, torch.arange(8), head, 50, TokenStatsRequest(entropy=True))
    stats.entropy.sum().backward()
    assert head.weight.grad is not None and head.weight.grad.any()


def test_what_a_model_never_says_adds_nothing(as_on_a_gpu):
    head = torch.nn.Linear(1, 40, bias=False)
    with torch.no_grad():
        head.weight[:20] = -torch.inf
    hidden, ids = torch.ones(2, 1), torch.tensor([25, 39])
    stats = token_stats(hidden, ids, head, 40, TokenStatsRequest(entropy="figure"))
    log_pi = torch.log_softmax(head(hidden), -1)[:, 20:]
    torch.testing.assert_close(stats.logp, log_pi.gather(1, ids[:, None] - 20)[:, 0])
    torch.testing.assert_close(stats.entropy, -(log_pi.exp() * log_pi).sum(1))


def test_a_token_that_the_head_does_not_have_is_refused(as_on_a_gpu):
    with pytest.raises(RuntimeError, match="A target is not a token of the head"):
        token_stats(torch.randn(2, 4), torch.tensor([0, 30]), torch.nn.Linear(4, 30, bias=False), 30, TokenStatsRequest())


class Count(TorchDispatchMode):
    """What is asked of the device."""

    def __init__(self):
        super().__init__()
        self.names, self.largest = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name not in FREE:
            self.names.append(name)
        if isinstance(out, torch.Tensor):
            self.largest = max(self.largest, out.numel())
        return out


def launches(tokens: int, vocabulary: int, dtype: torch.dtype, monkeypatch, **wanted) -> Count:
    """Of log-probs, forward and backward, with the sums of a half-precision head."""
    monkeypatch.setattr(logprobs, "_check_ids", lambda ids, count: None)  # it reads numbers, which meta tensors have not
    hidden = torch.empty(tokens, 64, device="meta", dtype=dtype, requires_grad=True)
    head = torch.nn.Linear(64, vocabulary, bias=False, device="meta", dtype=dtype)
    with gradients.in_place(), Count() as counted:
        token_stats(
            hidden, torch.empty(tokens, device="meta", dtype=torch.long), head, vocabulary, TokenStatsRequest(**wanted)
        ).logp.sum().backward()
    return counted


@pytest.mark.parametrize("wanted", [{}, {"entropy": "figure", "accuracy": True}], ids=["log-probs", "as fine-tuning asks"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_large_head_takes_at_most_200_launches(wanted, dtype, monkeypatch):
    counted = launches(16_384, 151_936, dtype, monkeypatch, **wanted)
    assert 60 < len(counted.names) <= 200
    assert counted.largest <= logprobs.TILE_ELEMENTS * logprobs.TILE_ON_GPU


def test_negative_control_small_tiles_take_more(monkeypatch):
    monkeypatch.setattr(logprobs, "TILE_ON_GPU", 64)
    assert len(launches(16_384, 151_936, torch.bfloat16, monkeypatch).names) > 300
