"""examples/environments/train.py, whole: a tiny model and the game behind a library."""

from __future__ import annotations

from pathlib import Path

import scripts


def check_that_it_improves(library: str, folder: Path) -> None:
    """The interval of its held-out reward ends up above where it was."""
    found = scripts.load("examples/environments/train.py").main(library, folder)
    assert found.after["eval/reward/low"] > found.before["eval/reward/high"]
