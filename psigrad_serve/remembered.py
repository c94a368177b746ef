"""The conversations that a server remembers, so that a request may go on from them by a name."""

from __future__ import annotations

import json
import sqlite3
import weakref
from pathlib import Path
from typing import Any

from psigrad.errors import UserError

MOST = 1000
"""The oldest are forgotten first."""


class Remembered:
    """Conversations by the name of the response that ended them. Those in a `folder` are there again for the next server, also
    where this one is killed; without one they are in memory. Raises `UserError` where nothing can be kept there.
    """

    def __init__(self, folder: str = "") -> None:
        file = Path(folder) / "responses.db" if folder else ":memory:"
        try:
            if folder:
                Path(folder).mkdir(parents=True, exist_ok=True)
            # each statement is whole or not at all, and sqlite lets one thread in at a time
            self._held = sqlite3.connect(file, check_same_thread=False, isolation_level=None)
            weakref.finalize(self, self._held.close)
            for line in (
                "PRAGMA journal_mode = WAL",
                "CREATE TABLE IF NOT EXISTS said (number INTEGER PRIMARY KEY, name TEXT UNIQUE, messages TEXT)",
                "CREATE TRIGGER IF NOT EXISTS forget AFTER INSERT ON said BEGIN "
                f"DELETE FROM said WHERE number <= new.number - {MOST}; END",
            ):
                self._held.execute(line)
        except (OSError, sqlite3.Error) as error:
            raise UserError(f"Responses cannot be kept in {file} ({error}); name another folder as --state.") from error

    def add(self, name: str, messages: list[dict[str, Any]]) -> None:
        """Remember it."""
        self._held.execute("INSERT INTO said (name, messages) VALUES (?, ?)", (name, json.dumps(messages)))

    def find(self, name: str) -> list[dict[str, Any]] | None:
        """The conversation; None where it is not known, or forgotten."""
        row = self._held.execute("SELECT messages FROM said WHERE name = ?", (name,)).fetchone()
        return None if row is None else list(json.loads(row[0]))
