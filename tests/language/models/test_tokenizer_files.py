"""Tokenizer files that would make a text very much longer, or take minutes to read."""

from __future__ import annotations

import json
import re
import shutil
import time

import pytest

from psigrad.config import Model
from psigrad.errors import UserError
from psigrad.language.loading import model_source
from psigrad.language.loading.load_model import configure_chat


def times(letter: str, count: int) -> dict:
    return {"type": "Replace", "pattern": {"String": letter}, "content": letter * count}


TOKENIZER = {
    "a text a billion times": (
        "normalizer",
        {"type": "Sequence", "normalizers": [times("a", 1000)] * 3},
        "can make a text 1e+09 times as long",
    ),
    "a token a million times": (
        "decoder",
        {"type": "Sequence", "decoders": [times("ab", 2000)] * 2},
        "can make a text 4e+06 times as long",
    ),
    "too much around a text": (
        "post_processor",
        {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<eos>", "type_id": 0}}] * 5000, "pair": []},
        "the post_processor of its tokenizer can make a text 5e+03 times as long",
    ),
    "too many added tokens": (
        "added_tokens",
        [{"id": i, "content": f"<{i}>"} for i in range(300_000)],
        "has 300,000 added tokens",
    ),
}


@pytest.mark.parametrize("name", TOKENIZER)
def test_a_hostile_tokenizer_is_a_sentence_within_seconds(name, job, tmp_path):
    kind, part, said = TOKENIZER[name]
    shutil.copytree(job / "base", tmp_path / "model")
    file = tmp_path / "model" / "tokenizer.json"
    held = json.loads(file.read_text())
    file.write_text(json.dumps({**held, kind: part}))
    start = time.process_time()
    with pytest.raises(UserError, match=f"cannot be read .*{re.escape(said)}"):
        model_source.load_tokenizer(str(tmp_path / "model"))
    with pytest.raises(UserError, match=f"chat_template_path .* cannot be read .*{re.escape(said)}"):
        configure_chat(model_source.load_tokenizer(str(job / "base")), Model(chat_template_path=str(tmp_path / "model")))
    assert time.process_time() - start < 5
    usual = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, times(" ", 3)]}
    file.write_text(json.dumps({**held, "normalizer": usual}))
    assert len(model_source.load_tokenizer(str(tmp_path / "model"))), "negative control: usual parts are read"
