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
    text = (ROOT / "docs" / "reliability.md").read_text().partition("## Promises")[2].partition("## What was tried")[0]
    promises = re.split(r"^\d+\. ", text, flags=re.MULTILINE)[1:]
    assert len(promises) >= 13
    for promise in promises:
        named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", promise)
        assert named, promise.splitlines()[0]
        for file, part in named:
            names = re.findall(r"^def (test_\w+)", (ROOT / file).read_text(), re.MULTILINE)
            assert any(part in name for name in names), f"{file} has no test with {part!r} in its name"


def outcomes_of(failed):
    return {1: faults.Outcome(tests=3, faults=40, failed=failed)}


def test_a_row_that_falls_short_is_shown():
    row = (faults.Row(1, "a kill", "all is there", (("tests/x.py", ""),)),)
    assert "| 1 | a kill | all is there | 3 | 40 | 0 |" in faults.table(row, outcomes_of(0))
    assert "**fell short** (1 of 3)" in faults.table(row, outcomes_of(1))
    assert "**fell short** (0 of 0)" in faults.table(row, {1: faults.Outcome()}), "a row without a test holds nothing"


def test_the_page_has_the_table_of_these_rows():
    page = (ROOT / "docs" / "reliability.md").read_text()
    shown = page.partition(faults.BEGIN)[2].partition(faults.END)[0]
    assert "fell short" not in shown
    for row in faults.ROWS:
        assert f"| {row.number} | {row.fault} | {row.holds} |" in shown


def test_what_ran_apart_is_counted_by_its_reports_and_the_last_run_of_a_test_holds(tmp_path):
    """Two files, of which one test ran twice; `count` says how many faults it injects, and one that was left out is no test."""
    case = '<testcase classname="tests.a.test_x" name="{name}" time="1">{inner}</testcase>'
    many = '<properties><property name="count" value="40"/></properties>'
    runs = [
        [("test_kill[1]", '<failure message="x"/>'), ("test_kill[2]", many), ("test_other", "")],
        [("test_kill[1]", ""), ("test_kill[3]", '<skipped message="x"/>')],
    ]
    reports = [tmp_path / f"{i}.xml" for i in range(2)]
    for report, cases in zip(reports, runs, strict=True):
        report.write_text(f"<testsuite>{''.join(case.format(name=n, inner=inner) for n, inner in cases)}</testsuite>")
    rows = (faults.Row(1, "a kill", "all is there", (("tests/a/test_x.py", "kill"),)),)
    found = faults.counted(rows, reports)[1]
    assert (found.tests, found.faults, found.failed) == (2, 41, 0)
    assert faults.counted(rows, reports[:1])[1].failed == 1
