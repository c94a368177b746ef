"""The list of faults in tests/cases.yaml: every test that it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]


def faults_of(cases: list[dict[str, str]]) -> list[str]:
    """What is wrong with each entry."""
    found = []
    for case in cases:
        if case.keys() - {"line", "test", "why"} or ("test" in case) == ("why" in case) or not all(case.values()):
            found.append(f"{case}: expected line, and test or why")
        elif "test" in case:
            file, _, name = case["test"].partition("::")
            path = ROOT / file
            if not path.is_file() or not re.search(rf"^def {re.escape(name)}\(", path.read_text(), re.MULTILINE):
                found.append(case["test"])
    return found


def test_every_test_that_the_list_names_exists() -> None:
    cases = yaml.safe_load((ROOT / "tests" / "cases.yaml").read_text())
    assert len(cases) > 20 and faults_of(cases) == []


def test_negative_control_a_test_that_is_gone_is_found() -> None:
    gone = [{"line": "a 1", "test": "tests/surface/test_cases.py::test_gone"}, {"line": "a 2", "test": "tests/gone.py::test_a"}]
    wrong = [{"line": "a 3"}, {"line": "a 4", "test": "tests/surface/test_cases.py::faults_of", "why": "none"}]
    assert len(faults_of([*gone, *wrong])) == 4
