"""Surrogates as functions of the ratio ρ = π/π_old: their values, their gradients, and the ranges without a gradient.

A batch has one step for each ρ of a grid. The push is d(−loss)/d log π by autograd through the library's own ratio and surrogate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from psigrad.objective.parts import ratio
from psigrad.objective.parts.surrogate import Surrogate, clip, clip_fractions, dual_clip, truncated_weight, unclipped
from psigrad.records.report.plots import GREY
from psigrad.tabular.mdp import FloatArray
from studies import drawing
from studies.drawing import BLUE, RUST
from studies.settings import ClipSettings

CASES = (0.5, 1.0, 2.0, 8.0)
OLD = 1 / 16
"""π_old of the only token, so that ratios reach up to 16."""


@dataclass(frozen=True)
class ClipResult:
    """The results of `run`."""

    settings: ClipSettings
    cases: tuple[float, ...]
    """The ratios of `ClipRow.pushes`."""
    rows: tuple[ClipRow, ...]
    curves: tuple[SurrogateCurve, ...]


def run(settings: ClipSettings) -> ClipResult:
    """Compute the ranges in which each surrogate has a gradient. Raises `ValueError` for invalid bounds."""
    chosen = check(settings)
    return ClipResult(settings, CASES, tuple(rows(chosen)), tuple(curves(chosen)))


def check(s: ClipSettings) -> list[NamedSurrogate]:
    """Return the surrogates of the settings. Raises `ValueError` for invalid bounds."""
    return surrogates(s.low, s.high, s.higher, s.bound, s.cap)


@dataclass(frozen=True)
class NamedSurrogate:
    """A surrogate with its common name."""

    name: str
    surrogate: Surrogate


def surrogates(
    low: float = 0.2, high: float = 0.2, higher: float = 0.28, bound: float = 3.0, cap: float = 5.0
) -> list[NamedSurrogate]:
    """Return the surrogates to compare. Raises `ValueError` for invalid bounds."""
    return [
        NamedSurrogate("no clip", unclipped),
        NamedSurrogate("clip (PPO)", clip(low, high)),
        NamedSurrogate("clip-higher (DAPO)", clip(low, higher)),
        NamedSurrogate("dual clip", dual_clip(low, high, bound)),
        NamedSurrogate("CISPO", truncated_weight(cap)),
    ]


def pushes(surrogate: Surrogate, rho: FloatArray, advantage: float) -> tuple[FloatArray, FloatArray]:
    """Return (value, push) at each ρ: the surrogate −L, and −∂L/∂ log π, which is ρ·A without a clip.

    π_old = 1/16 is fixed; log π moves. CISPO's value is its weight times A·log π and not a function of ρ alone.
    """
    old = torch.full((len(rho), 1), float(np.log(OLD)), dtype=torch.float64)
    logp = (old + torch.from_numpy(np.log(rho))[:, None]).requires_grad_()
    loss = surrogate(logp, _log_ratio(logp, old), torch.full_like(old, advantage))
    (gradient,) = torch.autograd.grad(loss.sum(), logp)
    return -loss.detach().numpy()[:, 0], 0.0 - gradient.numpy()[:, 0]


def _log_ratio(logp: Tensor, old: Tensor) -> Tensor:
    return ratio.token(logp, old, torch.ones_like(old, dtype=torch.bool))


@dataclass(frozen=True)
class FlatRange:
    """A range of ρ on which the gradient is exactly 0, by autograd; `high` is None if the range has no end."""

    low: float
    high: float | None


def flat_ranges(surrogate: Surrogate, advantage: float, *, least: float = 1e-3, most: float = 15.9) -> list[FlatRange]:
    """Return the ranges in which a surrogate has no gradient. The ends are found by bisection to 1e-9."""
    rho = np.geomspace(least, most, 2001)

    def silent(x: float) -> bool:
        return bool(pushes(surrogate, np.array([x]), advantage)[1][0] == 0)

    def edge(a: float, b: float) -> float:
        at_a = silent(a)
        while b - a > 1e-12:
            middle = (a + b) / 2
            a, b = (middle, b) if silent(middle) == at_a else (a, middle)
        return round((a + b) / 2, 9)

    dead = pushes(surrogate, rho, advantage)[1] == 0
    changes = [edge(float(rho[i]), float(rho[i + 1])) for i in np.flatnonzero(dead[1:] != dead[:-1])]
    starts = ([0.0] if dead[0] else []) + changes
    return [FlatRange(a, b) for a, b in zip_longest(starts[::2], starts[1::2])]


@dataclass(frozen=True)
class ClipRow:
    """The figures of one surrogate for one sign of the advantage."""

    name: str
    advantage: int
    silent: tuple[FlatRange, ...]
    """The ranges in which the gradient vanishes."""
    pushes: tuple[float, ...]
    """−∂L/∂ log π at ρ = 0.5, 1, 2 and 8."""
    logged: bool
    """True if `clip_fractions`, and so the run's clip_ratio, counts exactly the steps without gradient."""


@dataclass(frozen=True)
class SurrogateCurve:
    """The surrogate and its push over ρ, for the picture."""

    name: str
    advantage: int
    ratio: tuple[float, ...]
    value: tuple[float, ...]
    push: tuple[float, ...]


def rows(chosen: Sequence[NamedSurrogate]) -> list[ClipRow]:
    """Return a row for each surrogate with A = 1, and one with A = −1."""
    return [
        ClipRow(
            one.name,
            sign,
            tuple(flat_ranges(one.surrogate, sign)),
            tuple(map(float, pushes(one.surrogate, np.array(CASES), sign)[1])),
            _is_logged(one.surrogate, sign),
        )
        for sign in (1, -1)
        for one in chosen
    ]


def _is_logged(surrogate: Surrogate, advantage: float) -> bool:
    rho = np.geomspace(0.01, 15.0, 1000)
    logp = torch.from_numpy(np.log(rho))[:, None]
    hits = clip_fractions(surrogate, logp, torch.full_like(logp, advantage))
    counted = hits.get("clip_ratio/region_mean", torch.zeros_like(logp, dtype=torch.bool)).numpy()[:, 0]
    return bool((counted == (pushes(surrogate, rho, advantage)[1] == 0)).all())


def curves(chosen: Sequence[NamedSurrogate], most: float = 6.0) -> list[SurrogateCurve]:
    """Return values and pushes from ρ = 0 to `most`."""
    rho = np.linspace(0.02, most, 300)
    found = []
    for sign in (1, -1):
        for one in chosen:
            value, push = pushes(one.surrogate, rho, sign)
            columns = (tuple(column.round(6).tolist()) for column in (rho, value, push))
            found.append(SurrogateCurve(one.name, sign, *columns))
    return found


def tables(result: ClipResult) -> drawing.Printed:
    """Yield one row for each surrogate and sign of the advantage."""
    head = ("surrogate", "A", *(f"ρ = {case:g}" for case in result.cases), "zero where", "counted")
    table = drawing.new_table("Gradient of the surrogate with respect to log π", *head)
    for row in result.rows:
        silent = ", ".join(f"ρ > {s.low:g}" if s.high is None else f"ρ < {s.high:g}" for s in row.silent) or "–"
        pushes = (f"{push:+.3g}" if push else "0" for push in row.pushes)
        counted = "–" if not row.silent else "yes" if row.logged else "in part"
        table.add_row(row.name, f"{row.advantage:+d}", *pushes, silent, counted)
    yield table
    yield drawing.note("counted: whether a run's clip_ratio counts all tokens without a gradient")


def picture(found: Mapping[str, Any], path: Path) -> Path:
    """Plot a column for each surrogate and a row for each sign of the advantage; grey where the gradient vanishes."""
    names = list(dict.fromkeys(curve["name"] for curve in found["curves"]))
    figure, panels = drawing.new_figure(12.0, 4.6, 2, len(names), sharex=True, sharey="row")
    silent = {(row["name"], row["advantage"]): row["silent"] for row in found["rows"]}
    for curve in found["curves"]:
        row, column = int(curve["advantage"] < 0), names.index(curve["name"])
        axes, last = panels[row][column], curve["ratio"][-1]
        for span in silent[curve["name"], curve["advantage"]]:
            axes.axvspan(span["low"], last if span["high"] is None else span["high"], color=GREY, alpha=0.18, linewidth=0)
        if curve["name"] != "CISPO":  # its value is not a function of the ratio
            axes.plot(curve["ratio"], curve["value"], color=BLUE, linewidth=1.6, label="surrogate")
        axes.plot(
            curve["ratio"], curve["push"], color=RUST, linewidth=1.8, linestyle=(0, (4, 1.5)), label="gradient w.r.t. log π"
        )
        drawing.tidy(axes, f"{curve['name']}, A {'<' if row else '>'} 0", "y", "ratio ρ" if row else "")
        axes.set_xticks([0, 1, 2, 3, 4, 5, 6])
    panels[0][0].plot([], [], color=GREY, alpha=0.3, linewidth=6, label="no gradient")
    panels[0][0].legend(fontsize=8, frameon=False)
    return drawing.save(figure, path)
