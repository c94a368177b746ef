"""Small SVG plots for reports: a run's signals (see `psigrad.records.signals`), its rewards and its timings."""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from psigrad.records.read import RunData, kind_of, show_number
from psigrad.records.rows import number
from psigrad.records.signals import SIGNALS, Signal
from psigrad.redaction import escape

# Okabe and Ito (2008): colours that colour-blind readers can distinguish. The page uses lighter ones in dark mode.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#000000")
DARK = ("#4FA8E0", "#F0803C", "#2FBF94", "#DE98C0", "#F0B93A", "#8ACBF2", "#A5A9B0", "#E6E8EB")
GREY = "#8a8f98"
_INK = "#123456"  # a placeholder for the page's text colour
_LABEL = 16  # the maximum number of characters of a label at the end of a curve: longer ones make the plot too narrow
_POINTS = 400  # a picture 340 pixels wide cannot display more


@dataclass(frozen=True)
class Plot:
    """A plot: its title, its explanation, and the `keys` of its metrics, with a label for each.

    A plot that compares several runs draws only the first metric.
    """

    title: str
    note: str
    keys: tuple[str, ...]
    labels: tuple[str, ...] = ("",)
    smooth: bool = True

    @property
    def legend(self) -> tuple[str, ...]:
        """The labels of the curves, if they are too long to be drawn at the curves' ends; otherwise ()."""
        return self.labels if max(map(len, self.labels)) > _LABEL else ()


_TIME = Plot("Time", "Seconds per step, by phase.", ())
_SPREAD = Plot("Rewards", "Share of completions by reward.", ())


def smooth(values: Sequence[float], weight: float = 0.0) -> list[float]:
    """Return the exponential moving average with bias correction: Σ w^i·x_i / Σ w^i, where x_i is the value i steps earlier.

    w is `weight`, unless that is 0: then w depends on the number of values.
    """
    weight = weight or max(0.9, 1 - 80 / max(1, len(values)))
    out, total, norm = [], 0.0, 0.0
    for value in values:
        total, norm = weight * total + value, weight * norm + 1
        out.append(total / norm)
    return out


def draw(runs: Sequence[RunData]) -> list[tuple[Plot, str]]:
    """Return (plot, SVG) for each signal that the runs have recorded. For a single run, add plots of rewards and timings."""
    kinds = {kind_of(run.config) for run in runs}
    plots = dict.fromkeys(one for signal in SIGNALS if kinds & {*signal.kinds} for one in _plots_of(signal, runs))
    if len(runs) == 1 and len(parts := [key for key in runs[0].keys("rewards/") if key.endswith("/mean")][:8]) > 1:
        labels = tuple(escape(key.split("/")[-2]) for key in parts)
        plots[Plot("Reward functions", "Mean of each, before weighting.", tuple(parts), labels)] = None
    pictures = [
        (plot, picture(plot.title, partial(_lines, plot=plot, runs=runs)))
        for plot in plots
        if any(_worth_drawing(run.series(key)[1]) for run in runs for key in plot.keys)
    ]
    if len(runs) == 1 and len(runs[0].rewards) > 1:
        pictures.insert(1, (_SPREAD, picture(_SPREAD.title, partial(_spread, run=runs[0]))))
    if len(runs) == 1 and len(_phase_rows(runs[0])) > 1 and kind_of(runs[0].config) != "control":
        pictures.append((_TIME, picture(_TIME.title, partial(_phases, run=runs[0]))))
    return pictures


def _worth_drawing(values: Sequence[float]) -> bool:
    """Return True if a curve has at least two points, and not all of them are 0."""
    return len(values) > 1 and any(values)


def _plots_of(signal: Signal, runs: Sequence[RunData]) -> list[Plot]:
    """Return the plot of a signal. The signal "held_out" has one plot for each different `held_out_metric` of the runs."""
    note = " ".join(filter(None, (signal.says, f"In {signal.unit}." if signal.unit else "")))
    if signal.name == "held_out":
        metrics = dict.fromkeys(run.held_out_metric for run in runs if run.held_out_metric)
        return [Plot(f"Held-out {name.removeprefix('eval/')}", note, (f"{name}/mean",)) for name in metrics]
    written = [key for key in signal.keys if any(_worth_drawing(run.series(key)[1]) for run in runs)]
    keys = (*(written or signal.keys)[:1], *signal.extra_keys)
    return [Plot(signal.title, note, keys, signal.labels, signal.smooth)]


def _lines(axes: Any, plot: Plot, runs: Sequence[RunData]) -> None:
    several, ends = len(runs) > 1, []
    for r, run in enumerate(runs):
        for k, key in enumerate(plot.keys[:1] if several else plot.keys):
            steps, values = run.series(key)
            if not steps:
                continue
            colour = COLOURS[(r if several else k) % len(COLOURS)]
            line = {"color": colour, "linewidth": 1.6, "linestyle": "-" if r < len(COLOURS) else "--"}
            if key.startswith("eval/"):
                _band(axes, run, key.removesuffix("/mean"), colour)
                line |= {"linestyle": ":", "linewidth": 1.0} if len(steps) < 4 else {}  # too few points to show a trend
                axes.plot(steps, values, **line, marker="o", markersize=3 if len(steps) < 50 else 0)
            elif plot.smooth and len(values) > 20:
                axes.plot(*_thin(steps, values), color=colour, linewidth=0.6, alpha=0.3)
                values = smooth(values)
                axes.plot(*_thin(steps, values), **line)
            else:
                axes.plot(*_thin(steps, values), **line)
            label = "" if several or len(plot.labels) < 2 or plot.legend else plot.labels[k]
            ends.append((values[-1], label, colour))
    low, high = axes.get_ylim()
    ends = [(y, f"{_tick(y if abs(y) > 1e-3 * (high - low) else 0.0, 3)} {label}".strip(), c) for y, label, c in ends]
    _labels(axes, ends if len(ends) <= 6 else [])


def _thin(steps: Sequence[int], values: Sequence[float]) -> tuple[list[int], list[float]]:
    """Return (steps, values) of at most 2·`_POINTS` points of a curve.

    To preserve the outline, divide the curve into intervals and keep the minimum and the maximum of each.
    """
    stride = -(-len(steps) // _POINTS)
    if stride <= 2:
        return list(steps), list(values)
    stretches = [range(i, min(i + stride, len(steps))) for i in range(0, len(steps), stride)]
    kept = [i for s in stretches for i in sorted({min(s, key=values.__getitem__), max(s, key=values.__getitem__)})]
    return [steps[i] for i in kept], [values[i] for i in kept]


def _band(axes: Any, run: RunData, name: str, colour: str) -> None:
    """Draw the 95 % interval of a held-out figure as a band, if the figure has one."""
    rows = [(row["step"], number(row.get(f"{name}/low")), number(row.get(f"{name}/high"))) for row in run.all_evaluations]
    rows = [row for row in rows if math.isfinite(row[1]) and math.isfinite(row[2])]
    if rows:
        axes.fill_between(*zip(*rows, strict=True), color=colour, alpha=0.18, linewidth=0)


def _spread(axes: Any, run: RunData) -> None:
    """Draw the share of completions with each reward as stacked areas. Use five bins for more than five different rewards."""
    steps = sorted(run.rewards)
    every = [reward for step in steps for reward in run.rewards[step]]
    low, high, values = min(every), max(every), sorted(set(every))
    width = (high - low) / 5 or 1.0
    if len(values) <= 5:
        edges, names = values[1:], [show_number(value) for value in values]
    else:
        edges = [low + width * i for i in range(1, 5)]
        names = [f"{_tick(low + width * i, 2)} to {_tick(low + width * (i + 1), 2)}" for i in range(5)]
    stride = -(-len(steps) // 40)
    groups = [steps[i : i + stride] for i in range(0, len(steps), stride)]
    shares = []
    for group in groups:
        found = [sum(reward >= edge for edge in edges) for step in group for reward in run.rewards[step]]
        shares.append([found.count(i) / len(found) for i in range(len(names))])
    layers = [(name, [share[i] for share in shares]) for i, name in enumerate(names)]
    # Low rewards have one colour, high ones another, and the middle is grey. A layer that is too thin to see has no label.
    last = max(1, len(names) - 1)
    colours = [COLOURS[1] if i < last / 2 else COLOURS[0] if i > last / 2 else GREY for i in range(len(names))]
    strengths = [0.25 + 0.5 * abs(2 * i / last - 1) for i in range(len(names))]
    layers = [(name if max(shares) >= 0.02 else "", shares) for name, shares in layers]
    _stack(axes, [group[len(group) // 2] for group in groups], layers, colours, strengths, _INK)
    axes.set_ylim(0, 1)


def _phase_rows(run: RunData) -> list[dict[str, float]]:
    """Return {"step": step, phase: seconds, …} for each training step. Skip rows of timings.jsonl for evaluations."""
    rows = [
        {"step": row["step"], **{key[5:]: number(value) for key, value in row.items() if key.startswith("time/")}}
        for row in run.timings
    ]
    return [row for row in rows if row.keys() - {"step", "eval"} and all(math.isfinite(value) for value in row.values())]


def _phases(axes: Any, run: RunData) -> None:
    rows = _phase_rows(run)
    names = [name for name in dict.fromkeys(key for row in rows for key in row) if name != "step"]
    layers = [(name, smooth([row.get(name, 0.0) for row in rows])) for name in names]
    stride = -(-len(rows) // _POINTS)
    colours = [COLOURS[i % len(COLOURS)] for i in range(len(names))]
    steps = [int(row["step"]) for row in rows][::stride]
    _stack(axes, steps, [(name, values[::stride]) for name, values in layers], colours, [0.6] * len(names))


def _stack(axes: Any, steps: Sequence[int], layers: Any, colours: Any, strengths: Any, ink: str = "") -> None:
    """Draw `layers`, which are (label, values) pairs, as stacked areas over `steps`, with the labels at the right.

    `strengths` are the opacities of the layers. The labels have the colour `ink`, or their layer's if `ink` is "".
    """
    bottom, ends = [0.0] * len(steps), []
    for (name, values), colour, strength in zip(layers, colours, strengths, strict=True):
        top = [b + v for b, v in zip(bottom, values, strict=True)]
        axes.fill_between(steps, bottom, top, color=colour, alpha=strength, linewidth=0)
        if name:
            ends.append(((bottom[-1] + top[-1]) / 2, escape(name), ink or colour))
        bottom = top
    axes.set_ylim(0, max(bottom) * 1.02 or 1)
    _labels(axes, ends)


def _labels(axes: Any, ends: Sequence[tuple[float, str, str]]) -> None:
    """Draw the labels `ends`, each (y, text, colour), at the right ends of curves. Move them apart if they overlap."""
    _limits(axes)
    low, high = axes.get_ylim()
    ends = sorted(ends, key=lambda end: end[0])
    heights = [(y - low) / (high - low) for y, _, _ in ends]
    for _ in range(40):
        for i in range(len(heights) - 1):
            lack = max(0.0, 0.12 - (heights[i + 1] - heights[i])) / 2
            heights[i], heights[i + 1] = max(0.0, heights[i] - lack), min(1.0, heights[i + 1] + lack)
    for height, (_, text, colour) in zip(heights, ends, strict=True):
        axes.text(1.015, height, text, transform=axes.transAxes, color=colour, fontsize=8, va="center", parse_math=False)


def _limits(axes: Any) -> None:
    """Set the limits of the y-axis. If no value is negative and low < high / 2, start at 0. Extend an empty range by ±0.5."""
    axes.margins(x=0.01, y=0.08)
    low, high = axes.get_ylim()
    if axes.dataLim.y0 >= 0 and high > 0 and low < 0.5 * high:
        axes.set_ylim(bottom=0)
    if high - low < 1e-12:
        axes.set_ylim(low - 0.5, high + 0.5)


def _tick(value: float, digits: int = 4) -> str:
    """Format a label with at most `digits` digits, such as 3e-4."""
    text = f"{value:.{digits}g}" if value == 0 or 1e-3 <= abs(value) < 1e5 else f"{value:.{digits - 1}e}"
    return re.sub(r"(\.\d*?)0*e", r"\1e", text).replace(".e", "e").replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")


def picture(title: str, paint: Callable[[Any], None]) -> str:
    """Return the SVG that `paint(axes)` draws, with CSS variables as colours. `title` is the text for screen readers."""
    import matplotlib

    figure, axes = _axes(3.5, 2.0)
    paint(axes)
    _finish(axes)
    title, stream = escape(title), io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": f"psigrad {title}"}):
        figure.savefig(stream, format="svg", transparent=True)
    text = stream.getvalue()
    # the metadata contains web addresses
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->|<style.*?</style>|\n\s*", " ", text[text.index("<svg") :], flags=re.S)
    label = f'<svg role="img" aria-label="{html.escape(title)}"'
    text = re.sub(r'<svg [^>]*?( viewBox="[^"]*")[^>]*>', lambda m: f"{label}{m[1]}>", text, count=1)
    # drop ids, which would repeat from picture to picture, and fonts, which the page sets
    text = re.sub(r' id="[^"]*_\d+"|font-family: [^;]*; | transform="rotate\(-0 [^"]*"', "", text)
    for i, colour in enumerate(COLOURS):
        text = re.sub(colour, f"var(--c{i})", text, flags=re.I)
    return text.replace("xlink:href", "href").replace(_INK, "currentColor")


def _axes(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _finish(axes: Any, ink: str = _INK) -> None:
    from matplotlib.ticker import MaxNLocator

    _limits(axes)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GREY)
    axes.set_axisbelow(True)
    axes.grid(axis="y", color=GREY, alpha=0.25, linewidth=0.6)
    axes.tick_params(colors=ink, labelsize=8, length=0)
    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=high - low > 4, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(lambda value, place: _tick(value))  # without it, the exponent is at the axis's end
    axes.xaxis.set_major_formatter(lambda value, place: f"{value:,.0f}" if high - low > 4 else _tick(value))
