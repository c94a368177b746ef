"""Small faults planted in the mathematics one at a time, and whether a test notices.

    python tools/mutants.py                 a seeded sample of 1,000; goes on where it stopped
    python tools/mutants.py --count 50      fewer, of the same sequence
    python tools/mutants.py --only keep.py  those of one file
    python tools/mutants.py --again         judge the survivors once more, after a change of the tests

cosmic-ray knows what can be changed (`+` to `*`, `<` to `<=`, a number, a decorator, a loop that never runs …). Of every place in
the files of `SUBJECTS` and each family of changes one is a candidate, chosen by the seed; the sample is drawn from all of them.
Not changed are annotations, what a `raise` says, docstrings, `__all__`, and what only holds of our own code: `assert`, and the
`strict` of `zip`.

A mutant is killed when a test that runs its line fails, or takes far too long. Which tests run a line is measured once, with
coverage. Each mutant is tried in a fork of a process that has torch imported, so that it costs as long as its tests do; no file
is written: the fork's import finds the changed source. One without effect counts as a survivor like any other.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib.machinery
import itertools
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType
from typing import Any

ROOT = Path(__file__).parents[1]
WORK = ROOT / "build" / "mutants"
RESULTS = ROOT / "benchmarks" / "results" / "mutants.json"
SUBJECTS = (
    "psigrad/objective/**/*.py",
    "psigrad/tabular/*.py",
    "psigrad/language/models/logprobs.py",
    "psigrad/language/rollout/samplers/distribution.py",
    "psigrad/language/training/update.py",
    *(f"psigrad/language/training/online/{name}.py" for name in ("figures", "forward", "online_rl")),
)
TESTS = (
    "tests/objective",
    "tests/tabular",
    "tests/experiments",
    "tests/studies/test_groups.py",
    *(f"tests/control/test_{name}.py" for name in ("dqn", "on_policy", "sb3_agreement", "steps", "trust_region")),
    *(f"tests/surface/test_{name}.py" for name in ("docs", "immutable")),
    "tests/language/recipes/test_row_limits.py",
    *(
        f"tests/language/models/test_{name}.py"
        for name in ("logprob_bounds", "logprobs", "packed_forward", "gradients", "recomputed_gradients")
    ),
    *(f"tests/language/rollout/test_{name}.py" for name in ("distribution", "samplers", "episodes")),
    *(
        f"tests/language/training/test_{name}.py"
        for name in (
            *(
                "adamw",
                "bounds",
                "critic",
                "kept_activations",
                "lag",
                "learn",
                "offline_tasks",
                "old_log_probs",
                "overlap",
                "reference",
            ),
            *("token_figures", "update"),
        )
    ),
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

    def of(self, mutant: Mutant) -> list[str]:
        """The tests worth trying, the quickest first. A line that runs on import is tried with all tests of its file, and with
        those of what is written about the methods.
        """
        found = self.tests.get((mutant.file, mutant.line), set())
        if not found:
            found = set().union(*(tests for (file, _), tests in self.tests.items() if file == mutant.file))
            found |= {test for test in self.seconds if test.startswith(ABOUT)}
        chosen, total = [], 0.0
        for test in sorted(found, key=lambda test: self.seconds.get(test, 0.0)):
            total += self.seconds.get(test, 0.0)
            if chosen and total > PATIENCE:
                break
            chosen.append(test)
        return chosen


def measured(fresh: bool) -> Coverage:
    """The coverage of `TESTS`, measured once."""
    data, report = WORK / "coverage", WORK / "tests.xml"
    if fresh or not data.exists():
        WORK.mkdir(parents=True, exist_ok=True)
        settings = WORK / "coveragerc"
        settings.write_text(f"[run]\nsource = psigrad\ndata_file = {data}\n")
        tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tools.mutants", f"--junitxml={report}", *TESTS]
        coverage_of = [sys.executable, "-m", "coverage", "run", f"--rcfile={settings}"]
        subprocess.run([*coverage_of, *tests], cwd=ROOT, check=True, env=_environment())
    seconds: dict[str, float] = {}
    for case in ET.parse(report).iter("testcase"):
        name = f"{case.get('classname')}.{(case.get('name') or '').partition('[')[0]}"
        seconds[name] = seconds.get(name, 0.0) + float(case.get("time") or 0)
    tests: dict[tuple[str, int], set[str]] = {}
    import coverage

    held = coverage.CoverageData(str(data))
    held.read()
    for file in held.measured_files():
        place = str(Path(file).relative_to(ROOT))
        for line, contexts in held.contexts_by_lineno(file).items():
            if names := {context for context in contexts if context in seconds}:
                tests[place, line] = names
    return Coverage(tests, seconds)


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


def killed(mutant: Mutant, tests: list[str], allowed: float) -> bool:
    """Whether these tests notice, in a fork of this process, which must not have imported psigrad."""
    if not tests:
        return False
    file = ROOT / mutant.file
    _, source = changed(file, mutant.operator, mutant.occurrence)
    pid = os.fork()
    if pid == 0:
        _judge(file, source, tests)
    handle = os.pidfd_open(pid)
    try:
        in_time = bool(select.select([handle], [], [], allowed)[0])
        if not in_time:
            os.kill(pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0
    finally:
        os.close(handle)


def _judge(file: Path, source: str, tests: list[str]) -> None:
    """Run the tests against the changed source; never returns."""
    code = 3
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
        loader, original = importlib.machinery.SourceFileLoader, importlib.machinery.SourceFileLoader.get_code

        def get_code(self: importlib.machinery.SourceFileLoader, name: str) -> CodeType | None:
            if Path(self.path) == file:
                return compile(source, str(file), "exec", dont_inherit=True)
            return original(self, name)

        loader.get_code = get_code  # type: ignore[method-assign]
        import pytest

        names = [f"{name.rpartition('.')[0].replace('.', '/')}.py::{name.rpartition('.')[2]}" for name in tests]
        code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *names]))
    finally:
        os._exit(code)


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


def run(mutants: list[Mutant], coverage: Coverage, again: bool) -> dict[str, bool]:
    """Judge every mutant that has no verdict yet; key -> killed."""
    log = WORK / "verdicts.jsonl"
    verdicts: dict[str, bool] = {}
    if log.exists():
        verdicts = {row["key"]: row["killed"] for row in map(json.loads, log.read_text().splitlines())}
    open_ones = [m for m in mutants if m.key not in verdicts or (again and not verdicts[m.key])]
    start = time.time()
    for number, mutant in enumerate(open_ones, 1):
        tests = coverage.of(mutant)
        allowed = 20 + 4 * sum(coverage.seconds.get(test, 0.0) for test in tests)
        verdicts[mutant.key] = killed(mutant, tests, allowed)
        with log.open("a") as stream:
            stream.write(json.dumps({"key": mutant.key, "killed": verdicts[mutant.key]}) + "\n")
        if not verdicts[mutant.key]:
            print(f"survived  {mutant.file}:{mutant.line}  {mutant.before}  ->  {mutant.after}", flush=True)
        if number % 50 == 0:
            print(f"{number} of {len(open_ones)}, {time.time() - start:.0f} s", flush=True)
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
    """Run the sample and print what survived. The exit status is 1 below 95 %."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="part of a file's name")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--fresh", action="store_true", help="measure the coverage anew")
    asked = parser.parse_args(arguments)
    sys.path.insert(0, str(ROOT))
    os.chdir(ROOT)
    os.environ.update(_environment())
    coverage = measured(asked.fresh)
    mutants = sample(asked.seed, asked.count, asked.only)
    warm()
    verdicts = run(mutants, coverage, asked.again)
    survivors = [m for m in mutants if not verdicts[m.key]]
    share = 1 - len(survivors) / max(len(mutants), 1)
    print(f"{len(mutants)} mutants, {len(mutants) - len(survivors)} killed ({share:.1%}), {len(survivors)} survived")
    if not asked.only:
        write(asked.seed, mutants, survivors)
    return 0 if share >= 0.95 else 1


if __name__ == "__main__":
    sys.exit(main())
