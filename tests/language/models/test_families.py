"""The architectures that the fused decoder knows: their forms, and why others are left to transformers."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from fused_models import COMMON, CONFIGS, FORMS, HYBRIDS, made, made_anew
from transformers import CohereConfig, GraniteMoeHybridConfig, Lfm2Config, LlamaConfig

from psigrad.language.models.fused import decoder
from psigrad.language.models.fused.decoder import Decoder
from psigrad.language.models.fused.families import FAMILIES, Unsupported

pytestmark = pytest.mark.needs("compiler")


@pytest.mark.parametrize(
    ("name", "family", "wrong"),
    [
        ("smollm3", "SmolLM3", {"rope": lambda config, layer: ""}),
        ("exaone4", "Exaone4", {"rope": lambda config, layer: ""}),
        ("ministral3", "Ministral3", {"factors": None}),
        ("gemma3", "Gemma3Text", {"offset": 0.0}),
        ("olmo3", "Olmo3", {"window": lambda config, layer: None}),
        ("qwen3.5", "Qwen3_5Text", {"offset": 0.0}),
        ("nemotron-h", "NemotronH", {"factors": lambda config, positions: 1 + positions}),
        ("qwen3-moe", "Qwen3Moe", {"offset": 1.0}),
        ("gemma4 of shared keys", "Gemma4Text", {"window": lambda config, layer: None}),
        ("lfm3", "Lfm3", {"mixer": lambda config, layer: "" if layer else "convolution"}),
    ],
)
def test_negative_control_layers_of_another_form_are_not_used(name, family, wrong, tokenizer, monkeypatch):
    monkeypatch.setitem(decoder.FAMILIES, family, replace(FAMILIES[family], **wrong))
    model = made_anew({**FORMS, **HYBRIDS}[name], tokenizer)
    assert model.decoder is None and "outputs differ by" in model.why_unfused


def test_other_models_and_precisions_say_why_they_are_not_fused(tokenizer):
    cohere = made(CohereConfig(**COMMON, hidden_size=32), tokenizer)
    assert cohere.decoder is None and "CohereModel" in cohere.why_unfused
    relu = made(LlamaConfig(**COMMON, hidden_size=64, hidden_act="relu"), tokenizer)
    assert relu.decoder is None and "activation relu" in relu.why_unfused
    experts = {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["attention"] * 2,
        "mamba_d_head": "auto",
        "mamba_n_heads": 8,
    }
    sparse = made(GraniteMoeHybridConfig(**COMMON, hidden_size=64, shared_intermediate_size=96, **experts), tokenizer)
    assert sparse.decoder is None and "has experts" in sparse.why_unfused
    gemma = copy.deepcopy(HYBRIDS["gemma4"])
    gemma.enable_moe_block, gemma.num_experts, gemma.top_k_experts, gemma.moe_intermediate_size = True, 4, 2, 32
    sparse = made(gemma, tokenizer)
    assert sparse.decoder is None and "has experts" in sparse.why_unfused
    convolutions = made(Lfm2Config(**COMMON, hidden_size=64, layer_types=["conv", "conv"]), tokenizer)
    assert convolutions.decoder is None and "no layer with attention" in convolutions.why_unfused
    hf = made_anew(CONFIGS["llama"], tokenizer).network
    hf.model.__class__ = type("LlamaModel", (type(hf.model),), {"__module__": "code_of_a_checkpoint"})
    with pytest.raises(Unsupported, match="LlamaModel is not fused"):
        Decoder(hf)
    double = made(CONFIGS["qwen3"], tokenizer, torch.float64)
    assert double.decoder is None and "float64" in double.why_unfused
