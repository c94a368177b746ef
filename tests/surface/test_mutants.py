"""The tool that plants faults: a kill is a test that fails, what has no effect is not changed, and named faults apply."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import mutants  # noqa: E402


@pytest.mark.parametrize(("after", "noticed"), [("3 * x", True), ("x + x", False)])
def test_a_fault_is_noticed_by_a_test_that_fails_and_its_file_is_restored(after, noticed, tmp_path):
    (tmp_path / "planted_in.py").write_text("def doubled(x):\n    return 2 * x\n")
    (tmp_path / "test_it.py").write_text("import planted_in\n\ndef test_two():\n    assert planted_in.doubled(2) == 4\n")
    mutant = mutants.Mutant("planted_in.py", "op", f"def doubled(x):\n    return {after}\n")
    assert mutants.noticed_by(tmp_path, ["test_it.py"], mutant) == ("test_it.py::test_two" if noticed else "")
    assert not mutants.noticed_by(tmp_path, ["test_it.py"]), "as it was"


def test_annotations_exceptions_and_assertions_are_left_alone():
    source = (
        "def f(x: int | None = 3) -> int | None:\n"
        "    if x < 2:\n"
        "        raise ValueError(f'{x + 1} is wrong')\n"
        "    assert x > 1\n"
        "    return [x * 2]\n"
    )
    ranges = mutants.idle_ranges(source)

    def idle(text: str) -> bool:
        line = next(i for i, row in enumerate(source.splitlines(), 1) if text in row)
        place = (line, source.splitlines()[line - 1].index(text))
        return any(a <= place <= b for a, b in ranges)

    assert all(idle(text) for text in ("int | None =", "int | None:", "x + 1", "x > 1"))
    assert not any(idle(text) for text in ("3)", "x < 2", "x * 2"))


def test_every_named_fault_changes_its_file_and_has_tests():
    """Each changes what is in its file exactly once."""
    found = mutants.named()
    assert len(found) == 34 and all(mutant.source != (ROOT / mutant.file).read_text() for mutant in found)
    assert all((ROOT / test).exists() for mutant in found for test in mutants.tests_of(mutant.file))
    assert [mutant.about for mutant in found if not mutants.tests_of(mutant.file)] == []
