"""Update the warnings of docs/debugging.md from the rules and psigrad/records/alerts.yaml: python docs/make/alerts.py"""

from __future__ import annotations

import sys
from pathlib import Path

from psigrad.records.warnings import RULES, Rule, texts

sys.path.append(str(Path(__file__).parent))
from filled import fill

PAGE = Path(__file__).parents[1] / "debugging.md"


def section(rule: Rule) -> str:
    """Return the section of a rule: the problem, its cause, the remedy, and the rule's name."""
    entry = texts()[rule.name]
    name = f"Name: `{rule.name}`."
    return "\n\n".join([f"### {rule.title}", f"{entry['says']} {entry['why']}", f"**What to do.** {entry['do']}", name])


def page() -> str:
    """Return the page with a section for each rule."""
    return fill(PAGE.read_text(), rules="\n\n".join(map(section, RULES)))


if __name__ == "__main__":
    PAGE.write_text(page())
