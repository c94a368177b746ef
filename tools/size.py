"""Lines of Python code in each room: no blank lines, no comments, no docstrings (nor the strings under fields).

python tools/size.py [FOLDER ...]     default: psigrad psigrad_studio
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import defaultdict
from pathlib import Path

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
    held: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            held |= set(range(token.start[0], token.end[0] + 1))
    return len(held - strings)


def main(folders: list[str]) -> None:
    """Print a table: room, files, lines of code."""
    for folder in folders:
        rooms: dict[str, list[int]] = defaultdict(list)
        for path in sorted(Path(folder).rglob("*.py")):
            parts = path.relative_to(folder).parts
            room = "/".join(parts[: 2 if parts[:2] == ("models", "fused") else 1]) if len(parts) > 1 else "(top)"
            rooms[room].append(code_lines(path.read_text()))
        if not rooms:
            continue
        total = [size for sizes in rooms.values() for size in sizes]
        print(f"{folder:<24}{'files':>6}{'code':>8}")
        for room, sizes in sorted(rooms.items()):
            print(f"  {room:<22}{len(sizes):>6}{sum(sizes):>8}")
        print(f"  {'all':<22}{len(total):>6}{sum(total):>8}\n")


if __name__ == "__main__":
    main(sys.argv[1:] or ["psigrad", "psigrad_studio"])
