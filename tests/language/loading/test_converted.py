"""Adapters and GGUF files as models: converted once, computing the same, refused in a sentence."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from psigrad.config import Model, Run
from psigrad.errors import UserError
from psigrad.language.loading import model_source
from psigrad.language.loading.load_model import load_model
from psigrad.language.loading.model_source import convert_to_folder
from psigrad.language.models import tiny
from psigrad.records import pins

PROMPT = torch.tensor([[5, 6, 7, 8, 9]])


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "psigrad" / "models"


@pytest.fixture
def base(tmp_path) -> Path:
    tokenizer = tiny.tokenizer(["say a: b"], 270)
    tiny.model("llama", len(tokenizer), hidden=32, layers=2, heads=2, seed=3).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def adapted(base: Path, folder: Path, seed: int = 0, **settings: object) -> torch.Tensor:
    """An adapter of peft with random weights, saved in `folder`; the logits of the base with it."""
    model = AutoModelForCausalLM.from_pretrained(base)
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], **settings))
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.1)
    model.save_pretrained(folder)
    with torch.no_grad():
        return model(PROMPT).logits


@torch.no_grad()
def logits_at(folder: str) -> torch.Tensor:
    return AutoModelForCausalLM.from_pretrained(folder)(PROMPT).logits


@pytest.mark.parametrize("settings", [{}, {"use_dora": True}, {"use_rslora": True}, {"modules_to_save": ["lm_head"]}], ids=str)
def test_an_adapter_is_its_base_with_the_weights_added(base, tmp_path, settings):
    wanted = adapted(base, tmp_path / "adapter", **settings)
    place = convert_to_folder(str(tmp_path / "adapter"))
    torch.testing.assert_close(logits_at(place), wanted, rtol=1e-4, atol=1e-5)
    assert float((logits_at(str(base)) - wanted).abs().max()) > 1e-2, "negative control: the adapter matters"
    assert (Path(place) / "config.json").exists() and not (Path(place) / "adapter_config.json").exists()


def test_it_is_converted_once_and_anew_when_it_changed(base, tmp_path, monkeypatch, cache):
    adapted(base, tmp_path / "adapter")
    first = convert_to_folder(str(tmp_path / "adapter"))
    with monkeypatch.context() as patch:
        patch.setattr("peft.AutoPeftModelForCausalLM", None)
        assert convert_to_folder(str(tmp_path / "adapter")) == first
    adapted(base, tmp_path / "adapter", seed=1)
    second = convert_to_folder(str(tmp_path / "adapter"))
    assert second != first and sorted(p.name for p in cache.iterdir()) == sorted(Path(p).name for p in (first, second))


def test_it_is_converted_anew_when_its_base_was_trained_in_place(base, tmp_path):
    shutil.copytree(base, tmp_path / "own")
    adapted(tmp_path / "own", tmp_path / "adapter")
    first = convert_to_folder(str(tmp_path / "adapter"))
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "own")
    with torch.no_grad():
        trained.base_model.norm.weight.mul_(2)
    trained.save_pretrained(tmp_path / "own")
    second = convert_to_folder(str(tmp_path / "adapter"))
    assert second != first and convert_to_folder(str(tmp_path / "adapter")) == second
    torch.testing.assert_close(logits_at(second), 2 * logits_at(first), rtol=1e-4, atol=1e-5)


def test_training_starts_from_it_and_pins_it(base, tmp_path):
    wanted = adapted(base, tmp_path / "adapter")
    model = load_model(Model(path=str(tmp_path / "adapter"), lora_rank=2), Run(), None)
    with torch.no_grad():
        torch.testing.assert_close(model.network(PROMPT).logits, wanted, rtol=1e-4, atol=1e-5)
    assert pins.identify_model(str(tmp_path / "adapter")) is not None


def test_folders_of_transformers_and_hub_names_stay_as_they_are(base, cache):
    assert convert_to_folder(str(base)) == str(base) and convert_to_folder("org/name") == "org/name"
    assert not cache.exists()


def test_what_cannot_be_converted_is_a_sentence_and_leaves_nothing(tmp_path, cache):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(tmp_path / "none")}))
    with pytest.raises(UserError, match=r"There is no folder .*none' \(the base of the adapter .*adapter'\)"):
        convert_to_folder(str(tmp_path / "adapter"))
    (tmp_path / "broken.gguf").write_bytes(b"GGUF nothing")
    with pytest.raises(UserError, match=r"The model .*broken.gguf' cannot be converted: "):
        convert_to_folder(str(tmp_path / "broken.gguf"))
    (tmp_path / "two").mkdir()
    for name in ("a", "b"):
        (tmp_path / "two" / f"{name}.gguf").write_bytes(b"")
    with pytest.raises(UserError, match=r"several GGUF files \(a.gguf, b.gguf\); name one of them"):
        convert_to_folder(str(tmp_path / "two"))
    assert not list(cache.iterdir())
    with pytest.raises(UserError, match="is a local folder; remove the revision"):
        model_source.locate(Model(path=str(tmp_path / "broken.gguf"), revision="main"))


def test_what_transformers_trips_over_is_a_sentence_and_leaves_nothing(tmp_path, monkeypatch):
    """transformers 5.17 looks for a first token that a file need not have."""
    from transformers import AutoModelForCausalLM

    def trip(*_, **__):
        raise AttributeError("no attribute 'bos_token_id'")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", trip)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match=r"a\.gguf' cannot be converted: no attribute 'bos_token_id'"):
        convert_to_folder(str(tmp_path / "a.gguf"))
    assert not list((tmp_path / "cache").rglob("model"))


def test_the_cache_holds_the_conversions_that_were_used_last(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(model_source, "CONVERSIONS", 2)
    made = []

    def convert(source, folder):
        made.append(source.name)
        (folder / "inside").mkdir(parents=True)

    def use(name, at):
        place = Path(model_source._convert_once(name, Path(name), convert))
        os.utime(place, (at, at))
        return {one.name for one in place.parent.iterdir()}

    assert use("a", 1) == {"a"} and use("b", 2) == {"a", "b"}
    assert use("a", 3) == {"a", "b"}, "it is there: nothing is made or dropped"
    assert use("c", 4) == {"a", "c"}, "b was used longest ago"
    assert use("b", 5) == {"b", "c"} and made == ["a", "b", "c", "b"]
