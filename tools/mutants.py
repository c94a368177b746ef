"""Small faults planted in the mathematics one at a time, and whether a test notices.

    python tools/mutants.py                 a seeded sample of 1,000; goes on where it stopped
    python tools/mutants.py --count 50      fewer, of the same sequence
    python tools/mutants.py --only keep.py  those of one file
    python tools/mutants.py --minutes 20    what can be judged in that time, of the same sequence
    python tools/mutants.py --again         judge the survivors once more, after a change of the tests

cosmic-ray knows what can be changed (`+` to `*`, `<` to `<=`, a number, a decorator, a loop that never runs …). Of every place in
the files of `SUBJECTS` and each family of changes one is a candidate, chosen by the seed; the sample is drawn from all of them.
Not changed are annotations, what a `raise` says, docstrings, `__all__`, and what only holds of our own code: `assert`, and the
`strict` of `zip`.

A mutant is killed when a test that runs its line fails, or takes far too long. Which tests run a line is measured once, with
coverage. Each mutant is tried in a fork of a process that has torch imported, so that it costs as long as its tests do; no file
is written: the fork's import finds the changed source. What changes functions alone is tried in a fork that has psigrad and the
tests imported too, whose functions get the changed code; who survives there is judged again in the first way. One without effect
counts as a survivor like any other.
"""

from __future__ import annotations

import argparse
import ast
import functools
import gc
import hashlib
import importlib.machinery
import inspect
import itertools
import json
import math
import os
import random
import resource
import select
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
WORK = ROOT / "build" / "mutants"
RESULTS = ROOT / "benchmarks" / "results" / "mutants.json"
SUBJECTS = (
    "psigrad/objective/**/*.py",
    "psigrad/tabular/*.py",
    *(f"psigrad/control/methods/{name}.py" for name in ("dqn", "on_policy", "trpo")),
    "psigrad/language/models/logprobs.py",
    "psigrad/language/rollout/samplers/distribution.py",
    "psigrad/language/training/update.py",
    *(f"psigrad/language/training/online/{name}.py" for name in ("collect", "figures", "forward", "online_rl")),
)
TESTS = (
    *(f"tests/{room}" for room in ("objective", "tabular", "language/training", "extras/experiments")),
    *(f"tests/control/test_{name}.py" for name in ("dqn", "on_policy", "sb3_agreement", "steps", "trust_region")),
    "tests/studies/test_groups.py",
    *(f"tests/surface/test_{name}.py" for name in ("docs", "immutable")),
    "tests/language/recipes/test_row_limits.py",
    *(
        f"tests/language/models/test_{name}.py"
        for name in ("logprob_bounds", "logprobs", "packed_forward", "gradients", "recomputed_gradients")
    ),
    *(f"tests/language/rollout/test_{name}.py" for name in ("distribution", "samplers", "episodes")),
)
# Seconds of tests that a mutant is worth, the quickest first: one that only a slower test would notice is a survivor.
PATIENCE = 40.0
# Tests of what a file says when it is imported: the constants of the methods.
ABOUT = (
    *(
        "tests.surface.test_docs.",
        "tests.surface.test_immutable.",
        "tests.objective.test_bounds.",
        "tests.objective.test_catalog.",
    ),
    "tests.objective.test_enumerated",
)
SKIPPED_OPERATORS = ("VariableReplacer", "VariableInserter")


@dataclass(frozen=True)
class Mutant:
    """One change at one place."""

    file: str
    line: int
    operator: str
    occurrence: int
    before: str
    after: str
    copy: int = 1
    """Which of the equal lines of the file."""

    @property
    def key(self) -> str:
        """What identifies it as long as its lines are the same."""
        text = f"{self.file}\0{self.operator}\0{self.before}\0{self.after}\0{self.copy}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def idle_ranges(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Where changes have no effect on behaviour: annotations, what `raise` says, assertions, `__all__`."""
    found: list[ast.AST | None] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.arg | ast.AnnAssign):
            found.append(node.annotation)
        elif isinstance(node, ast.FunctionDef):
            found.append(node.returns)
        elif isinstance(node, ast.Raise):
            found.append(node.exc)
        elif isinstance(node, ast.Assert):
            found.append(node.test)
        elif (isinstance(node, ast.keyword) and node.arg == "strict") or (
            isinstance(node, ast.Assign) and "__all__" in [getattr(target, "id", "") for target in node.targets]
        ):
            found.append(node.value)
    ranges = (n for n in found if isinstance(n, ast.expr))
    return [((n.lineno, n.col_offset), (n.end_lineno or 0, n.end_col_offset or 0)) for n in ranges]


def candidates(file: Path, seed: int) -> Iterator[tuple[float, Path, str, int, int]]:
    """Place in the sample's order, file, operator, occurrence, and which of equal lines it is: one for each place in the file and
    family of changes.
    """
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    source = file.read_text()
    idle, nodes = idle_ranges(source), list(ast_nodes(get_ast(source)))
    places: dict[tuple[str, tuple[int, int]], list[tuple[str, int]]] = {}
    for name in operator_names():
        if name.split("/")[1] in SKIPPED_OPERATORS:
            continue
        operator, occurrence = get_operator(name)(), 0
        for node in nodes:
            for start, _ in operator.mutation_positions(node):
                if not any(a <= start <= b for a, b in idle):
                    places.setdefault((name.split("_")[0], start), []).append((name, occurrence))
                occurrence += 1
    lines, copies = source.splitlines(), Counter[str]()
    for (family, (line, column)), choices in sorted(places.items()):
        # by the line's words and not by its number, so that another line above it changes nothing
        about = f"{seed} {file.name} {family} {column} {lines[line - 1]}"
        copies[about] += 1
        draw = random.Random(f"{about} {copies[about]}")
        yield draw.random(), file, *draw.choice(choices), copies[about]


def made(file: Path, name: str, occurrence: int, copy: int) -> Mutant | None:
    """The mutant, unless the change changes nothing."""
    before, after = changed(file, name, occurrence)
    lines = list(zip(before.splitlines(), after.splitlines(), strict=False))
    at = next((i for i, (a, b) in enumerate(lines) if a != b), -1)
    return (
        None if at < 0 else Mutant(str(file.relative_to(ROOT)), at + 1, name, occurrence, *(x.strip() for x in lines[at]), copy)
    )


def changed(file: Path, name: str, occurrence: int) -> tuple[str, str]:
    """The source of a file before and after a change."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    source = file.read_text()
    return source, mutate_code(source, get_operator(name)(), occurrence) or source


def sample(seed: int, count: int, only: str = "") -> list[Mutant]:
    """The first `count` of the mutants in a seeded order."""
    files = sorted(file for pattern in SUBJECTS for file in ROOT.glob(pattern) if file.name != "__init__.py")
    found = sorted(candidate for file in files for candidate in candidates(file, seed))
    mutants = (made(*candidate) for _, *candidate in found if only in str(candidate[0]))
    return list(itertools.islice((mutant for mutant in mutants if mutant is not None), count))


@dataclass(frozen=True)
class Coverage:
    """Which tests run which line, and the seconds that each takes."""

    tests: dict[tuple[str, int], set[str]]
    seconds: dict[str, float]

    def of(self, mutant: Mutant, kills: Mapping[str, int] | None = None, patience: float = PATIENCE) -> list[str]:
        """The tests worth trying, the quickest first, and before them what has noticed much (`kills`). A line that runs on import
        is tried with all tests of its file, and with those of what is written about the methods.
        """
        found = self.tests.get((mutant.file, mutant.line), set())
        if not found:
            found = set().union(*(tests for (file, _), tests in self.tests.items() if file == mutant.file))
            found |= {test for test in self.seconds if test.startswith(ABOUT)}
        chosen, total = [], 0.0
        for test in sorted(found, key=lambda test: self.seconds.get(test, 0.0) / (1 + (kills or {}).get(test, 0))):
            total += self.seconds.get(test, 0.0)
            if chosen and total > patience:
                break
            chosen.append(test)
        return chosen


def measured(fresh: bool) -> Coverage:
    """The coverage of `TESTS`, measured once, one after the other; what was measured before a stop is not measured again."""
    WORK.mkdir(parents=True, exist_ok=True)
    tests: dict[tuple[str, int], set[str]] = {}
    seconds: dict[str, float] = {}
    for name in TESTS:
        data, report = (WORK / f"{name.replace('/', '.')}{end}" for end in (".coverage", ".xml"))
        if fresh or not report.exists():
            settings = WORK / "coveragerc"
            settings.write_text(f"[run]\nsource = psigrad\ndata_file = {data}\n")
            pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tools.mutants", f"--junitxml={report}.part", name]
            coverage_of = [sys.executable, "-m", "coverage", "run", f"--rcfile={settings}"]
            subprocess.run([*coverage_of, *pytest], cwd=ROOT, check=True, env=_environment())
            Path(f"{report}.part").rename(report)  # both are whole
        _add(data, report, tests, seconds)
    return Coverage(tests, seconds)


@functools.cache
def _source(module: str) -> str:
    file = ROOT / f"{module.replace('.', '/')}.py"
    return file.read_text() if file.exists() else ""


def _add(data: Path, report: Path, tests: dict[tuple[str, int], set[str]], seconds: dict[str, float]) -> None:
    import coverage

    for case in ET.parse(report).iter("testcase"):
        place, name = case.get("classname", ""), case.get("name", "").partition("[")[0]
        if f"def {name}(" not in _source(place):  # renamed since, or gone: pytest would run none of those beside it
            continue
        name = f"{place}.{name}"
        seconds[name] = seconds.get(name, 0.0) + float(case.get("time") or 0)
    held = coverage.CoverageData(str(data))
    held.read()
    for file in held.measured_files():
        place = str(Path(file).relative_to(ROOT))
        for line, contexts in held.contexts_by_lineno(file).items():
            if names := {context for context in contexts if context in seconds}:
                tests.setdefault((place, line), set()).update(names)


def pytest_runtest_setup(item: Any) -> None:
    """Tell coverage which test runs: this file is a plugin of pytest's while it is measured. Coverage's own way to know takes a
    method of hypothesis's for the test.
    """
    import coverage

    running = coverage.Coverage.current()
    if running is not None:
        running.switch_context(f"{item.module.__name__}.{item.originalname}")


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


class Verdict(NamedTuple):
    """Whether a mutant was noticed, and by which test, or how else the process ended."""

    killed: bool
    by: str = ""


# What is allowed is processor time, since a busy machine is no verdict; what waits without computing has so many times as long.
WALL = 10
ENDS = {
    -signal.SIGXCPU: "its processor time ended",
    -signal.SIGKILL: "its time ended",
    2: "the tests' import",  # pytest's status
}


def killed(mutant: Mutant, tests: list[str], allowed: float, swaps: Swaps | None = None) -> Verdict:
    """Whether these tests notice, in a fork of this process. The fork imports the changed source, so that this process must not
    have imported psigrad; or with `swaps` the functions that it has are given their changed code.
    """
    if not tests:
        return Verdict(False)
    file = ROOT / mutant.file
    _, source = changed(file, mutant.operator, mutant.occurrence)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        _judge(file, source, tests, allowed, writing, swaps)
    os.close(writing)
    handle = os.pidfd_open(pid)
    try:
        if not select.select([handle], [], [], WALL * allowed)[0]:
            os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code in (0, 4):  # pytest's status where a test is not there
            return Verdict(False)
        told = os.read(reading, 1 << 12).decode() if select.select([reading], [], [], 0)[0] else ""
        return Verdict(True, told or ENDS.get(code, f"exit status {code}"))
    finally:
        os.close(handle)
        os.close(reading)


class Reporter:
    """Tells the name of the first test that failed through a pipe: a plugin of pytest's."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe

    def pytest_runtest_logreport(self, report: Any) -> None:
        """One phase of one test."""
        if report.failed and self.pipe >= 0:
            file, _, name = report.nodeid.partition("::")
            os.write(self.pipe, f"{file.removesuffix('.py').replace('/', '.')}.{name.partition('[')[0]}".encode())
            self.pipe = -1


def _judge(file: Path, source: str, tests: list[str], allowed: float, pipe: int, swaps: Swaps | None) -> None:
    """Run the tests against the changed source, for so many seconds of processor time; never returns."""
    code = 3
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(allowed), math.ceil(allowed) + 5))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
        if swaps is None:
            _import_changed(file, source)
        else:
            swap(swaps)
        import pytest

        names = [f"{name.rpartition('.')[0].replace('.', '/')}.py::{name.rpartition('.')[2]}" for name in tests]
        code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *names], plugins=[Reporter(pipe)]))
    finally:
        os._exit(code)


def _import_changed(file: Path, source: str) -> None:
    loader, original = importlib.machinery.SourceFileLoader, importlib.machinery.SourceFileLoader.get_code

    def get_code(self: importlib.machinery.SourceFileLoader, name: str) -> CodeType | None:
        if Path(self.path) == file:
            return compile(source, str(file), "exec", dont_inherit=True)
        return original(self, name)

    loader.get_code = get_code  # type: ignore[method-assign]


Swaps = list[tuple[CodeType, CodeType]]


def swaps_of(before: str, after: str, file: Path) -> Swaps | None:
    """The functions whose code differs, each before and after; None where what runs on import differs too."""
    try:
        old, new = (compile(source, str(file), "exec", dont_inherit=True) for source in (before, after))
    except SyntaxError:
        return None
    found: Swaps = []
    return found if _compare(old, new, found) else None


def _compare(old: CodeType, new: CodeType, found: Swaps) -> bool:
    """Collect the functions of a module or class that differ; whether nothing else does."""
    if (old.co_code, old.co_names, len(old.co_consts)) != (new.co_code, new.co_names, len(new.co_consts)):
        return False
    for a, b in zip(old.co_consts, new.co_consts, strict=True):
        if not isinstance(a, CodeType) or not isinstance(b, CodeType):
            if (type(a), repr(a)) != (type(b), repr(b)):
                return False
        elif a.co_flags & inspect.CO_OPTIMIZED:
            if not _pair(a, b, found):
                return False
        elif not _compare(a, b, found):
            return False
    return True


def _pair(old: CodeType, new: CodeType, found: Swaps) -> bool:
    """A function and those within it, which a decorator may have made already; whether their cells agree."""
    if old == new:
        return True
    inner = [[c for c in code.co_consts if isinstance(c, CodeType)] for code in (old, new)]
    if old.co_freevars != new.co_freevars or [c.co_qualname for c in inner[0]] != [c.co_qualname for c in inner[1]]:
        return False
    found.append((old, new))
    return all(_pair(a, b, found) for a, b in zip(*inner, strict=True))


def swap(swaps: Swaps) -> None:
    """Give every living function its changed code."""
    wanted = {(old.co_filename, old.co_qualname, old.co_firstlineno): new for old, new in swaps}
    for thing in gc.get_objects():
        if type(thing) is FunctionType:
            code = thing.__code__
            if (new := wanted.get((code.co_filename, code.co_qualname, code.co_firstlineno))) is not None:
                thing.__code__ = new


def warm() -> None:
    """Import what every test needs, but for psigrad."""
    import hypothesis  # noqa: F401
    import numpy  # noqa: F401
    import pytest  # noqa: F401
    import torch
    import transformers  # noqa: F401
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401

    torch.set_num_threads(1)
    assert not any(name.partition(".")[0] == "psigrad" for name in sys.modules)


class Hot:
    """A fork that has imported psigrad and the tests, and judges what changes functions alone: no mutant waits for imports.

    What the unchanged code has computed on import stays, so that a survivor here may be none: it is judged again without.
    """

    def __init__(self) -> None:
        (self._asked, asking), (answering, self._answer) = os.pipe(), os.pipe()
        self._in, self._out = os.fdopen(asking, "w"), os.fdopen(answering)
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self._serve()
            finally:
                os._exit(1)
        os.close(self._asked)
        os.close(self._answer)

    def _serve(self) -> None:
        """Judge one mutant for each line that comes."""
        import pytest

        self._in.close()
        terminal = os.dup(1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *TESTS])
        os.dup2(terminal, 1)
        gc.freeze()
        with os.fdopen(self._asked) as asked, os.fdopen(self._answer, "w") as answer:
            for line in asked:
                row = json.loads(line)
                mutant = Mutant(**row["mutant"])
                swaps = swaps_of(*changed(ROOT / mutant.file, mutant.operator, mutant.occurrence), ROOT / mutant.file)
                verdict = killed(mutant, row["tests"], row["allowed"], swaps if mutant.operator else [])
                print(json.dumps(verdict), file=answer, flush=True)

    def killed(self, mutant: Mutant, tests: list[str], allowed: float) -> Verdict:
        """As `killed`."""
        print(json.dumps({"mutant": asdict(mutant), "tests": tests, "allowed": allowed}), file=self._in, flush=True)
        return Verdict(*json.loads(self._out.readline()))

    def close(self) -> None:
        """End it."""
        self._in.close()
        os.waitpid(self.pid, 0)


def run(mutants: list[Mutant], coverage: Coverage, again: bool, end: float, patience: float) -> dict[str, bool]:
    """Judge every mutant that has no verdict yet, until the time `end`; key -> killed."""
    log = WORK / "verdicts.jsonl"
    verdicts, kills = dict[str, bool](), Counter[str]()
    for row in map(json.loads, log.read_text().splitlines() if log.exists() else ()):
        if row["killed"] and not row.get("by"):  # of an older form, which took a busy machine for a test that noticed
            continue
        verdicts[row["key"]] = row["killed"]
        kills[row.get("by", "")] += 1
    open_ones = [m for m in mutants if m.key not in verdicts or (again and not verdicts[m.key])]
    start, hot = time.time(), Hot()
    for number, mutant in enumerate(open_ones, 1):
        if time.time() > end:
            break
        tests = coverage.of(mutant, kills, patience)
        allowed = 20 + 4 * sum(coverage.seconds.get(test, 0.0) for test in tests)
        verdict = Verdict(False)
        if (
            not again
            and swaps_of(*changed(ROOT / mutant.file, mutant.operator, mutant.occurrence), ROOT / mutant.file) is not None
        ):
            verdict = hot.killed(mutant, tests, allowed)
        if not verdict.killed:
            verdict = killed(mutant, tests, allowed)
        verdicts[mutant.key] = verdict.killed
        kills[verdict.by] += 1
        with log.open("a") as stream:
            stream.write(json.dumps({"key": mutant.key, **verdict._asdict()}) + "\n")
        if not verdict.killed:
            print(f"survived  {mutant.file}:{mutant.line}  {mutant.before}  ->  {mutant.after}", flush=True)
        if number % 50 == 0:
            print(f"{number} of {len(open_ones)}, {time.time() - start:.0f} s", flush=True)
    hot.close()
    return verdicts


def write(seed: int, mutants: list[Mutant], survivors: list[Mutant]) -> None:
    """The counts and the list of survivors; what was written by hand about one of them, in `why`, stays."""
    why = {}
    if RESULTS.exists():
        why = {row["key"]: row["why"] for row in json.loads(RESULTS.read_text())["survivors"]}
    ordered = sorted(survivors, key=lambda mutant: (mutant.file, mutant.line))
    rows = [{**asdict(mutant), "key": mutant.key, "why": why.get(mutant.key, "")} for mutant in ordered]
    held = {"seed": seed, "mutants": len(mutants), "killed": len(mutants) - len(survivors), "survivors": rows}
    RESULTS.write_text(json.dumps(held, indent=1, ensure_ascii=False) + "\n")


def main(arguments: list[str] | None = None) -> int:
    """Run the sample and print what survived. The exit status is 1 below 98 %."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="part of a file's name")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--fresh", action="store_true", help="measure the coverage anew")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop then; what is judged is a sample of all")
    parser.add_argument("--patience", type=float, default=PATIENCE, help="seconds of tests for a mutant")
    asked = parser.parse_args(arguments)
    sys.path.insert(0, str(ROOT))
    os.chdir(ROOT)
    os.environ.update(_environment())
    coverage = measured(asked.fresh)
    mutants = sample(asked.seed, asked.count, asked.only)
    warm()
    verdicts = run(mutants, coverage, asked.again, time.time() + 60 * asked.minutes, asked.patience)
    judged = [m for m in mutants if m.key in verdicts]
    survivors = [m for m in judged if not verdicts[m.key]]
    share = 1 - len(survivors) / max(len(judged), 1)
    print(f"{len(judged)} of {len(mutants)} mutants judged, {share:.1%} killed, {len(survivors)} survived")
    if not asked.only:
        write(asked.seed, judged, survivors)
    return 0 if share >= 0.98 else 1


if __name__ == "__main__":
    sys.exit(main())
