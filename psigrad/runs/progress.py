"""Progress bars for terminals and notebooks, and progress lines for log files. They have no effect on the run."""

from __future__ import annotations

import contextlib
import html
import io
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator
from typing import Any, Protocol

SILENCE = 10.0
"""If standard output is not a terminal, a line is printed at the end of a step once the last line is this many seconds old."""
NARROW = 100
"""On a terminal with fewer columns the bar itself is omitted, so that its numbers fit."""


class _ClosableStream:
    """An output stream that drops output without an error after its reader, such as `head`, has closed the pipe.

    A character that the stream cannot encode is written as a question mark.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream or io.StringIO()  # None if the shell has closed it: `>&-`

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
def ignore_closed_output() -> Iterator[None]:
    """In the block, drop output to stdout or stderr without an error after its reader has closed the pipe."""
    with contextlib.redirect_stdout(_ClosableStream(sys.stdout)), contextlib.redirect_stderr(_ClosableStream(sys.stderr)):
        yield


class Advance(Protocol):
    """The type of a function that advances a progress bar."""

    def __call__(self, count: float = 1, note: str = "") -> None:
        """Advance the bar by `count`. Show `note` after the bar; if it is "", the previous note stays."""


def _lines(description: str, total: float, done: float, every: int, unit: str) -> Advance:
    """Return a function that counts from `done` and prints lines like "name 10/100  note  1.2 s a step, 2 min left"."""
    at, calls, printed, begun = done, 0, done, time.monotonic()
    since = begun

    def advance(count: float = 1, note: str = "") -> None:
        nonlocal at, calls, printed, since
        at, calls, now = at + count, calls + 1, time.monotonic()
        if every and at > printed and (calls >= every or at >= total or now - since >= SILENCE):
            left = f", {format_remaining((now - begun) / (at - done) * (total - at))}" if at < total else ""
            pace = f"{(now - since) / (at - printed):.3g} s a {unit}"
            print("  ".join(filter(None, (f"{description} {at:g}/{total:g}", note, f"{pace}{left}"))), flush=True)
            calls, printed, since = 0, at, now

    return advance


def format_remaining(seconds: float) -> str:
    """Return the time left in words: 45 s left, 12 min left, 2.5 h left."""
    if seconds < 90:
        return f"{seconds:.0f} s left"
    return f"{seconds / 60:.0f} min left" if seconds < 5400 else f"{seconds / 3600:.1f} h left"


def _notebook_display() -> Any:
    """Return IPython's `display` in the kernel of a notebook, otherwise None."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return sys.modules["IPython.display"].display if type(shell).__name__ == "ZMQInteractiveShell" else None


def _in_notebook(show: Any, description: str, total: float, done: float) -> Advance:
    """Draw a bar in a notebook with `show`, and return a function that advances it and redraws it at most four times a second."""
    at, text, drawn, begun = done, "", -math.inf, time.monotonic()

    def draw() -> dict[str, str]:
        pace = (time.monotonic() - begun) / max(1e-9, at - done)
        left = f"{pace:.3g} s a step, {format_remaining(pace * (total - at))}" if done < at < total else ""
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
    description: str, total: float, *, enabled: bool = True, done: float = 0, every: int = 0, unit: str = "step"
) -> Iterator[Advance]:
    """Draw a progress bar from `done` to `total` while the block runs, and yield the function that advances it.

    If standard output is a file or a pipe, print a line at least every `every` calls of the function, or none if `every` is 0.
    """
    if not enabled:
        yield lambda count=1, note="": None
        return
    if (show := _notebook_display()) is not None:
        yield _in_notebook(show, description, total, done)
        return
    if not sys.stdout.isatty():
        yield _lines(description, total, done, every, unit)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    wide = shutil.get_terminal_size().columns >= NARROW
    columns = (
        TextColumn("[bold]{task.description:<22}" if wide else "[bold]{task.description}"),
        *((BarColumn(bar_width=28),) if wide else ()),
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
