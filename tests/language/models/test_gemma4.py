"""A fused Gemma 4 of which one part computes something else is noticed. `test_decoder.py` compares the right ones."""

from __future__ import annotations

from functools import partialmethod

import pytest
from fused_models import HYBRIDS, made_anew

from psigrad.language.models.fused.gemma4 import Gemma4Layer, LayerInputs

pytestmark = pytest.mark.needs("compiler")


@pytest.mark.parametrize(
    ("owner", "part", "wrong"),
    [
        (Gemma4Layer, "_scale", lambda own, layer, x: x),
        (Gemma4Layer, "_values", lambda own, layer, row: own(layer, row[:, : layer.queries + layer.values])),
        (Gemma4Layer, "_qkv", lambda own, layer, row, *given: own(layer, row.flip(0) if layer.source else row, *given)),
        (LayerInputs, "__call__", lambda own, inputs, *given: own(inputs, *given)[::-1]),
    ],
    ids=["scale", "values", "shared keys", "inputs"],
)
def test_negative_control_parts_of_gemma_4_are_noticed(owner, part, wrong, tokenizer, monkeypatch):
    monkeypatch.setattr(owner, part, partialmethod(lambda self, *given, own: wrong(own, self, *given), own=getattr(owner, part)))
    model = made_anew(HYBRIDS["gemma4 of shared keys"], tokenizer)
    assert model.decoder is None and "outputs differ by" in model.why_unfused
