"""sweep.html: the trials of a search over settings, out of sweep.json."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from psigrad.errors import UserError
from psigrad.records.read import show_number
from psigrad.records.report import plots
from psigrad.records.report.html import Cell, Figure, Table, render, save


def write(folder: str | Path, output: str | Path | None = None) -> Path:
    """The page of one sweep (default: sweep.html in its folder). Raises `UserError` where no trial has ended there."""
    try:
        found = json.loads((Path(folder) / "sweep.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} holds no sweep ({error}); run `psigrad sweep` first.") from error
    if not found["trials"]:
        raise UserError(f"No trial of {folder} has ended; the same `psigrad sweep` goes on.")
    return save(page(found), Path(output) if output else Path(folder) / "sweep.html")


def best_first(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The trials, the best first."""
    return sorted(found["trials"], key=lambda trial: trial["mean"], reverse=found["direction"] == "maximize")


def page(found: Mapping[str, Any]) -> str:
    """The whole page: the trials by rank, the best so far, and the figure over each setting."""
    trials, names = best_first(found), list(found["trials"][0]["settings"])
    lines = [
        [
            Cell(trial["number"], "n"),
            *(Cell(_shown(trial["settings"].get(name)), "n") for name in names),
            Cell(
                f"{trial['mean']:.4g}", "range", f"[{trial['low']:.4g}, {trial['high']:.4g}]" if len(trial["values"]) > 1 else ""
            ),
        ]
        for trial in trials
    ]
    what = found["metric"] or "held-out figure"
    pictures = [("The best so far", "each trial, and the best up to it", _so_far(found))]
    pictures += [(name, f"{what} over {name}; a bar is the 95 % interval over seeds", _over(trials, name)) for name in names]
    return render(
        "compare.html",
        f"A sweep of {len(trials)} trials",
        note=f"{what}, {found['direction']}d; mean and 95 % interval over {len(found['seeds'])} seeds (Student's t)",
        table=Table(("trial", *names, what), lines, shown=20),
        figures=[Figure(title, said, plots.picture(title, paint)) for title, said, paint in pictures],
        names=[],
    )


def _shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else show_number(value) if isinstance(value, int) else str(value)


def _so_far(found: Mapping[str, Any]) -> Callable[[Any], None]:
    def paint(axes: Any) -> None:
        better = max if found["direction"] == "maximize" else min
        numbers, means = [t["number"] for t in found["trials"]], [t["mean"] for t in found["trials"]]
        axes.plot(numbers, means, "o", color=plots.GREY, markersize=3)
        axes.step(numbers, [better(means[: i + 1]) for i in range(len(means))], where="post", color=plots.COLOURS[0])

    return paint


def _over(trials: Sequence[Mapping[str, Any]], name: str) -> Callable[[Any], None]:
    def paint(axes: Any) -> None:
        values = [trial["settings"][name] for trial in trials]
        numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
        if numeric and min(values) > 0 and max(values) / min(values) > 30:
            axes.set_xscale("log")
        reach = [[trial["mean"] - trial["low"] for trial in trials], [trial["high"] - trial["mean"] for trial in trials]]
        shown = values if numeric else list(map(str, values))
        axes.errorbar(shown, [t["mean"] for t in trials], yerr=reach, fmt="o", color=plots.COLOURS[0], markersize=4, linewidth=1)

    return paint
