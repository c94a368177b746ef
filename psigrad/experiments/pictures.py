"""Pictures of the experiments, drawn from the figures that they write (psi.json, bias.json, clip.json)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from psigrad.report.plots import COLOURS, GREY

_INK = "#333333"
_BLUE, _RUST, _GREEN, _PINK = COLOURS[:4]
_CRITICS = {"": (GREY, "no critic"), "exact": (_BLUE, "exact critic"), "rough": (_RUST, "rough critic")}
_BATCHES = [2.0**k for k in range(15)]


def psi(found: Mapping[str, Any], path: Path) -> Path:
    """Left: variance of each form. Right: error over the batch size, where bias shows as a floor."""
    figure, (left, right) = _figure(10.5, 5.4, 1, 2, width_ratios=(1.15, 1))
    rows = found["rows"]
    least, most = (f(row["exact_variance"] for row in rows) for f in (min, max))
    for y, row in enumerate(reversed(rows)):
        colour, biased = _CRITICS[row["critic"]][0], row["exact_bias"] > 1e-9
        left.plot([least / 4, row["exact_variance"]], [y, y], color=colour, linewidth=5, alpha=0.25, solid_capstyle="butt")
        _, low, high = row["variance"]
        left.plot([low, high], [y, y], color=colour, linewidth=2.4)
        note = f"{row['exact_variance']:.3g}" + (f"   bias {row['exact_bias']:.0%}" if biased else "")
        left.text(max(high, row["exact_variance"]) * 1.12, y, note, va="center", fontsize=8, color=_INK)
    left.set_yticks(range(len(rows)), [row["name"] for row in reversed(rows)])
    for colour, label in _CRITICS.values():
        left.plot([], [], color=colour, linewidth=5, alpha=0.6, label=label)
    left.set_xscale("log")
    left.set_xlim(least / 4, most * 6)
    left.xaxis.set_major_formatter("{x:g}")
    left.legend(fontsize=8, frameon=False, loc="upper right", bbox_to_anchor=(1.0, 0.7))
    _tidy(left, "Variance of the gradient of one episode", grid="x")
    shown = [
        ("reward to go G", ""),
        ("G − V", "rough"),
        ("GAE, λ = 0.9", "rough"),
        ("TD residual", "rough"),
        ("A = Q − V", "rough"),
    ]
    for (name, critic), colour in zip(shown, (GREY, _BLUE, _GREEN, _RUST, _PINK), strict=True):
        row = next(row for row in rows if (row["name"], row["critic"]) == (name, critic))
        size = found["gradient_length"]
        curve = [math.sqrt(row["exact_bias"] ** 2 + row["exact_variance"] / n / size**2) for n in _BATCHES]
        right.plot(_BATCHES, curve, color=colour, linewidth=1.8, label=name)
    right.set_xscale("log", base=2)
    right.set_yscale("log")
    right.set_xticks(_BATCHES[::2], [f"{n:,.0f}" for n in _BATCHES[::2]])
    right.yaxis.set_major_formatter("{x:g}")
    right.set_xlabel("episodes in a batch", color=_INK, fontsize=9)
    right.legend(fontsize=8, frameon=False)
    _tidy(right, "Error of the estimate with the rough critic, over ‖∇J‖", grid="y")
    return _save(figure, path)


def bias(found: Mapping[str, Any], path: Path) -> Path:
    """Bias² and variance over n and over λ, and their sum over λ for V̂ of growing error."""
    figure, panels = _figure(11.5, 3.9, 1, 3)
    rows = [row for row in found["rows"] if row["critic"] == "shrunk"]
    steps, traces = [row for row in rows if row["n"]], [row for row in rows if not row["n"]]
    _shares(panels[0], steps, [row["n"] for row in steps])
    panels[0].set_xscale("log", base=2)
    _named_ticks(panels[0], [row["n"] for row in steps], "steps n before V̂")
    _shares(panels[1], traces, list(range(len(traces))))
    _named_ticks(panels[1], list(range(len(traces))), "λ", [f"{row['lam']:g}" for row in traces])
    panels[0].legend(fontsize=8, frameon=False)
    curves = [curve for curve in found["curves"] if curve["critic"] == "shrunk"]
    for curve, strength in zip(curves, (0.25, 0.4, 0.6, 0.8, 1.0), strict=True):
        best = min(range(len(curve["mse"])), key=curve["mse"].__getitem__)
        panels[2].plot(curve["lam"], curve["mse"], color=_BLUE, alpha=strength, linewidth=1.8)
        panels[2].plot(curve["lam"][best], curve["mse"][best], "o", color=_RUST, markersize=5)
        said = {"xytext": (0, 3), "textcoords": "offset points", "fontsize": 8, "color": _INK}
        panels[2].annotate(f"error {curve['error']:g}", (0.3, curve["mse"][len(curve["mse"]) * 3 // 10]), **said)
    panels[2].set_yscale("log")
    panels[2].yaxis.set_major_formatter("{x:g}")
    panels[2].set_xlabel("λ", color=_INK, fontsize=9)
    error = found["settings"]["error"]
    for panel, title in zip(
        panels,
        (f"n-step targets, V̂ = {1 - error:g}·V", f"λ-returns, V̂ = {1 - error:g}·V", "bias² + variance; the best λ"),
        strict=True,
    ):
        _tidy(panel, title, grid="y")
    return _save(figure, path)


def _shares(axes: Any, rows: Sequence[Mapping[str, Any]], x: Sequence[float]) -> None:
    """Exact curves, with the sampled figures and their intervals as marks."""
    both = [row["exact_bias2"] + row["exact_variance"] for row in rows]
    axes.plot(x, both, color=_INK, linewidth=1.2, linestyle=(0, (4, 3)), label="sum")
    for key, colour, label in (("bias2", _BLUE, "bias²"), ("variance", _RUST, "variance")):
        axes.plot(x, [row[f"exact_{key}"] for row in rows], color=colour, linewidth=1.8, label=label)
        for at, row in zip(x, rows, strict=True):
            axes.plot([at, at], row[key][1:], color=colour, linewidth=3.5, alpha=0.45)
    axes.set_ylim(bottom=0)


def _named_ticks(axes: Any, places: Sequence[float], label: str, names: Sequence[str] | None = None) -> None:
    axes.set_xticks(places, names or [f"{place:g}" for place in places])
    axes.minorticks_off()
    axes.set_xlabel(label, color=_INK, fontsize=9)


def clip(found: Mapping[str, Any], path: Path) -> Path:
    """A column for each surrogate, a row for each sign of the advantage; grey where the gradient vanishes."""
    names = list(dict.fromkeys(curve["name"] for curve in found["curves"]))
    figure, panels = _figure(12.0, 4.6, 2, len(names), sharex=True, sharey="row")
    silent = {(row["name"], row["advantage"]): row["silent"] for row in found["rows"]}
    for curve in found["curves"]:
        row, column = int(curve["advantage"] < 0), names.index(curve["name"])
        axes, last = panels[row][column], curve["ratio"][-1]
        for span in silent[curve["name"], curve["advantage"]]:
            axes.axvspan(span["low"], last if span["high"] is None else span["high"], color=GREY, alpha=0.18, linewidth=0)
        if curve["name"] != "CISPO":  # its value is no function of the ratio
            axes.plot(curve["ratio"], curve["value"], color=_BLUE, linewidth=1.6, label="surrogate")
        axes.plot(
            curve["ratio"], curve["push"], color=_RUST, linewidth=1.8, linestyle=(0, (4, 1.5)), label="its gradient by log π"
        )
        _tidy(axes, f"{curve['name']}, A {'<' if row else '>'} 0", grid="y")
        axes.set_xticks([0, 1, 2, 3, 4, 5, 6])
        if row:
            axes.set_xlabel("ratio ρ", color=_INK, fontsize=9)
    panels[0][0].plot([], [], color=GREY, alpha=0.3, linewidth=6, label="no gradient")
    panels[0][0].legend(fontsize=8, frameon=False)
    return _save(figure, path)


def _figure(width: float, height: float, rows: int, columns: int, **layout: Any) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, **layout)


def _tidy(axes: Any, title: str, grid: str) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GREY)
    axes.set_axisbelow(True)
    axes.grid(axis=grid, color=GREY, alpha=0.25, linewidth=0.6)
    axes.tick_params(colors=_INK, labelsize=8, length=0, which="both")
    axes.set_title(title, loc="left", fontsize=10, color="#222222")


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=110)
    return path
