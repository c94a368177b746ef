"""Who takes part: invite links, roles, API tokens, passwords."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from pydantic import Field

from psigrad_studio.desk.store import Form, Store, answer
from psigrad_studio.desk.work import Number
from psigrad_studio.labels import invites, people, projects

DAY = 24 * people.HOUR
Role = Annotated[str, Field(max_length=40)]
Days = Annotated[int, Field(ge=1, le=365)]


class InviteForm(Form):
    """`invites.invite`; without a project it is for an administrator of the studio."""

    project: Number | None = None
    role: Role
    days: Days = 7


class NumberForm(Form):
    """Which invite, token or user."""

    id: Number


class RoleForm(Form):
    """`projects.set_role`; null takes the role away."""

    project: Number
    user: Number
    role: Role | None


class TokenForm(Form):
    """`people.make_token`."""

    name: Annotated[str, Field(max_length=200)]
    role: Role = "labeller"
    project: Number | None = None
    days: Days | None = None


class PasswordForm(Form):
    """`people.change_password`."""

    old: Annotated[str, Field(max_length=2000)]
    new: Annotated[str, Field(max_length=2000)]


def add_routes(routes: APIRouter, store: Store) -> None:
    """People and tokens."""

    @routes.get("/people")
    def members(request: Request, project: Annotated[int, Query(ge=1, lt=2**63)]) -> Response:
        db, person = store.db, store.asking(request)
        return answer({"members": projects.members(db, person, project), "invites": invites.pending(db, person, project)})

    @routes.get("/users")
    def users(request: Request) -> Response:
        return answer(people.everyone(store.db, store.asking(request)))

    @routes.post("/invite")
    def invite(form: InviteForm, request: Request) -> Response:
        token = invites.invite(store.db, store.asking(request), form.project, form.role, form.days * DAY)
        return answer({"token": token, "path": f"/join#{token}"})

    @routes.post("/uninvite")
    def uninvite(form: NumberForm, request: Request) -> Response:
        return answer({"revoked": invites.revoke(store.db, store.asking(request), form.id) is None})

    @routes.post("/role")
    def role(form: RoleForm, request: Request) -> Response:
        projects.set_role(store.db, store.asking(request), form.project, form.user, form.role)
        return answer({"role": form.role})

    @routes.post("/disable")
    def disable(form: NumberForm, request: Request) -> Response:
        return answer({"disabled": people.disable(store.db, store.asking(request), form.id) is None})

    @routes.get("/tokens")
    def tokens(request: Request) -> Response:
        return answer(people.tokens(store.db, store.asking(request)))

    @routes.post("/token")
    def token(form: TokenForm, request: Request) -> Response:
        lasts = None if form.days is None else form.days * DAY
        person = store.asking(request)
        number, value = people.make_token(store.db, person, form.name, form.role, project_id=form.project, lasts_ms=lasts)
        return answer({"id": number, "token": value})

    @routes.post("/untoken")
    def untoken(form: NumberForm, request: Request) -> Response:
        return answer({"revoked": people.revoke_token(store.db, store.asking(request), form.id) is None})

    @routes.post("/password")
    def password(form: PasswordForm, request: Request) -> Response:
        with store.slowly(hashing=True):
            people.change_password(store.db, store.asking(request), form.old, form.new)
        return answer({"changed": True})
