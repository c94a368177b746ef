"""Every command of the first section of docs/runs.md, in the order of the page."""

from __future__ import annotations

import filecmp
import json
import shlex
from pathlib import Path

import page_commands
import pytest
import torch

from psigrad import cli
from psigrad.language.models import tiny

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "runs.md"


def commands(folder: Path) -> list[list[str]]:
    """Return the words of each command of the section."""
    section = folder / "section.md"
    section.write_text(PAGE.read_text().partition("## One run, from start to report")[2].partition("\n## ")[0])
    return [shlex.split(command) for command in page_commands.commands(section)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    torch.manual_seed(0)
    tokenizer = tiny.tokenizer(["say a", "say b", "a b c d e"] * 5, 270)
    tiny.model("qwen3", len(tokenizer), hidden=16, layers=1, heads=2).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"say {c}"}) + "\n" for c in "abcdefgh"))
    (tmp_path / "reward.py").write_text(
        "def score(completions, **kwargs):\n    return [float(len(c) % 3) for c in completions]\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_every_command_of_the_section_runs(folder, capsys):
    seen = []
    for words in commands(folder):
        if words[0] == "cmp":
            assert filecmp.cmp(*words[1:], shallow=False)
        else:
            assert words[0] == "psigrad"
            status = cli.main(words[1:])
            assert status == 0, (words, capsys.readouterr().err)
        seen.append(words[1] if words[0] == "psigrad" else words[0])
    assert {"sample", "sft", "grpo", "replay", "cmp", "report"} == set(seen)
    assert len((folder / "runs/a/metrics.jsonl").read_text().splitlines()) >= 3
