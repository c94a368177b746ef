"""The labels of a running studio, and who is asking for them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fastapi import Request

from psigrad_studio.labels import database, intake, people
from psigrad_studio.labels.database import Database
from psigrad_studio.labels.intake import Added
from psigrad_studio.labels.people import Person
from psigrad_studio.labels.refusals import Unknown
from psigrad_studio.security import Refused
from psigrad_studio.studio_settings import StudioSettings

WAIT_SECONDS = 10.0


class LabelStore:
    """The labels, opened when they are first asked for, so that who never labels has no database."""

    def __init__(self, settings: StudioSettings) -> None:
        self.settings = settings
        self._lock = threading.Lock()
        self._db: Database | None = None
        self._local: Person | None = None
        self._slow, self._hashing = (threading.BoundedSemaphore(settings.work_at_once) for _ in range(2))

    @property
    def db(self) -> Database:
        """The database. Raises `UserError` where it can't be opened."""
        with self._lock:
            if self._db is None:
                self._db = database.connect(self.settings.labels)
            return self._db

    def asking(self, request: Request) -> Person:
        """Who sent a request: the person whom the guard recognised, or, by the key, the person at this machine."""
        known: Person | None = request.state.person
        if known is not None:
            return known
        db = self.db
        with self._lock:
            if self._local is None:
                self._local = people.local(db)
            return self._local

    def recognise(self, token: str) -> Person | None:
        """Whose a session or API token is."""
        try:
            return people.who(self.db, token)
        except Unknown:
            return None

    def send_pair(
        self, request: Request, project_id: int, prompt: Any, first: Mapping[str, Any], second: Mapping[str, Any]
    ) -> Added:
        """Put two completions of one prompt before the labellers of a project, on behalf of who sent `request`.

        See `labels.intake.add_pair`. Reach the store as `request.app.state.labels`.
        """
        return intake.add_pair(self.db, self.asking(request), project_id, prompt, first, second)

    @contextmanager
    def slowly(self, *, hashing: bool = False) -> Iterator[None]:
        """For what takes a processor for long or much memory: few at once, the others wait, then are told to come back.

        Passwords (`hashing`) wait in a line of their own, so that results keep nobody from logging in.
        """
        line = self._hashing if hashing else self._slow
        if not line.acquire(timeout=WAIT_SECONDS):
            raise Refused(429, "busy", "The studio is busy; try again in a moment.")
        try:
            yield
        finally:
            line.release()
