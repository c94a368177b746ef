"""Shared helpers for the tables (80 columns wide) and pictures of the experiments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from psigrad.intervals import Interval
from psigrad.records.report.plots import COLOURS, GREY

INK = "#333333"
BLUE, RUST, GREEN, PINK = COLOURS[:4]
Printed = Iterator[Table | Text]
"""What a study prints: its tables, and notes on them."""


def new_table(title: str, *head: str) -> Table:
    """Return a table with the first column aligned left and the others right."""
    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
    for i, name in enumerate(head):
        table.add_column(name, justify="left" if i == 0 else "right", no_wrap=True)
    return table


def section(table: Table, name: str) -> None:
    """Add a row with a heading."""
    table.add_row(Text(name, style="italic"))


def note(*lines: str) -> Text:
    """Return lines of explanation below a table."""
    return Text("\n".join(lines) + "\n", style="dim")


def around(found: Interval, form: str) -> str:
    """Return the mean and half of the interval; only the mean if a single seed gives no interval."""
    if found.low == found.high:
        return f"{found.mean:{form}}"
    return f"{found.mean:{form}}±{found.high - found.mean:{form.strip('+')}}"


def new_figure(width: float, height: float, rows: int, columns: int, **layout: Any) -> tuple[Any, Any]:
    """Return a figure of this size in inches, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, **layout)


def band(axes: Any, places: Sequence[float], curve: Sequence[Sequence[float]], colour: str, **style: Any) -> None:
    """Plot (mean, low, high) at each place: the means as a line, and their intervals as a band."""
    mean, low, high = zip(*curve, strict=True)
    axes.fill_between(places, low, high, color=colour, alpha=0.13, linewidth=0)
    axes.plot(places, mean, color=colour, linewidth=1.7, **style)


def intervals(axes: Any, found: Sequence[Sequence[float]], names: Sequence[str], colours: Sequence[str]) -> None:
    """Plot (mean, low, high) of each name, one below the other, as a point with its interval."""
    for y, ((mean, low, high), colour) in enumerate(zip(found, colours, strict=True)):
        axes.plot([low, high], [y, y], color=colour, linewidth=2.4, alpha=0.45, solid_capstyle="round")
        axes.plot([mean], [y], "o", color=colour, markersize=6)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)


def tidy(axes: Any, title: str, grid: str, xlabel: str = "", *, legend: bool = False) -> None:
    """Give every picture the same title, frame, grid lines, label and legend."""
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GREY)
    axes.set_axisbelow(True)
    axes.grid(axis=grid, color=GREY, alpha=0.25, linewidth=0.6)
    axes.tick_params(colors=INK, labelsize=8, length=0, which="both")
    axes.set_title(title, loc="left", fontsize=10, color="#222222")
    if xlabel:
        axes.set_xlabel(xlabel, color=INK, fontsize=9)
    if legend:
        axes.legend(fontsize=8, frameon=False)


def save(figure: Any, path: Path) -> Path:
    """Write the picture and return its path."""
    figure.savefig(path, dpi=110)
    return path
