"""Run folders made by hand, and a reader of pages."""

from __future__ import annotations

import html.parser
import json
import re
from pathlib import Path

import pytest
from browser import Visits, chromium

HOSTILE = "[bold]<script>alert(1)</script></style></td>\"'&\ud800\x00\u202e<img src=http://x.y/z onerror=a>"


class Page(html.parser.HTMLParser):
    """A page's elements, attributes and text, and its tables as rows of cell texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text: list[str] = []
        self.tables: list[list[list[str]]] = []
        self._in_cell = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")
            self._in_cell = True

    def handle_endtag(self, tag):
        self._in_cell = self._in_cell and tag not in ("td", "th")

    def handle_data(self, data):
        self.text.append(data)
        if self._in_cell:
            self.tables[-1][-1][-1] += data

    def dangers(self) -> list[str]:
        """Whatever could run or fetch something."""
        found = [tag for tag in self.tags if tag in ("script", "iframe", "object", "embed", "img", "link", "base", "form")]
        for name, value in self.attributes:
            links = name in ("src", "href", "xlink:href", "data", "action") and not value.startswith("#")
            if links or name.startswith("on") or re.search(r"url\(\s*[^#\s]", value) or "javascript:" in value:
                found.append(f"{name}={value}")
        return found


@pytest.fixture
def page():
    return Page


@pytest.fixture
def hostile():
    return HOSTILE


@pytest.fixture(scope="module")
def browser():
    # one module only: while it is open its loop runs in this thread, where no other can then be started
    with chromium() as found:
        yield found


@pytest.fixture
def visits(browser):
    found = Visits(browser)
    yield found
    found.close(bases=("file://",))


def rows(path: Path, *items: dict) -> None:
    path.write_bytes(b"".join(json.dumps(item).encode() + b"\n" for item in items))


@pytest.fixture
def run(tmp_path):
    """An online run of 30 steps, evaluated on 4 rows at 0, 15 and 30: hostile texts, a torn last line, a NaN, 1 MB of text."""

    def make(name: str, shift: float = 0.0, **settings) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        shape = {"prompts_per_step": 4, "num_generations": 8, "optim": {"learning_rate": 0.125}}
        config = {"recipe": "online", "algorithm": "grpo", "model": {"path": HOSTILE}, **shape, **settings}
        (folder / "config.json").write_text(json.dumps(config))
        training = [
            {"step": step, "reward": step / 30 + shift, "grad_norm": "NaN" if step == 7 else 1.0, "entropy": 0.5}
            for step in range(1, 31)
        ]
        held_out = [
            {"step": s, "eval/exact/mean": v, "eval/exact/low": v - 0.1, "eval/exact/high": v + 0.1, "eval/kl": s / 10}
            for s, v in ((0, 0.25 + shift), (15, 0.5 + shift), (30, 0.75 + shift))
        ]
        rows(folder / "metrics.jsonl", *sorted(training + held_out, key=lambda row: row["step"]))
        with (folder / "metrics.jsonl").open("ab") as stream:
            stream.write(b'{"step": 31, "rew')
        seconds = [{"step": s, "step_time": 2.0, "time/sample": 1.5, "time/update": 0.5} for s in range(1, 31)]
        rows(folder / "timings.jsonl", *seconds)
        rows(folder / "rollouts.jsonl", *rollouts())
        rows(folder / "events.jsonl", {"time": 1.7e9, "kind": "saved", "step": 5}, {"time": "NaN", "kind": HOSTILE})
        return folder

    return make


def rollouts() -> list[dict]:
    """Held-out rows 0 and 3 turn from wrong to right, 1 from right to wrong, 2 stays right, each with a second completion that
    is not shown; two training rows were not scored.
    """
    plain = {"kind": "eval", "k": 0, "prompt": HOSTILE, "status": "scored", "reason": ""}
    rewards = {0: (0.0, 0.0, 1.0), 1: (1.0, 1.0, 0.0), 2: (1.0, 1.0, 1.0), 3: (0.0, 1.0, 1.0)}
    held = [
        {"step": step, "row": row, "completion": f"{HOSTILE} row {row} at {step}", "reward": values[i], **plain}
        for i, step in enumerate((0, 15, 30))
        for row, values in rewards.items()
    ]
    held = [twin for row in held for twin in ({**row, "k": 1, "completion": "second", "reward": 0.5}, row)]
    trained = {"kind": "train", "k": 0, "prompt": "p", "row": 9}
    unscored = {**trained, "step": 3, "status": "unscored", "reason": f"time-out {HOSTILE}", "reward": None}
    scored = [{**trained, "step": s, "completion": "x", "reward": float(s > 10), "status": "scored"} for s in range(1, 31)]
    return [*held, {**unscored, "completion": "A" * 1_000_000}, {**unscored, "completion": "x"}, *scored]
