"""The public names are those that the list says; docs/stability.md says how they may change.

After a deliberate change: python tests/surface/test_public_names.py
"""

from __future__ import annotations

import importlib
from pathlib import Path

from psigrad import cli
from psigrad.objective import catalog
from psigrad.objective.preferences import preference_catalog

LIST = Path(__file__).with_name("public_names.txt")
MODULES = ("psigrad", "psigrad.config", "psigrad.control", "psigrad.objective", "psigrad.language.rewards", "psigrad.tabular")


def public() -> str:
    """Modules with their names, methods and commands."""
    lines = [f"{name}.{own}" for name in MODULES for own in sorted(importlib.import_module(name).__all__)]
    lines += [
        f"method {name}"
        for found in (catalog.METHODS, preference_catalog.ONLINE_METHODS, preference_catalog.METHODS)
        for name in found
    ]
    return "\n".join([*lines, *(f"command {name}" for name in cli.COMMANDS)]) + "\n"


def test_the_public_names_are_those_of_the_list():
    assert public() == LIST.read_text(), "a public name came, went or changed: see docs/stability.md and CHANGELOG.md"


def test_every_public_name_is_there():
    for name in MODULES:
        module = importlib.import_module(name)
        assert all(hasattr(module, own) for own in module.__all__), name


if __name__ == "__main__":
    LIST.write_text(public())
