"""The web application: all pages, protected by the middleware of `security`."""

from __future__ import annotations

import threading

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.exceptions import HTTPException

from psigrad.errors import UserError
from psigrad_studio import chat_routes, grid_routes
from psigrad_studio.label_api import join_routes, label_routes
from psigrad_studio.label_api.store import LabelStore
from psigrad_studio.labels.refusals import Refusal
from psigrad_studio.runs.run_routes import router as runs_router
from psigrad_studio.security import ENTER, Guard, Guests, error_body
from psigrad_studio.sessions import Sessions
from psigrad_studio.shell import Page, entered_page, missing_page, page_router, static_router
from psigrad_studio.studio_settings import StudioSettings

CHARTS = "vendor/uplot/uPlot.min.css"


def pages(settings: StudioSettings, labels: LabelStore) -> list[Page]:
    """Return all pages, in the order of the navigation. The first one is the home page."""
    return [
        Page("grid", "Grid", grid_routes.router(settings), styles=(CHARTS,)),
        Page("runs", "Runs", runs_router(settings, labels), styles=(CHARTS,)),
        Page("label", "Label", label_routes.router(labels), guests=True),
        Page("chat", "Chat", chat_routes.router(settings, labels)),
    ]


def create_app(settings: StudioSettings, sessions: Sessions | None = None) -> FastAPI:
    """Return the application for these settings. Tests pass `sessions`."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    sessions = sessions or Sessions(settings.key, settings.session_seconds)
    app.state.labels = labels = LabelStore(settings)
    app.state.ending = threading.Event()
    shown = pages(settings, labels)
    app.include_router(static_router())
    app.include_router(join_routes.router(labels))
    for page in shown:
        app.include_router(page_router(page, shown))
        app.include_router(page.router)
    home, guests = f"/{settings.home or shown[0].name}", [page.name for page in shown if page.guests]

    @app.get("/")
    async def first_page(request: Request) -> Response:
        return RedirectResponse(home if request.state.owner or not guests else f"/{guests[0]}", 303)

    @app.get(ENTER)
    async def enter() -> Response:
        """Set the session cookie, and return a page that stores the session's token and redirects immediately.

        The redirect removes the key from the address bar. The middleware has already checked the key.
        """
        cookie, seconds = sessions.new_session(), int(settings.session_seconds)
        session = sessions.session_of(cookie)
        assert session is not None
        response = HTMLResponse(entered_page(sessions.csrf_token(session), home))
        response.set_cookie(f"psigrad-{settings.port}", cookie, max_age=seconds, httponly=True, samesite="lax")
        return response

    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(UserError, _mistaken)
    invited = Guests(frozenset(guests), labels.recognise, label_routes.IMPORT)
    app.add_middleware(Guard, settings=settings, sessions=sessions, invited=invited)
    return app


def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404 and request.method == "GET" and "text/html" in request.headers.get("accept", ""):
        return HTMLResponse(missing_page(), 404)
    code = getattr(error, "code", {404: "missing", 405: "method"}.get(error.status_code, "request"))
    said = {404: "There is nothing at this address.", 405: "This method is not allowed."}.get(error.status_code, error.detail)
    return JSONResponse(error_body(code, said), error.status_code, headers=error.headers)


def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"] if part != "body")
    said = f"{where}: {first['msg']}" if where else str(first["msg"])
    return JSONResponse(error_body("invalid", f"{said[:200]}."), 422)


def _mistaken(request: Request, error: Exception) -> Response:
    if isinstance(error, Refusal):
        return JSONResponse(error_body(type(error).__name__.lower(), str(error)), error.status)
    return JSONResponse(error_body("mistake", str(error)), 422)
