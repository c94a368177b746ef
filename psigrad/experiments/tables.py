"""The tables that `psigrad experiment` prints, 80 columns wide."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich import box
from rich.table import Table
from rich.text import Text

from psigrad.experiments import bias as biases
from psigrad.experiments import clip as clips
from psigrad.experiments import psi as forms
from psigrad.intervals import Interval

_CRITICS = {"": "no critic", forms.EXACT: "exact V and Q", forms.ROUGH: "rough V and Q"}
_VALUES = {biases.PERFECT: "V̂ = V", biases.SHRUNK: "V̂ shrunk", biases.NOISY: "V̂ with noise"}


def psi(result: forms.Result) -> Iterator[Table | Text]:
    """One row for each form of Ψ, in sections by critic."""
    title = f"The policy gradient by Ψ; ‖∇J‖ = {result.gradient_length:.3f}, batches of {result.settings.batch} episodes"
    table = _table(title, "Ψ", "bias", "along ∇J", "p", "variance", "sampled", "error")
    for critic, said in _CRITICS.items():
        _section(table, said)
        for row in result.rows:
            if row.critic == critic:
                bias = "0" if row.exact_bias < 1e-9 else f"{row.exact_bias:.3g}"
                spread = (_around(row.along, "+z.3f"), _p(row.p), f"{row.exact_variance:.4g}", _three(row.variance))
                table.add_row(f" {row.name}", bias, *spread, f"{row.error:.2f}")
    yield table
    yield _note(
        "bias      ‖E ĝ − ∇J‖ / ‖∇J‖, exact by enumeration",
        "along ∇J  the part of it along ∇J, sampled, with its 95 % interval over seeds",
        "p         of the sampled mean if there is no bias in any parameter",
        "variance  trace of the covariance for one episode, exact; then sampled",
        "error     √E‖ĝ − ∇J‖² / ‖∇J‖ of one batch",
    )


def bias(result: biases.Result) -> Iterator[Table | Text]:
    """One row for each target, in sections by V̂; then the best λ."""
    table = _table(
        f"Targets of a critic on the {result.settings.world}, error of V̂ {result.settings.error:g}",
        "target",
        "bias²",
        "sampled",
        "variance",
        "sampled",
        "sum",
    )
    for kind, said in _VALUES.items():
        _section(table, said)
        for row in result.rows:
            if row.critic == kind:
                cells = (
                    f"{row.exact_bias2:.4f}",
                    _around(row.bias2, "z.4f"),
                    f"{row.exact_variance:.4f}",
                    _around(row.variance, "z.4f"),
                )
                table.add_row(f" {row.target}", *cells, f"{row.exact_bias2 + row.exact_variance:.4f}")
    yield table
    yield _note("means over the states; exact, and sampled with the 95 % interval over seeds")
    best = _table("λ with the least bias² + variance, exact", "", *(f"error {error:g}" for error in biases.ERRORS))
    for kind in (biases.SHRUNK, biases.NOISY):
        best.add_row(_VALUES[kind], *(f"{curve.best:.2f}" for curve in result.curves if curve.critic == kind))
    yield best


def clip(result: clips.Result) -> Iterator[Table | Text]:
    """One row for each surrogate and sign of the advantage."""
    head = ("surrogate", "A", *(f"ρ = {case:g}" for case in result.cases), "none where", "logged")
    table = _table("Gradient of the surrogate by log π, over the ratio ρ", *head)
    for row in result.rows:
        silent = ", ".join(f"ρ > {s.low:g}" if s.high is None else f"ρ < {s.high:g}" for s in row.silent) or "–"
        pushes = (f"{push:+.3g}" if push else "0" for push in row.pushes)
        table.add_row(row.name, f"{row.advantage:+d}", *pushes, silent, "yes" if row.logged else "in part")
    yield table
    yield _note("logged: whether a run's clip_ratio counts exactly the steps without gradient")


def _table(title: str, *head: str) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
    for i, name in enumerate(head):
        table.add_column(name, justify="left" if i == 0 else "right", no_wrap=True)
    return table


def _section(table: Table, name: str) -> None:
    table.add_row(Text(name, style="italic"))


def _note(*lines: str) -> Text:
    return Text("\n".join(lines) + "\n", style="dim")


def _p(value: float | None) -> str:
    return "–" if value is None else "<.001" if value < 1e-3 else f"{value:.3f}"


def _three(found: Interval) -> str:
    """Three digits of a positive mean, and as many places of its interval."""
    return _around(found, f".{max(0, 2 - math.floor(math.log10(found.mean))) if found.mean > 0 else 2}f")


def _around(found: Interval, form: str) -> str:
    """Mean and half of the interval; the mean alone where a single seed gives no interval."""
    if found.low == found.high:
        return f"{found.mean:{form}}"
    return f"{found.mean:{form}}±{found.high - found.mean:{form.strip('+')}}"
