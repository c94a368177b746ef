"""The page of a replayed step: a column of metrics for each method, and the effect of each method on every token.

Its template is in templates/.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from psigrad.errors import UserError
from psigrad.paths import absolute
from psigrad.records.read import messages, show_number
from psigrad.records.report import html
from psigrad.records.report.html import Cell, Table, render, save
from psigrad.records.run_folder import REPLAYS, to_line

LEVELS = 4


_MARK = b'"methods": '  # in the JSON of every replay


def check(output: str) -> None:
    """Raise `UserError` before the work if `output` or the JSON beside it is another file than a replay's."""
    html.check(absolute(output))
    html.check(absolute(output).with_suffix(".json"), _MARK)


def write(replay: Any, output: str = "") -> Path:
    """Write the page of a `Replay`, and its data as JSON, by default to the folder `replays/` of the run.

    Raises `UserError` if they cannot be written.
    """
    others = "".join(f"-{re.sub(r'[^a-z0-9]+', '_', name)}" for name in list(replay.methods)[1:])
    target = absolute(output) if output else Path(replay.run) / REPLAYS / f"step-{replay.step:08d}{others[:80]}.html"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"The page cannot be written to {target}: {error.strerror}; name another file as --output.") from error
    save(to_line(vars(replay)).decode(), target.with_suffix(".json"), _MARK)
    return save(page(replay), target)


def page(replay: Any) -> str:
    """Return the HTML of the page."""
    figures = replay.methods
    names = dict.fromkeys(name for own in figures.values() for name in own)
    rows = [[Cell(name), *(Cell(show_number(own.get(name)), "n") for own in figures.values())] for name in names]
    most = {name: _greatest(replay.groups, name) for name in figures}
    groups = [
        {
            **group,
            "prompt": messages(group["prompt"]) or group["prompt"],
            "completions": [{**c, "methods": _shown(c, most)} for c in group["completions"]],
        }
        for group in replay.groups
    ]
    return render(
        "replay.html",
        f"Step {replay.step} of {Path(replay.run).name}, replayed",
        replay=replay,
        table=Table(("", *figures), rows, name="methods"),
        groups=groups,
        seconds={name: show_number(value) for name, value in replay.seconds.items()},
    )


def _greatest(groups: list[dict[str, Any]], name: str) -> float:
    weights = [w for g in groups for c in g["completions"] for w in c["methods"].get(name, {}).get("weight", ())]
    return max((abs(w) for w in weights if not math.isnan(w)), default=0.0)


def _shown(completion: Mapping[str, Any], most: Mapping[str, float]) -> dict[str, list[tuple[str, str, str]]]:
    """Return method -> (text, style, figures) of each token.

    The style is up1 … up4 for a token that becomes more likely, and down1 … down4 for one that becomes less likely. The number is
    its weight relative to the method's greatest. "out" is a token that is not trained on, and "cut" a clipped one.
    """
    shown = {}
    for name, columns in completion["methods"].items():
        shown[name] = [
            (text, _look(weight, clipped, most[name]), f"advantage {a:.3g}, ratio {r:.4g}, weight {weight:.3g}")
            for text, a, r, clipped, weight in zip(
                completion["tokens"], *(columns[key] for key in ("advantage", "ratio", "clipped", "weight")), strict=True
            )
        ]
    return shown


def _look(weight: float, clipped: float, most: float) -> str:
    cut = " cut" if clipped == 1 else ""
    if math.isnan(weight):
        return "out"
    if not weight or not most:
        return cut.strip()
    return f"{'up' if weight > 0 else 'down'}{math.ceil(LEVELS * abs(weight) / most)}{cut}"
