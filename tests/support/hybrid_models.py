"""Small random models with layers that have a state, as docs/families.md has them."""

from __future__ import annotations

import inspect
import runpy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

from psigrad.language.models.fused import decoder
from psigrad.language.models.language_model import prepare

HYBRID = ["qwen3_5_text", "kimi_linear", "lfm3", "granitemoehybrid (hybrid)"]
# Their mixers are of the same kinds; the slow tests run them.
MORE = ["qwen3_next", "olmo_hybrid", "falcon_h1", "bamba", "nemotron_h", "nemotron_h (experts)"]
if "kwargs" in inspect.signature(Lfm2ShortConv.forward).parameters:
    MORE.append("lfm2")  # without fusion it runs padded with transformers 5.17, which passes its convolutions no layout
FUSED = ["qwen3_5_text", "lfm3", "granitemoehybrid (hybrid)", "lfm2", "bamba", "nemotron_h"]
_FAMILIES = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "make" / "families.py"))


def network(name, vocabulary=280):
    """transformers' model of a family, with states that last, so that a leak shows."""
    torch.manual_seed(0)
    hf = AutoModelForCausalLM.from_config(_FAMILIES["config"](name, vocab_size=vocabulary))
    for p in hf.parameters():
        torch.nn.init.normal_(p, mean=0.0 if p.dim() > 1 else 0.5, std=0.08)
    return hf


def packed(hf, tokenizer):
    """The model as it is prepared if its family is not fused."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder, "FAMILIES", {})
        return prepare(hf, tokenizer)
