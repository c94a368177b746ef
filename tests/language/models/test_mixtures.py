"""A fused mixture that takes other experts is noticed. `test_decoder.py` and `test_experts.py` compare the right ones."""

from __future__ import annotations

import pytest
from fused_models import HYBRIDS, made_anew

from psigrad.language.models.fused.mixtures import ClampedExpertLayer, ExpertLayer

pytestmark = pytest.mark.needs("compiler")


def _swapped(self, *given, route=ExpertLayer._route, **more):
    """The two experts of a token with each other's weights."""
    logits, share, choice = route(self, *given, **more)
    return logits, share.flip(1), choice


def _second_best(self, *given, route=ExpertLayer._route, **more):
    """Each token's second and third expert."""
    logits, share, _ = route(self, *given, **more)
    return logits, share, logits.topk(3).indices[:, 1:]


@pytest.mark.parametrize(
    ("name", "owner", "part", "wrong"),
    [
        ("qwen3-moe", ExpertLayer, "_route", _swapped),
        ("qwen3-moe", ExpertLayer, "_route", _second_best),
        ("gpt-oss", ClampedExpertLayer, "activate", lambda self, both: self.native.gated(both)),
    ],
)
def test_negative_control_other_experts_are_not_used(name, owner, part, wrong, tokenizer, monkeypatch):
    monkeypatch.setattr(owner, part, wrong)
    model = made_anew(HYBRIDS[name], tokenizer)
    assert model.decoder is None and "outputs differ by" in model.why_unfused
