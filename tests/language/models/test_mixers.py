"""A fused mixer of which one part computes something else is noticed. `test_decoder.py` compares the right ones."""

from __future__ import annotations

import pytest
import torch
from fused_models import HYBRIDS, made_anew

from psigrad.language.models.fused.layer import Layer
from psigrad.language.models.fused.mixers import (
    ConvolutionLayer,
    DeltaRuleLayer,
    GatedAttention,
    HeadGatedAttention,
    Mamba2Layer,
    SinkAttention,
)

pytestmark = pytest.mark.needs("compiler")


@pytest.mark.parametrize(
    ("name", "owner", "part", "wrong"),
    [
        ("gpt-oss", SinkAttention, "mix", lambda self, row, others, how: Layer.mix(self, row, (), how)),
        ("qwen3.5", GatedAttention, "gate", lambda self, row, mixed: mixed),
        ("lfm3", HeadGatedAttention, "gate", lambda self, row, mixed: mixed),
        ("lfm2", ConvolutionLayer, "core", lambda self, row, others, layout: row.chunk(3, 1)[2]),
        ("qwen3.5", DeltaRuleLayer, "norm", lambda self, x, weight: x.flatten(1)),
        ("nemotron-h", Mamba2Layer, "norm", lambda self, x, weight: x * weight),
    ],
)
def test_negative_control_a_part_of_a_mixer_is_noticed(name, owner, part, wrong, tokenizer, monkeypatch):
    monkeypatch.setattr(owner, part, wrong)
    model = made_anew(HYBRIDS[name], tokenizer)
    assert model.decoder is None and "differ" in model.why_unfused


def test_a_heads_gate_multiplies_all_of_its_numbers_by_hand():
    """Two heads of two numbers. σ(0) = 1/2, and a sigmoid of −∞ is 0."""
    layer = object.__new__(HeadGatedAttention)
    layer.heads = type("Heads", (), {"queries": 2, "dim": 2, "row": 8})
    row = torch.cat([torch.zeros(1, 8), torch.tensor([[0.0, -torch.inf]])], 1)
    assert layer.gate(row, torch.tensor([[2.0, 4.0, 6.0, 8.0]])).tolist() == [[1.0, 2.0, 0.0, 0.0]]
