"""Statistics of tokens: what a request asks for, and their values by hand."""

from __future__ import annotations

import math

import torch

from psigrad.language.models.stats import TokenStatsRequest


def test_a_token_that_the_reference_takes_and_the_policy_never_is_infinitely_far():
    logits = torch.tensor([[0.0, -math.inf, 1.0]])
    reference = torch.tensor([[0.0, 0.0, 0.0]])
    wanted = TokenStatsRequest(1.0, reference_head=lambda hidden: hidden, divergence="exact_forward")
    kl = wanted.of(logits, torch.tensor([0]), reference)[2]
    assert kl.tolist() == [math.inf]


def test_what_a_request_asks_for_says_how_it_can_be_computed():
    """On a GPU in closed form, but for an entropy that is learned from, a divergence and a mean over the vocabulary."""
    ask = TokenStatsRequest
    assert ask().is_closed_form and ask(accuracy=True).is_closed_form and ask(entropy="figure").is_closed_form
    assert not (
        ask(entropy=True).is_closed_form
        or ask(mean_logp=True).is_closed_form
        or ask(reference_head=torch.nn.Identity()).is_closed_form
    )
    with torch.no_grad():
        assert ask(entropy=True).is_closed_form and not ask(mean_logp=True).is_closed_form
    others = {"entropy": "figure", "accuracy": True, "mean_logp": True, "reference_head": torch.nn.Identity()}
    assert ask(2.0).logp_only and not any(ask(**{name: value}).logp_only for name, value in others.items())
