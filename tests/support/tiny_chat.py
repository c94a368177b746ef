"""A small model whose tokenizer has a chat template, and what the template writes before an answer."""

from __future__ import annotations

from pathlib import Path

from psigrad.language.data.templates import CHATML
from psigrad.language.models import tiny

HEAD = "<|im_start|>user\nsay a:<|endoftext|>\n<|im_start|>assistant\n"


def save_chat_model(folder: Path) -> Path:
    """The folder, with the model and its tokenizer."""
    tokenizer = tiny.tokenizer(["say a: user assistant"] * 5, 280)
    tokenizer.chat_template = CHATML
    tiny.model("qwen3", len(tokenizer), hidden=16, layers=1, heads=2, max_length=128).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
