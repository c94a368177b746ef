"""The routes for labellers: projects, the next task, and vote, skip, undo and renew.

No response reveals the origin of a completion or the answers of others.
"""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from psigrad_studio.json_api import RequestForm, json_response
from psigrad_studio.label_api.store import LabelStore
from psigrad_studio.labels import assignments, people, projects
from psigrad_studio.labels.assignments import LabelAnswer, ShownTask

Number = Annotated[int, Field(ge=1, lt=2**63)]
Key = Annotated[str, Field(max_length=200)]
Reason = Annotated[str, Field(max_length=assignments.LONGEST_REASON)]


class ProjectForm(RequestForm):
    """A request body with the number of a project."""

    project: Number


class NextForm(ProjectForm):
    """A request for the next task. With `count`, the response also contains the number of remaining tasks."""

    count: bool = False


class TaskForm(RequestForm):
    """A request body with the number of an assignment, which is a task shown to one person."""

    assignment: Number


class SkipForm(TaskForm):
    """The arguments of `assignments.skip`."""

    key: Key
    reason: Reason | None = None


class VoteForm(SkipForm):
    """The arguments of `assignments.vote`: a `LabelAnswer`, with sides and order as displayed."""

    choice: Annotated[str, Field(max_length=40)] | None = None
    ranks: Annotated[list[Annotated[int, Field(ge=1, le=100)]], Field(max_length=100)] | None = None
    rating: Annotated[int, Field(ge=0, le=100)] | None = None
    strength: Annotated[int, Field(ge=0, le=100)] | None = None
    client_ms: Annotated[int, Field(ge=0, lt=2**53)] | None = None
    answers: dict[str, dict[str, Any]] | None = None


class UndoForm(ProjectForm):
    """The arguments of `assignments.undo`."""

    key: Key


def add_routes(routes: APIRouter, store: LabelStore) -> None:
    """Add the routes for labellers."""

    @routes.get("/me")
    def me(request: Request) -> Response:
        person = store.asking(request)
        about = {"name": person.name, "admin": _administers(person), "owner": request.state.owner}
        return json_response(about | {"outside": [f"https://{name}" for name in store.settings.allowed_hosts]})

    @routes.get("/projects")
    def mine(request: Request) -> Response:
        return json_response([_seen(info) for info in projects.mine(store.db, store.asking(request))])

    @routes.post("/next")
    def next_task(form: NextForm, request: Request) -> Response:
        db, person = store.db, store.asking(request)
        shown = assignments.next_task(db, person, form.project)
        found: dict[str, Any] = {
            "task": None if shown is None else _task(shown),
            "mine": assignments.mine(db, person, form.project),
        }
        return json_response(found | {"left": assignments.left(db, person, form.project) if form.count else None})

    @routes.post("/vote")
    def vote(form: VoteForm, request: Request) -> Response:
        ranks = None if form.ranks is None else tuple(form.ranks)
        said = LabelAnswer(**form.model_dump(exclude={"assignment", "key", "ranks"}), ranks=ranks)
        return json_response(assignments.vote(store.db, store.asking(request), form.assignment, said, form.key))

    @routes.post("/skip")
    def skip(form: SkipForm, request: Request) -> Response:
        return json_response(assignments.skip(store.db, store.asking(request), form.assignment, form.key, form.reason))

    @routes.post("/undo")
    def undo(form: UndoForm, request: Request) -> Response:
        return json_response(assignments.undo(store.db, store.asking(request), form.project, form.key))

    @routes.post("/renew")
    def renew(form: TaskForm, request: Request) -> Response:
        return json_response({"lease_ms": _from_now(assignments.renew(store.db, store.asking(request), form.assignment))})


def _administers(person: people.Person) -> bool:
    return person.admin and person.role == "admin" and person.project_id is None


def _seen(info: projects.ProjectInfo) -> dict[str, Any]:
    """Return a project as JSON for one of its members.

    The seed is removed, because it would reveal how sides are drawn. Labellers also do not see that there are attention checks.
    """
    hidden = {"seed"} if "manage" in info.may else {"seed", "checks"}
    about = {k: v for k, v in vars(info.settings).items() if k not in hidden}
    return {"id": info.id, **about, "closed": info.closed_at is not None, "may": info.may}


def _task(shown: ShownTask) -> dict[str, Any]:
    """Return a task as JSON. The end of its lease is sent as a duration, since clocks differ."""
    about = {name: value for name, value in vars(shown).items() if name != "lease_until"}
    return about | {"lease_ms": _from_now(shown.lease_until)}


def _from_now(until: int) -> int:
    return max(0, until - time.time_ns() // 1_000_000)
