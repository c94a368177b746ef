"""Log-probs under a head that is too large to hold its logits: the closed form against autograd."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_choices import cut_head
from torch import nn

from psigrad.kernels.products import STRETCH
from psigrad.language.models import logprobs
from psigrad.language.models.fused.caches import CachedLogProbs, version_of
from psigrad.language.models.logprobs import token_stats
from psigrad.language.models.stats import TokenStatsRequest


def relative(found, right) -> float:
    """The distance of two gradients, as a share of the second."""
    a, b = (torch.cat([g.flatten() for g in gradient]) for gradient in (found, right))
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
@pytest.mark.parametrize("tile", [(250, 100), (250, 7), (6, 4), (50 * 23 - 1, 100)], ids=str)
@pytest.mark.parametrize("learns", [True, False], ids=["a head that learns", "a frozen head"])
def test_log_probs_under_a_large_head_have_autograds_gradient(tile, temperature, learns, monkeypatch):
    draw = torch.Generator().manual_seed(0)
    head = torch.nn.Linear(12, 50, bias=False).double().requires_grad_(learns)
    hidden = (3 * torch.randn(23, 12, generator=draw, dtype=torch.double)).requires_grad_()
    ids, weights = torch.randint(50, (23,), generator=draw), torch.randn(23, generator=draw, dtype=torch.double)
    cut_head(monkeypatch, tile[0], rows=tile[1], closed=True)
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.shape) or t, lambda t: t):
        logp = logprobs.token_stats(hidden, ids, head, 50, TokenStatsRequest(temperature)).logp
    assert not any(50 in s and 12 not in s for s in sizes), "no logits are kept"
    inputs = [hidden, head.weight] if learns else [hidden]
    found = torch.autograd.grad((weights * logp).sum(), inputs)
    oracle = torch.log_softmax(head(hidden) / temperature, -1).gather(1, ids[:, None])[:, 0]
    torch.testing.assert_close(logp, oracle, rtol=1e-12, atol=1e-12)
    for a, b in zip(found, torch.autograd.grad((weights * oracle).sum(), inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("tile", [(250, 100), (250, 7), (6, 4)], ids=str)
@pytest.mark.parametrize("kind", [torch.double, torch.float32], ids=str)
def test_figures_beside_them_come_of_the_same_tiles(tile, kind, monkeypatch):
    """In double precision through PyTorch, in float32 through the kernels: no logits are kept and none is made a second time."""
    draw = torch.Generator().manual_seed(0)
    head = torch.nn.Linear(12, 50, bias=False).to(kind)
    with torch.no_grad():
        head.weight[7] = head.weight[3]  # never the most probable one before token 3
    hidden = (3 * torch.randn(23, 12, generator=draw, dtype=kind)).requires_grad_()
    ids = head(hidden).argmax(1).where(torch.arange(23) % 2 == 0, torch.arange(23))
    cut_head(monkeypatch, tile[0], rows=tile[1], chunk=100, closed=True)
    wanted = TokenStatsRequest(0.7, entropy="figure", accuracy=True)
    stats = logprobs.token_stats(hidden, ids, head, 50, wanted)
    log_pi = torch.log_softmax(head(hidden) / 0.7, -1)
    close = {"rtol": 1e-12, "atol": 1e-12} if kind == torch.double else {"rtol": 2e-5, "atol": 2e-5}
    torch.testing.assert_close(stats.logp, log_pi.gather(1, ids[:, None])[:, 0], **close)
    torch.testing.assert_close(stats.entropy, -(log_pi.exp() * log_pi).sum(1), **close)
    assert stats.hit.tolist() == (log_pi.argmax(1) == ids).tolist() and 12 <= stats.hit.sum() < 23
    assert not stats.entropy.requires_grad and stats.logp.requires_grad


@pytest.mark.parametrize(("tile", "few"), [(4 * 23 * 50 - 1, False), (4 * 23 * 50, True)])
def test_figures_keep_logits_only_where_those_are_few(tile, few, monkeypatch):
    """Copies of another size in every pass fit into no hole that others left: a run's memory grew by them."""
    head, hidden = torch.nn.Linear(12, 50, bias=False), torch.randn(23, 12, requires_grad=True)
    cut_head(monkeypatch, tile)
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.shape) or t, lambda t: t):
        wanted = TokenStatsRequest(entropy="figure", accuracy=True)
        logprobs.token_stats(hidden, torch.arange(23), head, 50, wanted).logp.sum().backward()
    assert sizes.count(torch.Size([23, 50])) >= 3 if few else torch.Size([23, 50]) not in sizes


def test_the_entropy_of_a_tile_of_two_tokens_by_hand(monkeypatch):
    """Logits 0 and log 3 in two tiles: ¼ and ¾, entropy log 4 − ¾ log 3; a token that never comes (−∞) changes nothing."""
    cut_head(monkeypatch, 1)
    head = torch.nn.Linear(1, 3, bias=False).double()
    head.weight.data[:, 0] = torch.tensor([0.0, math.log(3), -math.inf], dtype=torch.double)
    wanted = TokenStatsRequest(entropy="figure", accuracy=True)
    stats = logprobs.token_stats(torch.ones(1, 1, dtype=torch.double), torch.tensor([1]), head, 3, wanted)
    assert stats.entropy.item() == pytest.approx(math.log(4) - 0.75 * math.log(3), rel=1e-12)
    assert stats.logp.item() == pytest.approx(math.log(0.75), rel=1e-12) and stats.hit.item() == 1


def test_a_large_head_in_bfloat16_is_as_near_as_autograd(monkeypatch):
    draw = torch.Generator().manual_seed(0)
    exact = torch.nn.Linear(64, 200, bias=False)
    hidden, ids = torch.randn(40, 64, generator=draw), torch.randint(200, (40,), generator=draw)
    cut_head(monkeypatch, 1000, rows=16, chunk=16 * 200)

    def gradient(dtype, closed=True):
        head = torch.nn.Linear(64, 200, bias=False)
        head.load_state_dict(exact.state_dict())
        head.to(dtype)
        logp = logprobs.token_stats(hidden.to(dtype), ids, head, 200, TokenStatsRequest(entropy=not closed)).logp
        assert logp.dtype == torch.float32
        return torch.autograd.grad(logp.sum(), head.weight)[0].float()

    right = gradient(torch.float32, closed=False)
    assert relative([gradient(torch.float32)], [right]) < 1e-5
    assert relative([gradient(torch.bfloat16)], [right]) < relative([gradient(torch.bfloat16, closed=False)], [right]) < 0.02


def test_a_token_that_the_head_does_not_have_is_refused(monkeypatch):
    head, hidden = torch.nn.Linear(4, 30, bias=False), torch.randn(8, 4)
    ids = torch.tensor([0, 1, 2, 3, 4, 5, 29, 30])
    with pytest.raises((IndexError, RuntimeError)):
        logprobs.token_stats(hidden, ids, head, 30, TokenStatsRequest())
    cut_head(monkeypatch, 16)
    with pytest.raises(IndexError, match="id 30, but the LM head has 30"):
        logprobs.token_stats(hidden, ids, head, 30, TokenStatsRequest())
    with pytest.raises(IndexError, match="id -1, but the LM head has 30"):
        logprobs.token_stats(hidden[:7], ids[:7] - 1, head, 30, TokenStatsRequest())
    logprobs.token_stats(hidden[:7], ids[:7], head, 30, TokenStatsRequest())


def test_tiles_of_tokens_that_cannot_come_are_passed_over(monkeypatch):
    cut_head(monkeypatch, 8)
    head = torch.nn.Linear(1, 40, bias=False)
    with torch.no_grad():
        head.weight[:20] = -torch.inf
    hidden, ids = torch.ones(2, 1), torch.tensor([25, 39])
    logp = logprobs.token_stats(hidden, ids, head, 40, TokenStatsRequest()).logp
    torch.testing.assert_close(logp, torch.log_softmax(head(hidden), -1).gather(1, ids[:, None])[:, 0])


def test_logits_too_large_for_exp_are_not(monkeypatch):
    """The maximum comes tile by tile: what was summed under a lower one is scaled down."""
    cut_head(monkeypatch, 8)
    head = torch.nn.Linear(1, 40, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.linspace(-500.0, 900.0, 40)[:, None])
    hidden, ids = torch.tensor([[1.0], [-1.0]]), torch.tensor([39, 3])
    logp = logprobs.token_stats(hidden, ids, head, 40, TokenStatsRequest()).logp
    oracle = torch.log_softmax(head(hidden).double(), -1).gather(1, ids[:, None])[:, 0]
    torch.testing.assert_close(logp.double(), oracle, rtol=1e-5, atol=1e-5)
    assert logp.isfinite().all()


@pytest.mark.parametrize("least", [float("-inf"), torch.finfo(torch.float32).min])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_entropy_and_exact_kl_of_tokens_that_cannot_come_are_those_of_the_others(least, temperature):
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    barred, fewer = logits.clone(), logits[:, :5].clone().requires_grad_()
    barred[:, 5:] = least
    barred.requires_grad_()
    reference = torch.randn(5, 7, generator=torch.Generator().manual_seed(1))
    reference[:, 5:] = least
    ids = torch.arange(5)

    def figures(given, ref):
        wanted = TokenStatsRequest(temperature, entropy=True, reference_head=lambda h: h)
        return wanted.of(given, ids, ref)[:3]

    for found, expected in zip(figures(barred, reference), figures(fewer, reference[:, :5]), strict=True):
        torch.testing.assert_close(found, expected)
    sum(x.sum() for x in figures(barred, reference)).backward()
    sum(x.sum() for x in figures(fewer, reference[:, :5])).backward()
    torch.testing.assert_close(barred.grad[:, :5], fewer.grad)
    assert (barred.grad[:, 5:] == 0).all()


@pytest.fixture
def given():
    generator = torch.Generator().manual_seed(0)
    head = nn.Linear(8, 40, bias=False)
    nn.init.normal_(head.weight, generator=generator)
    return torch.randn(6, 8, generator=generator), torch.randint(0, 40, (6,), generator=generator), head


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("closed", [False, True])
def test_logits_are_divided_by_the_temperature(given, temperature, closed, monkeypatch):
    hidden, ids, head = given
    cut_head(monkeypatch, 16 if closed else 1 << 30)
    found = token_stats(hidden, ids, head, 40, TokenStatsRequest(temperature)).logp
    expected = torch.log_softmax(head(hidden) / temperature, -1).gather(1, ids[:, None])[:, 0]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_log_probs_that_are_known_have_the_gradient_of_those_that_are_not(given, temperature, monkeypatch):
    cut_head(monkeypatch, 16)
    hidden, ids, head = given
    wanted = TokenStatsRequest(temperature)

    def gradients(cached):
        own = hidden.clone().requires_grad_()
        head.weight.grad = None
        logp = token_stats(own, ids, head, 40, wanted, None, cached).logp
        logp.sum().backward()
        return logp.detach(), own.grad, head.weight.grad.clone()

    plain = gradients(None)
    known = CachedLogProbs(plain[0], temperature, version_of(head.weight))
    for a, b in zip(gradients(known), plain, strict=True):
        torch.testing.assert_close(a, b)
    marked = CachedLogProbs(plain[0] - 1.0, temperature, version_of(head.weight))
    assert torch.equal(gradients(marked)[0], plain[0] - 1.0), "negative control: the known ones are what comes back"


def test_what_is_not_asked_for_is_not_given(given):
    hidden, ids, head = given
    plain = token_stats(hidden, ids, head, 40, TokenStatsRequest(entropy=True))
    assert plain.hit is None or not plain.hit.numel()
    asked = token_stats(hidden, ids, head, 40, TokenStatsRequest(accuracy=True))
    assert asked.hit.tolist() == (head(hidden).argmax(-1) == ids).float().tolist()


def test_a_reference_without_its_hidden_states_is_not_compared(given):
    hidden, ids, head = given
    found = token_stats(hidden, ids, head, 40, TokenStatsRequest(entropy=True, reference_head=head), None)
    assert found.kl is None or not found.kl.numel()


def test_closed_gradients_have_no_gradient_of_their_own(given, monkeypatch):
    """A second derivative would be silently wrong."""
    cut_head(monkeypatch, 16)
    hidden, ids, head = given
    own = hidden.clone().requires_grad_()
    (first,) = torch.autograd.grad(
        token_stats(own, ids, head, 40, TokenStatsRequest()).logp.square().sum(), own, create_graph=True
    )
    with pytest.raises(RuntimeError, match=r"once_differentiable|appears to not have been used"):
        torch.autograd.grad(first.sum(), own)
    (first,) = torch.autograd.grad(logprobs._Logits.apply(own, head.weight, None).square().sum(), own, create_graph=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable|appears to not have been used"):
        torch.autograd.grad(first.sum(), own)


@pytest.mark.needs("compiler")
def test_many_tiles_of_states_and_tokens_have_the_bits_of_one(monkeypatch):
    """Log-probs as a draw has them, and their gradient: 5 states by two at a time, 3 stretches of the vocabulary one by one."""
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, 16, generator=draw).requires_grad_()
    head, ids = torch.nn.Linear(16, 2 * STRETCH + 7, bias=False), torch.tensor([0, STRETCH, 2 * STRETCH + 6, 5, STRETCH - 1])
    found = []
    for elements, rows in ((1 << 20, 4096), (2 * STRETCH, 2)):
        cut_head(monkeypatch, elements, rows=rows)
        logp = logprobs.token_stats(hidden, ids, head, 2 * STRETCH + 7, TokenStatsRequest(0.7)).logp
        found.append((logp.detach(), *torch.autograd.grad(logp.sum(), [hidden, head.weight])))
    assert torch.equal(found[0][0], found[1][0])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
