"""An MCP server: `python shop_server.py` on its standard input and output, `python shop_server.py PORT` by HTTP."""

from __future__ import annotations

import os
import signal
import sys
import time

from mcp.server import MCPServer

server = MCPServer("shop", log_level="ERROR")


@server.tool()
def price(item: str, count: int = 1) -> str:
    """What some of an item cost.

    Args:
        item: its name.
        count: how many.
    """
    if item == "air":
        raise ValueError("air is not for sale")
    return f"{2 * count} euros for {item}"


@server.tool()
def process() -> int:
    """The number of this process, and one that leaves only when it is killed."""
    return os.getpid()


@server.tool()
def variable(name: str) -> str:
    """An environment variable."""
    return os.environ.get(name, "unset")


@server.tool()
def die() -> str:
    """End this process in the middle of a call."""
    os._exit(3)


if __name__ == "__main__":
    if "stubborn" in sys.argv:  # neither the end of its input nor a polite signal ends it
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.argv[-1].isdecimal():
        server.run("streamable-http", port=int(sys.argv[-1]))
    else:
        server.run()
    time.sleep(600 if "stubborn" in sys.argv else 0)
