"""Tiny models are drawn by their seed alone, and their tokenizer can say any text."""

from __future__ import annotations

import pytest
import torch

from psigrad.language.models import tiny


def test_a_tokenizer_gives_any_text_back_and_each_digit_a_token():
    made = tiny.tokenizer(["hello hello 123"] * 5, 280)
    for text in ("hello", "1234567", "Ä ö\n\t€ 猫"):
        assert made.decode(made(text).input_ids) == text
    assert len(made("123").input_ids) == 3 and len(made("hello").input_ids) < 5 and len(made) <= 280
    assert made.eos_token_id != made.pad_token_id


@pytest.mark.parametrize("name", ["qwen3", "llama", "gpt2", "gpt_neox"])
def test_a_model_is_that_of_its_seed_and_leaves_torchs_numbers_alone(name):
    before = torch.get_rng_state()
    first, again, other = (tiny.model(name, 64, hidden=16, layers=1, heads=2, seed=seed) for seed in (3, 3, 4))
    weights = [torch.cat([p.detach().flatten() for p in model.parameters()]) for model in (first, again, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert torch.equal(torch.get_rng_state(), before)
    assert first.get_input_embeddings().weight is first.get_output_embeddings().weight
    with pytest.raises(ValueError, match="Unknown architecture 'bert'"):
        tiny.model("bert", 64)
