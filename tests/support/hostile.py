"""Hostile requests: for every route and method what another site, another user or a broken client would send.

Each is bytes for a socket, with the code of the refusal that is expected. They are made from one honest request by changing
what the family is about, so that nothing else can be the reason of the refusal.
"""
# ruff: noqa: E501 - bytes of the wire are easier to read whole

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from live_studio import LiveStudio

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
CHANGING = ("POST", "PUT", "PATCH", "DELETE")
OPEN = ("/static/", "/enter")
JOIN = ("/join", "/api/join/")
"""Where strangers may ask; who has a session is held to its token there too."""
WHOLE = ("/", "/enter", "/grid", "/api/grid/frames", "/api/label/vote", "/api/join/login")
WORLD = {
    "rows": 8,
    "columns": 8,
    "prizes": [[1, 6, 1.0]],
    "walls": [],
    "start": None,
    "slip": 0.1,
    "step_reward": 0.0,
    "gamma": 0.9,
}
FILM = {"world": WORLD, "algorithm": "value_iteration"}


@dataclass(frozen=True)
class Request:
    """One request as it goes over the wire. A header may come twice."""

    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
    body: bytes = b""
    version: str = "HTTP/1.1"

    @property
    def data(self) -> bytes:
        """The bytes."""
        lines = [f"{self.method} {self.path} {self.version}", *(f"{name}: {value}" for name, value in self.headers)]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + self.body

    def having(self, name: str, *values: str) -> Request:
        """With these values of a header instead of what it had; none takes it away."""
        kept = tuple(pair for pair in self.headers if pair[0] != name)
        return replace(self, headers=(*kept, *((name, value) for value in values)))


@dataclass(frozen=True)
class Attack:
    """A request, why it is hostile, and the codes with which it may be refused (empty: closing the connection is enough)."""

    family: str
    what: str
    request: bytes
    codes: frozenset[str] = field(default_factory=frozenset)


def honest(studio: LiveStudio, method: str, path: str, content: object = None) -> Request:
    """What a page of the studio sends."""
    headers = [("Host", studio.host), ("Cookie", studio.cookie), ("X-Psigrad-CSRF", studio.csrf), ("Connection", "close")]
    body = b""
    if method in CHANGING:
        body = json.dumps({} if content is None else content).encode()
        headers += [("Origin", studio.base)]
        headers += [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
    return Request(method, path, tuple(headers), body)


def routes(studio: LiveStudio) -> list[str]:
    """Every path of the application, with something in the place of parameters, as the framework itself lists them."""
    from starlette.routing import Route

    found: list[str] = []

    def walk(routes_: list) -> None:
        for route in routes_:
            if isinstance(route, Route) or hasattr(route, "path"):
                found.append(route.path.replace("{path:path}", "base.css"))
            inner = getattr(route, "routes", None) or getattr(getattr(route, "original_router", None), "routes", None)
            if inner and not isinstance(route, Route):
                walk(inner)

    walk(studio.app.routes)
    assert not [path for path in found if "{" in path], "give hostile.routes a value for the new parameter"
    return sorted(set(found))


def corpus(studio: LiveStudio) -> Iterator[Attack]:
    """All attacks on all routes by all methods, and those that need no route.

    The first routes get every variant of every family by every method; each further one an eighth of them, another eighth each time.
    """
    turn = itertools.count()
    for path in routes(studio):
        for method in METHODS:
            base = honest(studio, method, path)
            families = [_names(studio, base), _origins(studio, base)]
            if not path.startswith((*OPEN, *JOIN)):
                families.append(_sessions(studio, base))
            if not path.startswith((*OPEN, *JOIN)) and (path.startswith("/api/") or method in CHANGING):
                families.append(_forged(studio, base))
            for family in families:
                yield from family if path in WHOLE else itertools.islice(family, next(turn) % 8, None, 8)
        for method in ("OPTIONS", "TRACE", "CONNECT", "PROPFIND", "DEBUG"):
            yield Attack("method", f"{method} {path}", honest(studio, method, path).data, frozenset({"method", "http", "path"}))
    yield from _paths(studio)
    yield from _keys(studio)
    yield from _bodies(studio)
    yield from _wires(studio)


def _label(request: Request) -> str:
    return f"{request.method} {request.path}"


def _names(studio: LiveStudio, base: Request) -> Iterator[Attack]:
    port = studio.settings.port
    names = [
        "evil.example", f"evil.example:{port}", f"127.0.0.1.evil.example:{port}", f"localhost.evil.example:{port}",
        f"127.0.0.1:{port + 1}", "127.0.0.1", "localhost", f"0.0.0.0:{port}", f"127.1:{port}", f"2130706433:{port}",
        f"127.0.0.1:{port}@evil.example", f"evil.example@127.0.0.1:{port}", f"127.0.0.1:{port}.", f"127.0.0.1:0{port}",
        f"[::1]:{port}", f"localhost:{port}/", f"127.0.0.1:{port}#", "",
    ]  # fmt: skip
    for name in names:
        yield Attack("host", f"{_label(base)} to {name!r}", base.having("Host", name).data, frozenset({"host", "http"}))
    yield Attack(
        "host", f"{_label(base)} to two", base.having("Host", studio.host, "evil.example").data, frozenset({"http", "header"})
    )
    yield Attack("host", f"{_label(base)} to nobody", base.having("Host").data, frozenset({"http", "host"}))
    forwarded = base.having("Host", "evil.example").having("X-Forwarded-Host", studio.host)
    yield Attack("host", f"{_label(base)} forwarded", forwarded.data, frozenset({"host"}))


def _origins(studio: LiveStudio, base: Request) -> Iterator[Attack]:
    port = studio.settings.port
    origins = [
        "http://evil.example", "null", f"http://127.0.0.1:{port + 1}", f"https://127.0.0.1:{port}", "http://localhost",
        f"http://127.0.0.1:{port}.evil.example", f"http://127.0.0.1:{port}/", f"http://evil.example:{port}", "file://",
        f"{studio.base} http://evil.example", f"{studio.base}\thttp://evil.example", "", "chrome-extension://abc",
    ]  # fmt: skip
    for origin in origins:
        yield Attack("origin", f"{_label(base)} from {origin!r}", base.having("Origin", origin).data, frozenset({"origin"}))
    twice = base.having("Origin", studio.base, "http://evil.example")
    yield Attack("origin", f"{_label(base)} from two", twice.data, frozenset({"header"}))
    if base.method in CHANGING:
        yield Attack("origin", f"{_label(base)} from nowhere", base.having("Origin").data, frozenset({"origin"}))
        referred = base.having("Origin").having("Referer", f"{studio.base}/grid")
        yield Attack("origin", f"{_label(base)} with a referer only", referred.data, frozenset({"origin"}))
    for site in ("cross-site", "same-site"):
        for mode, kind in (("no-cors", "image"), ("cors", "empty"), ("navigate", "iframe"), ("no-cors", "script")):
            fetched = base.having("Sec-Fetch-Site", site).having("Sec-Fetch-Mode", mode).having("Sec-Fetch-Dest", kind)
            yield Attack("site", f"{_label(base)} {site} {mode} {kind}", fetched.data, frozenset({"site"}))


def _sessions(studio: LiveStudio, base: Request) -> Iterator[Attack]:
    name, _, value = studio.cookie.partition("=")
    issued, nonce, signature = value.split(".")
    others = [
        "", "x", "..", f"{issued}.{nonce}.", f"{issued}.{nonce}.{'0' * 64}", f"{int(issued) + 1}.{nonce}.{signature}",
        f"{issued}.{nonce[::-1]}.{signature}", f"{issued}.{nonce}.{signature[:-1]}", f"{value}x", f"{issued}.{nonce}.{signature.upper()}",
        f"0.{nonce}.{signature}", "' OR 1=1 --", "<script>alert(1)</script>", "%00", "é" * 8, "9" * 4000, f".{signature}",
        f"-1.{nonce}.{signature}", f"1e9.{nonce}.{signature}", f"{issued}.{signature}",
    ]  # fmt: skip
    for other in others:
        request = base.having("Cookie", f"{name}={other}")
        yield Attack("session", f"{_label(base)} with {other[:40]!r}", request.data, frozenset({"session"}))
    yield Attack("session", f"{_label(base)} with nothing", base.having("Cookie").data, frozenset({"session"}))
    for shape in (f"{name}={value}; {name}=x", f"{name}=x; {name}={value}", f"psigrad={value}", f"{name.upper()}={value}"):
        yield Attack("session", f"{_label(base)} as {shape[:30]}", base.having("Cookie", shape).data, frozenset({"session"}))
    desk = f"psigrad-desk-{studio.settings.port}"
    for token in (
        "",
        "x",
        f"psigrad_session_{'A' * 43}",
        "psigrad_session_",
        f"psigrad_session_{'A' * 5000}",
        value,
        "' OR 1=1 --",
    ):
        request = base.having("Cookie", f"{desk}={token}")
        yield Attack("session", f"{_label(base)} as a guest with {token[:30]!r}", request.data, frozenset({"session"}))
    for token in (studio.settings.key, value, "", f"psigrad_api_{'A' * 43}", f"psigrad_session_{'A' * 43}"):
        bearer = base.having("Authorization", f"Bearer {token}")  # beside a cookie that is good
        yield Attack("session", f"{_label(base)} with the bearer {token[:20]!r}", bearer.data, frozenset({"session"}))
    bearer = base.having("Cookie").having("Authorization", f"Bearer {studio.settings.key}")
    yield Attack("session", f"{_label(base)} with the key as a bearer", bearer.data, frozenset({"session"}))


def _forged(studio: LiveStudio, base: Request) -> Iterator[Attack]:
    other = studio.sessions.csrf_token(studio.sessions.new_session())
    for token in ("", "x", other, studio.csrf[:-1], studio.csrf.upper(), studio.settings.key, "0" * 64, "undefined", "null"):
        request = base.having("X-Psigrad-CSRF", token)
        yield Attack("csrf", f"{_label(base)} with {token[:12]!r}", request.data, frozenset({"csrf"}))
    yield Attack("csrf", f"{_label(base)} without", base.having("X-Psigrad-CSRF").data, frozenset({"csrf"}))
    twice = base.having("X-Psigrad-CSRF", "x", studio.csrf)
    yield Attack("csrf", f"{_label(base)} twice", twice.data, frozenset({"header"}))
    in_query = replace(base.having("X-Psigrad-CSRF"), path=f"{base.path}?csrf={studio.csrf}")
    yield Attack("csrf", f"{_label(base)} in the query", in_query.data, frozenset({"csrf"}))


def _paths(studio: LiveStudio) -> Iterator[Attack]:
    tails = [
        "../../../etc/passwd", "..%2f..%2f..%2fetc/passwd", "%2e%2e/%2e%2e/etc/passwd", "%252e%252e/etc/passwd", "..\\..\\etc\\passwd",
        "..%5c..%5cetc%5cpasswd", "....//....//etc/passwd", "/etc/passwd", "base.css%00.js", "%00", "./base.css", "grid/../base.css",
        "base.css/", "..", "%c0%ae%c0%ae/etc/passwd", "..;/etc/passwd", "file:///etc/passwd", "base.css?/../../etc/passwd/..",
        "~root", "grid", "grid/", "grid/page.html", "../settings.py", "../__init__.py", "%2e%2e%2fsettings.py", "<script>", "%3Cscript%3E",
        "' OR '1'='1", "a" * 3000, "\x7f", "%0d%0aSet-Cookie:%20x=1", "__proto__", "constructor", "grid/main.js%20", "CON", "grid//main.js",
    ]  # fmt: skip
    for prefix in ("/static/", "/", "/api/grid/", "/grid/"):
        for tail in tails:
            if prefix + tail in ("/grid", "/static/base.css?/../../etc/passwd/.."):
                continue
            request = honest(studio, "GET", prefix + tail)
            yield Attack("path", f"GET {(prefix + tail)[:60]!r}", request.data, frozenset({"path", "missing", "http", "method"}))


def _keys(studio: LiveStudio) -> Iterator[Attack]:
    key = studio.settings.key
    used = studio.sessions.one_time_key()
    assert studio.sessions.admits(used)
    for query in (
        "", "?", "?key", "?key=", "?key=x", f"?key={key[:-1]}", f"?key={key}x", f"?key={key.swapcase()}", f"?key={used}", f"?KEY={key}",
        f"?key=x&key={key}", f"?key={key}&key={key}", f"?key[]={key}", "?key=null", "?key=' OR 1=1 --".replace(" ", "+"), "?key=%00",
        f"?key={key}%00", f"?key=%20{key}", "?key=" + "A" * 8000, f"?token={key}", f"?next=http://evil.example&key=x{key}",
    ):  # fmt: skip
        yield Attack("key", f"GET /enter{query[:30]}", honest(studio, "GET", f"/enter{query}").data, frozenset({"key"}))
    for method in CHANGING:
        request = honest(studio, method, f"/enter?key={key}")
        yield Attack("key", f"{method} /enter with the key", request.data, frozenset({"method"}))


def _bodies(studio: LiveStudio) -> Iterator[Attack]:
    most = studio.settings.body_bytes
    refused = frozenset({"invalid", "mistake", "type", "encoding", "size", "body", "request", "http", "header"})
    world, film = WORLD, FILM
    bodies = [
        b"", b"{", b"[]", b"null", b"1", b'"x"', b"\xff\xfe", b"\x00", b"[" * 100_000, b'{"world":' * 20_000, b"{}" * 10,
        b'{"world": NaN}', json.dumps({**film, "world": {**world, "gamma": float("nan")}}).encode(),
        json.dumps({**film, "world": {**world, "step_reward": float("inf")}}).encode(),
        json.dumps({**film, "world": {**world, "rows": 10**30}}).encode(), json.dumps({**film, "world": {**world, "rows": -8}}).encode(),
        json.dumps({**film, "world": {**world, "rows": 8.5}}).encode(), json.dumps({**film, "world": {**world, "rows": True}}).encode(),
        json.dumps({**film, "world": {**world, "rows": 10**5, "columns": 10**5}}).encode(),
        json.dumps({**film, "world": {**world, "prizes": [[0, 0, 1.0]] * 5000}}).encode(),
        json.dumps({**film, "world": {**world, "prizes": [[0, 0, "<img src=x onerror=alert(1)>"]]}}).encode(),
        json.dumps({**film, "world": {**world, "prizes": "' OR 1=1 --"}}).encode(),
        json.dumps({**film, "world": {**world, "prizes": [[10**9, 10**9, 1.0]]}}).encode(),
        json.dumps({**film, "algorithm": "<script>alert(1)</script>"}).encode(), json.dumps({**film, "algorithm": "__class__"}).encode(),
        json.dumps({**film, "algorithm": "../../etc/passwd"}).encode(), json.dumps({**film, "algorithm": "os.system"}).encode(),
        json.dumps({**film, "algorithm": "'; DROP TABLE votes; --"}).encode(), json.dumps({**film, "algorithm": "x" * 10_000}).encode(),
        json.dumps({**film, "algorithm": None}).encode(), json.dumps({**film, "algorithm": ["value_iteration"]}).encode(),
        json.dumps({**film, "count": 10**9}).encode(), json.dumps({**film, "count": -1}).encode(), json.dumps({**film, "first": 1e308}).encode(),
        json.dumps({**film, "first": 10**9}).encode(), json.dumps({**film, "__proto__": {"x": 1}}).encode(),
        json.dumps({**film, "value": [1e400] * 64}).encode(), json.dumps({**film, "value": [0.0] * 100_000}).encode(),
        json.dumps({**film, "q": [[0.0] * 4] * 100_000}).encode()[: most - 1], json.dumps({**film, "options": {"episodes": 10**9}}).encode(),
        json.dumps({**film, "options": {"evaluated": "__import__('os')"}}).encode(), json.dumps({**film, "options": []}).encode(),
        b'{"world":' + b"9" * 5000 + b"}",
    ]  # fmt: skip
    for path in ("/api/grid/frames", "/api/grid/backup"):
        base = honest(studio, "POST", path)
        for number, body in enumerate(bodies):
            request = replace(base.having("Content-Length", str(len(body))), body=body)
            yield Attack("body", f"POST {path} body {number}: {body[:40]!r}", request.data, refused)
        good = json.dumps(film).encode()
        sized = replace(base.having("Content-Length", str(len(good))), body=good)
        for kind in (
            "text/plain",
            "application/x-www-form-urlencoded",
            "multipart/form-data; boundary=x",
            "",
            "text/json",
            "application/json5",
        ):
            yield Attack("body", f"POST {path} as {kind!r}", sized.having("Content-Type", kind).data, frozenset({"type"}))
        yield Attack("body", f"POST {path} without a type", sized.having("Content-Type").data, frozenset({"type"}))
        for coding in ("gzip", "br", "deflate", "zstd", "gzip, identity"):
            yield Attack(
                "body", f"POST {path} in {coding}", sized.having("Content-Encoding", coding).data, frozenset({"encoding"})
            )
        for length in (most + 1, 10**8, 10**12):
            yield Attack(
                "body", f"POST {path} of {length} bytes", sized.having("Content-Length", str(length)).data, frozenset({"size"})
            )
        chunk = b"%x\r\n" % 65536 + b" " * 65536 + b"\r\n"
        flood = replace(base.having("Content-Length").having("Transfer-Encoding", "chunked"), body=chunk * 8 + b"0\r\n\r\n")
        yield Attack("body", f"POST {path} in endless chunks", flood.data, frozenset({"size"}))
    yield from _label_bodies(studio)
    with_body = replace(honest(studio, "GET", "/grid").having("Content-Length", "2"), body=b"{}")
    yield Attack("body", "GET with a body", with_body.data, frozenset({"body"}))


def _label_bodies(studio: LiveStudio) -> Iterator[Attack]:
    """What no form of the labels takes."""
    refused = frozenset({"invalid", "size", "body", "http", "missing", "refusal", "request"})
    key, most = "a key for tests", studio.settings.body_bytes
    bodies = {
        "/api/label/vote": [
            {"assignment": "1", "key": key, "choice": "left"}, {"assignment": True, "key": key, "choice": "left"}, {"assignment": 2**80, "key": key},
            {"assignment": -1, "key": key, "choice": "left"}, {"assignment": 1, "key": key, "choice": ["left"]}, {"assignment": 1, "choice": "left"},
            {"assignment": 1, "key": "x" * 300, "choice": "left"}, {"assignment": 1, "key": key, "ranks": [0] * 500}, {"assignment": 1, "key": key, "ranks": ["1"]},
            {"assignment": 1, "key": key, "rating": 1.5}, {"assignment": 1, "key": key, "reason": "x" * 20_000}, {"assignment": 1, "key": key, "person": 1},
            {"assignment": 1, "key": key, "client_ms": -5}, {"assignment": {"$gt": 0}, "key": key}, {"assignment": "1 OR 1=1", "key": key, "choice": "left"},
            {"assignment": 10**15, "key": key, "choice": "left"}, {"assignment": 10**15, "key": "short", "choice": "left"},
        ],
        "/api/label/next": [{"project": "1"}, {"project": 0}, {"project": None}, {"project": [1]}, {"project": 10**15}, {"project": 1, "role": "admin"}],
        "/api/label/create": [
            {"name": ""}, {"name": "x" * 500}, {"name": "a\x00b"}, {"name": "x", "kind": "essay"}, {"name": "x", "overlap": 0}, {"name": "x", "lease_s": 1},
            {"name": "x", "seed": 1}, {"name": "x", "ties": "yes"}, {"name": "\ud800"}, {"name": "x", "strengths": 99}, {"name": "x", "overlap": 10**9},
        ],
        "/api/label/role": [{"project": 10**15, "user": 1, "role": "admin"}, {"project": 1, "user": 1}, {"project": 1, "user": "1", "role": "admin"}],
        "/api/label/invite": [{"role": "owner"}, {"role": "labeller"}, {"project": 10**15, "role": "admin"}, {"role": "admin", "days": 10**6}],
        "/api/join/accept": [{"token": "x", "name": "n", "password": "p" * 5000}, {"token": "x" * 500, "name": "n", "password": "p"}, {"name": "n"}, {"token": None}],
        "/api/join/login": [{"name": "n"}, {"name": ["n"], "password": "p"}, {"name": "n", "password": {"$ne": ""}}, {"name": "n" * 5000, "password": "p"}],
    }  # fmt: skip
    for path, wrong in bodies.items():
        base = honest(studio, "POST", path)
        texts = [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"[" * 100_000, b"{" * 50, b"[]" + b" " * most]
        for body in [*texts, *(json.dumps(content).encode() for content in wrong)]:
            request = replace(base.having("Content-Length", str(len(body))), body=body)
            yield Attack("body", f"POST {path}: {body[:60]!r}", request.data, refused)


def _wires(studio: LiveStudio) -> Iterator[Attack]:
    """What is no HTTP, or two requests in one."""
    host = f"Host: {studio.host}\r\n"
    close = frozenset({"http", "path", "missing", "header", "host", "size", "type", "method", "origin", "session"})
    lines = [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64) + b"\r\n\r\n", b"GET /grid\r\n\r\n", b"GET\r\n\r\n", b"\r\n" * 50 + b"x\r\n\r\n",
        b"GET /grid HTTP/9.9\r\n\r\n", f"GET http://evil.example/grid HTTP/1.1\r\n{host}\r\n".encode(),
        f"GET http://{studio.host}/grid HTTP/1.1\r\n{host}\r\n".encode(), f"GET * HTTP/1.1\r\n{host}\r\n".encode(),
        f"GET grid HTTP/1.1\r\n{host}\r\n".encode(), f"GET /grid HTTP/1.1\r\n{host}X : y\r\n\r\n".encode(),
        f"GET /grid HTTP/1.1\r\n{host}X: a\x00b\r\n\r\n".encode(), f"GET /grid HTTP/1.1\r\n{host} folded: y\r\n\r\n".encode(),
        f"GET /grid HTTP/1.1\r\n{host}".encode() + b"X: " + b"a" * 100_000 + b"\r\n\r\n",
        f"GET /grid HTTP/1.1\r\n{host}".encode() + b"X: y\r\n" * 5_000 + b"\r\n",
        f"GET /{'a' * 100_000} HTTP/1.1\r\n{host}\r\n".encode(),
        f"POST /api/grid/frames HTTP/1.1\r\n{host}Content-Length: -1\r\n\r\n".encode(),
        f"POST /api/grid/frames HTTP/1.1\r\n{host}Content-Length: 5\r\nContent-Length: 6\r\n\r\n12345".encode(),
        f"POST /api/grid/frames HTTP/1.1\r\n{host}Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /grid".encode(),
        f"POST /api/grid/frames HTTP/1.1\r\n{host}Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n".encode(),
        f"POST /api/grid/frames HTTP/1.1\r\n{host}Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n".encode(),
        f"GET /grid HTTP/1.1\r\n{host}Cookie: {studio.cookie}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nOrigin: http://evil.example\r\n\r\n".encode(),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ]  # fmt: skip
    for number, line in enumerate(lines):
        yield Attack("wire", f"wire {number}: {line[:40]!r}", line, close)
