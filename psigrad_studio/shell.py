"""The HTML document around every page, with the navigation, and the static files, which are read once at the start."""

from __future__ import annotations

import gzip
import hashlib
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import HTMLResponse, Response

KINDS = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}


@dataclass(frozen=True)
class Page:
    """A page of the studio: its body, script and style are in static/<name>/, and `router` has its routes."""

    name: str
    """The name of the folder in static/ and of the path /<name>."""
    title: str
    router: APIRouter
    guests: bool = False
    """True if invited people without the owner's key may open the page and request /api/<name>/."""
    styles: tuple[str, ...] = ()
    """Style sheets in static/ that are loaded before the page's own: those of vendored software."""


@dataclass(frozen=True)
class Asset:
    """A static file in memory. All files are loaded at the start, so that no text of a request becomes a path."""

    body: bytes
    packed: bytes
    """The content compressed by gzip, for browsers that accept it."""
    kind: str
    tag: str


def assets() -> dict[str, Asset]:
    """Return all scripts, styles and pictures of static/, by path."""
    found: dict[str, Asset] = {}

    def walk(folder: Traversable, prefix: str) -> None:
        for entry in folder.iterdir():
            if entry.is_dir():
                walk(entry, f"{prefix}{entry.name}/")
            elif (kind := KINDS.get(entry.name.rpartition(".")[2])) is not None:
                body = entry.read_bytes()
                tag = f'"{hashlib.sha256(body).hexdigest()[:20]}"'
                found[prefix + entry.name] = Asset(body, gzip.compress(body, mtime=0), kind, tag)

    walk(resources.files("psigrad_studio") / "static", "")
    return found


def static_router() -> APIRouter:
    """Return a router that serves the static files of `assets`."""
    router, table = APIRouter(), assets()

    @router.get("/static/{path:path}")
    async def static(path: str, request: Request) -> Response:
        asset = table.get(path)
        if asset is None:
            raise HTTPException(404)
        headers = {"etag": asset.tag, "cache-control": "no-cache", "vary": "accept-encoding"}
        if request.headers.get("if-none-match") == asset.tag:
            return Response(status_code=304, headers=headers)
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(asset.packed, media_type=asset.kind, headers=headers | {"content-encoding": "gzip"})
        return Response(asset.body, media_type=asset.kind, headers=headers)

    return router


def page_router(page: Page, pages: Sequence[Page]) -> APIRouter:
    """Return a router that serves the HTML document of a page."""
    router = APIRouter()
    body = (resources.files("psigrad_studio") / "static" / page.name / "page.html").read_text(encoding="utf-8")

    @router.get(f"/{page.name}")
    async def document(request: Request) -> HTMLResponse:
        shown = pages if request.state.owner else [p for p in pages if p.guests]
        return HTMLResponse(_document(page, shown, body))

    return router


def _document(page: Page, pages: Sequence[Page], body: str) -> str:
    current = {True: ' aria-current="page"', False: ""}
    links = "".join(f'<a href="/{p.name}"{current[p is page]}>{html.escape(p.title)}</a>' for p in pages)
    return _fill(
        _DOCUMENT,
        {"title": f"{page.title} · psigrad", "name": page.name},
        links=links,
        styles="".join(f'<link rel="stylesheet" href="/static/{path}">\n' for path in page.styles),
        body=body,
    )


def entered_page(token: str, home: str) -> str:
    """Return the page that stores the token of a new session in the browser and redirects to `home`."""
    head = _fill(_ENTERED, {"token": token, "home": home})
    return _bare_page("psigrad studio", '<p id="said">The studio opens. It needs JavaScript.</p>', head)


def locked_page(message: str) -> str:
    """Return the page for visitors without access."""
    return _bare_page("Locked · psigrad", _fill(_LOCKED, {"message": message}))


def missing_page() -> str:
    """Return the page for unknown addresses."""
    return _bare_page("Nothing here · psigrad", _MISSING)


def _bare_page(title: str, body: str, head: str = "") -> str:
    return _fill(_BARE, {"title": title}, head=head, body=body)


def _fill(template: str, texts: Mapping[str, str], **markup: str) -> str:
    for name, text in texts.items():
        template = template.replace(f"[{name}]", html.escape(text))
    for name, text in markup.items():
        template = template.replace(f"[{name}]", text)
    return template


_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="/static/mark.svg" type="image/svg+xml">
<script src="/static/theme.js"></script>
<link rel="stylesheet" href="/static/base.css">
"""
_DOCUMENT = (
    _HEAD
    + """<title>[title]</title>
[styles]<link rel="stylesheet" href="/static/[name]/style.css">
<script type="module" src="/static/shell.js"></script>
<script type="module" src="/static/[name]/main.js"></script>
</head>
<body>
<a class="skip" href="#main">Skip to the content</a>
<header class="bar">
<a class="brand" href="/"><img src="/static/mark.svg" alt="" width="22" height="22"><span>psigrad studio</span></a>
<nav aria-label="Pages">[links]</nav>
<button type="button" id="theme" class="quiet icon"></button>
</header>
<main id="main" tabindex="-1">
[body]
</main>
<div id="notice" class="notice" role="alert" hidden></div>
</body>
</html>
"""
)
_BARE = (
    _HEAD
    + """<title>[title]</title>
[head]</head>
<body class="locked">
<main>
<img src="/static/mark.svg" alt="" width="40" height="40">
[body]
</main>
</body>
</html>
"""
)
_ENTERED = """<meta name="csrf" content="[token]">
<meta name="home" content="[home]">
<script type="module" src="/static/enter.js"></script>
"""
_LOCKED = """<h1>This page stays closed</h1>
<p>[message]</p>
<p class="soft">Were you invited to label? <a href="/join">Log in with your name and password</a>.</p>"""
_MISSING = """<h1>There is nothing here</h1>
<p>No page of the studio has this address. <a href="/">Go to its first page</a>.</p>"""
