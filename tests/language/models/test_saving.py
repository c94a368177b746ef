"""What is saved opens with plain transformers, and computes the same."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from psigrad.errors import UserError
from psigrad.language.models import language_model, scalar_model, tiny
from psigrad.language.models.language_model import Lora, prepare


def logits(model) -> torch.Tensor:
    return model(input_ids=torch.tensor([[5, 6, 7, 8]])).logits


def test_a_saved_model_opens_with_transformers_and_computes_the_same(model, tmp_path, monkeypatch):
    if model.module_kernels is not None:  # its kernels round otherwise than transformers' modules
        monkeypatch.setattr(model.module_kernels, "on", False)
    model.save(tmp_path)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(opened), logits(model.network))
    assert "psigrad" not in (tmp_path / "config.json").read_text()
    assert AutoTokenizer.from_pretrained(tmp_path)("hello").input_ids == model.tokenizer("hello").input_ids


def test_a_saved_model_goes_on_bitwise(model, tmp_path, groups):
    model.save(tmp_path)
    again = language_model.load(str(tmp_path))
    assert torch.equal(again.evaluate(groups).logp, model.evaluate(groups).logp)


def test_a_lora_model_is_saved_merged_for_others_and_as_an_adapter_for_itself(tokenizer, tmp_path, groups):
    prepare(tiny.model("qwen3", len(tokenizer)), tokenizer).save(tmp_path / "base")
    model = language_model.load(str(tmp_path / "base"), lora=Lora(4))
    for name, p in model.trainable().items():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.1)
    model.save(tmp_path / "adapter")
    model.save_merged(tmp_path / "merged")
    merged = prepare(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), tokenizer)
    assert torch.allclose(merged.evaluate(groups).logp, model.evaluate(groups).logp, atol=1e-5)
    again = language_model.load(str(tmp_path / "base"), lora=Lora(4), adapter=tmp_path / "adapter")
    assert torch.equal(again.evaluate(groups).logp, model.evaluate(groups).logp)
    assert list(again.trainable()) == list(model.trainable())
    assert "model.safetensors" not in {f.name for f in (tmp_path / "adapter").iterdir()}


def test_a_path_without_a_model_is_refused_in_one_sentence(tmp_path):
    with pytest.raises(UserError, match="No causal language model could be loaded from") as error:
        language_model.load(str(tmp_path))
    assert "\n" not in str(error.value)


def test_damaged_weights_are_refused_in_one_sentence(qwen3, tmp_path):
    qwen3.save(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(UserError, match="No causal language model could be loaded from"):
        language_model.load(str(tmp_path))


def test_others_may_read_what_the_umask_lets_them(qwen3, tmp_path):
    before = os.umask(0o022)
    try:
        qwen3.save(tmp_path)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o644}


def test_a_tokenizer_without_eos_is_refused(tokenizer):
    bare = tiny.tokenizer(["x"], 260)
    bare.eos_token = None
    with pytest.raises(UserError, match="no EOS token"):
        prepare(tiny.model("qwen3", len(tokenizer)), bare)


def test_lora_on_modules_that_do_not_exist_is_refused(tokenizer):
    with pytest.raises(UserError, match=r"No LoRA adapter could be put on .* are .*q_proj.*, or to all-linear"):
        prepare(tiny.model("qwen3", len(tokenizer)), tokenizer, lora=Lora(4, target_modules=("nowhere",)))


def test_dropout_of_the_model_is_off_and_its_configuration_is_kept(tokenizer, tmp_path):
    model = prepare(tiny.model("gpt2", len(tokenizer)), tokenizer, gradient_checkpointing=True)
    ids = torch.tensor([[5, 6, 7]])
    model.network.train()
    assert torch.equal(model.network(input_ids=ids).logits, model.network(input_ids=ids).logits)
    model.save(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["resid_pdrop"] == 0.1


def without(folder, name: str) -> None:
    """Take one weight out of a saved model."""
    weights = load_file(folder / "model.safetensors")
    del weights[name]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("architecture", "name"),
    [("llama", "lm_head.weight"), ("llama", "model.layers.0.mlp.up_proj.weight"), ("gpt_neox", "embed_out.weight")],
)
def test_weights_that_are_not_in_the_files_are_refused_and_not_drawn_at_random(architecture, name, tokenizer, tmp_path):
    prepare(tiny.model(architecture, len(tokenizer), tied=False), tokenizer).save(tmp_path)
    without(tmp_path, name)
    own = name.replace("embed_out", "lm_head")  # transformers' name of it
    with pytest.raises(UserError, match=rf"the model's files lack {own}, which would be initialised at random"):
        language_model.load(str(tmp_path))


def test_a_reward_model_may_lack_its_head_alone(tokenizer, tmp_path):
    prepare(tiny.model("gpt_neox", len(tokenizer), tied=False), tokenizer).save(tmp_path)
    assert scalar_model.load(str(tmp_path)).per_token
    without(tmp_path, "gpt_neox.layers.0.mlp.dense_h_to_4h.weight")
    with pytest.raises(
        UserError, match=r"the model's files lack .*layers\.0\.mlp\.dense_h_to_4h\.weight, which would be initialised at random"
    ):
        scalar_model.load(str(tmp_path))


@pytest.mark.parametrize("targets", [("lm_head",), ("q_proj", "embed_tokens"), ("embed_tokens", "lm_head")], ids=str)
def test_an_adapter_on_a_matrix_that_is_embedding_and_head_is_refused(targets, tokenizer, tmp_path):
    """Merged it would change the other too: at a rank of 2 the logits were off by 77."""
    with pytest.raises(UserError, match=r"one matrix in this model \(tie_word_embeddings\).*lora_modules_to_save"):
        prepare(tiny.model("qwen3", len(tokenizer)), tokenizer, lora=Lora(2, target_modules=targets))
    free = prepare(tiny.model("qwen3", len(tokenizer), tied=False), tokenizer, lora=Lora(2, target_modules=targets))
    saved = prepare(
        tiny.model("qwen3", len(tokenizer)), tokenizer, lora=Lora(2, target_modules=("q_proj",), modules_to_save=("lm_head",))
    )
    for model, folder in ((free, tmp_path / "free"), (saved, tmp_path / "saved")):
        for p in model.trainable().values():
            torch.nn.init.normal_(p, std=0.1)
        model.save_merged(folder)
        with torch.no_grad():
            wanted, found = logits(model.network), logits(AutoModelForCausalLM.from_pretrained(folder))
        assert torch.allclose(wanted, found, atol=1e-4), "these can be merged"
        assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False, "embedding and head are two"
