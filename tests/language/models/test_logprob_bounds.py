"""Edges of the log-probs: temperatures, what is not asked for, tokens that are impossible, gradients of gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from psigrad.kernels.products import STRETCH
from psigrad.language.models import logprobs
from psigrad.language.models.fused.caches import CachedLogProbs, version_of
from psigrad.language.models.logprobs import token_stats
from psigrad.language.models.stats import TokenStatsRequest


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
    monkeypatch.setattr(logprobs, "TILE_ELEMENTS", 16 if closed else 1 << 30)
    found = token_stats(hidden, ids, head, 40, TokenStatsRequest(temperature)).logp
    expected = torch.log_softmax(head(hidden) / temperature, -1).gather(1, ids[:, None])[:, 0]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_log_probs_that_are_known_have_the_gradient_of_those_that_are_not(given, temperature, monkeypatch):
    monkeypatch.setattr(logprobs, "TILE_ELEMENTS", 16)
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
    monkeypatch.setattr(logprobs, "TILE_ELEMENTS", 16)
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
        monkeypatch.setattr(logprobs, "TILE_ELEMENTS", elements)
        monkeypatch.setattr(logprobs, "TILE_ROWS", rows)
        logp = logprobs.token_stats(hidden, ids, head, 2 * STRETCH + 7, TokenStatsRequest(0.7)).logp
        found.append((logp.detach(), *torch.autograd.grad(logp.sum(), [hidden, head.weight])))
    assert torch.equal(found[0][0], found[1][0])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
