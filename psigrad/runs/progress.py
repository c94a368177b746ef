"""Progress bars on the terminal. They show; they never decide."""

from __future__ import annotations

import contextlib
import html
import io
import math
import os
import sys
import time
from collections.abc import Iterator
from typing import Any, Protocol


class _Unheard:
    """A stream whose reader may leave, as `head` does: what is written then goes nowhere, and nothing is raised. A sign that its
    encoding lacks becomes a question mark.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream or io.StringIO()  # None where the shell has closed it: `>&-`

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._or_nowhere():
            try:
                self._stream.write(text)
            except UnicodeEncodeError as error:
                self._stream.write(text.encode(error.encoding, "replace").decode(error.encoding))
        return len(text)

    def flush(self) -> None:
        with self._or_nowhere():
            self._stream.flush()

    @contextlib.contextmanager
    def _or_nowhere(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


@contextlib.contextmanager
def readers_may_leave() -> Iterator[None]:
    """For the length of the block it ends nothing that the reader of our output has left, or that there never was one."""
    with contextlib.redirect_stdout(_Unheard(sys.stdout)), contextlib.redirect_stderr(_Unheard(sys.stderr)):
        yield


class Advance(Protocol):
    """Move a bar by `count`; `note` replaces the text behind it."""

    def __call__(self, count: float = 1, note: str = "") -> None:
        """Move the bar by `count` and replace the note."""


def _lines(description: str, total: float, done: float, every: int, unit: str) -> Advance:
    """Prints "name 10/100 note, 1.2 s a step"."""
    at, calls, printed, since = done, 0, done, time.monotonic()

    def advance(count: float = 1, note: str = "") -> None:
        nonlocal at, calls, printed, since
        at, calls = at + count, calls + 1
        if every and at > printed and (calls >= every or at >= total):
            now = time.monotonic()
            print(f"{description} {at:g}/{total:g}  {note}  {(now - since) / (at - printed):.3g} s a {unit}", flush=True)
            calls, printed, since = 0, at, now

    return advance


def _notebook_display() -> Any:
    """IPython's `display` in the kernel of a notebook, else None."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return sys.modules["IPython.display"].display if type(shell).__name__ == "ZMQInteractiveShell" else None


def _in_notebook(show: Any, description: str, total: float, done: float) -> Advance:
    """A bar that is drawn again in its place, at most four times a second."""
    at, text, drawn, begun = done, "", -math.inf, time.monotonic()

    def draw() -> dict[str, str]:
        pace = (time.monotonic() - begun) / max(1e-9, at - done)
        left = f"{pace:.3g} s a step, {pace * (total - at) / 60:.1f} min left" if at > done and at < total else ""
        words = "  ".join(filter(None, (f"{description} {at:g}/{total:g}", text, left)))
        mark = f'<progress value="{at:g}" max="{total:g}" style="width: 16em; vertical-align: middle"></progress>'
        return {"text/plain": words, "text/html": f'<div style="white-space: pre">{mark}  {html.escape(words)}</div>'}

    handle = show(draw(), raw=True, display_id=True)

    def advance(count: float = 1, note: str = "") -> None:
        nonlocal at, text, drawn
        at, text, now = at + count, note or text, time.monotonic()
        if now - drawn >= 0.25 or at >= total:
            handle.update(draw(), raw=True)
            drawn = now

    return advance


@contextlib.contextmanager
def bar(
    description: str, total: float, *, shown: bool = True, done: float = 0, every: int = 0, unit: str = "step"
) -> Iterator[Advance]:
    """A bar from `done` to `total`, gone from the terminal's cursor when the block ends; nothing is drawn when not `shown`.

    In a notebook the bar stands below its cell. Where standard output is no terminal (a log file, a cluster's queue), a line is
    printed every `every` moves instead.
    """
    if not shown:
        yield lambda count=1, note="": None
        return
    if (show := _notebook_display()) is not None:
        yield _in_notebook(show, description, total, done)
        return
    if not sys.stdout.isatty():
        yield _lines(description, total, done, every, unit)
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
        task = progress.add_task(description, total=total, completed=done, note="")  # type: ignore[arg-type]

        def advance(count: float = 1, note: str = "") -> None:
            fields: dict[str, Any] = {"note": note} if note else {}
            progress.update(task, advance=count, **fields)

        yield advance
