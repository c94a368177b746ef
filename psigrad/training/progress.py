"""Progress bars on the terminal. They show; they never decide."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol


class Advance(Protocol):
    """Move a bar by `count`; `note` replaces the text behind it."""

    def __call__(self, count: float = 1, note: str = "") -> None: ...


@contextlib.contextmanager
def bar(description: str, total: float, *, shown: bool = True, done: float = 0) -> Iterator[Advance]:
    """A bar from `done` to `total`, gone from the terminal's cursor when the block ends; nothing is drawn when not `shown`."""
    if not shown:
        yield lambda count=1, note="": None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("[bold]{task.description:<22}"),
        BarColumn(bar_width=28),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns) as progress:
        task = progress.add_task(
            description,
            total=total,
            completed=done,  # type: ignore[arg-type]
            note="",
        )

        def advance(count: float = 1, note: str = "") -> None:
            fields: dict[str, Any] = {"note": note} if note else {}
            progress.update(task, advance=count, **fields)

        yield advance
