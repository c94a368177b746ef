"""docs/tabular.md: every block runs in order and prints what the page shows; the public names are documented."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

from cases import repeat_for

import psigrad.tabular as tabular

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tabular.md").read_text()
BLOCK = re.compile(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.S)


def printed_and_shown(page: str) -> list[tuple[str, str]]:
    """What each block prints when all run in one session, and what the page says that it prints."""
    session: dict[str, object] = {}
    out = []
    for code, shown in BLOCK.findall(page):
        buffer = io.StringIO()
        with contextlib.redirect_stdout(buffer):
            exec(compile(code, "docs/tabular.md", "exec"), session)
        out.append((buffer.getvalue(), shown))
    return out


def test_every_snippet_prints_what_the_page_shows():
    found = printed_and_shown(PAGE)
    assert len(found) >= 8
    for printed, shown in found:
        assert printed == shown


def test_negative_control_a_wrong_figure_is_noticed():
    ((printed, shown),) = printed_and_shown("```python\nprint(0.5)\n```\n\n```text\n0.6\n```")
    assert printed != shown


def test_every_picture_is_there():
    pictures = re.findall(r"\]\((images/tabular_\w+\.png)\)", PAGE)
    assert len(pictures) >= 5
    assert all((ROOT / "docs" / name).stat().st_size > 10_000 for name in pictures)


@repeat_for("name", sorted(set(tabular.__all__) - {"ACTIONS", "ARROWS"}))
def test_every_public_name_has_a_docstring_and_a_place_on_the_page(name):
    assert getattr(tabular, name).__doc__
    assert re.search(rf"\b{name}\b", PAGE), name


def test_the_public_names_are_sorted_and_complete():
    assert tabular.__all__ == sorted(tabular.__all__, key=lambda n: (not n.isupper(), not n[0].isupper(), n))
    assert all(hasattr(tabular, name) for name in tabular.__all__)
