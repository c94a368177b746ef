"""The documentation site: `make docs` builds it into build/docs. It needs no network.

The pages are Markdown that also reads well in the repository. So the reading order stands once, as the list of links on
index.md, and links that leave docs/ become plain text on the site. Docstrings are plain text with `code` and indented
formulas; `docstring` turns them into reStructuredText.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))  # the psigrad beside these pages, whatever is installed

sys.path.append(str(DOCS / "make"))
import llms  # noqa: E402
import typeset  # noqa: E402

import psigrad  # noqa: E402

project = "psigrad"
author = "the psigrad authors"
version = release = psigrad.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc"]
exclude_patterns = ["images/**", "site/**"]
nb_execution_mode = "off"  # the notebooks of the course keep their outputs: make/course.py
myst_heading_anchors = 3
nitpicky = True
smartquotes = False  # s' is a state, not the end of a quotation
# Types of other libraries have no page here (no network: no intersphinx), and types that are not public have none either.
nitpick_ignore_regex = [("py:.*", ".*")]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 100
add_module_names = False

toc_object_entries_show_parents = "hide"

html_theme = "pydata_sphinx_theme"
templates_path = ["site"]
html_static_path = ["site"]
html_css_files = ["site.css"]
html_js_files = ["found.js"]
html_search_scorer = str(DOCS / "site" / "scorer.js")
html_sidebars = {"**": ["contents.html"]}
html_title = "psigrad"
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "navbar_center": [],
    "navbar_persistent": ["search-field"],
    "navbar_end": ["theme-switcher"],
    "navigation_with_keys": False,
    "show_toc_level": 2,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "article_header_start": [],
    "collapse_navigation": True,
}
copyright = "the psigrad authors; Apache-2.0"

RAW = "\0html "
PAGE = (".md", ".ipynb")
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")


def contents(index: str) -> str:
    """The tables of contents of the site: one for each heading of index.md, with the links of its list in order."""
    found = ""
    for part in re.split(r"^## ", index, flags=re.MULTILINE)[1:]:
        heading, _, body = part.partition("\n")
        pages = [f"{words} <{target.rpartition('.')[0]}>" for words, target in LINK.findall(body) if target.endswith(PAGE)]
        found += "\n".join(["", "```{toctree}", ":hidden:", f":caption: {heading.strip()}", "", *pages, "```", ""])
    return found


def inside(text: str, folder: Path) -> str:
    """`text` of a page in `folder`, with links that leave docs/ as their words and the path in the repository."""

    def plain(match: re.Match[str]) -> str:
        words, target = match.groups()
        if "://" in target or target.startswith("#"):
            return match[0]
        path = Path(os.path.normpath(folder / target.partition("#")[0]))
        if path.is_relative_to(DOCS):
            return match[0]
        where = path.relative_to(DOCS.parent).as_posix()
        return f"`{where}`" if words.strip("`/") == where else f"{words} (`{where}`)"

    return typeset.typeset(paper_links(LINK.sub(plain, text)))


def paper_links(text: str) -> str:
    """Every "arXiv:2402.03300" outside of code and links as a link to the paper."""
    parts = re.split(r"(```.*?```|`[^`\n]*`|\]\([^)]*\))", text, flags=re.DOTALL)
    parts[::2] = [re.sub(r"(?<!\[)arXiv:(\d{4}\.\d{4,5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", part) for part in parts[::2]]
    return "".join(parts)


def chapter(source: str, folder: Path, page: str) -> str:
    """A notebook with the links of its text as `inside` makes them, and a link to itself under its title."""
    book = json.loads(source)
    texts = [cell for cell in book["cells"] if cell["cell_type"] == "markdown"]
    for cell in texts:
        cell["source"] = inside(cell["metadata"].pop("plain", None) or "".join(cell["source"]), folder)
    title, _, rest = texts[0]["source"].partition("\n")
    name = page.rpartition("/")[2]
    texts[0]["source"] = f"{title}\n\n{{download}}`Download this chapter as a notebook <{name}.ipynb>`\n{rest}"
    return json.dumps(book)


def docstring(lines: list[str]) -> list[str]:
    """reStructuredText of a docstring: `code` becomes a literal, indented lines a block or a formula, "- " begins an item."""
    out: list[str] = []
    lines = examples(formulas(lines))
    before = "blank"  # what the line above was: blank, text, item or block
    for line in lines:
        indented = line.startswith(" ")
        if not line.strip():
            kind = "block" if before == "block" else "blank"
        elif line.startswith("    ") or (indented and before != "item"):
            kind = "block"
        else:
            kind = "item" if indented or line.startswith("- ") else "text"
        if line.startswith(RAW):
            out += ["", ".. raw:: html", "", f"    {line.removeprefix(RAW)}", ""]
            before = "blank"
            continue
        if kind == "block" and before != "block":
            out += ["", ".. code-block:: text", ""]
        elif (before == "block" and kind != "block") or (kind == "item" and before == "text"):
            out.append("")
        out.append(f"    {line}" if kind == "block" else marked(line))
        before = kind
    return out


def examples(lines: list[str]) -> list[str]:
    """The docstring with each example, ">>> code" and its output, as an indented block."""
    out: list[str] = []
    for line in lines:
        inside = line.startswith(">>> ") or (line.strip() and bool(out) and out[-1].startswith("    >>> "))
        out.append(f"    {line}" if inside else line)
    return out


def formulas(lines: list[str]) -> list[str]:
    """The docstring with each block of formulas, and each paragraph "Formula: …", as one line of MathML."""
    out: list[str] = []
    is_formula = False
    for is_block, group in itertools.groupby(lines, key=lambda line: (line.startswith("    "), bool(line.strip()))):
        block = list(group)
        is_formula = block[0].startswith("Formula:") or (is_formula and is_block[1])
        if block[0].startswith("Formula:"):
            block[0] = block[0].removeprefix("Formula:")
        block = [line for line in block if line.strip()] or ([] if is_formula else block)
        typesets = block and (is_formula or (is_block[0] and typeset.is_formula(block)))
        out += [RAW + typeset.html([line.strip() for line in block])] if typesets else block
    return out


def marked(line: str) -> str:
    """One line of text with its `code` as literals, and nothing else that reStructuredText would read as markup."""
    text, *rest = re.split(r"`+([^`]+)`+", line)
    out = escaped(text)
    for code, after in zip(rest[0::2], rest[1::2], strict=True):
        # a literal needs a border on both sides; an escaped space is one that is not shown
        left = "" if not out or out[-1] in " ([" else "\\ "
        right = "\\ " if after[:1].isalnum() else ""
        out += f"{left}``{code}``{right}{escaped(after)}"
    return out


def escaped(text: str) -> str:
    text = re.sub(r"([\\*_|])", r"\\\1", text)
    return re.sub(r"arXiv:(\d{4}\.\d{4,5})", r"`arXiv:\1 <https://arxiv.org/abs/\1>`__", text)


def short(signature: str | None) -> str | None:
    """`signature` with numpy's types by their names, not spelled out as the unions that they are."""
    if signature is None:
        return None
    array_like = r"numpy\._typing\._array_like\._Buffer \| .*?_NestedSequence\[complex \| bytes \| str\]"
    array = r"ndarray\[tuple\[.*?\], numpy\.dtype\[(?:[^\[\]]|\[[^\]]*\])*\]\]"
    return re.sub(array, "ndarray", re.sub(array_like, "numpy.typing.ArrayLike", signature))


def setup(app: Sphinx) -> None:
    def source_read(app: Sphinx, page: str, source: list[str]) -> None:
        if page == "index":
            source[0] += contents(source[0])
        folder = (DOCS / page).parent
        is_notebook = app.env.doc2path(page, base=False).suffix == ".ipynb"
        source[0] = chapter(source[0], folder, page) if is_notebook else inside(source[0], folder)

    def process(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
        lines[:] = docstring(lines)

    def signature(app: Sphinx, what: str, name: str, obj: Any, options: Any, given: str | None, returned: str | None) -> Any:
        return short(given), short(returned)

    def finished(app: Sphinx, error: Exception | None) -> None:
        if error is None and app.builder.format == "html":
            llms.write(Path(app.outdir))

    app.connect("source-read", source_read)
    app.connect("build-finished", finished)
    app.connect("autodoc-process-signature", signature)
    app.connect("autodoc-process-docstring", process)
