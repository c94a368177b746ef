"""Plant small faults in the mathematics one at a time, and count those that a test notices.

    python tools/mutants.py                 the faults of tests/mutants.yaml, then a seeded sample of 100
    python tools/mutants.py --count 1000    more of the same sequence (hours); it resumes where it stopped

cosmic-ray says what can be changed (`+` to `*`, `<` to `<=`, a number, a decorator …). Each fault is written into a copy of the
checkout, where the tests of its room run until one fails; one that runs out of time is noticed too. The exit status is 1 if a
fault of tests/mutants.yaml survives.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).parents[1]
NAMED, VERDICTS = ROOT / "tests" / "mutants.yaml", ROOT / "build" / "mutants.jsonl"
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


def sample(seed: int) -> Iterator[Mutant]:
    """Yield mutants of all rooms in a seeded order."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator, operator_names

    names = [name for name in operator_names() if name.split("/")[1] not in SKIPPED_OPERATORS]
    places = []
    for file in sorted(file for pattern in ROOMS for file in ROOT.glob(pattern)):
        source = file.read_text()
        idle, nodes = idle_ranges(source), list(ast_nodes(get_ast(source)))
        for name in names:
            positions = [start for node in nodes for start, _ in get_operator(name)().mutation_positions(node)]
            places += [(file, name, i) for i, at in enumerate(positions) if not any(a <= at <= b for a, b in idle)]
    random.Random(seed).shuffle(places)
    for file, name, occurrence in places:
        source = file.read_text()
        if (after := mutate_code(source, get_operator(name)(), occurrence)) not in (None, source):
            yield Mutant(str(file.relative_to(ROOT)), f"{name} {occurrence}", after)


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


def notices(copy: Path, tests: list[str], mutant: Mutant | None = None) -> bool:
    """Return True if a test in `copy` fails, or takes too long, while its file has the mutant's source."""
    file = copy / mutant.file if mutant else None
    before = file.read_text() if file else ""
    if file and mutant:
        file.write_text(mutant.source)
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    try:
        # compiled files are told apart by seconds and size: a fault planted and removed within one second would be read again
        environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run(command, cwd=copy, env=environment, capture_output=True, timeout=SECONDS).returncode != 0
    except subprocess.TimeoutExpired:
        return True
    finally:
        if file:
            file.write_text(before)


def main() -> int:
    """Judge, print what survives, and the share that was noticed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    VERDICTS.parent.mkdir(exist_ok=True)
    known = dict(map(json.loads, VERDICTS.read_text().splitlines())) if VERDICTS.exists() else {}
    survived: list[Mutant] = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "psigrad"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "build"))
        sound: dict[tuple[str, ...], bool] = {}
        drawn = sample(given.seed)
        for mutant in [*named(), *(next(drawn) for _ in range(given.count))]:
            tests = tests_of(mutant.file)
            if tuple(tests) not in sound and not sound.setdefault(tuple(tests), not notices(copy, tests)):
                raise SystemExit(f"{' '.join(tests)}: a test fails with nothing changed, so nothing can be judged.")
            key = hashlib.sha256("\0".join(mutant).encode()).hexdigest()
            if key not in known:
                known[key] = notices(copy, tests, mutant)
                with VERDICTS.open("a") as stream:
                    stream.write(json.dumps([key, known[key]]) + "\n")
            if not known[key]:
                survived.append(mutant)
                print(f"survived  {mutant.file}  {mutant.about}", flush=True)
    total = len(named()) + given.count
    print(f"{total - len(survived)} of {total} noticed")
    return int(any(mutant in survived for mutant in named()))


if __name__ == "__main__":
    sys.exit(main())
