"""Starting the gateway: in a thread of this process, or as the process's only work."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from psigrad.errors import UserError
from psigrad_serve.gateway import gateway, guarded
from psigrad_serve.quiet_server import QuietServer
from psigrad_serve.served import Served
from psigrad_serve.threads import await_end
from psigrad_serve.tinker_api import TinkerServer

LOOPBACK = "127.0.0.1"
FIRST_PORT, PORTS = 8500, 20
GRACE = 2
"""The seconds that requests have to end at a shutdown. They are then cancelled, and have the same time again to clean up."""
VARIABLE = "PSIGRAD_SERVE_TOKEN"
"""The environment variable with the token. It is safer than --token, since all users of a machine see its command lines."""


@dataclass(frozen=True)
class Running:
    """A running gateway. `url` is its base URL without OpenAI's /v1, and `token` the API key."""

    url: str
    token: str


def listen(host: str = LOOPBACK, port: int = 0) -> socket.socket:
    """Open a socket on `port`; 0: on the first free port from 8500. Raises `UserError` if the port cannot be used."""
    if not 0 <= port <= 65535:
        raise UserError(f"The port is {port}; expected 1 to 65535, or no --port for the first free port from {FIRST_PORT} on.")
    why = ""
    for candidate in [port] if port else [*range(FIRST_PORT, FIRST_PORT + PORTS), 0]:
        try:
            found = socket.create_server((host, candidate), backlog=1024)
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return found
        except OSError as error:
            why = error.strerror or str(error)
    raise UserError(f"{host}:{port} cannot be used ({why}); give another --port, or omit it for a free one.")


def serve(served: Served | TinkerServer, listening: socket.socket, token: str, say: Callable[[str], None]) -> None:
    """Serve until Ctrl-C. Without a `token`, create one and print it."""
    known = token or os.environ.get(VARIABLE, "")
    tinker = isinstance(served, TinkerServer)
    key = known or ("tml-" if tinker else "") + secrets.token_urlsafe(24)  # Tinker's client rejects other keys
    host, port = listening.getsockname()[:2]

    def greet() -> None:
        names = (served.name,) if isinstance(served, TinkerServer) else served.names
        say(f"psigrad serve  http://{host}:{port}{'' if tinker else '/v1'}  {', '.join(names)}")
        say(f"The token is the value of {'--token' if token else VARIABLE}." if known else f"The token is {key}; keep it secret.")
        say("Ctrl-C stops the server.")

    with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises it after a clean shutdown
        _server(served, key, greet).run(sockets=[listening])


@contextlib.contextmanager
def running(served: Served | TinkerServer, token: str | None = None) -> Iterator[Running]:
    """Run a gateway in a thread of this process, on a free port of this machine. The caller closes the engine."""
    token = secrets.token_urlsafe(24) if token is None else token
    listening, ready = socket.create_server((LOOPBACK, 0), backlog=1024), threading.Event()
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    server = _server(served, token, ready.set)
    thread = threading.Thread(target=_run, args=(server, listening), name="gateway", daemon=True)
    thread.start()
    try:
        while not ready.wait(0.1):
            if not thread.is_alive():
                raise RuntimeError("The gateway did not start.")
        yield Running(f"http://{LOOPBACK}:{listening.getsockname()[1]}", token)
    finally:
        server.should_exit = True
        try:
            await_end(thread)
        finally:
            listening.close()


def _run(server: QuietServer, listening: socket.socket) -> None:
    """Run the server until it ends.

    `asyncio.run` is not used: it would wait forever for a task that ignores its cancellation, and for the default executor.
    """
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(server.serve([listening]))
    finally:
        left = loop.run_until_complete(_cancelled())
        loop.close()
    if left:
        raise RuntimeError(f"The gateway ended, but could not cancel {len(left)} requests, such as {left.pop()}.")


async def _cancelled() -> set[asyncio.Task[object]]:
    """Cancel all other tasks of this event loop, and close its generators.

    Return the tasks that do not end in `GRACE` seconds.
    """
    loop, own = asyncio.get_running_loop(), {asyncio.current_task()}
    until = loop.time() + GRACE
    while (left := asyncio.all_tasks() - own) and loop.time() < until:
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=0.1)
    await asyncio.wait({closing := asyncio.ensure_future(loop.shutdown_asyncgens())}, timeout=GRACE)
    return left if closing.done() else {*left, closing}


def _server(served: Served | TinkerServer, token: str, ready: Callable[[], None]) -> QuietServer:
    if isinstance(served, TinkerServer):
        app = guarded(token)
        app.include_router(served.routes())
    else:
        app = gateway(served, token)
    return QuietServer(app, ready, timeout_keep_alive=60, timeout_graceful_shutdown=GRACE)
