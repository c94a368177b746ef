"""Pictures of runs: small line plots, one idea each, as SVG for the page and as PNG for the README."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from psigrad.report.read import RunData

# Okabe and Ito (2008): eight colours that colour-blind readers tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#000000")
GREY = "#8a8f98"


@dataclass(frozen=True)
class Plot:
    """One picture: its title, what it says, and the metrics drawn (the first is smoothed over its raw line)."""

    title: str
    note: str
    keys: tuple[str, ...]
    band: bool = False
    smooth: bool = True


ONLINE = (
    Plot("Reward", "mean over all completions of a step", ("reward",)),
    Plot("Held-out {metric}", "with its 95 % interval", ("{metric}/mean",), band=True, smooth=False),
    Plot("KL to the starting model", "held-out, nats per completion", ("eval/kl",), band=True, smooth=False),
    Plot("Entropy", "of the policy, nats per token", ("entropy",)),
    Plot("Completion length", "tokens", ("completions/mean_length", "completions/max_length")),
    Plot("Cut by the length limit", "share of completions", ("completions/clipped_ratio",)),
    Plot("Groups without signal", "share of prompts whose rewards are all equal", ("frac_reward_zero_std",)),
    Plot("KL in the loss", "to the reference, nats per token", ("kl",)),
    Plot("Clipped", "share of tokens without gradient", ("clip_ratio/low_mean", "clip_ratio/high_mean")),
    Plot("Gradient norm", "before clipping", ("grad_norm",)),
    Plot("Learning rate", "", ("learning_rate",), smooth=False),
    Plot(
        "Sampler against trainer",
        "largest difference in log-probability",
        ("sampling/sampling_logp_difference/max",),
        smooth=False,
    ),
)
OFFLINE = (
    Plot("Loss", "nats per token; dots are held-out", ("loss", "eval/loss")),
    Plot("Held-out {metric}", "of generated completions, with its 95 % interval", ("{metric}/mean",), band=True, smooth=False),
    Plot(
        "Token accuracy", "share of target tokens that are the most probable", ("mean_token_accuracy", "eval/mean_token_accuracy")
    ),
    Plot("Entropy", "nats per token", ("entropy",)),
    Plot("Gradient norm", "before clipping", ("grad_norm",)),
    Plot("Learning rate", "", ("learning_rate",), smooth=False),
)


def smoothed(values: Sequence[float], weight: float = 0.9) -> list[float]:
    """Exponential moving average without the bias of its start: sum w^i x / sum w^i."""
    out, total, norm = [], 0.0, 0.0
    for value in values:
        total, norm = weight * total + value, weight * norm + 1
        out.append(total / norm)
    return out


def draw(runs: Sequence[RunData]) -> list[tuple[Plot, str]]:
    """(plot, SVG) of everything that these runs have to show."""
    plots = dict.fromkeys(p for run in runs for p in (OFFLINE if run.config.get("recipe") == "sft" else ONLINE))
    pictures = []
    for plot in plots:
        metric = next((run.held_out_metric for run in runs if run.held_out_metric), "")
        plot = _named(plot, metric)
        if any(_worth_drawing(run.series(key)[1]) for run in runs for key in plot.keys):
            pictures.append((plot, _svg(lambda axes, plot=plot: _lines(axes, plot, runs))))
    if len(runs) == 1 and runs[0].timings:
        pictures.append((Plot("Time", "seconds per step, by phase", ()), _svg(lambda axes: _phases(axes, runs[0]))))
    return pictures


def _worth_drawing(values: Sequence[float]) -> bool:
    """Whether there is a curve: two points or more, and not all zero (clip ratios of on-policy runs are)."""
    return len(values) > 1 and any(values)


def _named(plot: Plot, metric: str) -> Plot:
    title = plot.title.replace("{metric}", metric.removeprefix("eval/"))
    keys = tuple(key.replace("{metric}", metric) for key in plot.keys if metric or "{metric}" not in key)
    return Plot(title, plot.note, keys, plot.band, plot.smooth)


def _lines(axes: Any, plot: Plot, runs: Sequence[RunData]) -> None:
    several = len(runs) > 1
    for r, run in enumerate(runs):
        for k, key in enumerate(plot.keys[:1] if several else plot.keys):
            steps, values = run.series(key)
            if not steps:
                continue
            colour = COLOURS[(r if several else k) % len(COLOURS)]
            if plot.band:
                _band(axes, run, key.removesuffix("/mean"), colour)
            if key.startswith("eval/"):
                axes.plot(steps, values, color=colour, marker="o", markersize=3, linewidth=1.4)
            elif plot.smooth and len(values) > 20:
                axes.plot(steps, values, color=colour, linewidth=0.6, alpha=0.3)
                axes.plot(steps, smoothed(values), color=colour, linewidth=1.6)
            else:
                axes.plot(steps, values, color=colour, linewidth=1.4)
            if not several and len(plot.keys) > 1:
                label = key.rpartition("/")[2].removesuffix("_mean").removesuffix("_length") if "/" in key else "train"
                axes.annotate(
                    label,
                    (steps[-1], values[-1]),
                    xytext=(4, 0),
                    textcoords="offset points",
                    color=colour,
                    fontsize=7,
                    va="center",
                )


def _band(axes: Any, run: RunData, name: str, colour: str) -> None:
    rows = [row for row in run.evaluations if f"{name}/low" in row and f"{name}/high" in row]
    axes.fill_between(
        [row["step"] for row in rows],
        [row[f"{name}/low"] for row in rows],
        [row[f"{name}/high"] for row in rows],
        color=colour,
        alpha=0.18,
        linewidth=0,
    )


def _phases(axes: Any, run: RunData) -> None:
    """Seconds per step, stacked by phase, smoothed."""
    rows = [row for row in run.timings if any(key.startswith("time/") and key != "time/eval" for key in row)]
    names = list(dict.fromkeys(key for row in rows for key in row if key.startswith("time/")))
    steps = [row["step"] for row in rows]
    bottom = [0.0] * len(rows)
    for i, name in enumerate(names):
        top = [b + v for b, v in zip(bottom, smoothed([float(row.get(name, 0.0)) for row in rows]), strict=True)]
        axes.fill_between(steps, bottom, top, color=COLOURS[i], alpha=0.55, linewidth=0)
        if steps:
            axes.annotate(
                name.removeprefix("time/"),
                (steps[-1], (bottom[-1] + top[-1]) / 2),
                xytext=(4, 0),
                textcoords="offset points",
                color=COLOURS[i],
                fontsize=7,
                va="center",
            )
        bottom = top
    axes.set_ylim(bottom=0)


def _svg(paint: Callable[[Any], None]) -> str:
    """An SVG that takes the page's text colour, so that it is right in the dark as well."""
    figure, axes = _axes(3.5, 1.9)
    paint(axes)
    _finish(axes)
    stream = io.StringIO()
    figure.savefig(stream, format="svg", transparent=True)
    text = stream.getvalue()
    return text[text.index("<svg") :].replace("#123456", "currentColor")


def _axes(width: float, height: float) -> tuple[Any, Any]:
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.fonttype"] = "none"
    matplotlib.rcParams["svg.hashsalt"] = "psigrad"
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _finish(axes: Any, ink: str = "#123456") -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GREY)
    axes.grid(axis="y", color=GREY, alpha=0.25, linewidth=0.6)
    axes.tick_params(colors=ink, labelsize=7, length=0)
    axes.yaxis.set_major_formatter(lambda value, place: f"{value:g}")  # no offset in a corner
    axes.margins(x=0.02, y=0.08)
    low, high = axes.get_ylim()
    if low >= 0 and high > 0 and low < 0.5 * high:
        axes.set_ylim(bottom=0)
    if high - low < 1e-12 and math.isfinite(low):
        axes.set_ylim(low - 0.5, high + 0.5)


def readme_figure(folders: Sequence[str | Path], path: str | Path) -> Path:
    """A PNG for the README: held-out accuracy over steps, a thin line per seed with its interval, their mean, and SFT's level."""
    from psigrad.report.read import load

    runs = [load(folder) for folder in folders]
    metric = runs[0].held_out_metric
    figure, axes = _axes(8.0, 3.4)
    curves = []
    for run in runs:
        steps, values = run.series(f"{metric}/mean")
        curves.append((steps, values))
        _band(axes, run, metric, COLOURS[0])
        axes.plot(steps, values, color=COLOURS[0], linewidth=0.8, alpha=0.5)
    steps = curves[0][0]
    mean = [sum(values[i] for _, values in curves) / len(curves) for i in range(len(steps))]
    axes.plot(steps, mean, color=COLOURS[0], linewidth=2.4)
    axes.axhline(mean[0], color=COLOURS[1], linewidth=1.2, linestyle=(0, (4, 3)))
    axes.annotate(
        f"after SFT: {mean[0]:.0%}", (steps[-1], mean[0]), xytext=(0, 5), textcoords="offset points", color=COLOURS[1], ha="right"
    )
    axes.annotate(
        f"after GRPO: {mean[-1]:.0%}",
        (steps[-1], mean[-1]),
        xytext=(0, -16),
        textcoords="offset points",
        color=COLOURS[0],
        ha="right",
    )
    axes.set_xlabel("GRPO steps (128 completions each)", color="#333333")
    axes.set_title("Held-out accuracy on words that no demonstration held", loc="left", fontsize=11, color="#222222")
    _finish(axes, "#333333")
    axes.tick_params(labelsize=9)
    axes.set_ylim(0, 1)
    figure.savefig(path, dpi=125)
    return Path(path)
