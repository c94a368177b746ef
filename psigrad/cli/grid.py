"""`psigrad grid`: a grid world solved sweep by sweep, in the terminal."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from psigrad.errors import UserError, nearest
from psigrad.tabular import ARROWS, GridWorld, Sweep
from psigrad.tabular.solvers import SOLVERS

GOOD, BAD = (0, 114, 78), (178, 60, 20)  # the page's colours: green above zero, rust below
MOST_SWEEPS = 10_000


@dataclass(frozen=True)
class GridSettings:
    """A grid and how to solve it."""

    map: str = ""
    """Text file: `.` free, `#` wall, `S` start, `+` a prize of 1, `-` one of −1; empty: 8×8 with one of each."""
    method: str = "value_iteration"
    """value_iteration, policy_iteration, modified_policy_iteration or prioritised_sweeping."""
    discount: float = 0.9
    """γ, between 0 and 1."""
    slip: float = 0.0
    """Probability of going off at a right angle."""
    step_reward: float = 0.0
    """Paid for every step; negative for a cost."""
    every: int = 0
    """Show every this many sweeps, besides the first and the last."""
    play: float = 0.0
    """Seconds between sweeps: shows them as a film instead of one below the other."""


def run(settings: GridSettings, console: Console | None = None) -> Sweep:
    """Solve the grid, show the sweeps that were asked for and the last one, and return it. Raises `UserError` on a mistake."""
    grid, console = grid_of(settings), console or Console()
    if settings.method not in SOLVERS:
        known, hint = ", ".join(SOLVERS), nearest(settings.method, SOLVERS) or "."
        raise UserError(f"There is no method {settings.method!r}; expected one of {known}{hint}")
    try:
        mdp = grid.mdp(outcomes=False)
    except ValueError as error:
        raise UserError(str(error)) from error
    sweeps = itertools.islice(SOLVERS[settings.method](mdp), MOST_SWEEPS)
    if settings.play > 0:
        return _played(grid, sweeps, settings.play, console)
    last: Sweep | None = None
    for number, sweep in enumerate(sweeps):
        if number == 0 or (settings.every and sweep.iteration % settings.every == 0):
            console.print(picture(grid, sweep), "")
        last = sweep
    assert last is not None
    console.print(picture(grid, last))
    return last


def grid_of(settings: GridSettings) -> GridWorld:
    """The grid that the settings describe."""
    given: dict[str, Any] = {"slip": settings.slip, "step_reward": settings.step_reward, "gamma": settings.discount}
    try:
        if not settings.map:
            return GridWorld(**given)
        return GridWorld.from_text(Path(settings.map).read_text(), **given)
    except OSError as error:
        raise UserError(f"The map {settings.map!r} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise UserError(str(error)) from error


def _played(grid: GridWorld, sweeps: Iterator[Sweep], seconds: float, console: Console) -> Sweep:
    last: Sweep | None = None
    with Live(console=console, auto_refresh=False) as live:
        for sweep in sweeps:
            live.update(picture(grid, sweep), refresh=True)
            last = sweep
            time.sleep(seconds)
    assert last is not None
    return last


def picture(grid: GridWorld, sweep: Sweep) -> Group:
    """Values as colours and numbers, the greedy policy as arrows, and how far the sweep is from the end."""
    table = Table.grid(padding=0)
    policy = np.asarray(sweep.policy)
    actions = policy if policy.ndim == 1 else policy.argmax(1)
    largest = max(float(np.abs(sweep.value).max()), 1e-12)
    for row in range(grid.rows):
        table.add_row(*(_cell(grid, (row, column), sweep.value, actions, largest) for column in range(grid.columns)))
    bound = f"{sweep.error_bound:.2g}" if np.isfinite(sweep.error_bound) else "unknown"
    line = f"{sweep.step}, sweep {sweep.iteration}: largest change {sweep.residual:.2g}, error at most {bound}"
    return Group(table, Text(line, style="dim"))


def _cell(grid: GridWorld, cell: tuple[int, int], value: np.ndarray, actions: np.ndarray, largest: float) -> Text:
    state = grid.state(cell)
    if cell in grid.walls:
        return Text(" ██████ ", style="dim")
    if cell in grid.prizes and grid.ends:
        worth = grid.prizes[cell]
        return Text(f"{worth:^+8g}", style=f"bold white on rgb{_shade(GOOD if worth > 0 else BAD, 1.0)}")
    number = float(value[state])
    style = f"on rgb{_shade(GOOD if number > 0 else BAD, abs(number) / largest * 0.8)}" if abs(number) > 1e-12 else ""
    arrow = ARROWS[int(actions[state])] if abs(number) > 1e-12 else " "
    return Text(f"{number:6.2f}{arrow} ", style=style)


def _shade(colour: tuple[int, int, int], strength: float) -> str:
    """The colour over black, as rich writes it."""
    return f"({','.join(str(round(part * (0.15 + 0.85 * strength))) for part in colour)})"
