"""The routes for members: invites, roles, API tokens, passwords."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from pydantic import Field

from psigrad_studio.json_api import RequestForm, json_response
from psigrad_studio.label_api.store import LabelStore
from psigrad_studio.label_api.task_routes import Number
from psigrad_studio.labels import invites, people, projects

DAY = 24 * people.HOUR
Role = Annotated[str, Field(max_length=40)]
Days = Annotated[int, Field(ge=1, le=365)]


class InviteForm(RequestForm):
    """The arguments of `invites.invite`. Without a project, it invites an administrator of the studio."""

    project: Number | None = None
    role: Role
    days: Days = 7


class NumberForm(RequestForm):
    """The number of an invite, a token or a user."""

    id: Number


class RoleForm(RequestForm):
    """The arguments of `projects.set_role`. The role null removes the user's role."""

    project: Number
    user: Number
    role: Role | None


class TokenForm(RequestForm):
    """The arguments of `people.make_token`."""

    name: Annotated[str, Field(max_length=200)]
    role: Role = "labeller"
    project: Number | None = None
    days: Days | None = None


class PasswordForm(RequestForm):
    """The arguments of `people.change_password`."""

    old: Annotated[str, Field(max_length=2000)]
    new: Annotated[str, Field(max_length=2000)]


def add_routes(routes: APIRouter, store: LabelStore) -> None:
    """Add the routes for people and tokens."""

    @routes.get("/people")
    def members(request: Request, project: Annotated[int, Query(ge=1, lt=2**63)]) -> Response:
        db, person = store.db, store.asking(request)
        return json_response({"members": projects.members(db, person, project), "invites": invites.pending(db, person, project)})

    @routes.get("/users")
    def users(request: Request) -> Response:
        return json_response(people.everyone(store.db, store.asking(request)))

    @routes.post("/invite")
    def invite(form: InviteForm, request: Request) -> Response:
        token = invites.invite(store.db, store.asking(request), form.project, form.role, form.days * DAY)
        return json_response({"token": token, "path": f"/join#{token}"})

    @routes.post("/uninvite")
    def uninvite(form: NumberForm, request: Request) -> Response:
        return json_response({"revoked": invites.revoke(store.db, store.asking(request), form.id) is None})

    @routes.post("/role")
    def role(form: RoleForm, request: Request) -> Response:
        projects.set_role(store.db, store.asking(request), form.project, form.user, form.role)
        return json_response({"role": form.role})

    @routes.post("/disable")
    def disable(form: NumberForm, request: Request) -> Response:
        return json_response({"disabled": people.disable(store.db, store.asking(request), form.id) is None})

    @routes.get("/tokens")
    def tokens(request: Request) -> Response:
        return json_response(people.tokens(store.db, store.asking(request)))

    @routes.post("/token")
    def token(form: TokenForm, request: Request) -> Response:
        lasts = None if form.days is None else form.days * DAY
        person = store.asking(request)
        number, value = people.make_token(store.db, person, form.name, form.role, project_id=form.project, lasts_ms=lasts)
        return json_response({"id": number, "token": value})

    @routes.post("/untoken")
    def untoken(form: NumberForm, request: Request) -> Response:
        return json_response({"revoked": people.revoke_token(store.db, store.asking(request), form.id) is None})

    @routes.post("/password")
    def password(form: PasswordForm, request: Request) -> Response:
        with store.slowly(hashing=True):
            people.change_password(store.db, store.asking(request), form.old, form.new)
        return json_response({"changed": True})
