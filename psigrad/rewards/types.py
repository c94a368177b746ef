"""What scoring one completion can come to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from psigrad.errors import UserError


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

    def score(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        columns: dict[str, list[Any]],
        groups: Sequence[int] | None = None,
        prompt_ids: Sequence[Sequence[int]] | None = None,
    ) -> list[Result]:
        """One result per completion, in order. Completions with the same number in `groups` are shown to the functions
        together; `prompt_ids` are for scorers that read the policy's own tokens.
        """
        ...


class Scoring(Protocol):
    """Completions that are scored as they come, group by group."""

    def add(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        columns: dict[str, list[Any]],
        prompt_ids: Sequence[Sequence[int]] | None = None,
    ) -> None:
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
        self._given: tuple[list[Any], list[Any], list[Any], list[Any], list[int]] = ([], [], [], [], [])
        self._columns: dict[str, list[Any]] = {}

    def add(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        columns: dict[str, list[Any]],
        prompt_ids: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """See `Scoring`."""
        group = self._given[4][-1] + 1 if self._given[4] else 0
        parts = (prompts, completions, completion_ids, prompt_ids or [], [group] * len(completions))
        for values, new in zip(self._given, parts, strict=True):
            values.extend(new)
        for name, column in columns.items():
            self._columns.setdefault(name, []).extend(column)

    def turn(self) -> None:
        """There is nothing to do yet."""

    def results(self) -> list[Result]:
        """See `Scoring`."""
        prompts, completions, ids, prompt_ids, groups = self._given
        return self._scorer.score(prompts, completions, ids, self._columns, groups, prompt_ids or None) if completions else []


def begin(scorer: Scorer) -> Scoring:
    """A scoring by `scorer`, as early as it can."""
    return scorer.begin() if isinstance(scorer, Streaming) else AtOnce(scorer)


def text_of(completion: Any) -> str:
    """The text of a completion: plain, or the contents of its messages."""
    if isinstance(completion, str):
        return completion
    return "\n".join(str(message.get("content") or "") for message in completion)
