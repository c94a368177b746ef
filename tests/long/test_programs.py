"""The example in which a small model learns to write programs."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import programs


def test_the_tests_of_a_task_are_passed_by_its_program_and_not_by_a_careless_one():
    steps = [("times", 4), ("minus", 7), ("plus", 2)]
    made = {}
    exec(programs.program(steps), made)
    row = programs.row(steps, random.Random(0))
    assert all(eval(test.removeprefix("assert "), dict(made)) for test in row["tests"])
    exec(programs.program([steps[1], steps[0], steps[2]]), made)
    assert not all(eval(test.removeprefix("assert "), dict(made)) for test in row["tests"])


@pytest.mark.long
def test_grpo_unlearns_the_mistakes_of_the_demonstrations(tmp_path, capsys):
    programs.main(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "grpo" / "metrics.jsonl").read_text().splitlines()]
    means = [row["eval/code/mean"] for row in rows if "eval/code/mean" in row]
    assert means[0] < 0.6 and means[-1] > 0.85
    assert "after GRPO" in capsys.readouterr().out
