"""The tool that plants faults: what it changes is what the tests see, a kill is a test that failed for it, and what has no effect
is not looked at.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import forks  # noqa: E402
import mutants  # noqa: E402
import planting  # noqa: E402

SOURCE = """
LIMIT = 3

def doubled(x):
    return 2 * x
"""
TESTS = """
import os, time, pytest
import planted_in as subject

def test_two():
    assert subject.doubled(2) == 4

def test_limit():
    assert subject.LIMIT == 3

@pytest.fixture
def four():
    return {4: "four"}[subject.doubled(2)]

def test_of_a_fixture(four):
    pass

def test_that_dies():
    if subject.doubled(1) != 2:
        os._exit(7)

def test_that_has_no_end():
    while subject.doubled(1) != 2:
        pass

def test_that_waits():
    if subject.doubled(1) != 2:
        time.sleep(60)

def test_that_leaves_something(tmp_path):
    (tmp_path / "left").write_text("")

@pytest.mark.skip
def test_left_out():
    raise AssertionError
"""


def in_a_fork(path: Path, run):
    """What `run` returns in a child that has this folder's tests collected."""
    told = path / "told.json"
    pid = os.fork()
    if pid == 0:
        try:
            os.chdir(path)
            sys.path.insert(0, str(path))
            forks.silence()
            (path / "temporary").mkdir()
            tempfile.tempdir = str(path / "temporary")
            arguments = ["-c", "/dev/null", "--rootdir", str(path), "test_planted.py"]
            forks.collect(arguments, lambda collected: told.write_text(json.dumps(run(collected))))
        finally:
            os._exit(0)
    forks.ended(pid, 240)
    return json.loads(told.read_text())


@pytest.fixture
def planted(tmp_path):
    (tmp_path / "planted_in.py").write_text(SOURCE)
    (tmp_path / "test_planted.py").write_text(TESTS)
    return tmp_path


def test_each_test_alone_passes_without_a_fault_and_says_how_it_ended_with_one(planted):
    """The planted fault is noticed by a test's own check, by a fixture's, and by what a process does; a wait is no verdict."""

    def run(collected):
        swaps = forks.swaps_of(SOURCE, SOURCE.replace("2 * x", "3 * x"), planted / "planted_in.py")
        functions = forks.living([str(planted / "planted_in.py")])
        names = {name.partition("::")[2]: name for name in collected.items}
        plain = {short: collected.attempt(name, 20).kind for short, name in names.items()}
        quick = [name for short, name in names.items() if short != "test_that_waits"]
        kinds = {name: collected.attempt(name, 1, swaps, functions).kind for name in quick}
        verdict = collected.noticed([(name, 0.0) for name in quick], swaps, functions)
        ended, forks.ended = forks.ended, lambda pid, clock: ended(pid, 1.0)
        waits = collected.noticed([(names["test_that_waits"], 0.0)], swaps, functions)
        return [plain, kinds, verdict, waits, os.listdir(tempfile.gettempdir())]

    plain, kinds, verdict, waits, left = in_a_fork(planted, run)
    assert plain.pop("test_left_out") == "skipped" and len(plain) == 7 and set(plain.values()) == {"passed"}
    assert {name.partition("::")[2]: kind for name, kind in kinds.items()} == {
        "test_two": "failed",
        "test_limit": "passed",
        "test_of_a_fixture": "failed",
        "test_that_dies": "died",
        "test_that_has_no_end": "time",
        "test_that_leaves_something": "passed",
        "test_left_out": "skipped",
    }
    assert verdict == [True, "test_planted.py::test_two", "failed"] and not left
    assert waits == [False, "test_planted.py::test_that_waits", "waits"]


def test_a_value_that_another_module_took_on_import_is_the_changed_one(planted, monkeypatch):
    (planted / "taken_by.py").write_text("from planted_in import LIMIT\n\nTWICE = 2 * LIMIT\n")
    (planted / "test_taken.py").write_text("from taken_by import TWICE\n\ndef test_twice():\n    assert TWICE == 6\n")
    monkeypatch.chdir(planted)
    monkeypatch.syspath_prepend(str(planted))
    monkeypatch.setattr(forks, "ROOT", planted)
    monkeypatch.setattr(forks, "OPTIONS", (*forks.OPTIONS, "-c", "/dev/null", "--rootdir", str(planted)))
    asked = [("test_taken.py::test_twice", 0.1)]
    changed = forks._fresh(forks.Request(asked, "planted_in.py", SOURCE.replace("LIMIT = 3", "LIMIT = 4")))
    assert changed == (True, "test_taken.py::test_twice", "failed")
    assert not forks._fresh(forks.Request(asked, "planted_in.py", SOURCE)).killed


def test_the_lines_that_a_test_runs_are_its_own(planted, monkeypatch):
    monkeypatch.setattr(forks, "trace", lambda files: list(files))  # coverage is in the environment of `make test-mutants` alone
    monkeypatch.setattr(forks, "traced_lines", lambda tracer: {tracer[0]: [5]})
    outcome = in_a_fork(planted, lambda c: c.attempt("test_planted.py::test_two", 1, traced=("f.py",)).lines)
    assert outcome == {"f.py": [5]}


class Collected:
    """Stands for the tests that were found: of each, how it ends with the fault and without."""

    def __init__(self, with_fault, without):
        self.with_fault, self.without, self.asked = with_fault, without, []

    def noticed(self, tests, swaps=(), functions=()):
        for test, _ in tests:
            if self.with_fault[test] != "passed":
                return forks.Verdict(True, test, self.with_fault[test])
        return forks.Verdict(False)

    def attempt(self, name, allowed):
        self.asked.append(name)
        return forks.Outcome(self.without[name], 0.0)


def test_a_test_that_fails_without_the_fault_too_is_no_kill(monkeypatch):
    """It is left out and the next is tried; only where all that fails fails anyway does the mutant survive."""
    source = "def f(x):\n    return x + 1\n"
    monkeypatch.setattr(planting, "source_of", lambda file: source)
    planting.places_of.cache_clear()
    mutant = planting.mutant_of("f.py", "op", source.replace("+", "-"))
    assert (mutant.before, mutant.after, mutant.line) == ("return x + 1", "return x - 1", 2)
    seconds = {"t::a": 0.1, "t::b": 0.2}
    coverage = mutants.Coverage(seconds, {test: {"f.py": [2]} for test in seconds}, {"f.py": [1]})
    functions = {(str(ROOT / "f.py"), "f", 1): []}

    def judged(with_fault, without):
        collected = Collected(dict(zip(seconds, with_fault, strict=True)), dict(zip(seconds, without, strict=True)))
        verdict, tried = mutants.Judge(collected, None, coverage, functions).judge(mutant)
        return verdict, tried, collected.asked

    both = ["t::a", "t::b"]
    assert judged(("failed", "failed"), ("passed", "passed")) == ((True, "t::a", "failed"), both, ["t::a"])
    assert judged(("failed", "failed"), ("failed", "passed")) == ((True, "t::b", "failed"), both, both)
    assert judged(("failed", "passed"), ("failed", "passed")) == ((False, "", ""), both, ["t::a"])
    planting.places_of.cache_clear()


def test_annotations_messages_and_assertions_are_left_alone():
    source = (
        "__all__ = ['a']\n"
        "def f(x: int | None = 3) -> int | None:\n"
        "    if x < 2:\n"
        "        raise ValueError(f'{x + 1} is wrong')\n"
        "    assert x > 1\n"
        "    return list(zip([x * 2], [4], strict=True))\n"
    )
    ranges = planting.idle_ranges(source)

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
        return forks.swaps_of(before, before.replace(old, new), file)

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
    forks.swap(found, forks.living([str(file)]))
    assert (space["plain"](3), space["Held"]().size, space["decorated"](1)) == (2, 9, 6)


def test_what_a_function_makes_anew_at_each_call_needs_no_exchange_of_its_own():
    """The mean over n loses its n, so that the function within has another cell; made by a decorator it would live on."""
    before = "def mean(values, n):\n    return [each() for each in [lambda: sum(values) / n]][0]\n"
    file = Path("/tmp/closures.py")
    space = {}
    exec(compile(before, str(file), "exec"), space)
    functions = forks.living([str(file)])
    found = forks.swaps_of(before, before.replace(" / n", ""), file, functions)
    assert "mean" in [old.co_qualname for old, _ in found] and "mean.<locals>.<lambda>" not in [o.co_qualname for o, _ in found]
    forks.swap(found, functions)
    assert space["mean"]([1, 2, 3], 3) == 6
    made = "def outer(n):\n    def inner(x):\n        return x + n\n    return inner\nkept = outer(1)\n"
    exec(compile(made, str(file), "exec"), space)
    assert forks.swaps_of(made, made.replace("x + n", "x"), file, forks.living([str(file)])) is None, "it lives already"


def test_a_line_is_that_of_its_statement_and_runs_on_import_unless_a_function_holds_it():
    places = planting.Places(
        "LIMIT = 3\n"  # 1
        "@dataclass\n"  # 2
        "class Held:\n"  # 3
        "    size: int = (\n"  # 4
        "        LIMIT\n"  # 5
        "    )\n"  # 6
        "    def twice(self, by=2):\n"  # 7
        "        if self.size > LIMIT:\n"  # 8
        "            return (\n"  # 9
        "                self.size * by\n"  # 10
        "            )\n"  # 11
        "        return 0\n"  # 12
    )
    assert [places.runs_on_import(line) for line in range(1, 13)] == 7 * [True] + 5 * [False]
    assert places.statement(10) == {9, 10, 11} and places.statement(8) == {8} and places.statement(2) == {2, 3}
    assert places.mentions(1) == {1, 5, 8} and places.mentions(7) == set(range(2, 13))


def coverage_of(monkeypatch, on_import):
    monkeypatch.setattr(mutants, "places_of", lambda file: planting.Places("def f(x):\n    x = 1\n\n    return x\n\nLIMIT = 5\n"))
    about = f"{mutants.ABOUT[0]}::pages"
    seconds = {"a": 1.0, "b": 0.1, "c": 30.0, "d": 20.0, about: 0.5}
    lines = {"a": [2], "b": [2, 4], "c": [4], "d": [4], about: []}
    return mutants.Coverage(seconds, {test: {"f.py": held} for test, held in lines.items()}, {"f.py": on_import})


def test_a_line_is_tried_with_the_tests_that_run_it_the_quickest_first_and_not_for_ever(monkeypatch):
    coverage = coverage_of(monkeypatch, [1, 6])

    def of(line: int) -> list[str]:
        return coverage.of(planting.Mutant("f.py", line, "", "", "", (0, 0, "")))

    assert of(2) == ["b", "a"]
    assert of(4) == ["b", "d"], "more than the patience allows"
    assert of(6) == ["b", f"{mutants.ABOUT[0]}::pages", "a", "d"], "a line that runs on import"


@pytest.mark.parametrize("field", ["file", "operator", "copy", "before", "after"])
def test_verdicts_are_kept_by_what_was_changed_and_not_by_the_lines_number(field):
    one = planting.Mutant("f.py", 3, "op", "a + b", "a - b", (1, 2, "-"))
    moved = planting.Mutant("f.py", 90, "op", "a + b", "a - b", (7, 8, "-"))
    assert one.key == moved.key
    other = planting.Mutant(**{**vars(one), field: 2 if field == "copy" else "else"})
    assert other.key != one.key


def test_a_kill_by_a_test_that_is_gone_is_open_again(tmp_path, monkeypatch):
    log = mutants.Log(tmp_path / "verdicts.jsonl")
    monkeypatch.setattr(mutants, "VERDICTS", log)
    monkeypatch.setattr(mutants, "source_of", lambda file: "def test_a(x):\n    pass\n")
    killed_by = {"1": "t.py::test_a[1]", "2": "t.py::test_gone", "3": "", "4": "t.py: TypeError"}
    for (key, by), how in zip(killed_by.items(), ("failed", "failed", "", "import"), strict=True):
        log.add({"key": key, "killed": bool(by), "by": by, "how": how})
    with log.path.open("a") as stream:
        stream.write('{"key": "5", "kil')
    assert sorted(mutants.verdicts()) == ["1", "3", "4"]


def test_what_people_planted_is_found_in_the_sources():
    """Each changes what stands in its file exactly once; all of the reviews are there."""
    found = planting.named()
    assert len(found) == 34 and all(before != after for before, after in (m.sources() for m in found.values()))
