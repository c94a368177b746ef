"""A runs folder with small language models of every kind that the chat page meets, and with what it must leave out."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from psigrad.language.data.templates import CHATML
from psigrad.language.models import tiny
from psigrad.language.models.language_model import load
from psigrad.language.models.lora import Lora

# a template that says nothing of system prompts
SILENT = (
    "{% for m in messages if m['role'] != 'system' %}{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def make_runs(runs: Path) -> Path:
    """base/, chat/plain/model, chat/talking/checkpoints/step-00000007, chat/silent/model, chat/adapter/checkpoints/step-00000002;
    and a control run, a reward model, an empty folder and a link, none of which is a model to chat with.
    """
    tokenizer = tiny.tokenizer(["say a: b c d e f g h", "you said that"] * 5, 280)
    places = {
        "base": None,
        "chat/plain/model": None,
        "chat/talking/checkpoints/step-00000007": CHATML,
        "chat/silent/model": SILENT,
    }
    for seed, (place, template) in enumerate(places.items()):
        tokenizer.chat_template = template
        model = tiny.model("qwen3", len(tokenizer), hidden=32, layers=1, heads=2, seed=seed)
        with torch.no_grad():  # distributions that differ between prompts, and an EOS that is rare
            for parameter in model.parameters():
                parameter.mul_(2)
        model.save_pretrained(runs / place)
        tokenizer.save_pretrained(runs / place)
    _adapter(runs)
    (runs / "control" / "model").mkdir(parents=True)
    (runs / "control" / "model" / "config.json").write_text(json.dumps({"architectures": ["ActorCritic"]}))
    (runs / "control" / "model" / "model.safetensors").write_bytes(b"x")
    (runs / "reward" / "model").mkdir(parents=True)
    (runs / "reward" / "model" / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForSequenceClassification"]}))
    (runs / "reward" / "model" / "model.safetensors").write_bytes(b"x")
    (runs / "empty").mkdir()
    (runs / "link").symlink_to(runs / "base")
    return runs


def _adapter(runs: Path) -> None:
    run = runs / "chat" / "adapter"
    model = load(str(runs / "base"), lora=Lora(rank=2, alpha=16.0))
    with torch.no_grad():
        for name, parameter in model.network.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.5, generator=torch.Generator().manual_seed(0))
    model.save(run / "checkpoints" / "step-00000002")
    (run / "config.json").write_text(json.dumps({"model": {"path": str(runs / "base"), "lora_rank": 2}}))
