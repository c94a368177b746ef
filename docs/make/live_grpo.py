"""Builds the page on which a language model is trained in the browser: a folder that needs no server, opened from a disk too.

`build(folder)` writes index.html, one script and one style sheet. What computes runs in a worker, whose script lies in the
page's as a string, because browsers load no worker from a disk.
"""

from __future__ import annotations

import json
from pathlib import Path

import live_grid

SOURCES = live_grid.SOURCES / "grpo"
# In the order in which they need one another.
LEARNER = {name: SOURCES / name for name in ("gemm.js", "random.js", "model.js", "task.js", "learner.js")}
WORKER = LEARNER | {"worker.js": SOURCES / "worker.js"}
SHARED = (*live_grid.PLOTS, "runs/format.js", "runs/tokens.js")
PAGE = {name: live_grid.STATIC / name for name in SHARED} | {"main.js": SOURCES / "main.js"}
STYLES = (live_grid.STATIC / "vendor/uplot/uPlot.min.css", live_grid.STATIC / "base.css", SOURCES / "style.css")


def build(folder: Path) -> None:
    """Write the page into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "index.html").write_text((SOURCES / "index.html").read_text())
    (folder / "style.css").write_text("\n".join(path.read_text() for path in STYLES))
    worker = json.dumps(live_grid.bundle(WORKER))
    (folder / "page.js").write_text(f"window.psigradWorker = {worker};\n{live_grid.bundle(PAGE)}")
