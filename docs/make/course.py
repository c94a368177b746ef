"""Makes the notebooks of the course, docs/course/*.ipynb, from their sources, docs/course/*.py (percent format).

python docs/make/course.py [chapter …] [--again]     all chapters without a name

A chapter whose code has not changed, comments aside, keeps its outputs, and only its text is written anew; --again runs it
nevertheless. The site shows the stored outputs, so that building it takes no training. tests/course runs the sources.
"""

from __future__ import annotations

import argparse
import ast
import base64
import io
import json
import os
import re
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))
from typeset import with_latex

COURSE = Path(__file__).parents[1] / "course"
MARK = re.compile(r"# %%(?: \[(markdown)\])?(?: tags=(\[.*\]))?\n")
MINE = {"hide-cell": {"mystnb": {"code_prompt_show": "Show the answer", "code_prompt_hide": "Hide the answer"}}}
INSTALL = """\
# where psigrad is missing: install it from the checkout that holds this notebook
import importlib.util
import subprocess
import sys
from pathlib import Path

if importlib.util.find_spec("psigrad") is None:
    checkout = Path("../..").resolve()
    if not (checkout / "psigrad" / "extras.py").exists():
        raise SystemExit("psigrad is on no index: open this notebook in its checkout.")
    command = [sys.executable, "-m", "pip", "install", "--quiet", str(checkout)]
    subprocess.run(command, check=True)"""
ABOUT = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}, "language_info": {"name": "python"}}


@dataclass(frozen=True)
class Cell:
    """One cell of a chapter."""

    kind: str
    """"markdown" or "code"."""
    text: str
    tags: tuple[str, ...] = ()


def chapters() -> list[str]:
    """Return the names of all chapters."""
    return sorted(path.stem for path in COURSE.glob("*.py"))


def cells(source: str) -> list[Cell]:
    """Return the cells of a source in percent format: `# %%` begins code, `# %% [markdown]` text in comments.

    A cell that installs psigrad follows the first one. The site collapses it and the imports, so that a chapter begins with its
    subject.
    """
    found = []
    before, *parts = MARK.split(source)
    if before.strip():
        raise ValueError(f"A chapter begins with a cell mark `# %%`, not with {before.splitlines()[0]!r}.")
    for kind, tags, text in zip(parts[0::3], parts[1::3], parts[2::3], strict=True):
        body = text.strip("\n")
        if kind:
            body = "\n".join(line.removeprefix("#").removeprefix(" ") for line in body.splitlines())
        found.append(Cell(kind or "code", body, tuple(json.loads(tags or "[]"))))
    imports = replace(found[1], tags=(*found[1].tags, "hide-input"))
    return [found[0], Cell("code", INSTALL, ("install", "hide-input")), imports, *found[2:]]


def stored(name: str) -> dict[str, Any] | None:
    """Return the notebook as it is in the repository."""
    path = COURSE / f"{name}.ipynb"
    return json.loads(path.read_text()) if path.exists() else None


def notebook(name: str, outputs: dict[int, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the notebook of a chapter, with the outputs of its cells by their place."""
    made = []
    for place, cell in enumerate(cells((COURSE / f"{name}.py").read_text())):
        metadata: dict[str, Any] = {"tags": list(cell.tags)} if cell.tags else {}
        for tag in cell.tags:
            metadata |= MINE.get(tag, {})
        entry = {"cell_type": cell.kind, "id": f"{name}-{place}", "metadata": metadata}
        source = cell.text if cell.kind == "code" else with_latex(cell.text)
        if source != cell.text:
            metadata["plain"] = cell.text  # for the site, which has formulas of its own
        entry["source"] = source.splitlines(keepends=True)
        if cell.kind == "code":
            entry |= {"execution_count": None, "outputs": merged(outputs.get(place, []))}
        made.append(entry)
    return {"cells": made, "metadata": ABOUT, "nbformat": 4, "nbformat_minor": 5}


def outputs_of(book: dict[str, Any]) -> dict[int, list[dict[str, Any]]]:
    """Return the outputs of each code cell, by its place."""
    return {place: cell["outputs"] for place, cell in enumerate(book["cells"]) if cell["cell_type"] == "code"}


def kept(name: str) -> dict[str, Any] | None:
    """Return the notebook with the current text and the stored outputs; None if its code has changed since."""
    book = stored(name)
    if book is None:
        return None
    old = ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]
    new = {place: cell for place, cell in enumerate(cells((COURSE / f"{name}.py").read_text())) if cell.kind == "code"}
    if [meaning(code) for code in old] != [meaning(cell.text) for cell in new.values()]:
        return None
    return notebook(name, dict(zip(new, outputs_of(book).values(), strict=True)))


def meaning(code: str) -> str:
    """Return code without its comments and layout."""
    return ast.dump(ast.parse(code))


def executed(name: str) -> dict[str, Any]:
    """Run the notebook of a chapter in a temporary folder and return it."""
    import nbformat
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient

    os.environ |= {"MATPLOTLIBRC": str(COURSE / "matplotlibrc"), "PYTHONPATH": str(COURSE.parents[1])}
    # progress bars of transformers, and tqdm's regret that it cannot draw them as widgets
    os.environ |= {"TQDM_DISABLE": "1", "PYTHONWARNINGS": "ignore:IProgress", "OMP_NUM_THREADS": "1"}
    book = nbformat.reads(text(notebook(name, {})), as_version=4)
    with tempfile.TemporaryDirectory(prefix="course-") as folder:
        kernel = AsyncKernelManager(transport="ipc", connection_file=f"{folder}/kernel.json")
        NotebookClient(book, km=kernel, timeout=1800, resources={"metadata": {"path": folder}}).execute()
    ran = json.loads(nbformat.writes(book))
    return notebook(
        name,
        # what goes to stderr are warnings of a run that depend on the machine
        {place: [tidy(output) for output in found if output.get("name") != "stderr"] for place, found in outputs_of(ran).items()},
    )


def merged(outputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Outputs with what was printed piece by piece as one."""
    found: list[dict[str, Any]] = []
    for output in outputs:
        if found and output["output_type"] == found[-1]["output_type"] == "stream":
            found[-1] = {**output, "text": [*found[-1]["text"], *output["text"]]}
        else:
            found.append(output)
    return found


def tidy(output: dict[str, Any]) -> dict[str, Any]:
    """An output without what changes from run to run, and with pictures of few colours."""
    output.pop("execution_count", None)
    if output["output_type"] == "execute_result":
        output["execution_count"] = None
    data = output.get("data", {})
    if "image/png" in data:
        data["image/png"] = small(data["image/png"])
        data.pop("text/plain", None)
    return output


def small(png: str) -> str:
    """The same picture with 128 colours: a third of the size."""
    from PIL import Image

    image, out = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB"), io.BytesIO()
    image.quantize(128, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(out, "PNG", optimize=True)
    return base64.b64encode(out.getvalue()).decode()


def text(book: dict[str, Any]) -> str:
    """A notebook as it is written to its file."""
    return json.dumps(book, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    """Write the notebooks that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chapters", nargs="*", metavar="chapter", help=f"of {', '.join(chapters())}; all without a name")
    parser.add_argument("--again", action="store_true", help="run chapters whose code has not changed too")
    given = parser.parse_args()
    for name in given.chapters or chapters():
        start = time.perf_counter()
        book = None if given.again else kept(name)
        what = "text" if book else "run"
        (COURSE / f"{name}.ipynb").write_text(text(book or executed(name)))
        print(f"{name}: {what}, {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
