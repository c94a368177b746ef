"""`psigrad grid`: a grid world solved sweep by sweep, in the terminal."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from psigrad.errors import UserError
from psigrad.tabular import ARROWS, GridWorld, Sweep
from psigrad.tabular.solvers import SOLVERS

Method = Literal["value_iteration", "policy_iteration", "modified_policy_iteration", "prioritised_sweeping"]
GOOD, BAD = (0, 114, 78), (178, 60, 20)  # the page's colours: green above zero, rust below
MOST_SWEEPS = 10_000


@dataclass(frozen=True)
class GridSettings:
    """Solve a grid world sweep by sweep. Show each cell's value as a number and a colour, and its best action as an arrow.

    If γ is 1 and several actions have the same value, the arrow shows one that leads towards an end, or · if none does.
    """

    map: str = ""
    """Text file: `.` free, `#` wall, `S` start, `+` a prize of 1, `-` a prize of −1; empty: 8×8 cells with each prize once."""
    method: Method = "value_iteration"
    """Method that solves the grid."""
    discount: float = 0.9
    """Discount γ, from 0 to 1."""
    slip: float = 0.0
    """Probability of moving at a right angle to the action."""
    step_reward: float = 0.0
    """Reward of every step; negative for a cost."""
    every: int = 0
    """Show every Nth sweep, besides the first and the last; 0: only those two."""
    play: float = 0.0
    """Play the sweeps as a film, with this many seconds between them; 0: print them one below the other."""


def run(settings: GridSettings, console: Console | None = None) -> Sweep:
    """Solve the grid, print the selected sweeps and the last one, and return the last. Raises `UserError` on a mistake."""
    for name, value in (("every", settings.every), ("play", settings.play)):
        if value < 0:
            raise UserError(f"{name} is {value:g}; expected 0 or more.")
    grid, console = grid_of(settings), console or Console()
    try:
        sweeps = SOLVERS[settings.method](grid.mdp(outcomes=False))
        few = itertools.islice(sweeps, MOST_SWEEPS)
        last = _show(grid, few, settings, console)
        if next(sweeps, None) is not None:
            console.print(f"Not finished after {MOST_SWEEPS:,} sweeps{_why(settings)}.")
    except ValueError as error:
        raise UserError(str(error)) from error
    return last


def _why(settings: GridSettings) -> str:
    endless = settings.discount == 1 and settings.step_reward > 0
    return ": with a reward at every step and a discount of 1, an endless walk has infinite value" if endless else ""


def grid_of(settings: GridSettings) -> GridWorld:
    """Return the grid that the settings describe."""
    given: dict[str, Any] = {"slip": settings.slip, "step_reward": settings.step_reward, "gamma": settings.discount}
    try:
        if not settings.map:
            return GridWorld(**given)
        return GridWorld.from_text(Path(settings.map).read_text(), **given)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "the file is not text"
        raise UserError(f"The map {settings.map!r} cannot be read: {why}.") from error
    except ValueError as error:
        raise UserError(str(error)) from error


def _show(grid: GridWorld, sweeps: Iterator[Sweep], settings: GridSettings, console: Console) -> Sweep:
    """Show all sweeps as a film, or else print the first one, every `every`-th, and the last one. Return the last."""
    last = shown = None
    with Live(console=console, auto_refresh=False) if settings.play else contextlib.nullcontext() as live:
        for sweep in sweeps:
            if live is not None:
                live.update(picture(grid, sweep), refresh=True)
                time.sleep(settings.play)
            elif last is None or (settings.every and sweep.iteration % settings.every == 0):
                console.print(*([] if shown is None else [""]), picture(grid, sweep))
                shown = sweep
            last = sweep
    assert last is not None
    if shown is not last and not settings.play:
        console.print("", picture(grid, last))
    return last


def picture(grid: GridWorld, sweep: Sweep) -> Group:
    """Return the grid for the terminal: values as numbers and colours, the greedy policy as arrows, and the error bound."""
    table = Table.grid(padding=0)
    policy = np.asarray(sweep.policy)
    actions = policy if policy.ndim == 1 else policy.argmax(1)
    signs = ["·" if open_ else ARROWS[int(action)] for open_, action in zip(sweep.leads_nowhere, actions, strict=True)]
    largest = max(float(np.abs(sweep.value).max()), 1e-12)
    for row in range(grid.rows):
        table.add_row(*(_cell(grid, (row, column), sweep.value, signs, largest) for column in range(grid.columns)))
    bound = f"{sweep.error_bound + 0.0:.2g}" if np.isfinite(sweep.error_bound) else "unknown"
    line = f"{sweep.step}, sweep {sweep.iteration}: largest change {sweep.residual:.2g}, error at most {bound}"
    return Group(table, Text(line, style="dim"))


def _cell(grid: GridWorld, cell: tuple[int, int], value: np.ndarray, signs: list[str], largest: float) -> Text:
    state = grid.state(cell)
    if cell in grid.walls:
        return Text(" ██████ ", style="dim")
    if cell in grid.prizes and grid.ends:
        worth = grid.prizes[cell]
        return Text(f"{worth:^+8g}", style=f"bold white on rgb{_shade(GOOD if worth > 0 else BAD, 1.0)}")
    number = float(value[state])
    style = f"on rgb{_shade(GOOD if number > 0 else BAD, abs(number) / largest * 0.8)}" if abs(number) > 1e-12 else ""
    arrow = signs[state] if abs(number) > 1e-12 else " "
    return Text(f"{number:6.2f}{arrow} ", style=style)


def _shade(colour: tuple[int, int, int], strength: float) -> str:
    """Return the colour mixed with black by `strength`, in the notation of rich."""
    return f"({','.join(str(round(part * (0.15 + 0.85 * strength))) for part in colour)})"
