"""Writes docs/warnings.md out of the rules that raise alerts and of psigrad/records/alerts.yaml: python docs/make/alerts.py"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from psigrad.records.signals import SIGNAL_BY_NAME
from psigrad.records.warnings import RULES, Rule, texts

sys.path.append(str(Path(__file__).parent))
from filled import fill

PAGE = Path(__file__).parents[1] / "warnings.md"
RUNS = Path(__file__).with_name("debugging.json")


def faults(rule: Rule) -> list[str]:
    """Return links to the runs of docs/debugging.md that raise a warning."""
    page = PAGE.with_name("debugging.md").read_text()
    titles = {name: title for title, name in re.findall(r"^!\[(.*)\]\(.*/(\w+)\.png\)", page, re.MULTILINE)}
    return [
        f"[{titles[name]}](debugging.md#{titles[name].lower().replace(' ', '-')})"
        for name, run in json.loads(RUNS.read_text()).items()
        if rule.name in run["alerts"]
    ]


def example(rule: Rule) -> str:
    """A command that raises an alert, and the spoilt runs that did; empty where there is neither."""
    entry, drawn = texts()[rule.name], faults(rule)
    said = []
    if "example" in entry:
        files = "".join(
            f"\n```python\n{text.rstrip()}\n```\n\nin `{file}`, and\n" for file, text in entry.get("files", {}).items()
        )
        said.append(f"**An example.**\n{files}\n```\npsigrad {entry['example']}\n```")
    if drawn:
        said.append(f"{'Also drawn' if said else '**An example.** Drawn'} on the page of faults: {', '.join(drawn)}.")
    return "\n\n".join(said)


def section(rule: Rule) -> str:
    """One alert: its name, what is wrong, why, what to do, what gives it, when it is raised."""
    entry = texts()[rule.name]
    figure = SIGNAL_BY_NAME[rule.signal].title if rule.signal else ""
    when = f"Raised after {rule.patience} rows in a row." if rule.patience > 1 else "Raised at once."
    when += (
        ""
        if rule.told_from == 1
        else f" A run tells of it the {rule.told_from}rd time; the report and the studio have every time."
    )
    drawn = f" It is drawn as *{figure}*." if figure else ""
    grave = " It is shown in red." if rule.grave else ""
    last = f"{when}{drawn}{grave} In a terminal: `psigrad explain {rule.name}`."
    parts = (f"## {rule.title}", entry["says"], entry["why"], f"**What to do.** {entry['do']}", example(rule), last)
    return "\n\n".join(filter(None, parts))


def page() -> str:
    """Return docs/warnings.md with a section for each rule."""
    return fill(PAGE.read_text(), rules="\n\n".join(map(section, RULES)))


if __name__ == "__main__":
    PAGE.write_text(page())
