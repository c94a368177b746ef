"""What scoring one completion can come to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from psigrad.errors import UserError
from psigrad.rewards.samples import Samples, joined


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


class Scorer(Protocol):
    """Who scores. `RewardPool` does it in processes that can be killed, `InlineScorer` where it stands."""

    def score(self, samples: Samples, groups: Sequence[int] | None = None) -> list[Result]:
        """One result per completion, in order. The functions see neighbours with the same number in `groups` together."""
        ...


class Scoring(Protocol):
    """Completions that are scored as they come, group by group."""

    def add(self, samples: Samples) -> None:
        """One more group, which is shown to the functions together."""
        ...

    def turn(self) -> None:
        """Do what can be done now without waiting."""
        ...

    def results(self) -> list[Result]:
        """One result per completion, in the order in which they were added."""
        ...


@runtime_checkable
class Streaming(Protocol):
    """A `Scorer` that can begin before it has seen all completions. Its results are those of `score`."""

    def begin(self) -> Scoring:
        """A new scoring; what an earlier one has not finished is given up."""
        ...


class AtOnce:
    """A `Scoring` by any `Scorer`: all completions together, at the end."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        self._given: list[Samples] = []

    def add(self, samples: Samples) -> None:
        """See `Scoring`."""
        self._given.append(samples)

    def turn(self) -> None:
        """There is nothing to do yet."""

    def results(self) -> list[Result]:
        """See `Scoring`."""
        groups = [number for number, part in enumerate(self._given) for _ in range(len(part))]
        return self._scorer.score(joined(self._given), groups) if groups else []


def begin(scorer: Scorer) -> Scoring:
    """A scoring by `scorer`, as early as it can."""
    return scorer.begin() if isinstance(scorer, Streaming) else AtOnce(scorer)


def text_of(completion: Any) -> str:
    """The text of a completion: plain, or the contents of its messages."""
    if isinstance(completion, str):
        return completion
    return "\n".join(str(message.get("content") or "") for message in completion)
