"""The code that runs an agent (a Python function or any program) in a worker process, for one session on one row."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import shlex
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from shutil import which
from typing import IO, Any

from psigrad.errors import UserError
from psigrad.processes.workers.child import reason_for
from psigrad.processes.workers.shipping import Packed, unpack
from psigrad_serve.agents.tunnel import through

# The parameter names that an agent's function may have.
GIVEN = ("row", "client", "base_url", "api_key")
# The bytes at the end of a program's output that are kept, since the reward is in the last line.
_TAIL = 1 << 16
# The characters of the output that a reason quotes.
_SHOWN = 300


@dataclass(frozen=True)
class Place:
    """The data that a session starts with: its row, and the address and key with which it queries the policy."""

    row: Mapping[str, Any]
    base_url: str
    """The URL up to /v1, for clients of OpenAI's API; Anthropic's clients add that themselves."""
    key: str
    tunnel: str = ""
    """The path of the server's Unix socket, for agents without a network; empty for none."""


@dataclass(frozen=True)
class AgentCommand:
    """An agent that is a program. It reads the row as JSON from its standard input, and prints its reward as the last line."""

    line: str

    def __post_init__(self) -> None:
        if not self.arguments:
            raise UserError("agent_command is empty; give the command line of a program, such as 'python my_agent.py'.")

    @property
    def arguments(self) -> list[str]:
        """The words of the command line, split as in a shell."""
        try:
            return shlex.split(self.line)
        except ValueError as error:
            raise UserError(f"agent_command {self.line!r} has an open quotation ({error}); close it.") from error

    def __call__(self, row: Mapping[str, Any]) -> float | None:
        """Run the program and return its reward. Raises `RuntimeError` if it fails, or if its last line is not a reward."""
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen(self.arguments, **pipes)  # type: ignore[call-overload]
        said, complained = _Tail(process.stdout), _Tail(process.stderr)
        try:
            process.stdin.write(json.dumps(row).encode() + b"\n")
            process.stdin.close()
        except BrokenPipeError:  # the program does not read the row
            pass
        code = process.wait()
        last = (said.lines() or [""])[-1]
        if code:
            raise RuntimeError(f"the program ended with status {code}: {(complained.lines() or [last])[-1][:_SHOWN]}")
        if not last or last.lower() in ("none", "null"):
            return None
        try:
            return float(last)
        except ValueError:
            raise RuntimeError(f"the program's last line is {last[:_SHOWN]!r}; expected a number (the reward) or none") from None


class _Tail:
    """A reader of a program's output that keeps only its end, so that memory is bounded."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._kept = b""
        self._thread = threading.Thread(target=self._read, args=(stream,), daemon=True)
        self._thread.start()

    def _read(self, stream: IO[bytes]) -> None:
        while part := os.read(stream.fileno(), _TAIL):
            self._kept = (self._kept + part)[-_TAIL:]

    def lines(self) -> list[str]:
        """Return the last lines that are not empty, even if a child of the program still holds its output open."""
        self._thread.join(1.0)
        return [line.strip() for line in self._kept.decode(errors="replace").splitlines() if line.strip()]


def check_agent(agent: Callable[..., Any]) -> None:
    """Raise an error if an agent's function has a required parameter that psigrad cannot pass."""
    if isinstance(agent, AgentCommand):
        if which(program := agent.arguments[0]) is None:
            raise UserError(f"agent_command: the program {program!r} was not found; give its path, or add its folder to PATH.")
        return
    if "client" in inspect.signature(agent).parameters and find_spec("openai") is None:
        raise UserError("The agent takes a client, which needs the package openai. Run `pip install openai`.")
    for name, parameter in inspect.signature(agent).parameters.items():
        optional = parameter.default is not parameter.empty or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if not optional and (name not in GIVEN or parameter.kind is parameter.POSITIONAL_ONLY):
            shown = getattr(agent, "__name__", "the agent")
            raise UserError(f"The agent {shown} has the parameter {name!r}; expected one of {', '.join(GIVEN)}.")


def service(payload: Packed) -> Callable[[Any], Iterator[Any]]:
    """Return the function that answers a worker's requests, for a packed agent. A `Place` gets {"reward"} or {"fault"}."""
    agent = unpack(payload)

    def answer(place: Place) -> Iterator[Any]:
        try:
            yield {"reward": _number(_play(agent, place))}
        except (Exception, SystemExit) as error:
            yield {"fault": reason_for("the agent", error) if not isinstance(agent, AgentCommand) else f"the agent: {error}"}

    return answer


def _play(agent: Callable[..., Any], place: Place) -> Any:
    if place.tunnel:
        path = place.base_url.partition("//")[2].partition("/")[2]
        place = replace(place, base_url=f"http://127.0.0.1:{_port_of(place.tunnel)}/{path}", tunnel="")
        for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):  # clients load them at once, and no HTTPS is used
            os.environ.pop(name, None)
    root = place.base_url.removesuffix("/v1")
    os.environ |= {"OPENAI_BASE_URL": place.base_url, "OPENAI_API_KEY": place.key}
    os.environ |= {"ANTHROPIC_BASE_URL": root, "ANTHROPIC_API_KEY": place.key}
    for name in ("no_proxy", "NO_PROXY"):  # a proxy can't reach this machine
        os.environ[name] = ",".join(dict.fromkeys(filter(None, (*os.environ.get(name, "").split(","), "127.0.0.1"))))
    if isinstance(agent, AgentCommand):
        return agent(place.row)
    wanted = inspect.signature(agent).parameters
    awaits = inspect.iscoroutinefunction(agent) or inspect.iscoroutinefunction(getattr(agent, "__call__", None))  # noqa: B004
    offered = {"row": dict(place.row), "base_url": place.base_url, "api_key": place.key}
    given = {name: value for name, value in offered.items() if name in wanted}
    if "client" in wanted:
        given["client"] = _client(awaits)
    made = agent(**given)
    return asyncio.run(_wait(made, given.get("client"))) if inspect.isawaitable(made) else made


@cache
def _port_of(path: str) -> int:
    """Return the local port that leads through the Unix socket at `path`. All sessions of this process share it."""
    return through(path)


async def _wait(made: Any, client: Any) -> Any:
    try:
        return await made
    finally:
        if client is not None:
            await client.close()


def _client(awaits: bool) -> Any:
    import openai

    return openai.AsyncOpenAI() if awaits else openai.OpenAI()


def _number(reward: Any) -> float | None:
    if reward is None:
        return None
    try:
        number = float(reward)
    except (TypeError, ValueError):
        raise TypeError(f"the agent returned {repr(reward)[:80]} as its reward; expected a number or None") from None
    if not math.isfinite(number):
        raise ValueError(f"the agent's reward is {number}; expected a finite number")
    return number


def decode(call: Any, content: Any) -> float | str | None:
    """Return a session's reward, or the reason why it has none. Raises `ValueError` for an invalid answer."""
    match content:
        case {"fault": str(reason)}:
            return reason
        case {"reward": float() | int() | None as reward}:
            return None if reward is None else float(reward)
    raise ValueError(f"the agent's process sent {content!r}; expected a reward or a fault")
