"""How fast rows of chat become tokens: two starts on the same rows, told in seconds."""

from __future__ import annotations

import sys

import pytest
import rows
from transformers import AutoTokenizer

from psigrad.language.data.templates import CHATML


@pytest.mark.slow
def test_both_starts_have_the_same_rows_and_are_timed(job, tmp_path, monkeypatch, capsys):
    tokenizer = AutoTokenizer.from_pretrained(job / "base")
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(tmp_path)
    monkeypatch.setattr(sys, "argv", ["rows", str(tmp_path), "--rows", "100", "--turns", "2"])
    rows.main()
    said = capsys.readouterr().out
    assert "100 rows of 2 answers, " in said and " rows a second; second start: " in said
    del sys.modules["rows"]
