"""The table of faults: it covers the rows that it says it does, and every test that it names exists."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from cases import repeat_for

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import faults  # noqa: E402


def test_it_covers_every_row_of_the_list():
    assert [row.number for row in faults.ROWS] == [*range(1, 30)]


@repeat_for("row", faults.ROWS)
def test_every_row_has_tests_that_exist(row):
    assert row.tests
    for file, part in row.tests:
        names = re.findall(r"^def (test_\w+)", (ROOT / file).read_text(), re.MULTILINE)
        assert any(part in name for name in names), f"{file} has no test with {part!r} in its name"


def test_every_promise_of_the_page_names_tests_that_exist():
    text = (ROOT / "docs" / "reliability.md").read_text().partition("## Promises")[2].partition("## What was tested")[0]
    promises = re.split(r"^\d+\. ", text, flags=re.MULTILINE)[1:]
    assert len(promises) >= 13
    for promise in promises:
        named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", promise)
        assert named, promise.splitlines()[0]
        for file, part in named:
            names = re.findall(r"^def (test_\w+)", (ROOT / file).read_text(), re.MULTILINE)
            assert any(part in name for name in names), f"{file} has no test with {part!r} in its name"


def test_the_page_has_the_table_of_these_rows():
    page = (ROOT / "docs" / "reliability.md").read_text()
    shown = page.partition("## What was tested")[2]
    shown_rows = re.findall(r"^\| (\d+) \| (.*?) \| [\d,]+ \| [\d,]+ \| (\d+) \|$", shown, re.MULTILINE)
    assert shown_rows == [(str(row.number), row.fault, "0") for row in faults.ROWS]
    assert "`tests/faults.yaml` says what each row requires" in shown and all(row.holds for row in faults.ROWS)
