"""examples/environments/train.py, whole: a tiny model and the game behind a library."""

from __future__ import annotations

import importlib.util
from pathlib import Path

TRAIN = Path(__file__).parents[2] / "examples" / "environments" / "train.py"


def check_that_it_improves(library: str, folder: Path) -> None:
    """The interval of its held-out reward ends up above where it was."""
    spec = importlib.util.spec_from_file_location("train_example", TRAIN)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    found = example.main(library, folder)
    assert found.after["eval/reward/low"] > found.before["eval/reward/high"]
