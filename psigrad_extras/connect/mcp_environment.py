"""Environments that are MCP servers: `--environment "mcp:python game.py"`, or mcp:http://… of a running one.

The server's tools are the policy's actions, offered and called like the tools of a run. The field `_meta` of an answer, which the
policy does not read, can have the number `reward` and `done`. The tool `reset`, which is not offered to the policy, starts an
episode and may return its name (`episode`). This name is passed to every tool with a parameter `episode`, which the policy does
not see. So one server without sessions can play any number of episodes at once.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from psigrad.language.episodes.environments import Observation, Step
from psigrad.language.episodes.tools import CallForm, ToolBox, ToolBoxes, resolve
from psigrad_extras.connect.mcp_tools import MCPTool
from psigrad_extras.connect.seeded_episodes import RESET, SEED, begin, rows_of

EPISODE = "episode"


@dataclass(frozen=True)
class ServerEpisodes(ToolBoxes):
    """The factory of a server's episodes: the tools that it offers, and the tool that starts an episode."""

    opens: MCPTool | None = None

    def __call__(self) -> ServerEpisode:
        """Return a new episode."""
        return ServerEpisode(self)

    def rows(self, count: int, seed: int) -> list[Mapping[str, Any]]:
        """Return a row for each of `count` seeds. Raises `UserError` if the server's `reset` takes no seed."""
        takes = self.opens is not None and SEED in self.opens.parameters
        named = f"{self.tools[0].server!r}" if self.tools and isinstance(self.tools[0], MCPTool) else ""
        return rows_of(count, seed, "mcp", named, self().opened if takes else lambda **_: "")


def episodes_of(server: str, variables: Sequence[str] = (), form: CallForm | None = None) -> ServerEpisodes:
    """Return the environment of a server, which is a command or an address.

    `variables` are names of extra environment variables for the server, and `form` is the syntax of tool calls. Raises
    `UserError` if there is no server.
    """
    tools = {tool.name: tool for tool in resolve([server], variables) if isinstance(tool, MCPTool)}
    opens = tools.pop(RESET, None)
    return ServerEpisodes([_without_episode(tool) for tool in tools.values()], form or CallForm(), opens)


def _without_episode(tool: MCPTool) -> MCPTool:
    """Return the tool as it is offered to the policy: without the parameter `episode`, which psigrad sets."""
    if EPISODE not in tool.parameters:
        return tool
    schema = copy.deepcopy(dict(tool.schema))
    offered = schema["function"]["parameters"]
    del offered["properties"][EPISODE]
    offered["required"] = [name for name in offered.get("required", ()) if name != EPISODE]
    return replace(tool, schema=schema, beside=(EPISODE,))


class ServerEpisode(ToolBox):
    """One episode: a `ToolBox` whose rewards come with the server's answers."""

    def __init__(self, made: ServerEpisodes) -> None:
        super().__init__(made.tools, made.form)
        self._opens, self._episode = made.opens, None
        self._worth, self._over = 0.0, False

    def reset(self, row: Mapping[str, Any]) -> Observation | None:  # type: ignore[override]
        """Start the episode. Return the server's first observation, or None if it is the row's prompt."""
        return None if self._opens is None else begin(row, self.opened)

    def opened(self, **arguments: Any) -> str:
        """Call the server's `reset` with these arguments and return its first observation. Raises `ValueError` if it fails."""
        assert self._opens is not None
        if unknown := sorted(set(arguments) - set(self._opens.parameters)):
            known = f"only {', '.join(self._opens.parameters)}" if self._opens.parameters else "none"
            raise ValueError(f"the row gives the server's tool `reset` the arguments {', '.join(unknown)}; expected {known}")
        text, beside = self._opens.ask(arguments)
        if text.startswith("error: "):
            raise ValueError(f"the server's tool `reset` failed: {text.removeprefix('error: ')}")
        self._episode = beside.get(EPISODE)
        return text

    def step(self, completion: str) -> Step:
        """Run the completion's calls until the server reports the end. A completion without a call ends the episode."""
        self._worth = 0.0
        said = super().step(completion)
        return said._replace(reward=self._worth, done=said.done or self._over)

    def _run_tool(self, name: str, arguments: dict[str, Any]) -> str:
        tool = self.tools[name]
        if self._over:
            return "error: the episode is over"
        assert isinstance(tool, MCPTool)
        text, beside = tool.ask({**arguments, **dict.fromkeys(tool.beside, self._episode)})
        self._worth += float(beside.get("reward") or 0.0)
        self._over = bool(beside.get("done"))
        return text


def adapt_named(server: str) -> ServerEpisodes:
    """Return the environment of `mcp:SERVER`."""
    return episodes_of(f"mcp:{server}")
