"""uvicorn with limits on connections, since anyone on the machine can reach the server."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import resource
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import h11
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from psigrad_serve.quiet_server import QuietServer
from psigrad_studio.security import ADMITTED, HEADERS, error_body
from psigrad_studio.studio_settings import StudioSettings

HEADER_BYTES = 16 * 1024
CONNECTIONS, EACH = 200, 64
"""The maximum number of open connections, in total and per person."""
GRACE, LOOKS = 0.25, 3
"""The least age in seconds, and number of checks (`thin_out`), before a connection may be closed.

A busy server reads late, but between two checks it reads all data that has arrived.
"""
FILES, OTHER_FILES = 8192, 150
"""The number of open files that the process requests as its limit, and how many of them are not connections."""


class Server(QuietServer):
    """A server that sets `ending` when it stops, so that streams end."""

    def __init__(self, app: ASGIApp, ready: Callable[[], None], ending: threading.Event, **settings: Any) -> None:
        super().__init__(app, ready, **settings)
        self._ending = ending

    async def shutdown(self, *arguments: Any, **named: Any) -> None:
        """Set `ending`, then wait for open requests. Errors of requests that are cut off at the end are not logged."""
        self._ending.set()
        logging.getLogger("uvicorn.error").addFilter(_no_cut)  # stays: they are logged after this has returned
        await super().shutdown(*arguments, **named)


def _no_cut(record: logging.LogRecord) -> bool:
    """Return False for a log line of uvicorn about a request that was cut off at shutdown. This is a logging filter."""
    cut = bool(record.exc_info and record.exc_info[0] is asyncio.CancelledError)
    return not (cut or "timeout graceful shutdown exceeded" in record.getMessage())


class Connections:
    """The open connections by person. Above `most`, or `each` of one person, the oldest of the person with the most is closed.

    All strangers, whose requests have no session, count as one person, so they cannot use up the connections of others. A new
    connection counts as a stranger's until the guard has `admitted` a request on it. For that, it has `grace` seconds and `LOOKS`
    checks, during which it is closed only if the process has no files left. Connections without a request are closed first.
    """

    def __init__(self, most: int = CONNECTIONS, each: int = EACH, grace: float = GRACE) -> None:
        self.most, self.each, self.grace = most, each, grace
        self.hard = _allowed_files() - OTHER_FILES
        self.held: dict[object, dict[H11Protocol, tuple[float, int]]] = {}
        """Person -> connection -> (time in seconds, number of the check) when it became that person's; the oldest first."""
        self.look = 0
        self.whose: dict[H11Protocol, object] = {}
        self._planned = False

    def opened(self, connection: H11Protocol) -> None:
        """Add a new connection, which counts as a stranger's."""
        self._put(connection, None)

    def admitted(self, connection: H11Protocol, who: object) -> None:
        """Assign the connection to `who`, the sender of a request on it."""
        if connection in self.whose and self.whose[connection] != who:
            self.lost(connection)
            self._put(connection, who)

    def lost(self, connection: H11Protocol) -> None:
        """Remove a closed connection."""
        if connection in self.whose:
            who = self.whose.pop(connection)
            del self.held[who][connection]
            if not self.held[who]:
                del self.held[who]

    def _put(self, connection: H11Protocol, who: object) -> None:
        self.whose[connection] = who
        self.held.setdefault(who, {})[connection] = (asyncio.get_running_loop().time(), self.look)
        while len(self.whose) > self.hard and self._cut(self._largest(), (math.inf, math.inf)):
            pass
        if len(self.held[who]) > self.each or len(self.whose) > self.most:
            self._plan()

    def _plan(self) -> None:
        if not self._planned:
            self._planned = True
            asyncio.get_running_loop().call_later(self.grace / LOOKS, self.thin_out)

    def thin_out(self) -> None:
        """Close connections until the limits are met."""
        self._planned = False
        self.look += 1
        latest = (asyncio.get_running_loop().time() - self.grace, self.look - LOOKS)
        for group in list(self.held.values()):
            while len(group) > self.each and self._cut(group, latest):
                pass
        while len(self.whose) > self.most and self._cut(self._largest(), latest):
            pass
        if len(self.whose) > self.most or any(len(group) > self.each for group in self.held.values()):
            self._plan()  # check again later, for connections that are still too young

    def _largest(self) -> dict[H11Protocol, tuple[float, int]]:
        return max(self.held.items(), key=lambda entry: (len(entry[1]), entry[0] is None))[1]

    def _cut(self, group: dict[H11Protocol, tuple[float, int]], latest: tuple[float, float]) -> bool:
        """Close one of a person's connections in `group` that is not newer than `latest`. Return True if there was one."""
        oldest = None
        for connection, (since, look) in group.items():
            if since > latest[0] or look > latest[1]:
                break
            oldest = oldest or connection
            if connection.conn.their_state is h11.IDLE:
                oldest = connection
                break
        if oldest is not None:
            self.lost(oldest)
            oldest.transport.abort()
        return oldest is not None


def _allowed_files() -> int:
    """Raise the limit of open files of this process, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return FILES if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def server(app: ASGIApp, settings: StudioSettings, ready: Callable[[], None] = lambda: None) -> Server:
    """Return a server for the application. It does not listen yet."""
    state = getattr(app, "state", None)
    return Server(
        app,
        ready,
        getattr(state, "ending", None) or threading.Event(),
        http=protocol(settings.header_seconds),
        timeout_keep_alive=5,
        timeout_graceful_shutdown=2,
        h11_max_incomplete_event_size=HEADER_BYTES,
    )


def protocol(header_seconds: float) -> type[H11Protocol]:
    """Return an HTTP/1.1 protocol class that closes connections with slow headers (slowloris), and some if there are too many."""
    connections = Connections()

    class Impatient(H11Protocol):
        _waiting: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.app_state = {**self.app_state, ADMITTED: partial(connections.admitted, self)}
            connections.opened(self)
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            connections.lost(self)
            self._stop_watching()
            super().connection_lost(exc)

        def send_400_response(self, msg: str) -> None:
            """Answer malformed HTTP with the JSON body that all errors have."""
            body = json.dumps(error_body("http", "This is not well-formed HTTP.")).encode()
            fields = HEADERS | {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
            headers = [(name.encode(), value.encode()) for name, value in fields.items()]
            first = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
            for event in (first, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
            self.transport.close()

        def _watch(self) -> None:
            if self.conn.their_state is not h11.IDLE:
                self._stop_watching()
            elif self._waiting is None:
                self._waiting = self.loop.call_later(header_seconds, self._give_up)

        def _stop_watching(self) -> None:
            if self._waiting is not None:
                self._waiting.cancel()
                self._waiting = None

        def _give_up(self) -> None:
            self._waiting = None
            if self.conn.their_state is h11.IDLE:
                self.transport.close()

    return Impatient
