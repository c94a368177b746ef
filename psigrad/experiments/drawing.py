"""What the tables (80 columns wide) and pictures of the experiments share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from psigrad.intervals import Interval
from psigrad.records.report.plots import COLOURS, GREY

INK = "#333333"
BLUE, RUST, GREEN, PINK = COLOURS[:4]


def new_table(title: str, *head: str) -> Table:
    """A table with the first column to the left and the others to the right."""
    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
    for i, name in enumerate(head):
        table.add_column(name, justify="left" if i == 0 else "right", no_wrap=True)
    return table


def section(table: Table, name: str) -> None:
    """A row with a heading."""
    table.add_row(Text(name, style="italic"))


def note(*lines: str) -> Text:
    """Lines of explanation below a table."""
    return Text("\n".join(lines) + "\n", style="dim")


def around(found: Interval, form: str) -> str:
    """Mean and half of the interval; the mean alone where a single seed gives no interval."""
    if found.low == found.high:
        return f"{found.mean:{form}}"
    return f"{found.mean:{form}}±{found.high - found.mean:{form.strip('+')}}"


def new_figure(width: float, height: float, rows: int, columns: int, **layout: Any) -> tuple[Any, Any]:
    """A figure of this size in inches, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, **layout)


def tidy(axes: Any, title: str, grid: str) -> None:
    """The same title, frame and grid lines for every picture."""
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GREY)
    axes.set_axisbelow(True)
    axes.grid(axis=grid, color=GREY, alpha=0.25, linewidth=0.6)
    axes.tick_params(colors=INK, labelsize=8, length=0, which="both")
    axes.set_title(title, loc="left", fontsize=10, color="#222222")


def save(figure: Any, path: Path) -> Path:
    """Write the picture; its path."""
    figure.savefig(path, dpi=110)
    return path


def learning_curves(
    found: Mapping[str, Any],
    path: Path,
    *panels: tuple[str, Sequence[str]],
    sharey: bool = True,
    beside: Sequence[tuple[str, Sequence[str]]] = (),
) -> Path:
    """Held-out accuracy over steps, an axis for each panel (title, names of its arms), with 95 % intervals over seeds.

    `beside` asks for axes with figures of every arm: (title, names of the figures).
    """
    number = len(panels) + len(beside)
    figure, axes = new_figure(4.9 * number, 3.4, 1, number, sharey=sharey and not beside, squeeze=False)
    for ax, (title, names) in zip(axes[0], panels, strict=False):
        arms = [arm for arm in found["arms"] if arm["name"] in names]
        for arm, colour in zip(arms, COLOURS * 3, strict=False):
            mean, low, high = zip(*arm["curve"], strict=True)
            ax.fill_between(arm["steps"], low, high, color=colour, alpha=0.13, linewidth=0)
            ax.plot(arm["steps"], mean, color=colour, linewidth=1.7, label=arm["name"])
        tidy(ax, title, grid="y")
        ax.set_xlabel("steps", color=INK, fontsize=9)
        ax.legend(fontsize=8, frameon=False)
    for ax, (title, names) in zip(axes[0][len(panels) :], beside, strict=True):
        _intervals(ax, found["arms"], names)
        tidy(ax, title, grid="x")
    return save(figure, path)


def _intervals(axes: Any, arms: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    """Figures of every arm that has them, one below the other, as points with their intervals."""
    places = [(arm, name, colour) for name in names for arm, colour in zip(arms, COLOURS * 3, strict=False)]
    places = [(arm, name, colour) for arm, name, colour in places if not math.isnan(arm["figures"][name][0])]
    for y, (arm, name, colour) in enumerate(places):
        mean, low, high = arm["figures"][name]
        axes.plot([low, high], [y, y], color=colour, linewidth=2.4, alpha=0.45, solid_capstyle="round")
        axes.plot([mean], [y], "o", color=colour, markersize=6)
    labels = [arm["name"] if len(names) == 1 else f"{name}, {arm['name']}" for arm, name, _ in places]
    axes.set_yticks(range(len(places)), labels)
    axes.set_ylim(len(places) - 0.4, -0.6)
