"""The example of docs/agents.md, run as it stands there: a short form of it, and the whole with what it claims."""

from __future__ import annotations

import json
import re
import shlex
from contextlib import chdir
from pathlib import Path

import pytest

from psigrad.cli import main

PAGE = (Path(__file__).parents[3] / "docs" / "agents.md").read_text()


def run_page(folder: Path, monkeypatch, **instead: str) -> list[dict]:
    """Do what the page says, with some of its numbers replaced; the held-out figures."""
    pytest.importorskip("openai")
    text = PAGE
    for old, new in instead.items():
        assert re.search(rf"{old}[= ]\d+", text), old
        text = re.sub(rf"{old}([= ])\d+", rf"{old}\g<1>{new}", text)
    agent, prepare, *_ = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (command,) = re.findall(r"^psigrad (grpo.*?)\n```", text, re.DOTALL | re.MULTILINE)
    with chdir(folder):
        monkeypatch.syspath_prepend(str(folder))
        Path("my_agent.py").write_text(agent)
        exec(compile(prepare, "prepare.py", "exec"), {"__name__": "__main__"})
        assert main(shlex.split(command.replace("\\\n", " "))) == 0
        rows = [json.loads(line) for line in Path("runs/agent/metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "eval/reward/mean" in row]


@pytest.mark.slow
def test_the_example_runs(tmp_path, monkeypatch):
    short = {"max_steps": "2", "--max-steps": "1", "--num-generations": "2", "--eval-prompts": "4"}
    assert len(run_page(tmp_path, monkeypatch, **short)) == 2


@pytest.mark.long
def test_the_example_learns_what_the_page_says(tmp_path, monkeypatch):
    before, after = run_page(tmp_path, monkeypatch)
    assert after["eval/reward/low"] > before["eval/reward/mean"] + 0.02


def test_the_page_has_the_agent_and_its_two_files():
    assert len(re.findall(r"```python\n", PAGE)) == 3 and "def solve(row, client)" in PAGE
