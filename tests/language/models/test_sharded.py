"""A model in shards is saved as one model."""

from __future__ import annotations

import torch
from safetensors.torch import load_file

from psigrad.language.models import sharded, tiny
from psigrad.language.models.language_model import Lora, prepare
from psigrad.processes.parallel.world import ALONE


def test_shards_of_transformers_modules_are_saved_as_one_model(tokenizer, tmp_path):
    """As several processes save what is not fused: one has all weights, beside modules that have none of them."""
    model = prepare(tiny.model("qwen3", len(tokenizer)), tokenizer, lora=Lora(4))
    with torch.no_grad():
        for name, p in model.trainable().items():
            p.normal_(std=0.1) if "lora_B" in name else None
    model.save_merged(tmp_path / "one")
    sharded.save_merged(model, ALONE, tmp_path / "shards")
    one, shards = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "shards"))
    assert one.keys() == shards.keys()
    assert all(torch.allclose(one[name], shards[name], atol=1e-6) for name in one)
