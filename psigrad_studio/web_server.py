"""uvicorn, with the limits of a server that anyone on the machine can reach."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from psigrad_studio.security import HEADERS, error_body
from psigrad_studio.studio_settings import StudioSettings

HEADER_BYTES = 16 * 1024
CONNECTIONS = 256


class Server(uvicorn.Server):
    """A server that calls `ready` when it answers, and sets `ending` when it stops, so that streams end."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None], ending: threading.Event) -> None:
        super().__init__(config)
        self._ready, self._ending = ready, ending

    async def startup(self, *arguments: Any, **named: Any) -> None:
        """Start listening, then call `ready`."""
        await super().startup(*arguments, **named)
        if self.started:
            self._ready()

    async def shutdown(self, *arguments: Any, **named: Any) -> None:
        """Set `ending`, then wait for open requests."""
        self._ending.set()
        await super().shutdown(*arguments, **named)


def server(app: ASGIApp, settings: StudioSettings, ready: Callable[[], None] = lambda: None) -> Server:
    """A server for the application, without a socket yet."""
    config = uvicorn.Config(
        app,
        http=protocol(settings.header_seconds),
        ws="none",
        lifespan="off",
        log_level="error",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=CONNECTIONS,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=2,
        h11_max_incomplete_event_size=HEADER_BYTES,
    )
    state = getattr(app, "state", None)
    return Server(config, ready, getattr(state, "ending", None) or threading.Event())


def protocol(header_seconds: float) -> type[H11Protocol]:
    """HTTP/1.1 that closes connections whose headers are too slow (slowloris)."""

    class Impatient(H11Protocol):
        _waiting: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_watching()
            super().connection_lost(exc)

        def send_400_response(self, msg: str) -> None:
            """Malformed HTTP, answered as everything else is."""
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
