"""The list of faults in tests/cases.yaml: every test that it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]


def faults_of(cases: dict[str, str | list[str]]) -> list[str]:
    """What names no test, and gives no reason for that either."""
    found = []
    for line, entries in cases.items():
        for entry in entries if isinstance(entries, list) else [entries]:
            file, _, name = entry.partition("::")
            path = ROOT / file
            known = path.is_file() and re.search(rf"^def {re.escape(name)}\(", path.read_text(), re.MULTILINE)
            if not known and not re.match(r"why: \S", entry):
                found.append(f"{line}: {entry}")
    return found


def test_every_test_that_the_list_names_exists() -> None:
    cases = yaml.safe_load((ROOT / "tests" / "cases.yaml").read_text())
    assert len(cases) > 100 and faults_of(cases) == []


def test_negative_control_a_test_that_is_gone_is_found() -> None:
    gone = {"a 1": "tests/surface/test_cases.py::test_gone", "a 2": ["tests/gone.py::test_a", "why: none is needed"]}
    wrong = {"a 3": "", "a 4": "why: ", "a 5": "tests/surface/test_cases.py"}
    assert len(faults_of(gone | wrong)) == 5
