"""The store of conversations, so that a request can continue one by the id of its last response."""

from __future__ import annotations

import json
import sqlite3
import weakref
from typing import Any

from psigrad.errors import UserError
from psigrad.paths import absolute, claim

MOST, MOST_BYTES = 1000, 1 << 30
"""The maximum number of conversations that are stored, and of their bytes together. The oldest are dropped first."""


class Remembered:
    """A store of conversations by the id of the response that ended them.

    In a `folder` they survive the server, even if it is killed. Without one they are in memory. Raises `UserError` if the folder
    can't be used.
    """

    def __init__(self, folder: str = "") -> None:
        file = claim(absolute(folder), "serve", "--state") / "responses.db" if folder else ":memory:"
        try:
            # Each statement is atomic, and sqlite admits one thread at a time.
            self._held = sqlite3.connect(file, check_same_thread=False, isolation_level=None)
            weakref.finalize(self, self._held.close)
            for line in (
                "PRAGMA journal_mode = WAL",
                "CREATE TABLE IF NOT EXISTS said (number INTEGER PRIMARY KEY, name TEXT UNIQUE, size INTEGER, messages TEXT)",
                "CREATE TRIGGER IF NOT EXISTS forget AFTER INSERT ON said BEGIN "
                f"DELETE FROM said WHERE number <= new.number - {MOST} OR number IN (SELECT number FROM "
                f"(SELECT number, sum(size) OVER (ORDER BY number DESC) AS held FROM said) WHERE held > {MOST_BYTES}); END",
            ):
                self._held.execute(line)
        except (OSError, sqlite3.Error) as error:
            raise UserError(f"Responses cannot be stored in {file} ({error}); name another folder as --state.") from error

    def add(self, name: str, messages: list[dict[str, Any]]) -> None:
        """Store a conversation."""
        text = json.dumps(messages)
        self._held.execute("INSERT INTO said (name, size, messages) VALUES (?, ?, ?)", (name, len(text), text))

    def find(self, name: str) -> list[dict[str, Any]] | None:
        """Return the conversation, or None if it is unknown or was dropped."""
        row = self._held.execute("SELECT messages FROM said WHERE name = ?", (name,)).fetchone()
        return None if row is None else list(json.loads(row[0]))
