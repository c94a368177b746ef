"""Models that are not known: transformers reads them, and their numbers are compared before anything runs fused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from fused_models import COMMON, CONFIGS, is_known, some_groups, written
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GemmaConfig, LlamaConfig, Qwen2Config, Qwen3Config
from transformers.utils import hub

from psigrad.errors import UserError
from psigrad.language.models import language_model, scalar_model
from psigrad.language.models.fused import loader

SCALED = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
OTHERS = {
    "scaled rotary embedding": LlamaConfig(
        **COMMON, hidden_size=64, rope_parameters=SCALED | {"original_max_position_embeddings": 64}
    ),
    "biases in the feed-forward layers": LlamaConfig(**COMMON, hidden_size=64, mlp_bias=True),
    "another activation": Qwen2Config(**COMMON, hidden_size=64, hidden_act="gelu"),
    "another architecture": GemmaConfig(**COMMON, hidden_size=64, head_dim=16),
}


@pytest.mark.parametrize(
    "settings",
    [
        {"quantization_config": {"bits": 4}},
        {"auto_map": {"AutoModelForCausalLM": "other.Model"}},
        {"transformers_weights": "other.safetensors"},
        {"num_key_value_heads": 3},
        {"layer_types": ["full_attention", "chunked_attention"]},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_that_change_the_model_are_left_to_transformers(settings):
    config = copy.deepcopy(CONFIGS["qwen3"])
    assert loader.describes(config)
    vars(config).update(settings)  # past the checks of its own
    assert not loader.describes(config)


@pytest.mark.needs("compiler")
def test_a_llama_has_no_window_whatever_its_file_says(tmp_path, tokenizer):
    hf = written(tmp_path, CONFIGS["llama"], tokenizer, sliding_window=3)
    around = language_model.prepare(hf, tokenizer)
    for model in (language_model.load(str(tmp_path)), around):
        assert model.decoder is not None and [layer.window for layer in model.decoder.layers] == [0, 0]


@pytest.mark.parametrize("name", OTHERS)
def test_transformers_reads_what_is_not_known(name, tmp_path, tokenizer):
    hf = written(tmp_path, OTHERS[name], tokenizer)
    assert not loader.describes(hf.config)
    model = language_model.load(str(tmp_path))
    assert not is_known(model)
    ids = torch.tensor([[5, 6, 7, 8]])
    assert torch.allclose(model.network(input_ids=ids).logits, hf.eval()(input_ids=ids).logits, atol=1e-5)


@pytest.mark.needs("compiler")
def test_every_layers_window_is_its_own(tmp_path, tokenizer):
    config = Qwen3Config(
        **COMMON,
        hidden_size=64,
        head_dim=16,
        use_sliding_window=True,
        sliding_window=3,
        layer_types=["sliding_attention", "full_attention"],
    )
    written(tmp_path, config, tokenizer)
    model = language_model.load(str(tmp_path))
    assert is_known(model) and model.decoder is not None
    assert [layer.window for layer in model.decoder.layers] == [3, 0]
    ours = model.evaluate(some_groups()).logp
    assert torch.allclose(ours, model.evaluate(some_groups(), packed=False).logp, atol=2e-5, rtol=0)


def changed(folder: Path, change) -> None:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    "change",
    [
        lambda x: {**x, "lm_head.weight": x["model.embed_tokens.weight"] * 2},
        lambda x: {name.removeprefix("model."): t for name, t in x.items()},
        lambda x: {**x, "model.extra": torch.zeros(3)},
    ],
    ids=["a tied head of its own", "names without their prefix", "a tensor too many"],
)
def test_files_that_are_not_as_expected_are_left_to_transformers(change, tmp_path, tokenizer):
    written(tmp_path, CONFIGS["qwen3"], tokenizer, tie_word_embeddings=True)
    changed(tmp_path, change)
    model = language_model.load(str(tmp_path))
    assert not is_known(model)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(p, q) for p, q in zip(model.network.parameters(), theirs.parameters(), strict=True))


@pytest.mark.needs("compiler")
def test_a_tensor_of_another_shape_is_refused(tmp_path, tokenizer):
    written(tmp_path, CONFIGS["qwen3"], tokenizer)
    changed(tmp_path, lambda x: {**x, "model.norm.weight": torch.ones(3)})
    with pytest.raises(UserError, match=r"model\.norm\.weight has shape \(3,\); the configuration says \(40,\)"):
        language_model.load(str(tmp_path))


@pytest.fixture
def asked(monkeypatch):
    """Files that the hub is asked for, which never answers."""
    files = []

    def no_answer(repo: str, name: str, **_: Any) -> str:
        files.append(name)
        raise LocalEntryNotFoundError(f"{name} of {repo} is not in the cache")

    monkeypatch.setattr(hub, "hf_hub_download", no_answer)
    return files


@pytest.mark.parametrize("load", [language_model.load, scalar_model.load])
def test_a_hub_that_does_not_answer_is_not_asked_again(load, asked):
    with pytest.raises(UserError, match=r"'some/model'.*couldn't connect"):
        load("some/model")
    assert asked == ["config.json"]


def test_an_adapter_in_the_hubs_cache_is_left_to_transformers(asked, monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    kept = tmp_path / "models--some--adapter"
    for file, text in {"refs/main": "5e7", "snapshots/5e7/adapter_config.json": "{}"}.items():
        (kept / file).parent.mkdir(parents=True)
        (kept / file).write_text(text)
    assert loader.load("some/adapter", torch.float32) is None
    assert asked == ["config.json"]


def test_lora_goes_around_transformers_modules(tmp_path, tokenizer):
    written(tmp_path, CONFIGS["qwen3"], tokenizer)
    model = language_model.load(str(tmp_path), lora=language_model.Lora(2))
    assert not is_known(model) and model.adapter is not None
    late = language_model.prepare(language_model.load(str(tmp_path)).network, model.tokenizer, lora=language_model.Lora(2))
    assert list(late.trainable()) == list(model.trainable())
