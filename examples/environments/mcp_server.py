"""An MCP server as an environment: in each of three turns the policy reads a number n and must say n + 1. python mcp_server.py"""

from __future__ import annotations

import random
from itertools import count
from typing import Any

from mcp.server import MCPServer
from mcp.types import CallToolResult, TextContent

server = MCPServer("successor", log_level="ERROR")
games: dict[str, list[int]] = {}
names = count()


def answer(text: str, **beside: Any) -> CallToolResult:
    """Return `text`, which the policy reads, and metadata, which only psigrad reads."""
    return CallToolResult(content=[TextContent(type="text", text=text)], _meta=beside)


@server.tool()
def reset(seed: int) -> CallToolResult:
    """Start an episode. Its numbers are drawn from the seed."""
    episode = str(next(names))
    games[episode] = random.Random(seed).choices(range(1, 6), k=3)
    return answer(str(games[episode][0]), episode=episode)


@server.tool()
def say(number: int, episode: str) -> CallToolResult:
    """Say a number.

    Args:
        number: the number after the one that you read last.
        episode: filled in by psigrad.
    """
    heard = games[episode].pop(0)
    left = games[episode]
    return answer(str(left[0]) if left else "", reward=(number == heard + 1) / 3, done=not left)


if __name__ == "__main__":
    server.run()
