"""The shell commands that the pages show."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAMS = "psigrad|python3?|pip|make|docker|torchrun|vllm|curl|cmp|export|for|echo|mkdir"


def commands(page: Path) -> Iterator[str]:
    """Yield those in blocks of no language or the shell's; two spaces begin what a line says of a command."""
    for language, body in re.findall(r"^ *```(\w*)\n(.*?)^ *```", page.read_text(), re.MULTILINE | re.DOTALL):
        lines = re.sub(r"\\\n\s*", "", textwrap.dedent(body)) if language in ("", "sh", "bash", "console") else ""
        for line in re.sub(r"; do (psigrad[^\n]*)\n\s*", r"; do \1 ", lines).splitlines():
            found = re.match(rf"(?:\$ )?((?:[A-Z_]+=\S+ )*(?:{PROGRAMS}) .*|[A-Z]=\S+|\. \S+)", line)
            if found and not line.startswith("psigrad serve  http"):
                text = re.sub(r"\s+#.*", "", found[1])
                yield text.split("  ")[0] if "experiment" in text else text


def inline(page: Path) -> list[str]:
    """Return the commands of psigrad within the page's sentences and tables."""
    return re.findall(r"`(psigrad [^`]+)`", re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL))


def pages() -> list[Path]:
    """Return all pages."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
