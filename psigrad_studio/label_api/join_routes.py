"""The page /join for invited people. With an invite link, they become users with a name and a password.

The link has its token after a #, so that browsers do not send it and no log stores it. The page removes it from the address bar.
"""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from psigrad_studio.json_api import RequestForm, json_response
from psigrad_studio.label_api.store import LabelStore
from psigrad_studio.labels import invites, people
from psigrad_studio.labels.people import Login
from psigrad_studio.labels.refusals import Conflict
from psigrad_studio.shell import Page, page_router

Token = Annotated[str, Field(max_length=200)]
Text = Annotated[str, Field(max_length=2000)]


class LinkForm(RequestForm):
    """A request body with the token of an invite."""

    token: Token


class AcceptForm(LinkForm):
    """The body for a new user who uses an invite."""

    name: Text
    password: Text


class LoginForm(RequestForm):
    """The body of a login."""

    name: Text
    password: Text
    device: Annotated[str, Field(max_length=200)] = ""


def router(store: LabelStore) -> APIRouter:
    """Return the page /join and its routes."""
    routes = APIRouter()
    routes.include_router(page_router(Page("join", "Come in", APIRouter()), []))

    @routes.post("/api/join/look")
    def look(form: LinkForm, request: Request) -> Response:
        known = request.state.owner or request.state.person is not None
        name = store.asking(request).name if known else None
        return json_response({**vars(invites.look(store.db, form.token)), "name": name, "owner": request.state.owner})

    @routes.post("/api/join/accept")
    def accept(form: AcceptForm, request: Request) -> Response:
        _must_be_new(request)
        with store.slowly(hashing=True):
            return _entered(store, request, invites.accept(store.db, form.token, form.name, form.password))

    @routes.post("/api/join/use")
    def use(form: LinkForm, request: Request) -> Response:
        """Use an invite as a user who is logged in."""
        if request.state.person is None:
            raise Conflict("You are not logged in; log in first, or join as a new user.")
        return json_response({"project": invites.join(store.db, request.state.person, form.token)})

    @routes.post("/api/join/login")
    def log_in(form: LoginForm, request: Request) -> Response:
        _must_be_new(request)
        with store.slowly(hashing=True):
            return _entered(store, request, people.log_in(store.db, form.name, form.password, form.device))

    @routes.post("/api/join/logout")
    def log_out(form: RequestForm, request: Request) -> Response:
        if request.state.token:
            people.log_out(store.db, request.state.token)
        response = json_response({"out": True})
        response.delete_cookie(_cookie(store))
        return response

    return routes


def _must_be_new(request: Request) -> None:
    if request.state.owner:
        raise Conflict("This browser is logged in with the studio's own key; use a private window or another browser.")


def _cookie(store: LabelStore) -> str:
    return f"psigrad-desk-{store.settings.port}"


def _entered(store: LabelStore, request: Request, login: Login) -> Response:
    """Return the response to a login, which sets a cookie that scripts cannot read. Under HTTPS, it is sent only over HTTPS."""
    response = json_response({"name": login.person.name, "csrf": login.csrf, "device": login.device})
    seconds = max(0, login.expires_at // 1000 - int(time.time()))
    safe = request.headers.get("origin", "").startswith("https://")
    response.set_cookie(_cookie(store), login.token, max_age=seconds, httponly=True, samesite="lax", secure=safe)
    return response
