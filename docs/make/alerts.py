"""Writes docs/warnings.md out of the rules that raise alerts and of psigrad/records/alerts.yaml: python docs/make/alerts.py"""

from __future__ import annotations

import json
import re
from pathlib import Path

from psigrad.records.signals import SIGNAL_BY_NAME
from psigrad.records.warnings import RULES, Rule, texts

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
    """The text of docs/warnings.md."""
    sections = "\n\n".join(map(section, RULES))
    return f"""# Alerts

Rules look at every row of figures and say when a run goes wrong: on the terminal, in `report.html`, in the studio and in `events.jsonl`. Each
is raised once and taken back when its figure is well again, so that one that trembles about a threshold is one alert. Where a run has solved
its task (0.9 or more of 1, and less at its start), *Dead groups*, *Rewards do not differ*, *Entropy is gone* and *A leap of the gradient* are
what that looks like: the terminal does not tell of them, and the verdict's line counts none of them as a warning.

[Debugging](debugging.md) shows most of them in a run that was spoilt on purpose; how often each is right and wrong was measured, see
[Claims](claims.md). In the examples `base` is any model, and `train.jsonl` rows of `prompt` and `answer` (of SFT: `prompt` and `completion`); a
test runs each on a small model and sees its alert.

{sections}
"""


if __name__ == "__main__":
    PAGE.write_text(page())
