"""docs/labelling.md: its example runs as it stands, and it names every table and every reason that is left out."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

from psigrad_studio.labels import assignments
from psigrad_studio.labels.schema import Base

PAGE = (Path(__file__).parents[3] / "docs" / "labelling.md").read_text()


def test_the_example_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "grpo"
    folder.mkdir(parents=True)
    rows = [
        {"step": step, "kind": "train", "row": row, "k": k, "prompt": f"q{row}", "completion": f"{step} {row} {k}"}
        for step, row, k in itertools.product((1, 2), range(20), range(3))
    ]
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    before, after = re.search(r"```python\n(.*?)```", PAGE, re.S).group(1).split("results.agreement")
    names: dict = {}
    exec(before, names)
    sides = itertools.cycle(("left", "right"))
    for n in itertools.count():
        shown = assignments.next_task(names["db"], names["me"], names["project"])
        if shown is None:
            break
        assignments.vote(
            names["db"], names["me"], shown.assignment, assignments.LabelAnswer(choice=next(sides)), key=f"number {n:06}"
        )
    exec("results.agreement" + after, names)
    assert len((tmp_path / "pairs.jsonl").read_text().splitlines()) == 40


def test_every_table_and_reason_is_explained():
    assert all(f"`{table}`" in PAGE for table in Base.metadata.tables)
    reasons = ("tie", "both_bad", "split", "middle", "alone", "skipped", "unanswered")
    assert all(f"`{reason}`" in PAGE for reason in reasons)
