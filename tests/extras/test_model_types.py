"""`psigrad plan` and one step of `psigrad grpo` on a tiny checkpoint of every type of model that is trained."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest
import torch
from cases import slow
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)

from psigrad import cli
from psigrad.language.loading import load_model
from psigrad.language.models import tiny

MADE = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "make" / "families.py"))
FIRST = ("qwen3", "qwen3_5_text", "granitemoehybrid (hybrid)", "gemma3n_text")
"""Run always: softmax attention, linear attention, a recurrence with experts, and inputs of each layer. The others, whose numbers
are in language/models/test_attention.py, with the slow tests.
"""
TYPES = [pytest.param(name, marks=() if name in FIRST else pytest.mark.slow) for name in MADE["FAMILIES"]]
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 14}
REWARD = f"{Path(__file__).parents[1] / 'support' / 'tiny_rewards.py'}:early_letters"
ROWS = "".join(json.dumps({"prompt": f"say {c}", "answer": c}) + "\n" for c in "abcdefgh")


@pytest.fixture(scope="module")
def tokenizer():
    return tiny.tokenizer(["hello world 123"] * 5, 280)


def config(name: str):
    """That of docs/families.md."""
    return MADE["config"](name, vocab_size=280)


def save(network, tokenizer, folder: Path) -> Path:
    torch.manual_seed(0)
    for p in network.parameters():
        torch.nn.init.normal_(p, std=0.1)
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder.parent / "rows.jsonl").write_text(ROWS)
    return folder


def command(name: str, model: Path, *more: str) -> int:
    given = ["--model", str(model), "--dataset", str(model.parent / "rows.jsonl"), "--reward", REWARD, "--max-steps", "1"]
    given += ["--max-completion-length", "6", "--num-generations", "4", "--prompts-per-step", "2", "--micro-batch-tokens", "64"]
    return cli.main([*name.split(), *given, "--device", "cpu", "--threads", "1", "--no-report", *more])


def grpo(model: Path, *more: str) -> dict:
    """The figures of one step; psigrad's own check of the sampler runs in it."""
    out = model.parent / "run"
    assert command("grpo", model, "--output-dir", str(out), "--learning-rate", "0.01", "--save-steps", "1", *more) == 0
    return json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])


@pytest.mark.usefixtures("rewards_here")
@pytest.mark.parametrize("name", TYPES)
def test_it_is_planned_and_trained(name, tokenizer, tmp_path, capsys):
    network = AutoModelForCausalLM.from_config(config(name))
    model = save(network, tokenizer, tmp_path / "model")
    assert command("plan grpo", model, "--json") == 0
    assert json.loads(capsys.readouterr().out)["model"]["parameters"] == sum(p.numel() for p in network.parameters())
    figures = grpo(model)
    assert figures["step"] == 1 and figures["sampling/sampling_logp_difference/max"] < 1e-4


MERGED = ("--lora-rank", "4", "--lora-save", "merged")
TOWERED = [("qwen3_5", ()), ("gemma3", MERGED), *slow(("qwen3_5", MERGED), ("gemma3", ()), ("gemma4", ()), ("gemma4", MERGED))]


def vision_language(name: str):
    """A checkpoint of images and text, and its class in transformers."""
    if name == "qwen3_5":
        tower = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
        ids = {f"{token}_token_id": 270 + i for i, token in enumerate(("image", "video", "vision_start", "vision_end"))}
        text, tower = config("qwen3_5_text").to_dict(), {**tower, "patch_size": 4, "num_position_embeddings": 16}
        return Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=tower, **ids))
    if name == "gemma4":
        tower = {**TOWER, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 16}
        text = config("gemma4_text").to_dict()
        return Gemma4ForConditionalGeneration(Gemma4Config(text_config=text, vision_config=tower, audio_config=None))
    tower = {**TOWER, "image_size": 28}
    tokens = {"mm_tokens_per_image": 4, "image_token_index": 270, "boi_token_index": 271, "eoi_token_index": 272}
    return Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=config("gemma3_text").to_dict(), vision_config=tower, **tokens)
    )


@pytest.mark.usefixtures("rewards_here")
@pytest.mark.parametrize(("name", "lora"), TOWERED)
def test_the_towers_of_a_vision_language_checkpoint_never_learn_and_are_saved(name, lora, tokenizer, tmp_path, capsys):
    network = vision_language(name)
    model = save(network, tokenizer, tmp_path / "model")
    (model / "preprocessor_config.json").write_text("{}") if name == "qwen3_5" else None
    load_model.print_once.cache_clear()
    before = {key: x.clone() for key, x in network.state_dict().items()}
    assert command("plan grpo", model, *lora, "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    grpo(model, *lora)
    assert len(re.findall(r"Only the language model in .* is trained\. ", capsys.readouterr().err)) == 1
    opened = AutoModelForImageTextToText.from_pretrained(tmp_path / "run" / "model")
    assert type(opened) is type(network) and opened.config.text_config.to_dict()["vocab_size"] == 280
    after = opened.state_dict()
    assert after.keys() == before.keys()
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert changed and all("language_model" in key or key == "lm_head.weight" for key in changed)
    checkpoint = next((tmp_path / "run" / "checkpoints").iterdir())
    if lora:
        adapted = load_file(checkpoint / "adapter_model.safetensors")
        assert adapted and not any("vis" in key for key in adapted)
        learnt = sum(x.numel() for x in adapted.values())
    else:
        learnt = sum(p.numel() for key, p in network.named_parameters() if "language_model" in key or key == "lm_head.weight")
        assert grpo(model, "--max-steps", "2", "--extend")["step"] == 2
        assert (tmp_path / "run" / "model" / "preprocessor_config.json").exists() == (name == "qwen3_5")
    gradients = next(item["bytes"] for item in plan["memory"]["items"] if item["name"] == "policy: gradients")
    assert gradients == 4 * learnt


@pytest.mark.parametrize("wanted", ["plan grpo", "grpo"])
def test_a_checkpoint_without_a_text_half_to_load_is_refused_with_what_to_take(wanted, tokenizer, tmp_path, capsys):
    Qwen2_5_VLConfig().save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text(ROWS)
    assert command(wanted, tmp_path / "model", *([] if "plan" in wanted else ["--output-dir", str(tmp_path / "run")])) == 2
    said = capsys.readouterr().err.strip()
    assert "qwen2_5_vl is an image or audio model, which psigrad cannot train; choose a text model of the family" in said
    assert said.count("\n") == 0
