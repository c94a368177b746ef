"""Users' tags and notes on runs.

They are stored in one file next to the folder of runs, like the labels. Nothing is written inside the runs.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from psigrad.errors import UserError
from psigrad.records.row_lines import replace_file

FILE, MOST_BYTES = "run_notes.json", 8 << 20
EMPTY: dict[str, Any] = {"tags": [], "note": ""}


class RunNotes:
    """The store of the tags and notes of all runs in a folder."""

    def __init__(self, root: Path) -> None:
        self.folder, self.path = root.resolve().name, root.resolve().parent / FILE
        self._lock = threading.Lock()
        self._known: tuple[int, dict[str, dict[str, Any]]] = (0, {})

    def of(self, name: str) -> dict[str, Any]:
        """Return the tags and the note of the run with this name."""
        return self._read().get(f"{self.folder}/{name}", EMPTY)

    def put(self, name: str, tags: list[str], note: str) -> dict[str, Any]:
        """Replace the tags and the note of a run. Raises `UserError` if the file cannot be read or written."""
        words = sorted({tag.strip() for tag in tags if tag.strip()})
        with self._lock:
            found = dict(self._read(strict=True))
            key = f"{self.folder}/{name}"
            found[key] = {"tags": words, "note": note.strip()}
            if found[key] == EMPTY:
                del found[key]
            try:
                replace_file(self.path, [json.dumps(found, indent=1, ensure_ascii=False).encode() + b"\n"])
            except OSError as error:
                raise UserError(f"{self.path} could not be written ({error.strerror}); the note was not saved.") from error
        return self.of(name)

    def _read(self, strict: bool = False) -> dict[str, dict[str, Any]]:
        try:
            status = self.path.stat(follow_symlinks=False)
            if status.st_size > MOST_BYTES:
                raise ValueError(f"the file is larger than {MOST_BYTES >> 20} MiB")
            if status.st_mtime_ns != self._known[0]:
                self._known = (status.st_mtime_ns, _checked(json.loads(self.path.read_text("utf-8"))))
        except FileNotFoundError:
            self._known = (0, {})
        except (OSError, ValueError, RecursionError) as error:
            if strict:  # an unreadable file must not be overwritten
                raise UserError(f"{self.path} is not a file of notes ({error}); move it to another folder.") from error
        return self._known[1]


def _checked(found: Any) -> dict[str, dict[str, Any]]:
    if not isinstance(found, dict):
        raise ValueError("expected an object of runs by name")
    return {
        str(name): {"tags": [str(tag) for tag in own.get("tags", [])], "note": str(own.get("note", ""))}
        for name, own in found.items()
        if isinstance(own, dict) and isinstance(own.get("tags", []), list)
    }
