"""The faults that `tools/mutants.py` plants: one change each at one place of a file, drawn by a seed or written by people.

cosmic-ray knows what can be changed (`+` to `*`, `<` to `<=`, a number, a decorator, a loop that never runs …). Of every place in
the files of `SUBJECTS` and each family of changes one is a candidate, chosen by the seed; the sample is drawn from all of them.
Not changed are annotations, what a `raise` says, docstrings, `__all__`, and what only holds of our own code: `assert`, and the
`strict` of `zip`. `named` are those of tests/mutants.yaml.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import itertools
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
WORK = ROOT / "build" / "mutants"
NAMED = ROOT / "tests" / "mutants.yaml"
SUBJECTS = (
    "psigrad/objective/**/*.py",
    "psigrad/tabular/*.py",
    *(f"psigrad/control/methods/{name}.py" for name in ("dqn", "on_policy", "trpo")),
    "psigrad/language/models/logprobs.py",
    "psigrad/language/rollout/samplers/distribution.py",
    "psigrad/optim/optimizer.py",
    *(f"psigrad/language/training/online/{name}.py" for name in ("collect", "figures", "online_rl", "online_run")),
)
SKIPPED_OPERATORS = ("VariableReplacer", "VariableInserter")


@dataclass(frozen=True)
class Mutant:
    """One change at one place."""

    file: str
    line: int
    operator: str
    before: str
    after: str
    edit: tuple[int, int, str]
    """From which character to which of the source, and what stands there instead."""
    copy: int = 1
    """Which of the equal lines of the file."""

    @property
    def key(self) -> str:
        """What identifies it as long as its lines are the same."""
        text = f"{self.file}\0{self.operator}\0{self.before}\0{self.after}\0{self.copy}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def sources(self) -> tuple[str, str]:
        """The source of its file before and after the change."""
        source = source_of(self.file)
        start, end, text = self.edit
        return source, source[:start] + text + source[end:]


@functools.cache
def source_of(file: str) -> str:
    """The text of a file of the repository; empty where there is none."""
    return (ROOT / file).read_text() if (ROOT / file).is_file() else ""


def digest(*files: str) -> str:
    """Of what stands in these files."""
    return hashlib.sha256("\0".join(map(source_of, files)).encode()).hexdigest()[:12]


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
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    place = str(file.relative_to(ROOT))
    return mutant_of(place, name, mutate_code(source_of(place), get_operator(name)(), occurrence) or "", copy)


def mutant_of(file: str, operator: str, after: str, copy: int = 1) -> Mutant | None:
    """The change that makes this of a file, unless it is none."""
    before = source_of(file)
    if after in ("", before):
        return None
    start = common(before, after)
    same = common(before[start:][::-1], after[start:][::-1])
    rows = list(zip(before.splitlines(), after.splitlines(), strict=False))
    at = next((i for i, (a, b) in enumerate(rows) if a != b), len(rows) - 1)
    at = next(
        (i for i, (a, _) in enumerate(rows) if i >= at and a.strip()), at
    )  # a decorator goes with the empty lines before it
    edit = (start, len(before) - same, after[start : len(after) - same])
    return Mutant(file, at + 1, operator, *(row.strip() for row in rows[at]), edit, copy)


def common(a: str, b: str) -> int:
    """How many characters are the same from the start."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def subjects() -> list[str]:
    """The files in which faults are planted by the seed."""
    files = sorted(file for pattern in SUBJECTS for file in ROOT.glob(pattern) if file.name != "__init__.py")
    return [str(file.relative_to(ROOT)) for file in files]


def sample(seed: int, count: int) -> list[Mutant]:
    """The first `count` of the mutants in a seeded order; kept until a file changes, since to find them takes minutes."""
    kept = WORK / f"sample-{seed}-{count}-{digest(*subjects())}.json"
    if not kept.exists():
        found = sorted(candidate for file in subjects() for candidate in candidates(ROOT / file, seed))
        mutants = (made(*candidate) for _, *candidate in found)
        kept.write_text(json.dumps([asdict(m) for m in itertools.islice((m for m in mutants if m is not None), count)]))
    return [Mutant(**{**row, "edit": tuple(row["edit"])}) for row in json.loads(kept.read_text())]


def named() -> dict[str, Mutant]:
    """The mutants of tests/mutants.yaml, by what they are about."""
    found = {}
    for row in yaml.safe_load(NAMED.read_text()):
        source = source_of(row["file"])
        if source.count(row["old"]) != 1:
            count = source.count(row["old"])
            raise SystemExit(f"{NAMED.name}: {row['about']}: what it changes stands {count} times in {row['file']}.")
        mutant = mutant_of(row["file"], "named", source.replace(row["old"], row["new"]))
        assert mutant is not None
        found[row["about"]] = mutant
    return found


class Places:
    """What stands on which line of a file."""

    def __init__(self, source: str) -> None:
        self.rows = source.splitlines()
        self.statements = sorted(
            (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)), key=lambda node: node.lineno
        )

    def statement(self, line: int) -> set[int]:
        """The lines of the innermost statement, without what stands within it."""
        around = self._around(line)
        if not around:
            return {line}
        inner = around[-1]
        body = getattr(inner, "body", None)
        if isinstance(inner, ast.Match):
            body = [inner.cases[0].pattern]
        end = body[0].lineno - 1 if body else inner.end_lineno or line
        return set(range(self._first(inner), max(end, inner.lineno) + 1)) | {line}

    def runs_on_import(self, line: int) -> bool:
        """Whether the line stands in no function's body."""
        functions = [n for n in self._around(line) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
        return not any(line >= node.body[0].lineno for node in functions)

    def is_plain(self, line: int) -> bool:
        """Whether a statement of a function's body stands on this line alone."""
        around = self._around(line)
        alone = bool(around) and isinstance(around[-1], ast.Assign | ast.Return | ast.Expr) and around[-1].lineno == line
        return alone and around[-1].end_lineno == line and not self.runs_on_import(line)

    def mentions(self, line: int) -> set[int]:
        """The lines that speak of what the statement on this line defines, and those of its class or function."""
        names: set[str] = set()
        inside: set[int] = set()
        for node in self._around(line):
            targets = getattr(node, "targets", [getattr(node, "target", None)])
            names |= {n.id for t in targets if t is not None for n in ast.walk(t) if isinstance(n, ast.Name)}
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                inside |= set(range(self._first(node), (node.end_lineno or 0) + 1))
        words = re.compile(rf"\b({'|'.join(map(re.escape, sorted(names)))})\b") if names else None
        return inside | {i for i, row in enumerate(self.rows, 1) if words and words.search(row)}

    def _around(self, line: int) -> list[ast.stmt]:
        return [node for node in self.statements if self._first(node) <= line <= (node.end_lineno or 0)]

    @staticmethod
    def _first(node: ast.stmt) -> int:
        return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])


@functools.cache
def places_of(file: str) -> Places:
    """Of a file of the repository."""
    return Places(source_of(file))
