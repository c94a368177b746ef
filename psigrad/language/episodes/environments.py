"""Text environments, which answer completions in a conversation of several turns, and how settings name them."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Protocol, Self

from psigrad import extras
from psigrad.errors import UserError, nearest
from psigrad.importing import imported_callable
from psigrad.language.data.image_rows import has_parts, observation_json
from psigrad.language.images import open_columns
from psigrad.processes.workers.child import reason_for

Message = dict[str, Any]
# Environments of other libraries: the prefix before the colon, and the module's name in `psigrad.extras`.
LIBRARIES = {"openenv": "openenv", "verifiers": "verifiers", "mcp": "mcp environment", "textarena": "textarena"}
# The policy's next input: text (a user turn if the prompt is a conversation), or messages with their own roles. An environment
# may also give a Pillow image or a list of content parts, which become text with marks (`image_rows.observation_text`).
Observation = str | list[Message]


class Step(NamedTuple):
    """An environment's answer to a completion."""

    observation: Observation
    """The policy's next input; ignored if `done`."""
    reward: float
    """The reward of this turn."""
    done: bool
    """True if the episode is over."""
    seat: int = 0
    """The seat that acts next and reads the observation, in a game of several seats."""
    rewards: tuple[float, ...] = ()
    """The reward of each seat, in a game of several seats."""


class Opening(NamedTuple):
    """The start of a game of several seats: the seat that acts first, and what it reads."""

    seat: int
    observation: Observation


class Environment(Protocol):
    """One episode. A new object is created for each episode, and everything that varies comes from the row.

    `step` returns a `Step` or a plain tuple (observation, reward, done).
    """

    def reset(self, row: Mapping[str, Any]) -> Observation | None:
        """Start the episode. `row` has the dataset row's `prompt` and columns. The returned observation follows the prompt."""

    def step(self, completion: str) -> tuple[Observation, float, bool]:
        """Answer the policy's turn, which is text (`templates.decode`)."""


class SeatedEnvironment(Protocol):
    """One game of several seats, that is, players. A new object is created for each game, as for an `Environment`.

    Rewards may sum to 0 (opponents), be equal (a team), or neither. Most games give 0 until the last turn.
    """

    seats: ClassVar[int]

    def reset(self, row: Mapping[str, Any]) -> tuple[int, Observation]:
        """Start the game. Return the seat that acts first, and what it reads after the prompt."""

    def step(self, completion: str) -> tuple[int, Observation, Sequence[float], bool]:
        """Answer the acting seat's turn. Return the seat that acts next, the text that it reads (all since its own last turn),
        the reward of every seat, and True if the game is over.
        """


Factory = Callable[[], Environment | SeatedEnvironment]


@dataclass(frozen=True)
class Fault:
    """The reason why an environment gave no answer: it raised, hung, died, or returned something invalid.

    Its episode has no reward.
    """

    reason: str


@dataclass(frozen=True)
class EpisodeCall:
    """A request to an episode: answer the last of its `turns` so far, or return the opening if there are none.

    An environment depends on these fields alone. A process that has not played the earlier turns replays them, and gives the same
    answer.
    """

    batch: int
    number: int
    row: Mapping[str, Any]
    turns: tuple[str, ...] = ()


# The answer of an environment: an observation or None to an opening, a `Step` to a turn, or a fault.
Answer = Observation | Opening | Step | Fault | None


class Playing(ABC):
    """A runner of many numbered episodes at once. Use it as a context manager, or call `close()`."""

    paced = True
    """True if answers arrive as they are ready, and so in an unpredictable order."""
    _batch = 0
    _episodes: dict[int, EpisodeCall]

    def begin(self, rows: Sequence[Mapping[str, Any]]) -> list[Observation | Opening | Fault | None]:
        """Replace all episodes by new ones 0, 1, … on these rows, and return what each `reset` returned."""
        self._batch += 1
        self._episodes = {number: EpisodeCall(self._batch, number, row) for number, row in enumerate(rows)}
        answers: dict[int, Any] = self.answer(list(self._episodes.values()))
        return [answers[number] for number in range(len(rows))]

    def ask(self, turns: Mapping[int, str]) -> None:
        """Submit the policy's turn in each of these episodes without waiting. `answers` returns the results."""
        for number, text in turns.items():
            episode = self._episodes[number]
            self._episodes[number] = replace(episode, turns=(*episode.turns, text))
        self.submit([self._episodes[number] for number in turns])

    def step(self, turns: Mapping[int, str]) -> dict[int, Step | Fault]:
        """Submit the policy's turn in each of these episodes, wait, and return the results."""
        self.ask(turns)
        answers = self.wait(len(turns))
        return {number: answers[number] for number in turns}

    def answer(self, calls: Sequence[EpisodeCall]) -> dict[int, Answer]:
        """Return the environments' answers to these calls, by episode number. Earlier calls without an answer are dropped."""
        self.give_up()
        self.submit(calls)
        return self.wait(len(calls))

    def wait(self, count: int, patience: float = math.inf) -> dict[int, Any]:
        """Return answers to some of `count` episodes: all that arrive within `patience` seconds of the first."""
        answers: dict[int, Any] = {}
        first = math.inf
        while len(answers) < count and (left := first + patience - time.monotonic()) > 0:
            answers |= self.answers(min(left, 60.0))
            first = min(first, time.monotonic()) if answers else first
        return answers

    @abstractmethod
    def submit(self, calls: Sequence[EpisodeCall]) -> None:
        """Start answering these calls. Episodes of an earlier batch end."""

    @abstractmethod
    def answers(self, seconds: float) -> dict[int, Answer]:
        """Return the answers since the previous call, by episode number. If there are none, wait for at most `seconds`."""

    def give_up(self) -> None:  # noqa: B027
        """Drop the calls that have no answer yet. The default does nothing."""

    @abstractmethod
    def rows(self, count: int, seed: int) -> list[Mapping[str, Any]] | None:
        """Return `count` rows that the environment makes itself with this seed, or None if it makes none."""

    def close(self) -> None:  # noqa: B027
        """End all episodes. The default does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class InProcess(Playing):
    """Episodes in this process, for psigrad's own environments, which neither hang nor exit.

    An `EnvironmentPool` runs all other environments. Its workers use this class.
    """

    paced = False

    def __init__(self, factory: Factory) -> None:
        self._factory = factory
        self._said: dict[int, Answer] = {}
        self._played: dict[int, tuple[tuple[str, ...], Any]] = {}
        self._played_batch = 0

    def submit(self, calls: Sequence[EpisodeCall]) -> None:
        """Answer the calls at once, and store the answers for `answers`. See `Playing`."""
        self._said |= {call.number: deque(self.play(call), 1)[0] for call in calls}

    def answers(self, seconds: float) -> dict[int, Answer]:
        """Return the stored answers without waiting. See `Playing`."""
        said, self._said = self._said, {}
        return said

    def give_up(self) -> None:
        """Drop the stored answers. See `Playing`."""
        self._said = {}

    def play(self, call: EpisodeCall) -> Iterator[Answer]:
        """Yield an answer for each turn that must be replayed, and last the answer to the call itself."""
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
        """Return the rows that the factory makes, if it has a method `rows`. See `Playing`."""
        make = getattr(self._factory, "rows", None)
        return list(make(count, seed)) if callable(make) else None


def reset(environment: Any, row: Mapping[str, Any]) -> Observation | Opening | Fault | None:
    """Call an environment's `reset` and return its result. Return a `Fault` if it raises or the result is invalid."""
    seats = seats_of(environment)
    try:
        opening = environment.reset(open_columns(row))
        if seats > 1:
            seat, said = opening
            opening = Opening(seat, said)
    except (Exception, SystemExit) as error:
        return Fault(reason_for("the environment", error))
    said = opening.observation if isinstance(opening, Opening) else opening
    known = _is_observation(said) or (said is None and seats == 1)
    if not known or (seats > 1 and opening.seat not in range(seats)):
        return Fault(f"the environment's reset() returned {_shorten(opening)}")
    plain: Any = _without_objects(said)
    return plain if seats == 1 or isinstance(plain, Fault) else Opening(int(opening.seat), plain)


def step(environment: Any, text: str) -> Step | Fault:
    """Call an environment's `step` and return its result. Return a `Fault` if it raises or the result is invalid."""
    seats, seat, reward = seats_of(environment), 0, 0.0
    rewards: Sequence[Any] = ()
    try:
        given = environment.step(text)
        if seats > 1:
            seat, observation, rewards, done = given
            rewards = rewards if isinstance(rewards, Mapping) else tuple(rewards)  # a tuple of a mapping would be its keys
        else:
            observation, reward, done = given[:3] if isinstance(given, Step) else given
    except (Exception, SystemExit) as error:
        return Fault(reason_for("the environment", error))
    observation = _without_objects(observation)
    if isinstance(observation, Fault):
        return observation
    if not _is_observation(observation):
        return Fault(f"the environment's step() returned {_shorten(observation)} as the observation; expected text or messages")
    if seats > 1 and (isinstance(rewards, Mapping) or len(rewards) != seats or seat not in range(seats)):
        got, want = f"seat {seat} and rewards {_shorten(rewards)}", f"a sequence of {seats} rewards"
        return Fault(
            f"the environment's step() returned {got}; with {seats} seats, expected a seat from 0 to {seats - 1} and {want}"
        )
    try:
        number, each = float(reward), tuple(float(one) for one in rewards)
    except (TypeError, ValueError):
        wrong = rewards if seats > 1 else reward
        return Fault(f"the environment's step() returned {_shorten(wrong)} as its reward; expected a number")
    if wrong := [one for one in (number, *each) if not math.isfinite(one)]:
        return Fault(f"the environment's reward is {wrong[0]}; expected a finite number")
    return Step(observation, number, bool(done), int(seat), each)


def seats_of(environment: Any) -> int:
    """Return the number of seats of an environment or of its class."""
    return int(getattr(environment, "seats", 1))


def _is_observation(value: object) -> bool:
    messages = isinstance(value, list) and all(isinstance(x, dict) and "role" in x for x in value)
    return isinstance(value, str) or messages or has_parts(value)


def _without_objects(said: Any) -> Any:
    """Return an observation whose image objects are replaced by text that any process can read, or a `Fault`."""
    try:
        return observation_json(said)
    except ValueError as error:
        return Fault(f"the environment's image {error}")


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def is_ours(environment: str | Factory) -> bool:
    """Return True if an environment is named like psigrad's games, by a text without a colon."""
    return isinstance(environment, str) and ":" not in environment


def library_of(environment: str | Factory) -> str:
    """Return the library of an environment, as `LIBRARIES` names it; empty for psigrad's games and a user's own environments."""
    kind = environment.partition(":")[0] if isinstance(environment, str) else ""
    return kind if kind in LIBRARIES else ""


def resolve(environment: str | Factory) -> Factory:
    """Return the factory of an environment: a built-in name, "openenv:ADDRESS", "verifiers:TASKSET", "textarena:GAME",
    "mcp:COMMAND", "module:Class", or a class. Raise `UserError` if there is no such environment.
    """
    if not isinstance(environment, str):
        return environment
    if is_ours(environment):
        games: Mapping[str, Factory] = extras.load("games").GAMES | extras.load("text games").GAMES
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
