"""Recognising and creating the folder of a run, and removing it again if the start fails."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from psigrad.records import checkpoint, row_lines
from psigrad.records.rows import parse_row

ROWS = ("metrics", "timings", "rollouts", "events")


def is_run(path: Path) -> bool:
    """Return True if a folder is a run of psigrad, is empty, or has only the first files of a run that was killed."""
    file, events = path / "config.json", path / "events.jsonl"
    saved = any(path.glob(f"checkpoints/step-*/{checkpoint.MANIFEST}"))
    if config := parse_row(file.read_bytes()) if file.is_file() else None:
        # a Hugging Face model has a config.json too
        return "recipe" in config and ("format" in config or saved)
    begun = events.is_file() and row_lines.last_event(events, "started", "resumed", "finished", "failed")
    if saved or begun or file.is_symlink():  # a link gets its own error message
        return True
    return all(one.name in (".lock", ".config.json.tmp") for one in path.iterdir())


def create(path: Path) -> list[Path]:
    """Create a missing folder and its missing parents. Return the folders that were created, the innermost first."""
    created = [one for one in (path, *path.parents) if not one.exists()]
    path.mkdir(parents=True, exist_ok=True)
    return created


def remove_unused(path: Path, created: Sequence[Path]) -> None:
    """Undo a failed start: remove the run's files from `path`, and the folders `created`. Do nothing if there are other files."""
    files = (".lock", "config.json", *(f"{rows}.jsonl" for rows in ROWS))
    with contextlib.suppress(OSError):
        if any(one.name not in (*files, "checkpoints") for one in path.iterdir()):
            return
        (path / "checkpoints").rmdir()
        for name in files:
            (path / name).unlink(missing_ok=True)
        for folder in created:
            folder.rmdir()
