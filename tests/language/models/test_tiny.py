"""Tiny models are drawn by their seed alone, and their tokenizer can say any text."""

from __future__ import annotations

import torch

from psigrad.language.models import tiny


def test_a_tokenizer_gives_any_text_back_and_each_digit_a_token():
    made = tiny.tokenizer(["hello hello 123"] * 5, 280)
    assert all(made.decode(made(text).input_ids) == text for text in ("hello", "1234567", "Ä ö\n\t€ 猫"))
    assert len(made("123").input_ids) == 3 and len(made("hello").input_ids) < 5 and len(made) <= 280


def test_a_model_is_that_of_its_seed_and_leaves_torchs_numbers_alone():
    before = torch.get_rng_state()
    models = [tiny.model("llama", 64, hidden=16, layers=1, heads=2, seed=seed) for seed in (3, 3, 4)]
    first, again, other = (torch.cat([p.detach().flatten() for p in model.parameters()]) for model in models)
    assert torch.equal(first, again) and not torch.equal(first, other) and torch.equal(torch.get_rng_state(), before)
