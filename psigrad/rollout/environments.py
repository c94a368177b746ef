"""Text environments: what answers a completion in a conversation of several turns, and how one is named in the settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from psigrad.errors import UserError, nearest
from psigrad.importing import imported_callable

Message = dict[str, Any]
# What the policy reads next: text (a user's turn where the prompt is a conversation), or messages with roles of their own.
Observation = str | list[Message]


class Step(NamedTuple):
    """What came of a completion."""

    observation: Observation
    """What the policy reads next; unread where `done`."""
    reward: float
    """Reward of this turn."""
    done: bool
    """Whether the episode is over."""


class Environment(Protocol):
    """One episode. An object is made for each episode and used once; all that varies comes from the row.

    `step` may return any (observation, reward, done).
    """

    def reset(self, row: Mapping[str, Any]) -> Observation | None:
        """Begin. `row` has the dataset row's `prompt` and columns; what is returned is read behind the prompt."""
        ...

    def step(self, completion: str) -> tuple[Observation, float, bool]:
        """The answer to the policy's turn, as text without special tokens."""
        ...


Factory = Callable[[], Environment]


def resolve(environment: str | Factory) -> Factory:
    """The environment that is meant: a built-in's name, "module:Class", or the class itself."""
    if not isinstance(environment, str):
        return environment
    from psigrad.rollout import games

    if ":" not in environment:
        if environment not in games.GAMES:
            known = ", ".join(games.GAMES)
            hint = nearest(environment, games.GAMES) or "."
            raise UserError(f"There is no environment {environment!r}; expected one of {known} or module:Class{hint}")
        built_in: Factory = games.GAMES[environment]
        return built_in
    found = imported_callable(environment, "environment")
    for method in ("reset", "step"):
        if not callable(getattr(found, method, None)):
            raise UserError(f"The environment {environment!r} has no {method}(); give a class with reset(row) and step(text).")
    factory: Factory = found
    return factory
