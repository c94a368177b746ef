"""What the terminal shows when a run is done."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text


def printable(text: str, width: int = 60) -> str:
    """One line of at most `width` characters that any terminal can show: control characters and lone surrogates are escaped."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in text)
    return shown if len(shown) <= width else shown[: width - 1] + "…"


def finished(result: Any) -> None:
    """The headline table, completions before and after, and where everything is."""
    console = Console()
    summary = result.folder / "summary.json"
    if summary.exists():
        headline(json.loads(summary.read_text())["rows"], console)
        before_and_after(result.folder, console)
    elif result.after:
        changes(result.before, result.after, console)
    console.print(f"\nmodel   {result.model}" + (f"\nreport  {result.report}" if result.report else ""))


def headline(rows: Sequence[Mapping[str, Any]], console: Console | None = None) -> None:
    """A table of named figures with their intervals and units."""
    table = Table("", "value", "95 % interval", "")
    for row in rows:
        interval = f"{row['low']:.3f} to {row['high']:.3f}" if "low" in row else ""
        table.add_row(row["name"], _number(row["value"]), interval, row.get("unit", ""))
    (console or Console()).print(table)


def changes(before: Mapping[str, Any], after: Mapping[str, Any], console: Console | None = None) -> None:
    """Evaluation figures before and after training."""
    table = Table("", f"step {before.get('step', 0)}", f"step {after.get('step', 0)}")
    for name in after:
        if name.startswith("eval/"):
            table.add_row(name.removeprefix("eval/"), _number(before.get(name)), _number(after[name]))
    (console or Console()).print(table)


def figures(values: Mapping[str, Any]) -> None:
    """The figures of one evaluation."""
    table = Table("", "value")
    for name, value in values.items():
        table.add_row(name.removeprefix("eval/"), _number(value))
    Console().print(table)


def samples(prompts: Sequence[str], completions: Sequence[str], rewards: Sequence[float | None], shown: int = 8) -> None:
    """A few completions with their rewards."""
    table = Table("prompt", "completion", "reward")
    for prompt, completion, reward in list(zip(prompts, completions, rewards, strict=True))[:shown]:
        table.add_row(Text(printable(prompt)), Text(printable(completion)), _number(reward))
    Console().print(table)


def before_and_after(folder: Any, console: Console | None = None, shown: int = 6) -> None:
    """Completions of the same held-out prompts at the first and the last evaluation; those that changed first."""
    rows = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    held = [row for row in rows if row["kind"] == "eval" and row["k"] == 0]
    if not held:
        return
    first, last = min(row["step"] for row in held), max(row["step"] for row in held)
    early = {row["row"]: row for row in held if row["step"] == first}
    late = {row["row"]: row for row in held if row["step"] == last}
    table = Table("prompt", f"step {first}", "", f"step {last}", "")
    pairs = [(early[i], late[i]) for i in sorted(early.keys() & late.keys())]
    for a, b in sorted(pairs, key=lambda pair: pair[0]["completion"] == pair[1]["completion"])[:shown]:
        prompt = a["prompt"] if isinstance(a["prompt"], str) else str(a["prompt"][-1].get("content"))
        table.add_row(Text(printable(prompt)), *_cells(a), *_cells(b))
    (console or Console()).print(table)


def _cells(row: Mapping[str, Any]) -> tuple[Text, str]:
    return Text(printable(row["completion"])), _number(row["reward"])


def _number(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, int | str):
        return str(value)
    return f"{value:.3f}" if abs(value) < 100 else f"{value:.0f}"
