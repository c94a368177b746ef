"""Lines of Python code by room and drawer, and the house's budget: no blank lines, comments, docstrings nor strings under fields.

python tools/size.py [FOLDER ...]     default: the packages, studies and benchmarks
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import defaultdict
from pathlib import Path

CORE = ("objective", "language", "processes", "runs", "records", "config", "cli")
"""Rooms of the core; the files beside the rooms (`errors.py`, `seeds.py` …) count to it."""
PACKAGES = ("psigrad", "psigrad_extras", "psigrad_serve", "psigrad_studio")
"""What is installed."""
GOALS = {"library, lines": 29_000, "library, files": 250, "core, lines": 21_000}
"""For psigrad alone; what the other packages hold is not in it, and stands below."""
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}


def code_lines(source: str) -> int:
    """Lines that hold code."""
    strings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            strings |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            code |= set(range(token.start[0], token.end[0] + 1))
    return len(code - strings)


def sizes(folder: Path) -> dict[tuple[str, ...], list[int]]:
    """Lines of each file, by the folders that it is in below this one."""
    found: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for path in sorted(folder.rglob("*.py")):
        found[path.relative_to(folder).parts[:-1]].append(code_lines(path.read_text()))
    return found


def table(folder: Path) -> list[str]:
    """A line for each room with all that is in it, and below it its drawers."""
    found = sizes(folder)
    drawers = {parts[:n] for parts in found for n in range(len(parts) + 1)}

    def line(name: str, files: list[int]) -> str:
        return f"{name:<28}{len(files):>6}{sum(files):>8,}"

    lines = [f"{folder.name:<28}{'files':>6}{'code':>8}", line("  (beside the rooms)", found.get((), []))]
    for drawer in sorted(drawers - {()}):
        inside = [size for parts, files in found.items() if parts[: len(drawer)] == drawer for size in files]
        lines.append(line("  " * len(drawer) + drawer[-1], inside))
    return [*lines, line("  all", [size for files in found.values() for size in files])]


def budget(found: dict[tuple[str, ...], list[int]]) -> list[str]:
    """The library and its core against the goals."""
    every = [size for files in found.values() for size in files]
    core = [size for parts, files in found.items() if not parts or parts[0] in CORE for size in files]
    now = {"library, lines": sum(every), "library, files": len(every), "core, lines": sum(core)}
    over = {name: f"{now[name] - goal:,} over" if now[name] > goal else "" for name, goal in GOALS.items()}
    return [f"{name:<28}{now[name]:>14,}   at most {goal:>6,}   {over[name]}".rstrip() for name, goal in GOALS.items()]


def main(folders: list[str]) -> None:
    """Print the rooms of each folder and the library's budget."""
    for folder in folders:
        print("\n".join(table(Path(folder))) + "\n")
    if "psigrad" in folders:
        print("\n".join(budget(sizes(Path("psigrad")))))
        installed = [size for name in PACKAGES for files in sizes(Path(name)).values() for size in files]
        print(f"{'all packages':<28}{sum(installed):>14,}   in {len(installed)} files")


if __name__ == "__main__":
    main(sys.argv[1:] or [*PACKAGES, "studies", "benchmarks"])
