"""Surrogates for samples of another policy: whom they mask, and against what."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from edge_batches import batch, gradient

from psigrad.config.algorithms import resolve
from psigrad.objective import Batch, PolicyOutputs, terminal
from psigrad.objective.parts.off_policy import off_policy_mask
from psigrad.objective.parts.surrogate import covariance_penalty, kl_penalty, unclipped, with_imitation


def gradient_of(method, logp: torch.Tensor, **given: torch.Tensor) -> torch.Tensor:
    """Of two completions of ten tokens, the first right and the second wrong."""
    mask = torch.ones(2, 10, dtype=torch.bool)
    batch = Batch(mask, terminal(torch.tensor([1.0, 0.0]), mask), group=torch.zeros(2), **given)
    leaf, prepared = logp.clone().requires_grad_(), method.prepare(batch, {})
    method.loss(prepared, PolicyOutputs(leaf), method.totals(prepared), {}).value.backward()
    return leaf.grad


def masked(preset: str, delta: float):
    spec = {"part": "off_policy_mask", "surrogate": "unclipped", "delta": delta}
    return resolve({"preset": preset, "surrogate": spec, "kl": None})


@pytest.mark.parametrize("preset", ["grpo", "gspo", "rloo"])
def test_the_off_policy_mask_counts_nats_per_step_whatever_the_ratio(preset) -> None:
    """Ten tokens that fell by 0.125 nats each: the mean is 0.125, of which 0.1 is less and 0.2 is more. Their sum is 1.25."""
    old = torch.zeros(2, 10)
    for delta, counts in ((0.1, False), (0.2, True)):
        found = gradient_of(masked(preset, delta), old - 0.125, logp_old=old)
        assert bool(found[1].any()) == counts and found[0].any()


def test_the_off_policy_mask_is_measured_against_what_the_sampler_said() -> None:
    """In the one pass over stale completions log π_old is log π: the policy has left them all the same, by 0.6 nats a step."""
    now = torch.full((2, 10), -1.0)
    found = gradient_of(masked("grpo", 0.5), now, logp_old=now, logp_sampler=now + 0.6)
    assert not found[1].any() and found[0].any()
    near = gradient_of(masked("grpo", 0.5), now, logp_old=now + 0.6, logp_sampler=now + 0.4)
    assert near[1].any(), "the sampler's log-probs are asked, and no others"


def test_masks_around_others_say_what_they_cannot_hold() -> None:
    for outer in (off_policy_mask, with_imitation):
        for inner in (covariance_penalty(), kl_penalty(target=0.01), with_imitation()):
            with pytest.raises(ValueError, match=f"{outer.__name__} cannot wrap {type(inner).__name__}, .*such as clip"):
                outer(inner)
    with pytest.raises(ValueError, match="off_policy_mask cannot wrap off_policy_mask"):
        off_policy_mask(off_policy_mask())
    old = torch.zeros(2, 10)
    within = {"preset": "grpo", "kl": None, "surrogate": {"part": "with_imitation", "surrogate": "off_policy_mask"}}
    imitates = gradient_of(resolve(within), old - 0.6, logp_old=old)
    assert not imitates[1].any() and imitates[0].any()
    fixed = {"preset": "grpo", "kl": None, "surrogate": {"part": "off_policy_mask", "surrogate": "kl_penalty"}}
    assert gradient_of(resolve(fixed), old, logp_old=old).any()


def test_off_policy_sequences_are_those_of_negative_advantage_that_the_policy_has_left():
    old = torch.zeros(4, 10, dtype=torch.float64)
    rows = batch([1.0, 1.0, 0.0, 0.0], old, torch.float64)
    now = old.clone()
    now[1] -= 0.6  # left, with a positive advantage
    now[2] -= 0.6  # left, with a negative one
    now[3] -= 0.4  # not far enough
    plain = replace(resolve("grpo"), kl=None, surrogate=unclipped)
    masked = replace(plain, surrogate=off_policy_mask(unclipped, 0.5))
    found, expected = gradient(masked, rows, now), gradient(plain, rows, now)
    assert (found[2] == 0).all() and (expected[2] != 0).all()
    torch.testing.assert_close(found[[0, 1, 3]], expected[[0, 1, 3]], rtol=0, atol=0)
