"""Text environments: what answers a completion in a conversation of several turns, and how one is named in the settings."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

from psigrad.errors import UserError, nearest
from psigrad.importing import imported_callable
from psigrad.processes.workers.child import reason_for

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


@dataclass(frozen=True)
class Fault:
    """Why an environment gave no answer: it raised, hung, died, or returned what is none. Its episode has no reward."""

    reason: str


class Playing(ABC):
    """Many episodes under way at once, by number. Use as a context manager, or `close()`."""

    def begin(self, rows: Sequence[Mapping[str, Any]]) -> list[Observation | Fault | None]:
        """New episodes 0, 1, … on these rows, in place of those before; what each `reset` said."""
        self.clear()
        said = self.open(dict(enumerate(rows)))
        return [said[number] for number in range(len(rows))]

    @abstractmethod
    def clear(self) -> None:
        """Give up all episodes."""

    @abstractmethod
    def open(self, rows: Mapping[int, Mapping[str, Any]]) -> dict[int, Observation | Fault | None]:
        """Episodes of these numbers on these rows, anew where there is one; what each `reset` said."""

    @abstractmethod
    def step(self, turns: Mapping[int, str]) -> dict[int, Step | Fault]:
        """The policy's turn in each of these episodes, and what came of it."""

    @abstractmethod
    def rows(self, count: int, seed: int) -> list[Mapping[str, Any]] | None:
        """The rows that the environment brings along; None if it brings none."""

    def close(self) -> None:  # noqa: B027
        """End what is under way; by default nothing is."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class InProcess(Playing):
    """Episodes in this process: for environments of psigrad's own, which neither hang nor exit."""

    def __init__(self, factory: Factory) -> None:
        self._factory = factory
        self._episodes: dict[int, Environment] = {}

    def clear(self) -> None:
        """See `Playing`."""
        self._episodes = {}

    def open(self, rows: Mapping[int, Mapping[str, Any]]) -> dict[int, Observation | Fault | None]:
        """See `Playing`."""
        self._episodes |= {number: self._factory() for number in rows}
        return {number: opened(self._episodes[number], row) for number, row in rows.items()}

    def step(self, turns: Mapping[int, str]) -> dict[int, Step | Fault]:
        """See `Playing`."""
        return {number: stepped(self._episodes[number], text) for number, text in turns.items()}

    def rows(self, count: int, seed: int) -> list[Mapping[str, Any]] | None:
        """See `Playing`."""
        return rows_of(self._factory, count, seed)


def opened(environment: Environment, row: Mapping[str, Any]) -> Observation | Fault | None:
    """What `reset` says, or why it says nothing."""
    try:
        said = environment.reset(row)
    except (Exception, SystemExit) as error:
        return Fault(reason_for("the environment", error))
    return said if said is None or _is_observation(said) else Fault(f"the environment's reset() returned {_shown(said)}")


def stepped(environment: Environment, text: str) -> Step | Fault:
    """What `step` gives, or why it gives nothing."""
    try:
        given = environment.step(text)
        observation, reward, done = given
    except (Exception, SystemExit) as error:
        return Fault(reason_for("the environment", error))
    if not _is_observation(observation):
        return Fault(f"the environment's step() returned {_shown(observation)} as its observation; expected text or messages")
    try:
        number = float(reward)
    except (TypeError, ValueError):
        return Fault(f"the environment's step() returned {_shown(reward)} as its reward; expected a number")
    return Step(observation, number, bool(done)) if math.isfinite(number) else Fault(f"the environment's reward is {number}")


def rows_of(factory: Any, count: int, seed: int) -> list[Mapping[str, Any]] | None:
    """The rows that an environment brings along, where it does."""
    make = getattr(factory, "rows", None)
    return list(make(count, seed)) if callable(make) else None


def _is_observation(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(x, dict) and "role" in x for x in value))


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def is_ours(environment: str | Factory) -> bool:
    """Whether an environment is one of psigrad's games."""
    return isinstance(environment, str) and ":" not in environment


def resolve(environment: str | Factory) -> Factory:
    """The environment that is meant: a built-in's name, "module:Class", or the class itself."""
    if not isinstance(environment, str):
        return environment
    from psigrad.language.rollout.episodes import games

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
