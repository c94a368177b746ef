"""People who label at a running studio over HTTP, as their browsers or programs would."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from live_studio import LiveStudio, Reply

PASSWORD = "a password for tests"
_numbers = itertools.count()


@dataclass
class Guest:
    """Somebody who came in by an invite: a cookie and the token of their pages."""

    studio: LiveStudio
    name: str
    cookie: str
    csrf: str = field(default="")

    @property
    def headers(self) -> dict[str, str]:
        """What their page sends."""
        return self.studio.headers | {"Cookie": self.cookie, "X-Psigrad-CSRF": self.csrf}

    def get(self, path: str) -> Reply:
        return self.studio.ask("GET", path, headers=self.headers)

    def post(self, path: str, content: Any) -> Reply:
        return self.studio.ask("POST", path, content, self.headers)

    def next(self, project: int) -> dict | None:
        """The next task."""
        return told(self.post("/api/label/next", {"project": project}))["task"]

    def vote(self, task: dict, **answer: Any) -> Reply:
        """Answer it."""
        return self.post("/api/label/vote", {"assignment": task["assignment"], "key": key(), **answer})


def key() -> str:
    """A key for a submission."""
    return f"test-key-{next(_numbers):08}"


def told(reply: Reply) -> Any:
    """What a request that must work was answered."""
    assert reply.status == 200, (reply.status, reply.body)
    return reply.json


def stranger(studio: LiveStudio) -> dict[str, str]:
    """Headers of a page of ours without any session."""
    return {"Host": studio.host, "Origin": studio.base, "Content-Type": "application/json"}


def project(studio: LiveStudio, pairs: int = 3, name: str = "", **settings: Any) -> int:
    """A project with some pairs in it, as its owner makes it."""
    made = told(studio.post("/api/label/create", {"name": name or f"project {next(_numbers)}", **settings}))["project"]
    rows = [
        {"prompt": f"question {i}", "completions": [f"good {i}", f"bad {i}"], "samplers": ["SAMPLER-X", "SAMPLER-Y"]}
        for i in range(pairs)
    ]
    bring(studio, made, rows)
    return made


def bring(studio: LiveStudio, project: int, rows: list[dict], **making: Any) -> dict:
    """Import rows."""
    import json

    text = "".join(json.dumps(row) + "\n" for row in rows)
    body = {"project": project, "text": text, "name": "rows.jsonl", "making": {"shuffle": False, **making}}
    return told(studio.post("/api/label/import", body))


def invite(studio: LiveStudio, project: int | None, role: str = "labeller") -> str:
    """The token of an invite."""
    return told(studio.post("/api/label/invite", {"project": project, "role": role}))["token"]


def guest(studio: LiveStudio, project: int | None, role: str = "labeller", name: str = "") -> Guest:
    """Somebody new with a role in a project."""
    name = name or f"{role} {next(_numbers)}"
    body = {"token": invite(studio, project, role), "name": name, "password": PASSWORD}
    reply = studio.ask("POST", "/api/join/accept", body, stranger(studio))
    return entered(studio, name, reply)


def entered(studio: LiveStudio, name: str, reply: Reply) -> Guest:
    """Who a reply let in."""
    told(reply)
    made = Guest(studio, name, reply.headers["set-cookie"].partition(";")[0])
    made.csrf = reply.json["csrf"]
    return made
