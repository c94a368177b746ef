"""Environments behind OpenEnv servers: `--environment openenv:http://127.0.0.1:8000`.

A session of the server is an episode. The policy's turn becomes an action, and the server's answer becomes text.

Source: https://github.com/meta-pytorch/OpenEnv.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import threading
import urllib.request
from collections.abc import Callable, Coroutine, Mapping
from http.client import HTTPException
from typing import Any, ClassVar, TypeVar

from psigrad import extras
from psigrad.errors import UserError, reason_of
from psigrad.language.episodes.environments import Observation
from psigrad_extras.connect.seeded_episodes import begin, rows_of

T = TypeVar("T")
# Fields of every observation that the policy does not see.
_OWN = ("done", "reward", "metadata")
Act = Callable[[str], Mapping[str, Any]]
Show = Callable[[Mapping[str, Any]], str]


def adapt(url: str, action: Act | None = None, observation: Show | None = None) -> type:
    """Return the environment of the server at `url`, as a class for `--environment`.

    `action` converts the policy's turn into an action. If it raises `ValueError`, the policy gets the error. By default, an
    action with one field gets the turn as text or as a number, and one with several fields gets the turn as a JSON object.
    `observation` converts the server's observation into text. By default, that is its only text field, or all fields as JSON.
    """
    own: dict[str, Any] = {"act": action, "show": observation}
    given = {name: staticmethod(function) for name, function in own.items() if function is not None}
    return type("OpenEnvEpisode", (OpenEnvEpisode,), {"url": url.rstrip("/"), **given})


def adapt_named(url: str) -> type:
    """Return the environment of `openenv:URL`."""
    return adapt(url)


class OpenEnvEpisode:
    """One episode on an OpenEnv server. `adapt` returns a subclass with the server's address."""

    url: ClassVar[str] = ""
    act: ClassVar[Any] = None
    show: ClassVar[Any] = None
    _client: Any = None

    def reset(self, row: Mapping[str, Any]) -> Observation | None:
        """Start an episode with the row's seed and arguments. Return its first observation, or None if it is the row's prompt."""
        return begin(row, self._opened)

    def step(self, completion: str) -> tuple[Observation, float, bool]:
        """Return the server's answer to the completion."""
        try:
            action = type(self).act(completion) if type(self).act else _action(_schema(self.url)["action"], completion)
        except ValueError as error:
            return f"error: {error}", 0.0, False
        found = _run(self._client.step(dict(action)))
        if found.done:
            self._close()
        return self._say(found), float(found.reward or 0.0), bool(found.done)

    @classmethod
    def rows(cls, count: int, seed: int) -> list[Mapping[str, Any]]:
        """Return a row for each of `count` seeds, with the server's first observation as its prompt."""

        def opened(**arguments: Any) -> str:
            episode = cls()
            opening = episode._opened(**arguments)
            episode._close()
            return opening

        return rows_of(count, seed, "openenv", f"at {cls.url}", opened)

    def _opened(self, **arguments: Any) -> str:
        return self._say(self._open(**arguments))

    def _open(self, **arguments: Any) -> Any:
        client = _client_of(self.url)
        try:
            found = _run(client.reset(**arguments))
        except Exception as error:
            _run(client.close())
            full = "; all its sessions are in use, so raise max_concurrent_envs" if "CAPACITY" in str(error) else "; see its log"
            raise UserError(f"The OpenEnv server at {self.url} does not start an episode ({reason_of(error)}){full}.") from error
        self._client = client
        return found

    def _say(self, found: Any) -> str:
        return type(self).show(found.observation) if type(self).show else _text(found.observation)

    def _close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(Exception):
                _run(client.close())

    def __del__(self) -> None:
        self._close()


def _text(observation: Mapping[str, Any]) -> str:
    """Return the observation as text, without the fields that the policy does not see."""
    told = {name: value for name, value in observation.items() if name not in _OWN and value is not None}
    words = [value for value in told.values() if isinstance(value, str)]
    return words[0] if len(words) == len(told) == 1 else json.dumps(told) if told else ""


def _action(schema: Mapping[str, Any], turn: str) -> Mapping[str, Any]:
    """Return the policy's turn as an action of this schema. Raises `ValueError` if it is not an action."""
    fields = {name: field for name, field in schema.get("properties", {}).items() if name != "metadata"}
    if len(fields) != 1:
        try:
            found = json.loads(turn)
        except ValueError:
            found = None
        if not isinstance(found, dict) or not set(found) <= set(fields) or not set(schema.get("required", ())) <= set(found):
            raise ValueError(f"expected a JSON object with the fields {', '.join(fields)}")
        return found
    ((name, field),) = fields.items()
    if field.get("type", "string") == "string":
        return {name: turn}
    try:
        return {name: json.loads(turn)}
    except ValueError:
        raise ValueError(f"expected a value of type {field['type']}") from None


@functools.cache
def _schema(url: str) -> dict[str, Any]:
    """Return the schema of the actions and observations of the server at `url`."""
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{url}/schema", timeout=10) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
    except (OSError, ValueError, HTTPException) as error:
        raise UserError(f"There is no OpenEnv server at {url} ({reason_of(error)}); start the server first.") from error


def _client_of(url: str) -> Any:
    with extras.needing("An environment of OpenEnv", "openenv"):
        from openenv.core.generic_client import GenericEnvClient
    _schema(url)
    return GenericEnvClient(base_url=url)


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all connections of this process."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="openenv", daemon=True).start()
    return loop


def _run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run_coroutine_threadsafe(work, _loop()).result()
