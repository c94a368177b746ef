"""Access to the database of labels in a running studio, and to the person who sent a request."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from fastapi import Request

from psigrad_studio.json_api import taking_turns
from psigrad_studio.labels import database, intake, people
from psigrad_studio.labels.database import Database, reads
from psigrad_studio.labels.intake import Added
from psigrad_studio.labels.people import Person
from psigrad_studio.labels.refusals import Unknown
from psigrad_studio.studio_settings import StudioSettings

_require_admin = reads(people.require_admin)


class LabelStore:
    """The studio's access to the database of labels, which is opened, or created, on first use."""

    def __init__(self, settings: StudioSettings) -> None:
        self.settings = settings
        self._lock = threading.Lock()
        self._db: Database | None = None
        self._local: Person | None = None
        self._slow, self._hashing = (threading.BoundedSemaphore(settings.work_at_once) for _ in range(2))

    @property
    def db(self) -> Database:
        """The database. Raises `UserError` if it cannot be opened."""
        with self._lock:
            if self._db is None:
                self._db = database.connect(self.settings.labels)
            return self._db

    def asking(self, request: Request) -> Person:
        """Return the person who sent a request: the one that the guard recognised, or the local user for the owner's key."""
        known: Person | None = request.state.person
        if known is not None:
            return known
        db = self.db
        with self._lock:
            if self._local is None:
                self._local = people.local(db)
            return self._local

    def administrator(self, request: Request) -> Person:
        """Return the person who sent a request. Raises `Forbidden` unless they are an administrator of the studio.

        Runs and models belong to the studio's owner, so admins of single projects have no access to them.
        """
        person = self.asking(request)
        _require_admin(self.db, person)
        return person

    def recognise(self, token: str) -> Person | None:
        """Return the person to whom a session token or an API token belongs; None if it is invalid."""
        try:
            return people.who(self.db, token)
        except Unknown:
            return None

    def send_pair(
        self, request: Request, project_id: int, prompt: Any, first: Mapping[str, Any], second: Mapping[str, Any]
    ) -> Added:
        """Add two completions of one prompt to a project, on behalf of the person behind `request`.

        See `labels.intake.add_pair`. Other pages reach the store as `request.app.state.labels`.
        """
        return intake.add_pair(self.db, self.asking(request), project_id, prompt, first, second)

    def slowly(self, *, hashing: bool = False) -> AbstractContextManager[None]:
        """Limit the number of blocks that run at once, for work that takes much time or memory. See `taking_turns`.

        Password hashing (`hashing`) has a separate limit, so that slow results do not keep users from logging in.
        """
        return taking_turns(self._hashing if hashing else self._slow)
