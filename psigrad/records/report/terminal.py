"""The terminal output at the end of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from psigrad.records import checkpoint, run_folder
from psigrad.records.read import RunData, interval, load, prompt_text, show_number
from psigrad.records.report.verdict import verdict
from psigrad.records.rows import first_and_last
from psigrad.redaction import escape


def fit_line(text: Any, width: int = 60, encoding: str = "utf-8") -> str:
    """Return `text` as one line of at most `width` characters that any terminal can display.

    Control characters, lone surrogates and characters that `encoding` lacks are escaped.
    """
    line = escape(str(text)[: width + 1]).replace("\n", "\\n").replace("\t", "\\t")
    if "→".encode(encoding, "ignore") == b"":
        line = line.replace("→", "->")
    line = line.encode(encoding, "backslashreplace").decode(encoding)
    dots = "…".encode(encoding, "replace").decode(encoding).replace("?", "...")
    return line if len(line) <= width else line[: width - len(dots)] + dots


def print_result(result: Any) -> None:
    """Print the result of a run: main figures, completions before and after training, the verdict, and the paths of files."""
    run = load(result.folder)
    if run.summary:
        print_summary(run.summary)
        print_before_and_after(run)
    elif result.after:
        ends = first_and_last(result.before, result.after)
        names = [name for name in result.after if name.startswith("eval/")]
        cells = [[name.removeprefix("eval/"), *(show_number(figures.get(name)) for figures in ends)] for name in names]
        print_table(["held-out", *(f"step {figures.get('step', 0)}" for figures in ends)], cells)
    console = Console()
    console.print(
        "", Text(fit_line(verdict(run), 10_000, console.encoding), style="bold"), sep="\n", soft_wrap=not console.is_terminal
    )
    film = result.folder / run_folder.VIDEO
    print(f"\nmodel   {result.model}" + (f"\nreport  {result.report}" if result.report else ""))
    if film.exists():
        print(f"video   {film}")
    if kept := describe_disk_use(result.folder):
        print(kept)


def describe_disk_use(folder: Path) -> str:
    """Return a line with the sizes of the run's model and checkpoints, and the settings that reduce them; "" below 100 MB."""
    model, adapter, checkpoints = (checkpoint.size_of(folder / name) for name in ("model", "model/adapter", "checkpoints"))
    if model + checkpoints < 100e6:
        return ""
    alone = f" (the adapter alone is {show_size(adapter)}: --lora-save adapter)" if adapter else ""
    return (
        f"kept    {show_size(model)} in model/{alone}, {show_size(checkpoints)} in checkpoints/, which only "
        "resuming needs (--save-total-limit)"
    )


def show_size(count: float) -> str:
    """Format a number of bytes for display: 953 MB, 1.9 GB, 128 GB."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}" if count < 1000 * scale else f"{count / scale:.0f} {unit}"
    return f"{count:.0f} B"


def print_summary(rows: Iterable[Mapping[str, Any]], console: Console | None = None) -> None:
    """Print a table of named figures with their intervals and units.

    Rows have {"name", "value"} and, if known, {"low", "high", "unit"}.
    """
    cells = [[row.get("name", ""), show_number(row.get("value")), interval(row), row.get("unit", "")] for row in rows]
    print_table(["", "value", "95 % interval", ""], cells, console)


def print_lines(lines: Iterable[tuple[str, str]]) -> None:
    """Print (line, style) pairs one by one, styled if the terminal supports it."""
    console = Console(highlight=False)
    for line, style in lines:
        console.print(Text(fit_line(line, 10_000, console.encoding), style=style), soft_wrap=True)


def print_figures(values: Mapping[str, Any]) -> None:
    """Print the figures of one evaluation."""
    print_table(["", "value"], [[name.removeprefix("eval/"), show_number(value)] for name, value in values.items()])


def print_completions(
    prompts: Sequence[Any], completions: Sequence[str], rewards: Sequence[float | None], max_rows: int = 8
) -> None:
    """Print the first `max_rows` completions with their prompts and rewards."""
    rows = list(zip(map(prompt_text, prompts), completions, map(show_number, rewards), strict=True))
    print_table(["prompt", "completion", "reward"], rows[:max_rows])


def print_before_and_after(run: RunData | str | Path, console: Console | None = None, max_rows: int = 6) -> None:
    """Print the first and the last evaluation's completions for `max_rows` prompts. Prompts whose reward changed come first."""
    run = run if isinstance(run, RunData) else load(run)
    rows, steps = run.compared, sorted({*list(run.samples)[:1], *list(run.samples)[-1:]})
    cells = [
        [row[steps[0]].prompt, *(cell for s in steps for cell in (row[s].completion, show_number(row[s].reward)))]
        for row in rows[:max_rows]
    ]
    if cells:
        print_table(["prompt", *(head for step in steps for head in (f"step {step}", ""))], cells, console)


def print_table(head: Sequence[str], rows: Iterable[Sequence[Any]], console: Console | None = None) -> None:
    """Print a table with the columns `head`, each cell shortened to one line."""
    console = console or Console()
    table = Table(*head)
    for row in rows:
        table.add_row(*(Text(fit_line(cell, encoding=console.encoding)) for cell in row))
    console.print(table)
