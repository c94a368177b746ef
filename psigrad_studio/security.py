"""The middleware that guards all routes: it checks Host, Origin, session, CSRF token, size and rate of each request.

It wraps the whole application, so that no new route can be left unprotected. A refusal is `{"error": {"code", "message"}}`.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from psigrad.errors import UserError
from psigrad_studio.labels import passwords
from psigrad_studio.sessions import Sessions
from psigrad_studio.shell import locked_page
from psigrad_studio.studio_settings import StudioSettings

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"})
SAFE = frozenset({"GET", "HEAD"})
ENTER = "/enter"
JOIN = ("/join", "/api/join/")
"""The path prefixes for invited people. They are open to strangers, within the rate limit of refused requests."""
STATIC = "/static/"
SESSION, API = "psigrad_session_", "psigrad_api_"
"""The prefixes of session tokens and of API tokens."""
ADMITTED = "admitted"
"""The key, in the state of a request, of a function that tells the server the sender, so that their connection is kept."""
OWNER, COOKIE = "owner", "cookie"
"""The two kinds of senders with the owner's cookie: those with the token of the owner's pages, and those without it."""
KNOWN_TOKENS = 1000
"""The number of tokens whose users are cached, for requests of files that need no session."""
SHARE = 0.3
"""The rate limit of each invited person, as a share of the owner's."""
DATA = "/api/"
CSRF_HEADER = "x-psigrad-csrf"
NO_TOKEN = "This browser lacks a part of its session; open the address that psigrad studio printed, or log in again at /join."
NOBODY = {"owner": False, "person": None, "token": "", "session": ""}
_ODD_PATH = re.compile(r"[\x00-\x1f\x7f\\]|//|(^|/)\.\.?(/|$)")
_ENCODED = re.compile(rb"%(2f|5c|00|2e|25)", re.IGNORECASE)
_POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' blob:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
)
HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=(), payment=(), usb=()",
}


class Refused(HTTPException):
    """A refused request. `code` names the reason for programs, `detail` for users."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(status, message)
        self.code = code


@dataclass(frozen=True)
class Guests:
    """The access of users without the owner's key, whom a session or an API token of the labelling system identifies.

    `pages` are the pages that they may open. `recognise` returns the person to whom a token belongs, or None. It may block.
    """

    pages: frozenset[str]
    recognise: Callable[[str], Any]
    imports: str
    """The path to which administrators may send bodies of up to `StudioSettings.import_bytes`."""


class Bucket:
    """A token bucket for rate limits: `burst` requests at once, `rate` per second on average."""

    def __init__(self, rate: float, burst: int, now: Callable[[], float] = time.monotonic) -> None:
        self.rate, self.burst, self.now = rate, burst, now
        self.level, self.seen = float(burst), now()

    def take(self) -> bool:
        """Take one token. Return False if there is none."""
        now = self.now()
        self.level = min(self.burst, self.level + (now - self.seen) * self.rate)
        self.seen = now
        if self.level < 1:
            return False
        self.level -= 1
        return True


class Guard:
    """ASGI middleware that passes only requests from the studio's pages, sent by the owner or an invited person.

    It sets in the state of a request: `owner` (True if the sender has the key), `person` (the user of the labelling system, or
    None) and `token` (that of the user's session).
    """

    def __init__(self, app: ASGIApp, settings: StudioSettings, sessions: Sessions, invited: Guests) -> None:
        self.app, self.settings, self.sessions, self.invited = app, settings, sessions, invited
        self.cookie, self.desk_cookie = f"psigrad-{settings.port}", f"psigrad-desk-{settings.port}"
        self.guests, self.holders, self.visitors = (Bucket(settings.requests_per_second, settings.burst) for _ in range(3))
        self.seen: dict[str, int] = {}
        self.strangers = Bucket(settings.strangers_per_second, settings.strangers_burst)
        self.people: dict[int, Bucket] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request to the application, or refuse it."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = False

        async def with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                present = {name.lower() for name, _ in message["headers"]}
                given = HEADERS | {"cache-control": "no-store"}
                extra = [(k.encode(), v.encode()) for k, v in given.items() if k.encode() not in present]
                message = {**message, "headers": [*message["headers"], *extra]}
            await send(message)

        try:
            await self._check(scope)
            await self.app(scope, self._limited(scope, receive), with_headers)
        except Refused as refused:
            if not started:
                await _answer(with_headers, refused, scope)
        except Exception:
            logging.getLogger("psigrad_studio").exception("%s %s failed", scope["method"], scope["path"])
            if not started:
                await _answer(
                    with_headers, Refused(500, "failed", "The studio failed to answer; its terminal shows the error."), scope
                )

    async def _check(self, scope: Scope) -> None:
        """Raise `Refused` unless the request is from the studio's pages. Refusals count against the rate limit of strangers."""
        try:
            self._check_form(scope)
            self._check_source(scope)
            if scope["path"] == ENTER:
                self._check_key(scope)
            elif not scope["path"].startswith(STATIC):
                await self._check_session(scope)
        except Refused:
            if not self.strangers.take():
                raise Refused(429, "too_many", "Too many requests were refused; wait a minute.") from None
            raise
        who = self._who(scope)
        if who is not None and (admitted := scope.get("state", {}).get(ADMITTED)) is not None:
            admitted(who)
        if not self._bucket(scope, who).take():
            raise Refused(429, "too_many", "Too many requests at once; wait a second.")

    def _who(self, scope: Scope) -> int | str | None:
        """Return the sender, for limits on rates and connections: OWNER, COOKIE, a person's number, or None for a stranger."""
        asker = scope.get("state", {})
        if asker.get("person") is not None:
            number: int = asker["person"].id
            if asker["token"]:
                if len(self.seen) >= KNOWN_TOKENS:
                    self.seen.clear()
                self.seen[asker["token"]] = number
            return number
        if asker.get("owner"):
            return OWNER if self._csrf_holds(scope, asker) else COOKIE
        if scope["path"] == ENTER:
            return OWNER
        if self.sessions.session_of(_only(_cookies(scope, self.cookie))) is not None:
            return COOKIE
        return self.seen.get(_only(_cookies(scope, self.desk_cookie)))

    def _bucket(self, scope: Scope, who: int | str | None) -> Bucket:
        """Return the token bucket from which a request of this sender takes a token.

        Each invited person has a separate bucket, so that nobody can lock others out.
        """
        if who is None:
            return self.strangers if _is_open(scope) and scope["method"] not in SAFE else self.visitors
        if isinstance(who, str):
            return self.guests if who == OWNER else self.holders
        share = Bucket(self.settings.requests_per_second * SHARE, max(1, int(self.settings.burst * SHARE)))
        return self.people.setdefault(who, share)

    def _check_form(self, scope: Scope) -> None:
        if scope["method"] not in METHODS:
            raise Refused(405, "method", "This method is not allowed.")
        if _ODD_PATH.search(scope["path"]) or _ENCODED.search(scope.get("raw_path") or b"") or len(scope["path"]) > 1024:
            raise Refused(400, "path", "This path is not well-formed.")

    def _check_source(self, scope: Scope) -> None:
        """Check Host, Origin (required for changes) and Sec-Fetch-Site, so that other sites are refused."""
        if _header(scope, "host") not in self.settings.hosts:
            raise Refused(421, "host", "This is not the server's host name; open the address that psigrad studio printed.")
        origin, site = _header(scope, "origin"), _header(scope, "sec-fetch-site")
        safe = scope["method"] in SAFE
        if origin is not None and origin not in self.settings.origins:
            raise Refused(403, "origin", "Requests from other sites are refused.")
        if origin is None and not safe and _bearer(scope) is None:
            raise Refused(403, "origin", "The request does not say which page it comes from.")
        visits = safe and _header(scope, "sec-fetch-mode") == "navigate" and _header(scope, "sec-fetch-dest") == "document"
        if site not in (None, "same-origin", "none") and not visits:
            raise Refused(403, "site", "Requests from other sites are refused.")

    def _check_key(self, scope: Scope) -> None:
        if scope["method"] != "GET":
            raise Refused(405, "method", "This method is not allowed.")
        if _header(scope, "host") not in self.settings.own_hosts:
            raise Refused(403, "key", "The key opens the studio only on its own machine; on another one, use an invite.")
        values = [part[4:] for part in scope["query_string"].split(b"&") if part.startswith(b"key=")]
        if len(values) != 1 or not self.sessions.admits(values[0].decode("latin-1")):
            raise Refused(
                403,
                "key",
                "This key belongs to another studio or an earlier start; open the address that psigrad studio printed.",
            )

    async def _check_session(self, scope: Scope) -> None:
        """Identify the sender, and raise `Refused` for a stranger.

        If there is an API token, cookies are ignored, since browsers add those automatically.
        """
        token, asker = _bearer(scope), dict(NOBODY)
        if token is not None:
            asker |= {"person": await self._recognised(token, API)}
        elif (session := self.sessions.session_of(_only(_cookies(scope, self.cookie)))) is not None:
            asker |= {"owner": True, "session": session}
        elif (person := await self._recognised(given := _only(_cookies(scope, self.desk_cookie)), SESSION)) is not None:
            asker |= {"person": person, "token": given}
        if token is None and _is_open(scope) and not self._csrf_holds(scope, asker):  # a cookie left from an earlier session
            asker = dict(NOBODY)
        known = asker["owner"] or asker["person"] is not None
        if not known and not _is_open(scope):
            raise Refused(401, "session", "This studio is locked; open the address that psigrad studio printed in its terminal.")
        careful = token is None and (scope["path"].startswith(DATA) or scope["method"] not in SAFE)
        if known and careful and not self._csrf_holds(scope, asker):
            raise Refused(403, "csrf", NO_TOKEN)
        if known and not asker["owner"] and not self._may_visit(scope["path"], token is not None):
            raise Refused(403, "guest", "Only the studio's owner may open this part; you were invited to label.")
        scope["state"] = {**scope.get("state", {}), **asker}

    def _csrf_holds(self, scope: Scope, asker: Mapping[str, Any]) -> bool:
        """Return True if the request has the CSRF token of its session, which only pages from this port know."""
        given = _header(scope, CSRF_HEADER) or ""
        if asker["owner"]:
            return self.sessions.csrf_holds(asker["session"], given)
        return asker["person"] is not None and _same(passwords.session_token(given), asker["token"])

    async def _recognised(self, token: str, kind: str) -> Any:
        """Return the person to whom a token belongs. The database is queried in a thread, since that may block."""
        if not token.startswith(kind) or len(token) > 200:
            return None
        try:
            return await run_in_threadpool(self.invited.recognise, token)
        except UserError as error:
            raise Refused(503, "busy", str(error)) from error

    def _may_visit(self, path: str, by_token: bool) -> bool:
        """Return True if people without the key may open the path. API tokens get no documents."""
        if any(path.startswith(f"/api/{name}/") for name in self.invited.pages):
            return True
        return not by_token and (path == "/" or path.startswith(JOIN) or path[1:] in self.invited.pages)

    def _most_bytes(self, scope: Scope) -> int:
        asker = scope.get("state", {})
        trusted = asker.get("owner") or getattr(asker.get("person"), "admin", False)
        return self.settings.import_bytes if trusted and scope["path"] == self.invited.imports else self.settings.body_bytes

    def _limited(self, scope: Scope, receive: Receive) -> Receive:
        """Return a `receive` function that refuses bodies that are too long, too slow, compressed or not JSON."""
        length, kind = _header(scope, "content-length"), _header(scope, "content-type")
        most = self._most_bytes(scope)
        if _header(scope, "content-encoding") not in (None, "identity"):
            raise Refused(415, "encoding", "Compressed bodies are refused.")
        if length is not None and (not re.fullmatch("[0-9]{1,12}", length) or int(length) > most):
            raise Refused(413, "size", f"The request is too large; the limit is {most // 1024} KB.")
        has_body = length not in (None, "0") or _header(scope, "transfer-encoding") is not None
        if has_body and scope["method"] in SAFE:
            raise Refused(400, "body", "This method takes no body.")
        if has_body and (kind or "").partition(";")[0].strip().lower() != "application/json":
            raise Refused(415, "type", "The body must be application/json.")
        seen, deadline = 0, time.monotonic() + self.settings.body_seconds
        whole = False

        async def limited() -> Message:
            nonlocal seen, whole
            if whole:
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), max(deadline - time.monotonic(), 0.001))
            except TimeoutError:
                raise Refused(408, "slow", "The body took too long to arrive.") from None
            seen += len(message.get("body", b""))
            if seen > most:
                raise Refused(413, "size", f"The request is too large; the limit is {most // 1024} KB.")
            whole = not message.get("more_body", False)
            return message

        return limited


def _is_open(scope: Scope) -> bool:
    return bool(scope["path"].startswith(JOIN))


def _bearer(scope: Scope) -> str | None:
    """Return the API token of a request. Other schemes, such as Basic for a proxy, are ignored."""
    scheme, _, token = (_header(scope, "authorization") or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


def _same(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), expected.encode())


def _all(scope: Scope, name: str) -> list[str]:
    return [value.decode("latin-1") for key, value in scope["headers"] if key == name.encode()]


def _header(scope: Scope, name: str) -> str | None:
    """Return the value of a header, or None. Raises `Refused` if it is repeated."""
    found = _all(scope, name)
    if len(found) > 1:
        raise Refused(400, "header", "A header is given twice.")
    return found[0] if found else None


def _cookies(scope: Scope, name: str) -> list[str]:
    pairs = [part.strip().partition("=") for text in _all(scope, "cookie") for part in text.split(";")]
    return [value for key, _, value in pairs if key == name]


def _only(values: list[str]) -> str:
    """Return the only value of a cookie; "" if it is missing or repeated."""
    return values[0] if len(values) == 1 else ""


def error_body(code: str, message: str) -> dict[str, Any]:
    """Return the JSON body that all errors have."""
    return {"error": {"code": code, "message": message}}


async def _answer(send: Send, refused: Refused, scope: Scope) -> None:
    accept = next((value for key, value in scope["headers"] if key == b"accept"), b"")
    if b"text/html" in accept and scope["method"] == "GET":
        body, kind = locked_page(refused.detail).encode(), b"text/html; charset=utf-8"
    else:
        body, kind = json.dumps(error_body(refused.code, refused.detail)).encode(), b"application/json"
    headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
    if refused.status_code in (429, 408, 413):
        headers.append((b"connection", b"close") if refused.status_code != 429 else (b"retry-after", b"2"))
    await send({"type": "http.response.start", "status": refused.status_code, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})
