"""What scoring one completion can come to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from psigrad.errors import UserError
from psigrad.rewards.samples import Samples


@dataclass(frozen=True)
class Scored:
    """A reward: `value` is the weighted sum, `parts` what each function gave (None: not applicable).

    `steps` are (place, reward) of rewards for steps inside the completion, beside `value`, which is for the whole of it.
    """

    value: float
    parts: dict[str, float | None] = field(default_factory=dict)
    steps: tuple[tuple[int, float], ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Failed:
    """The policy's fault, said by a reward function through `Failure`: the completion is worth `value`."""

    value: float
    reason: str
    parts: dict[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Unscored:
    """Our fault: a time-out, an exception, a malformed return. Never a silent 0: such completions are not trained on."""

    reason: str


Result = Scored | Failed | Unscored


class Failure(Exception):
    """Raised by a reward function (or returned in its list, for one sample) to say that the completion as such is at fault."""


class RewardError(UserError):
    """The rewards cannot be used: the functions do not load, or too many completions stay unscored."""


class Scoring:
    """Completions on their way to their rewards, added group by group as they are written.

    This one asks `score` for all groups at the end; a scorer that can begin earlier has a subclass.
    """

    def __init__(self, score: Callable[[Sequence[Samples]], list[Result]]) -> None:
        self._score = score
        self._groups: list[Samples] = []

    def add(self, group: Samples) -> None:
        """One more group, which reward functions are shown together."""
        self._groups.append(group)

    def turn(self) -> None:
        """Do what can be done now without waiting."""

    def results(self) -> list[Result]:
        """One result per completion, in the order in which they were added."""
        return self._score(self._groups)


class Scorer(Protocol):
    """Who scores completions: reward functions in processes, reward models, or a mixture of both."""

    def begin(self) -> Scoring:
        """A new scoring; what an earlier one has not finished is given up."""
        ...


def text_of(completion: Any) -> str:
    """The text of a completion: plain, or the contents of its messages."""
    if isinstance(completion, str):
        return completion
    return "\n".join(str(message.get("content") or "") for message in completion)
