"""The tools of a Model Context Protocol server, which is started as a program or found at an address.

Each worker has its own connection. A server that is a program ends with the worker: its input ends, or it is killed together with
the worker.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shlex
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from psigrad import extras
from psigrad.errors import UserError, reason_of
from psigrad.language.episodes.tools import ServerLost, ServerTool
from psigrad.processes.workers.worker_pool import START_LIMIT

INVALID_PARAMETERS = -32602
"""JSON-RPC's code for a call that the server rejects."""


@dataclass(frozen=True)
class MCPTool(ServerTool):
    """A tool of a server. The server is a command, or an address that starts with http."""

    server: str
    name: str
    schema: Mapping[str, Any]
    beside: tuple[str, ...] = ()
    """Parameters of the tool that are not offered to the policy."""

    def connect(self) -> tuple[Any, Any]:
        """Return this process's connection to the server, and open it if there is none. See `ServerTool`."""
        if self.server not in _connections:
            stack = contextlib.ExitStack()
            _connections[self.server] = stack, *stack.enter_context(_connect(self.server, os.environ))
        return _connections[self.server][1:]

    def run(self, arguments: Mapping[str, Any]) -> str:
        """Call the tool and return the server's answer. See `ServerTool`."""
        return self.ask(arguments)[0]

    def ask(self, arguments: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        """Call the tool. Return (the server's answer, its `_meta`, which the model does not read). Raises `ServerLost`."""
        from mcp import MCPError

        try:
            portal, client = self.connect()
            result = portal.call(client.call_tool, self.name, dict(arguments))
        except Exception as error:
            if isinstance(error, MCPError) and error.error.code == INVALID_PARAMETERS:
                return f"error: {error}", {}
            if self.server in _connections:
                with contextlib.suppress(Exception):  # the connection is already broken
                    _connections.pop(self.server)[0].close()
            raise ServerLost(f"the MCP server {self.server!r} gave no answer ({reason_of(error)})") from error
        parts = [part.text if part.type == "text" else f"[{part.type}]" for part in result.content]
        text = "\n".join(parts) or ("" if result.structured_content is None else json.dumps(result.structured_content))
        return f"error: {text}" if result.is_error else text, result.meta or {}


_connections: dict[str, tuple[contextlib.ExitStack, Any, Any]] = {}


@contextlib.contextmanager
def _connect(server: str, variables: Mapping[str, str], seconds: float | None = None) -> Iterator[tuple[Any, Any]]:
    """Yield (an event loop that runs in a thread, a client of the server in it). Calls have this time limit.

    Raises `UserError` if there is no server.
    """
    with extras.needing("An MCP server's tools", "mcp"):
        from anyio.from_thread import start_blocking_portal
        from mcp import Client, StdioServerParameters
        from mcp.client.stdio import stdio_client

    with contextlib.ExitStack() as stack:
        said = stack.enter_context(tempfile.TemporaryFile("w+", errors="replace"))
        where: Any = server
        try:
            if not server.startswith(("http://", "https://")):
                command, *arguments = shlex.split(server)
                parameters = StdioServerParameters(command=command, args=arguments, env=dict(variables))
                where = stdio_client(parameters, errlog=said)
            portal = stack.enter_context(start_blocking_portal())
            client = stack.enter_context(portal.wrap_async_context_manager(Client(where, read_timeout_seconds=seconds)))
            yield portal, client
        except Exception as error:
            said.seek(0)
            last = (said.read()[-2000:].strip().splitlines() or [reason_of(error)])[-1]
            raise UserError(
                f"The MCP server {server!r} did not start ({last}); expected mcp:COMMAND, or mcp:http://… of a running server."
            ) from error


@functools.cache
def list_tools(server: str, variables: tuple[tuple[str, str], ...]) -> tuple[MCPTool, ...]:
    """Return the tools of a server with these environment variables. The result is cached in each process."""
    found: list[MCPTool] = []
    with _connect(server, dict(variables), START_LIMIT) as (portal, client):
        cursor = None
        while True:
            page = portal.call(functools.partial(client.list_tools, cursor=cursor))
            for tool in page.tools:
                function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
                found.append(MCPTool(server, tool.name, {"type": "function", "function": function}))
            if not (cursor := page.next_cursor):
                return tuple(found)
