"""The page on Python: its snippets run, one after the other."""

from __future__ import annotations

import re
from pathlib import Path

from tiny_jobs import make_job

PAGE = Path(__file__).parents[2] / "docs" / "python.md"


def test_the_snippets_run(tmp_path, monkeypatch):
    job = make_job(tmp_path)
    (tmp_path / "prompts.jsonl").write_text((job / "train.jsonl").read_text())
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(snippets) == 4
    source = "\n".join(snippets).replace("MODEL", str(job / "base"))
    names: dict = {}
    exec(compile(source, str(PAGE), "exec"), names)
    assert names["result"].folder == Path("runs/second").absolute()
    assert (tmp_path / "runs" / "third" / "model").is_dir()
