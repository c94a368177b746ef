"""The page compare.html, which shows several methods side by side, with means over seeds. Its data is compare.json."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from psigrad.errors import UserError
from psigrad.records.read import brief
from psigrad.records.report import plots
from psigrad.records.report.html import Cell, Figure, Table, render, save

_COLUMNS = (
    ("truth", "held-out metric"),
    ("proxy", "reward trained on"),
    ("kl", "KL to the start"),
    ("length", "tokens"),
    ("samples", "samples"),
    ("seconds", "seconds"),
    ("peak_mb", "peak memory, MB"),
)


def write(folder: str | Path, output: str | Path | None = None) -> Path:
    """Write the page of a comparison (default: compare.html in its folder). Raises `UserError` if there is no comparison."""
    return save(page(read(folder)), Path(output) if output else Path(folder) / "compare.html")


def read(folder: str | Path) -> Any:
    """Read the comparison in a folder. Raises `UserError` if there is none."""
    try:
        return json.loads((Path(folder) / "compare.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} holds no comparison ({error}); run `psigrad compare` first.") from error


def rows(found: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return (header, lines) of a narrow table as text: the mean and 95 % interval over seeds of the main metrics."""
    several = len(found["table"]) > 1
    names = ("truth", *(["lead"] if several else []), "proxy", "kl", "seconds")
    lines = []
    for row in found["table"]:
        cells = [_figure(row[name]) if name in row else Cell("") for name in names]
        lines.append([row["method"], *(" ".join(filter(None, (cell.value, cell.name))) for cell in cells)])
    return ["method", "held-out", *(["vs first"] if several else []), "reward", "KL", "seconds"], lines


def page(found: Mapping[str, Any]) -> str:
    """Return the HTML of the page."""
    rows, runs = found["table"], found["runs"]
    names = [row["method"] for row in rows]
    columns = [_COLUMNS[0], ("lead", f"minus {names[0]}"), *_COLUMNS[1:]]
    lines = [
        [Cell(i, "key", row["method"]), *(_figure(row[name]) if name in row else Cell("") for name, _ in columns)]
        for i, row in enumerate(rows)
    ]
    seeds = f"{rows[0]['seeds']} seeds" if rows[0]["seeds"] > 1 else "one seed"
    over_kl = "held-out metric over KL to the start, nats per completion; one point per evaluation"
    over_proxy = "held-out metric over the reward trained on; one point per run"
    pictures = (
        ("Held-out metric over samples", "mean over seeds", _over(runs, names, "samples")),
        ("Reward against KL", over_kl, _over(runs, names, "kl")),
        ("What was trained on, and the truth", over_proxy, _truth(runs, names)),
    )
    return render(
        "compare.html",
        f"{len(names)} methods compared",
        note=f"{seeds}; mean and 95 % interval over seeds (Student's t), differences between runs of one seed; samples are "
        "completions seen",
        table=Table(("method", *(label for _, label in columns)), lines),
        figures=[Figure(title, said, plots.picture(title, paint)) for title, said, paint in pictures],
        names=names,
    )


def _figure(values: Sequence[float]) -> Cell:
    mean, low, high = values
    return Cell(brief(mean), "range", "" if low == high else f"[{brief(low)}, {brief(high)}]")


def _over(runs: Sequence[Mapping[str, Any]], names: Sequence[str], x: str) -> Callable[[Any], None]:
    """Return a function that plots the metric over samples or KL, with a thin line per seed and a thick one for the mean."""

    def paint(axes: Any) -> None:
        for i, name in enumerate(names):
            colour = plots.COLOURS[i % len(plots.COLOURS)]
            curves = [[p for p in run["curve"] if math.isfinite(p[x])] for run in runs if run["method"] == name]
            for curve in curves:
                axes.plot([p[x] for p in curve], [p["truth"] for p in curve], color=colour, linewidth=0.6, alpha=0.4)
            steps = min((len(curve) for curve in curves), default=0)
            mean = [[sum(c[k][key] for c in curves) / len(curves) for k in range(steps)] for key in (x, "truth")]
            axes.plot(*mean, color=colour, linewidth=1.8)
            axes.plot(*[column[-1:] for column in mean], "o", color=colour, markersize=4)

    return paint


def _truth(runs: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Callable[[Any], None]:
    def paint(axes: Any) -> None:
        for i, name in enumerate(names):
            mine = [run for run in runs if run["method"] == name]
            colour = plots.COLOURS[i % len(plots.COLOURS)]
            axes.plot([run["proxy"] for run in mine], [run["truth"] for run in mine], "o", color=colour, markersize=4)

    return paint
