"""Lint the English of docstrings, comments, messages and pages: python tools/english.py [FILE ...]

Print docstrings that open with a question word, turns of phrase that technical English does not have, and, on pages, words for
which docs/glossary.md has another. The exit status is 1 if there are any. `make lint` and pre-commit run this.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
OPENERS = re.compile(r"(What|Who|Whom|Whose|Where|Whether|How|Which|That which|Of|From|By|As)\b")
PHRASES = re.compile(
    r"\b((?:none|thing|file|module|package|process|kernel|loop|fault|code|name|one)s? of ours|of one's own|"
    r"(?:is|are|was|were|be|been|being) (?:told|said|gone on|begun|drawn anew|made anew|let go|asked for|handed over)|"
    r"(?:goes|go|going|went|gone) on with|(?:stands?|stood|standing) (?:in|beside|there|behind|below|above|on|at|as)|"
    r"(?:lies?|lay|lying) (?:in|beside|there|behind)|who(?:ever)? (?:asks|looks|listens|reads|wants|calls|speaks)|"
    r"is no \w+ of|as (?:it|they) stands?|anew|wherefore|thereof|therein|whereby)\b",
    re.IGNORECASE,
)
GLOSSARY = re.compile(r"\b(alerts?|foretells?)\b", re.IGNORECASE)
PINNED = ("psigrad_extras/judges/rubric.py", "psigrad_extras/judges/group_ranking.py")
"""Files with prompts for a judge: another wording gives another reward."""


def faults(name: str, text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of each fault in a Python file or a page."""
    if not name.endswith(".py"):
        for number, line in enumerate(text.splitlines(), 1):
            yield from ((number, line) for pattern in (PHRASES, GLOSSARY) if pattern.search(line))
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if (found := ast.get_docstring(node)) and OPENERS.match(found):
                yield node.body[0].lineno, found.splitlines()[0]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and name not in PINNED:
            # `anew` in backticks is a name
            yield from ((node.lineno, line) for line in node.value.splitlines() if PHRASES.search(re.sub("`[^`]*`", "", line)))
    comments = (token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type == tokenize.COMMENT)
    yield from ((token.start[0], token.string) for token in comments if PHRASES.search(token.string))


def checked_files() -> list[str]:
    """Return the tracked files that are checked: the packages' Python, the pages and README.md."""
    patterns = ["psigrad/*.py", "psigrad_*/*.py", "docs/*.md", "README.md"]
    listed = subprocess.run(["git", "ls-files", "-z", "--", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def main(names: list[str]) -> int:
    """Print the faults of these files, or of all, and return the exit status."""
    found = [(n, *fault) for n in names or checked_files() for fault in faults(n, (ROOT / n).read_text(encoding="utf-8"))]
    for name, line, text in found:
        print(f"{name}:{line}: {text.strip()[:120]}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
