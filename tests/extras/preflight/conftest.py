"""The model that plans are made for."""

from __future__ import annotations

import pytest

from psigrad.language.models import tiny


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A configuration and a tokenizer, and no weights."""
    path = tmp_path_factory.mktemp("model")
    tokenizer = tiny.tokenizer(["one two three"], 270)
    tiny.model("qwen3", len(tokenizer), hidden=64, layers=2, max_length=512).config.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
