"""The tool that plants faults: what it changes is what the tests see, and what has no effect is not looked at."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import mutants  # noqa: E402

PLANTED = """
import json, sys
from pathlib import Path
sys.path.insert(0, "tools")
import mutants
file = "psigrad/objective/parts/advantage.py"
found = {}
mutants.warm()
for kind, (old, new) in json.loads(sys.argv[1]).items():
    source = Path(file).read_text()
    assert old in source
    mutants.changed = lambda *_: (source, source.replace(old, new))
    mutant = mutants.Mutant(file, 1, "none", 0, old, new)
    found[kind] = mutants.killed(mutant, sys.argv[2:], float(120 if kind != "endless" else 5))
print(json.dumps(found))
"""


@pytest.mark.slow
def test_a_planted_fault_is_noticed_and_none_is_not():
    """The fork's import finds the changed source, though nothing is written; a test that never ends counts as noticed."""
    old = "    return over_steps(stats.centre(batch.sequence_reward, batch.present.long()), batch)"
    changes = {
        "none": (old, old),
        "wrong": (old, old.replace("stats.centre(", "2 * stats.centre(")),
        "endless": (old, "    while True: pass"),
    }
    tests = ["tests.objective.test_catalog.test_a_mapping_changes_the_slots_it_names_and_no_other"]
    tests.append("tests.objective.test_golden.test_reinforce_gives_the_numbers_worked_by_hand")
    before = (ROOT / "psigrad/objective/parts/advantage.py").read_bytes()
    done = subprocess.run(
        [sys.executable, "-c", PLANTED, json.dumps(changes), *tests],
        cwd=ROOT, env=mutants._environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    wrong = [True, tests[1]]  # by the test that noticed
    assert json.loads(done.stdout) == {"none": [False, ""], "wrong": wrong, "endless": [True, "its processor time ended"]}
    assert (ROOT / "psigrad/objective/parts/advantage.py").read_bytes() == before


def test_annotations_messages_and_assertions_are_left_alone():
    source = (
        "__all__ = ['a']\n"
        "def f(x: int | None = 3) -> int | None:\n"
        "    if x < 2:\n"
        "        raise ValueError(f'{x + 1} is wrong')\n"
        "    assert x > 1\n"
        "    return list(zip([x * 2], [4], strict=True))\n"
    )
    ranges = mutants.idle_ranges(source)

    def idle(text: str) -> bool:
        line = next(i for i, row in enumerate(source.splitlines(), 1) if text in row)
        place = (line, source.splitlines()[line - 1].index(text))
        return any(a <= place <= b for a, b in ranges)

    assert all(idle(text) for text in ("['a']", "int | None =", "int | None:", "x + 1", "x > 1", "True"))
    assert not any(idle(text) for text in ("3)", "x < 2", "x * 2", "[4]"))


def test_what_changes_functions_alone_is_swapped_also_where_they_are_decorated_or_within_others():
    before = """
import functools
LIMIT = 3
def plain(x, least=1):
    return max(x, least) + 1
class Held:
    @functools.cached_property
    def size(self):
        return 2 * LIMIT
def outer(f):
    def inner(x):
        return f(x) + 1
    return inner
@outer
def decorated(x):
    return x
"""
    file = Path("/tmp/some.py")
    space = {}
    exec(compile(before, str(file), "exec"), space)

    def swapped(old, new):
        return mutants.swaps_of(before, before.replace(old, new), file)

    for old, new in (
        ("LIMIT = 3", "LIMIT = 4"),
        ("least=1", "least=2"),
        ("@outer\n", ""),
        ("@functools.cached_property", "@property"),
    ):
        assert swapped(old, new) is None, "runs on import"
    assert swapped("+ 1", "+ 1") == []
    found = [*swapped("least) + 1", "least) - 1"), *swapped("2 * LIMIT", "3 * LIMIT"), *swapped("f(x) + 1", "f(x) + 5")]
    assert [old.co_qualname for old, _ in found] == ["plain", "Held.size", "outer", "outer.<locals>.inner"]
    mutants.swap(found)
    assert (space["plain"](3), space["Held"]().size, space["decorated"](1)) == (2, 9, 6)


def test_what_has_noticed_much_comes_first_and_patience_ends_the_list():
    coverage = mutants.Coverage({("f.py", 3): {"a", "b", "c"}}, {"a": 1.0, "b": 2.0, "c": 9.0})
    one = mutants.Mutant("f.py", 3, "", 0, "", "")
    assert coverage.of(one, {"b": 5}) == ["b", "a", "c"] and coverage.of(one, {}, 4.0) == ["a", "b"]


def test_a_line_is_tried_with_the_tests_that_run_it_the_quickest_first_and_not_for_ever():
    seconds = {"a": 1.0, "b": 0.1, "c": 30.0, "d": 20.0, f"{mutants.ABOUT[0]}pages": 0.5}
    coverage = mutants.Coverage({("f.py", 3): {"a", "b"}, ("f.py", 4): {"c", "d", "b"}}, seconds)

    def of(line: int) -> list[str]:
        return coverage.of(mutants.Mutant("f.py", line, "", 0, "", ""))

    assert of(3) == ["b", "a"]
    assert of(4) == ["b", "d"], "more than the patience allows"
    assert of(1) == ["b", f"{mutants.ABOUT[0]}pages", "a", "d"], "a line that runs on import"


@pytest.mark.parametrize("field", ["file", "operator", "copy", "before", "after"])
def test_verdicts_are_kept_by_what_was_changed_and_not_by_the_lines_number(field):
    one = mutants.Mutant("f.py", 3, "op", 0, "a + b", "a - b")
    moved = mutants.Mutant("f.py", 90, "op", 7, "a + b", "a - b")
    assert one.key == moved.key
    other = mutants.Mutant(**{**vars(one), field: 2 if field == "copy" else "else"})
    assert other.key != one.key
