"""A GGUF file below an adapter, number for number as it is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fused_models import COMMON, made, some_groups
from transformers import LlamaConfig

from psigrad.config import Model, Run
from psigrad.errors import UserError
from psigrad.language.loading.load_model import load_model
from psigrad.language.models import tiny
from psigrad.language.models.coded_linear import CodedLinear
from psigrad_extras.connect.exporting import write_gguf

pytestmark = pytest.mark.needs("compiler")
CONFIG = LlamaConfig(**COMMON, hidden_size=64)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny.tokenizer(["hello world 123"] * 5, 280)


@pytest.mark.parametrize("quantization", ["q4_0", "q8_0"])
def test_a_gguf_file_is_trained_on_as_it_is(quantization, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    hf = made(CONFIG, tokenizer).network
    file = tmp_path / "tiny.gguf"
    write_gguf(hf, tokenizer, file, quantization)
    settings = Model(path=str(file), lora_rank=4, quantize_base="gguf")
    coded = load_model(settings, Run(), None)
    plain = load_model(replace(settings, quantize_base=""), Run(), None)  # unpacked by transformers
    layers = [m for m in coded.network.modules() if isinstance(m, CodedLinear)]
    assert len(layers) == 14 and {layer.matrix.bits for layer in layers} == {int(quantization[1])}
    torch.testing.assert_close(coded.evaluate(some_groups()).logp, plain.evaluate(some_groups()).logp, rtol=0, atol=2e-5)
    with pytest.raises(UserError, match="give a GGUF file"):
        load_model(replace(settings, path=str(tmp_path / "cache")), Run(), None)
