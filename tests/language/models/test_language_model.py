"""Models of known architectures, loaded unprobed, against transformers' own: numbers, names, sharing and files."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from fused_models import CONFIGS, is_known, some_groups, written
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from psigrad.errors import UserError
from psigrad.language.models import language_model, scalar_model
from psigrad.language.models.packing import Groups
from psigrad.optim.gradients import in_place

pytestmark = pytest.mark.needs("compiler")


@pytest.fixture(params=[(name, tied) for name in CONFIGS for tied in (False, True)], ids=lambda p: f"{p[0]}, tied: {p[1]}")
def stored(request, tmp_path, tokenizer):
    """(folder, the model of transformers in it)."""
    name, tied = request.param
    return tmp_path, written(tmp_path, CONFIGS[name], tokenizer, tie_word_embeddings=tied)


def test_log_probs_are_those_of_transformers(stored):
    folder, _ = stored
    model = language_model.load(str(folder))
    assert is_known(model)
    ours = model.evaluate(some_groups()).logp
    theirs = model.evaluate(some_groups(), packed=False).logp
    assert not model.why_padded
    assert torch.allclose(ours, theirs, atol=2e-5, rtol=0)


def test_values_are_those_of_the_files(stored):
    folder, hf = stored
    model = language_model.load(str(folder))
    assert all(torch.equal(p, q) for p, q in zip(model.network.parameters(), hf.parameters(), strict=True))
    assert model.eos_token_ids == language_model.prepare(hf, model.tokenizer).eos_token_ids


def test_the_padding_token_does_not_learn_from_being_looked_up(tmp_path, tokenizer):
    """It is token 1: neither in the decoder nor in transformers' model, nor where gradients are written in place."""
    written(tmp_path, CONFIGS["qwen3"], tokenizer)
    model = language_model.load(str(tmp_path))
    groups = Groups([[1, 5, 1, 7]], [[[8, 1, 9]]])

    def gradient(packed):
        (found,) = torch.autograd.grad(model.evaluate(groups, packed=packed).logp.sum(), [table])
        return found

    table = model.network.get_input_embeddings().weight
    found = gradient(True)
    with in_place():
        model.evaluate(groups).logp.sum().backward()
    for ours in (found, table.grad, gradient(False)):
        assert ours[5].any() and not ours[1].any()


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_generation_settings_are_kept_wherever_they_stand(file, tmp_path, tokenizer):
    written(tmp_path, CONFIGS["qwen3"], tokenizer)
    if file == "config.json":
        (tmp_path / "generation_config.json").unlink()
    settings = json.loads((tmp_path / file).read_text()) | {
        "temperature": 0.3,
        "top_k": 7,
        "do_sample": True,
        "eos_token_id": [0, 9],
    }
    (tmp_path / file).write_text(json.dumps(settings))
    model, theirs = language_model.load(str(tmp_path)), AutoModelForCausalLM.from_pretrained(tmp_path)
    assert is_known(model)
    assert model.eos_token_ids == (0, 9)
    model.save(tmp_path / "ours")
    assert model.network.generation_config.to_dict() == theirs.generation_config.to_dict()
    assert model.network.generation_config.temperature == 0.3
    theirs.save_pretrained(tmp_path / "theirs")
    for name in ("generation_config.json", "config.json"):
        assert (tmp_path / "ours" / name).read_text() == (tmp_path / "theirs" / name).read_text()


def test_an_adapter_in_the_folder_is_not_overlooked(tmp_path, tokenizer):
    import peft

    hf = written(tmp_path, CONFIGS["qwen3"], tokenizer)
    adapted = peft.get_peft_model(hf, peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    adapted.save_pretrained(tmp_path)
    model = language_model.load(str(tmp_path))
    assert not is_known(model)
    ids = torch.tensor([[5, 6, 7, 8]])
    assert torch.allclose(model.network(input_ids=ids).logits, adapted.eval()(input_ids=ids).logits, atol=1e-5)


def test_loading_draws_nothing_and_leaves_no_dropout(tmp_path, tokenizer):
    written(tmp_path, CONFIGS["qwen3"], tokenizer, attention_dropout=0.5)
    before = torch.get_rng_state()
    model = language_model.load(str(tmp_path), gradient_checkpointing=True)
    assert torch.equal(torch.get_rng_state(), before)
    assert is_known(model) and model.decoder is not None and model.network.is_gradient_checkpointing
    model.network.train()
    padded = [model.evaluate(some_groups(), packed=False).logp for _ in range(2)]
    assert torch.equal(*padded), "no dropout"


def test_a_padding_token_beyond_the_embedding_is_no_hindrance(tmp_path, tokenizer):
    written(tmp_path, CONFIGS["qwen3"], tokenizer)
    longer = copy.deepcopy(tokenizer)
    longer.add_special_tokens({"pad_token": "<beyond>"})
    longer.save_pretrained(tmp_path)
    model = scalar_model.load(str(tmp_path))
    assert model.network.config.pad_token_id == len(longer) - 1 == len(tokenizer)
    ours = model.scores(some_groups()).detach()
    assert torch.allclose(ours, model.scores(some_groups(), packed=False).detach(), atol=2e-5, rtol=0)
    assert model.network.config.pad_token_id == len(tokenizer)


def test_the_gradient_is_that_of_the_model_in_memory_which_is_compared_first(stored):
    folder, hf = stored

    def gradient(model):
        logp = model.evaluate(some_groups()).logp
        weights = torch.randn(logp.shape, generator=torch.Generator().manual_seed(1))
        return torch.autograd.grad((logp * weights).sum(), list(model.trainable().values()))

    model = language_model.load(str(folder))
    around = language_model.prepare(hf, model.tokenizer)
    assert around.decoder is not None
    assert all(torch.equal(a, b) for a, b in zip(gradient(model), gradient(around), strict=True))


def test_weights_learn_in_every_way_to_compute_and_a_frozen_copy_does_not(stored):
    folder, _ = stored
    model = language_model.load(str(folder))
    frozen = model.frozen_copy()
    assert not any(p.requires_grad for p in frozen.network.parameters())
    with torch.no_grad():
        for p in model.trainable().values():
            p.add_(0.05)
    fused, padded = (model.evaluate(some_groups(), packed=packed).logp for packed in (True, False))
    assert torch.allclose(fused, padded, atol=2e-5, rtol=0)
    assert not torch.allclose(fused, frozen.evaluate(some_groups()).logp, atol=1e-2)


def test_bfloat16_is_read_as_bfloat16(tmp_path, tokenizer):
    hf = written(tmp_path, CONFIGS["qwen3"], tokenizer)
    model = language_model.load(str(tmp_path), dtype="bfloat16")
    assert is_known(model)
    assert all(torch.equal(p, q.bfloat16()) for p, q in zip(model.network.parameters(), hf.parameters(), strict=True))
    model.save(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["dtype"] == "bfloat16"
    assert {x.dtype for x in load_file(tmp_path / "again" / "model.safetensors").values()} == {torch.bfloat16}


def test_recomputing_layers_changes_no_gradient(tmp_path, tokenizer):
    written(tmp_path, CONFIGS["qwen3"], tokenizer)

    def gradient(recompute):
        model = language_model.load(str(tmp_path), gradient_checkpointing=recompute)
        assert is_known(model)
        return torch.autograd.grad(model.evaluate(some_groups()).logp.sum(), list(model.trainable().values()))

    assert all(torch.equal(a, b) for a, b in zip(gradient(False), gradient(True), strict=True))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_scalar_model_scores_as_transformers_does(name, tmp_path, tokenizer):
    written(tmp_path, CONFIGS[name], tokenizer, AutoModelForSequenceClassification, num_labels=1)
    model = scalar_model.load(str(tmp_path), fresh_head="refuse")
    assert is_known(model)
    ours = model.scores(some_groups()).detach()
    assert torch.allclose(ours, model.scores(some_groups(), packed=False).detach(), atol=2e-5, rtol=0)


def test_a_fresh_score_is_the_one_that_transformers_draws(tmp_path, tokenizer):
    written(tmp_path, CONFIGS["qwen3"], tokenizer)
    torch.manual_seed(7)
    model = scalar_model.load(str(tmp_path))
    torch.manual_seed(7)
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=1)
    ours = model.network.score.weight
    assert is_known(model) and torch.equal(ours, theirs.score.weight) and ours.std() > 0
    assert not scalar_model.load(str(tmp_path), fresh_head="zero").network.score.weight.any()
    with pytest.raises(UserError, match=r"without a trained scalar head \(score.weight is missing\)"):
        scalar_model.load(str(tmp_path), fresh_head="refuse")


def test_weights_in_several_files_are_read(tmp_path, tokenizer):
    hf = written(tmp_path / "whole", CONFIGS["qwen3"], tokenizer)
    hf.save_pretrained(tmp_path / "parts", max_shard_size="50KB")
    tokenizer.save_pretrained(tmp_path / "parts")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 2
    model = language_model.load(str(tmp_path / "parts"))
    assert is_known(model)
    assert all(torch.equal(p, q) for p, q in zip(model.network.parameters(), hf.parameters(), strict=True))
