"""The errors that users meet most, each with why it is one and what to do: `psigrad explain NAME`, and docs/errors.md."""

from __future__ import annotations

import functools
import re
from importlib import resources
from typing import Any


@functools.cache
def entries() -> dict[str, dict[str, Any]]:
    """The entries of mistakes.yaml by name: says, why, do, example, and the files that the example reads."""
    import yaml

    found: dict[str, dict[str, Any]] = yaml.safe_load(resources.files("psigrad.cli").joinpath("mistakes.yaml").read_text())
    return found


def name_of(message: str) -> str:
    """The name of the first entry that a message is one of, or an empty string."""
    return next((n for n, e in entries().items() if re.search(re.escape(e["says"]).replace("…", ".*"), message, re.DOTALL)), "")


def tell(name: str) -> str:
    """An entry as text."""
    entry = entries()[name]
    return f"{entry['says']}\n\nWhy: {entry['why']}\nDo:  {entry['do']}\n\nThis gives it: psigrad {entry['example']}"
