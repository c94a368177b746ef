"""Text environments: what answers a completion in a conversation of several turns, and how one is named in the settings."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, Self

from psigrad import extras
from psigrad.errors import UserError, nearest
from psigrad.importing import imported_callable
from psigrad.processes.workers.child import reason_for

Message = dict[str, Any]
# Environments of other libraries: what stands before the colon, and the module's name in `psigrad.extras`.
LIBRARIES = {"openenv": "openenv", "verifiers": "verifiers", "mcp": "mcp environment"}
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
        """The answer to the policy's turn, as text (`templates.decode`)."""
        ...


Factory = Callable[[], Environment]


@dataclass(frozen=True)
class Fault:
    """Why an environment gave no answer: it raised, hung, died, or returned what is none. Its episode has no reward."""

    reason: str


@dataclass(frozen=True)
class EpisodeCall:
    """What an episode is asked: after its `turns` so far the answer to the last, or its opening where there is none.

    An environment depends on these alone. So whoever has not played the episode so far plays it again, and answers the same.
    """

    batch: int
    number: int
    row: Mapping[str, Any]
    turns: tuple[str, ...] = ()


# What an environment says: to an opening an observation or nothing, to a turn a step.
Answer = Observation | Step | Fault | None


class Playing(ABC):
    """Many episodes under way at once, by number. Use as a context manager, or `close()`."""

    paced = True
    """Whether answers come as they are ready, and so in an order that nobody knows before."""
    _batch = 0
    _episodes: dict[int, EpisodeCall]

    def begin(self, rows: Sequence[Mapping[str, Any]]) -> list[Observation | Fault | None]:
        """New episodes 0, 1, … on these rows, in place of those before; what each `reset` said."""
        self._batch += 1
        self._episodes = {number: EpisodeCall(self._batch, number, row) for number, row in enumerate(rows)}
        answers: dict[int, Any] = self.answer(list(self._episodes.values()))
        return [answers[number] for number in range(len(rows))]

    def ask(self, turns: Mapping[int, str]) -> None:
        """Tell the policy's turn in each of these episodes, and do not wait; `answers` says what came of it."""
        for number, text in turns.items():
            episode = self._episodes[number]
            self._episodes[number] = replace(episode, turns=(*episode.turns, text))
        self.submit([self._episodes[number] for number in turns])

    def step(self, turns: Mapping[int, str]) -> dict[int, Step | Fault]:
        """The policy's turn in each of these episodes, and what came of it."""
        self.ask(turns)
        answers = self.wait(len(turns))
        return {number: answers[number] for number in turns}

    def answer(self, calls: Sequence[EpisodeCall]) -> dict[int, Answer]:
        """What the environments say to these calls, by the number of the episode. Whatever else they were at is given up."""
        self.give_up()
        self.submit(calls)
        return self.wait(len(calls))

    def wait(self, count: int, patience: float = math.inf) -> dict[int, Any]:
        """Answers to some of `count` episodes: those that come until the first has waited for so many seconds."""
        answers: dict[int, Any] = {}
        first = math.inf
        while len(answers) < count and (left := first + patience - time.monotonic()) > 0:
            answers |= self.answers(min(left, 60.0))
            first = min(first, time.monotonic()) if answers else first
        return answers

    @abstractmethod
    def submit(self, calls: Sequence[EpisodeCall]) -> None:
        """Have the environments answer these calls. Episodes of another batch are over."""

    @abstractmethod
    def answers(self, seconds: float) -> dict[int, Answer]:
        """What has been answered since the last time, by the number of the episode. Where there is nothing it waits for so many
        seconds, or less.
        """

    def give_up(self) -> None:  # noqa: B027
        """Forget calls that have no answer yet; by default there are none."""

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
    """Episodes in this process: for environments of psigrad's own, which neither hang nor exit, and in workers for all others."""

    paced = False

    def __init__(self, factory: Factory) -> None:
        self._factory = factory
        self._said: dict[int, Answer] = {}
        self._played: dict[int, tuple[tuple[str, ...], Environment]] = {}
        self._played_batch = 0

    def submit(self, calls: Sequence[EpisodeCall]) -> None:
        """See `Playing`."""
        self._said |= {call.number: deque(self.play(call), 1)[0] for call in calls}

    def answers(self, seconds: float) -> dict[int, Answer]:
        """See `Playing`: all of them."""
        said, self._said = self._said, {}
        return said

    def give_up(self) -> None:
        """See `Playing`."""
        self._said = {}

    def play(self, call: EpisodeCall) -> Iterator[Answer]:
        """The answer to a call, last; before it those of the turns that are played again."""
        if call.batch != self._played_batch:
            self._played_batch, self._played = call.batch, {}
        turns, environment = self._played.pop(call.number, ((), None))
        again: Sequence[str] = call.turns[-1:]
        if environment is None or not call.turns or turns != call.turns[:-1]:
            again = call.turns
            try:
                environment = self._factory()
            except (Exception, SystemExit) as error:
                yield Fault(reason_for("the environment", error))
                return
            answer: Answer = reset(environment, call.row)
            yield answer
            if isinstance(answer, Fault):
                return
        for text in again:
            answer = step(environment, text)
            yield answer
            if isinstance(answer, Fault):
                return
        self._played[call.number] = (call.turns, environment)

    def rows(self, count: int, seed: int) -> list[Mapping[str, Any]] | None:
        """See `Playing`."""
        make = getattr(self._factory, "rows", None)
        return list(make(count, seed)) if callable(make) else None


def reset(environment: Environment, row: Mapping[str, Any]) -> Observation | Fault | None:
    """What `reset` says, or why it says nothing."""
    try:
        opening = environment.reset(row)
    except (Exception, SystemExit) as error:
        return Fault(reason_for("the environment", error))
    known = opening is None or _is_observation(opening)
    return opening if known else Fault(f"the environment's reset() returned {_shorten(opening)}")


def step(environment: Environment, text: str) -> Step | Fault:
    """What `step` gives, or why it gives nothing."""
    try:
        given = environment.step(text)
        observation, reward, done = given
    except (Exception, SystemExit) as error:
        return Fault(reason_for("the environment", error))
    if not _is_observation(observation):
        return Fault(f"the environment's step() returned {_shorten(observation)} as its observation; expected text or messages")
    try:
        number = float(reward)
    except (TypeError, ValueError):
        return Fault(f"the environment's step() returned {_shorten(reward)} as its reward; expected a number")
    return Step(observation, number, bool(done)) if math.isfinite(number) else Fault(f"the environment's reward is {number}")


def _is_observation(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(x, dict) and "role" in x for x in value))


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def is_ours(environment: str | Factory) -> bool:
    """Whether an environment is one of psigrad's games."""
    return isinstance(environment, str) and ":" not in environment


def library_of(environment: str | Factory) -> str:
    """The library that an environment is of, as `LIBRARIES` names it; empty for psigrad's games and a user's own."""
    kind = environment.partition(":")[0] if isinstance(environment, str) else ""
    return kind if kind in LIBRARIES else ""


def resolve(environment: str | Factory) -> Factory:
    """The environment that is meant: a built-in's name, "openenv:ADDRESS", "verifiers:TASKSET", "mcp:COMMAND", "module:Class", or
    the class.
    """
    if not isinstance(environment, str):
        return environment
    if is_ours(environment):
        games: Mapping[str, Factory] = extras.load("games").GAMES
        if environment not in games:
            known, hint = ", ".join(games), nearest(environment, games) or "."
            raise UserError(f"There is no environment {environment!r}; expected one of {known} or module:Class{hint}")
        return games[environment]
    if kind := library_of(environment):
        adapted: Factory = extras.load(LIBRARIES[kind]).adapt_named(environment.partition(":")[2])
        return adapted
    found = imported_callable(environment, "environment")
    for method in ("reset", "step"):
        if not callable(getattr(found, method, None)):
            raise UserError(f"The environment {environment!r} has no {method}(); give a class with reset(row) and step(text).")
    factory: Factory = found
    return factory
