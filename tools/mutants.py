"""Plant small faults in the mathematics one at a time, and count those that a test notices.

    python tools/mutants.py                 the faults of tests/mutants.yaml, then a seeded sample of 100
    python tools/mutants.py --count 1000    more of the same sequence (hours)
    python tools/mutants.py --drawn FILE    the first --count faults of a list that have an effect. If FILE is new, it gets a list
                                            of --draw faults, by --seed --within FOLDER …, and nothing is judged

The list (build/mutants.txt by default) gets the verdicts, so that a stopped call resumes. "no effect" is written by hand.
cosmic-ray says what can be changed (`+` to `*`, `<` to `<=`, a number, a decorator …). Each fault is written into a copy of the
checkout, where the tests of its room run until one fails, those that name its module first; one that runs out of time is
noticed too. A test that also fails without the fault gives no verdict. The exit status is 1 if a fault of tests/mutants.yaml
survives.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import itertools
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).parents[1]
NAMED, DRAWN = ROOT / "tests" / "mutants.yaml", ROOT / "build" / "mutants.txt"
# What faults are planted in, and the tests that must notice.
ROOMS = {
    "psigrad/objective/**/*.py": ("tests/objective", "tests/studies/test_psi.py", "tests/studies/test_groups.py"),
    "psigrad/tabular/*.py": ("tests/tabular",),
    "psigrad/control/methods/*.py": ("tests/control",),
    "psigrad/control/environments/*.py": ("tests/control",),
    "psigrad/control/networks/*.py": ("tests/control",),
    "psigrad/language/models/logprobs.py": ("tests/language/models", "tests/objective"),
    "psigrad/language/rollout/**/*.py": ("tests/language/rollout",),
    "psigrad/language/rewards/*.py": ("tests/language/rewards",),
    "psigrad/language/training/**/*.py": ("tests/language/training", "tests/language/recipes"),
    "psigrad/language/recipes/*.py": ("tests/language/recipes", "tests/language/training", "tests/language/rewards"),
    "psigrad/language/data/**/*.py": ("tests/language/data",),
}
SKIPPED_OPERATORS = ("VariableReplacer", "VariableInserter")
SECONDS = 1200


class Mutant(NamedTuple):
    """A file of the checkout and its changed source; `about` says what was changed."""

    file: str
    about: str
    source: str


def idle_ranges(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return where changes have no effect on behaviour: annotations, exceptions, assertions."""
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
    return [((n.lineno, n.col_offset), (n.end_lineno or 0, n.end_col_offset or 0)) for n in found if isinstance(n, ast.expr)]


def sample(seed: int, within: tuple[str, ...] = ("",)) -> Iterator[Mutant]:
    """Yield mutants of all rooms, or of the folders `within`, in a seeded order."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    names = [name for name in operator_names() if name.split("/")[1] not in SKIPPED_OPERATORS]
    places = []
    files = sorted(file for pattern in ROOMS for file in ROOT.glob(pattern))
    for file in (file for file in files if str(file.relative_to(ROOT)).startswith(within)):
        source = file.read_text()
        idle, nodes = idle_ranges(source), list(ast_nodes(get_ast(source)))
        for name in names:
            positions = [start for node in nodes for start, _ in get_operator(name)().mutation_positions(node)]
            places += [(file, name, i) for i, at in enumerate(positions) if not any(a <= at <= b for a, b in idle)]
    random.Random(seed).shuffle(places)
    for file, name, occurrence in places:
        if mutant := plant(str(file.relative_to(ROOT)), name, occurrence):
            yield mutant


def plant(file: str, name: str, occurrence: int) -> Mutant | None:
    """Return the mutant of an operator's occurrence in a file. None if nothing changes, or if every import would fail."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    source = (ROOT / file).read_text()
    after = mutate_code(source, get_operator(name)(), occurrence)
    with contextlib.suppress(SyntaxError):
        if after is not None and ast.dump(ast.parse(after)) != ast.dump(ast.parse(source)):
            return Mutant(file, f"{name} {occurrence}", after)
    return None


def named() -> list[Mutant]:
    """Return the faults of tests/mutants.yaml. Raises `SystemExit` if a text to change is not in its file exactly once."""
    found = []
    for row in yaml.safe_load(NAMED.read_text()):
        source = (ROOT / row["file"]).read_text()
        if source.count(row["old"]) != 1:
            raise SystemExit(f"{NAMED.name}: {row['about']}: {row['file']} has its text {source.count(row['old'])} times.")
        found.append(Mutant(row["file"], row["about"], source.replace(row["old"], row["new"])))
    return found


def tests_of(file: str) -> list[str]:
    """Return the tests of the room that a file is in."""
    return [test for pattern, tests in ROOMS.items() if ROOT / file in ROOT.glob(pattern) for test in tests]


def nearest_first(file: str, rooms: list[str]) -> list[str]:
    """Return the test files of some rooms that name a file's module, then the rooms."""
    tests = [test for room in rooms for test in sorted((ROOT / room).rglob("test_*.py"))]
    return [str(test.relative_to(ROOT)) for test in tests if re.search(rf"\b{Path(file).stem}\b", test.read_text())] + rooms


def noticed_by(copy: Path, tests: list[str], mutant: Mutant | None = None) -> str:
    """Return the first test in `copy` that fails with the mutant's source, or what else ended pytest. "" if none."""
    file = copy / mutant.file if mutant else None
    before = file.read_text() if file else ""
    if file and mutant:
        file.write_text(mutant.source)
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "-p", "no:cacheprovider"]
    command += nearest_first(mutant.file, tests) if mutant else tests
    try:
        # compiled files are told apart by seconds and size: a fault planted and removed within one second would be read again
        environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        ended = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=SECONDS)
        named = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", ended.stdout, re.MULTILINE)
        return "" if ended.returncode == 0 else named[0] if named else f"exit status {ended.returncode}"
    except subprocess.TimeoutExpired:
        return f"more than {SECONDS} s"
    finally:
        if file:
            file.write_text(before)


def verdict(copy: Path, mutant: Mutant) -> str:
    """Return "noticed", "survived", or "open" where the failing test fails with nothing changed as well. Print it."""
    test = noticed_by(copy, tests_of(mutant.file), mutant)
    found = "open" if "::" in test and noticed_by(copy, [test]) else "noticed" if test else "survived"
    print(found, mutant.file, mutant.about, test, flush=True)
    return found


def draw(file: Path, seed: int, within: tuple[str, ...], count: int) -> None:
    """Write a list of drawn faults, none of them judged. Each line has the verdict, the file, the operator and its occurrence."""
    lines = [f"open {mutant.file} {mutant.about}" for mutant in itertools.islice(sample(seed, within), count)]
    command = f"python tools/mutants.py --seed {seed} --within {' '.join(within)} --draw {count}"
    file.write_text("\n".join([f"# {command}", *lines, ""]))


def judge(file: Path, copy: Path, wanted: int) -> None:
    """Judge the list's faults in order until `wanted` with an effect have a verdict, and print the shares."""
    lines = file.read_text().splitlines()
    count = lambda word: sum(line.startswith(f"{word} ") for line in lines)  # noqa: E731
    for i, line in enumerate(lines):
        if count("noticed") + count("survived") >= wanted:
            break
        if line.startswith("open "):
            _, path, name, occurrence = line.split()
            mutant = plant(path, name, int(occurrence))
            assert mutant is not None, f"{line}: the code has changed since the list was drawn"
            lines[i] = f"{verdict(copy, mutant)} {path} {name} {occurrence}"
            file.write_text("\n".join([*lines, ""]))
    print(f"{count('noticed')} of {count('noticed') + count('survived')} noticed")


def main() -> int:
    """Judge the named faults and the drawn ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--draw", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--within", nargs="+", default=[""])
    parser.add_argument("--drawn", type=Path)
    given = parser.parse_args()
    file = given.drawn or DRAWN
    file.parent.mkdir(exist_ok=True)
    if new := not file.exists():
        draw(file, given.seed, tuple(given.within), given.draw or 2 * given.count)
    if given.drawn and new:
        return 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "psigrad"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "build"))
        missed = [] if given.drawn else [mutant for mutant in named() if verdict(copy, mutant) != "noticed"]
        judge(file, copy, given.count)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
