"""Writes docs/errors.md out of psigrad/cli/mistakes.yaml: python docs/make/errors.py"""

from __future__ import annotations

from pathlib import Path

from psigrad.cli.mathematics import mistakes

PAGE = Path(__file__).parents[1] / "errors.md"
HEAD = """# Errors

The errors that users meet most. An error on the terminal ends with the name of its entry here, and `psigrad explain NAME` prints it there. Each
command below gives the error, and a test runs them all. What a run says when it goes wrong while it runs is on the page [Alerts](warnings.md).
"""


def section(name: str) -> str:
    """One entry: what is said, why, what to do, and what gives it."""
    entry = mistakes()[name]
    files = "".join(f"\n```\n{text.rstrip()}\n```\n\nin `{file}`, and\n" for file, text in entry.get("files", {}).items())
    commands = "\n".join(f"psigrad {entry[key]}" for key in ("before", "example") if key in entry)
    given = f"**An example.**\n{files}\n```\n{commands}\n```"
    return f"## {name}\n\n> {entry['says'].strip()}\n\n{entry['why']}\n\n**What to do.** {entry['do']}\n\n{given}"


def page() -> str:
    """The whole page."""
    return "\n\n".join([HEAD.strip(), *map(section, mistakes())]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
