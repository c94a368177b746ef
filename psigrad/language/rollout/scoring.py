"""What a scorer is given, what scoring a completion can come to, and who scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from psigrad.errors import UserError

WINDOW = 200
"""Completions over which `max_unscored` is judged."""
_ENOUGH = 8
"""Completions after which a reward that has never worked stops a run."""
NOT_APPLICABLE = "no reward function applies to it"
"""The reason of a completion that no reward function gave a number."""


@dataclass(frozen=True)
class Samples:
    """Completions with their prompts and what else is known of them; sequences of one length."""

    prompts: Sequence[Any]
    completions: Sequence[Any]
    completion_ids: Sequence[Sequence[int]]
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """The other columns of the prompts' rows, by name."""
    prompt_ids: Sequence[Sequence[int]] | None = None
    """For scorers that read the policy's own tokens."""
    policy_turns: Sequence[Sequence[str]] | None = None
    """What the policy wrote, turn by turn, where a completion holds what others said too; None: see `turns_of`."""
    policy_ids: Sequence[Sequence[int]] | None = None
    """The tokens that the policy wrote; None: all of `completion_ids`."""
    opened_thoughts: Sequence[str] | None = None
    """The tag of a thought that each prompt ends in, which the completion goes on with; None: of none."""

    def __post_init__(self) -> None:
        lengths = {name: len(values) for name, values in self.shown.items()}
        if self.prompt_ids is not None:
            lengths["prompt_ids"] = len(self.prompt_ids)
        if len(set(lengths.values())) > 1:
            raise ValueError(f"Samples are sequences of one length; these have {lengths}.")

    def __len__(self) -> int:
        return len(self.completions)

    @property
    def shown(self) -> dict[str, Sequence[Any]]:
        """What goes to the reward functions' workers, by name."""
        own = {"prompts": self.prompts, "completions": self.completions, "completion_ids": self.completion_ids}
        policy = {"policy_turns": self.policy_turns, "policy_ids": self.policy_ids, "opened_thoughts": self.opened_thoughts}
        return {**self.columns, **own, **{name: values for name, values in policy.items() if values is not None}}


def join(parts: Sequence[Samples]) -> Samples:
    """All of these, one behind the other. Raises `ValueError` unless they say the same kinds of things of every completion."""
    optional = ("prompt_ids", "policy_turns", "policy_ids", "opened_thoughts")
    kinds = {(*sorted(part.columns), *(name for name in optional if getattr(part, name) is not None)) for part in parts}
    if len(kinds) > 1:
        raise ValueError(f"These samples have different columns, or only some have {', '.join(optional)}: {sorted(kinds)}.")

    if not parts:
        return Samples([], [], [])
    names = ("prompts", "completions", "completion_ids", *optional)
    all_of: dict[str, Any] = {
        name: [value for part in parts for value in getattr(part, name)] for name in names if getattr(parts[0], name) is not None
    }
    columns = {name: [value for part in parts for value in part.columns[name]] for name in parts[0].columns}
    return Samples(**all_of, columns=columns)


def pick(shown: Mapping[str, Sequence[Any]], indices: Sequence[int]) -> dict[str, list[Any]]:
    """What is shown of the samples at these indices."""
    return {name: [values[i] for i in indices] for name, values in shown.items()}


class Preparable:
    """A reward function that is looked at before a run, and made ready in its worker before the first completion's clock runs."""

    def check(self) -> None:
        """Raises `UserError` where its parameters are no use."""

    def prepare(self) -> None:
        """Load what it asks."""


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
    """A reward function said through `Failure` that the policy is at fault, and counts with the failure value: `value` is the
    weighted sum with it, `parts` what each function gave.
    """

    value: float
    reason: str
    parts: dict[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Unscored:
    """Our fault: a time-out, an exception, a malformed return. Never a silent 0: such completions are not trained on.

    A reward function may return one in its list, where it cannot judge a completion through no fault of the policy's.
    """

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

    def poll(self) -> None:
        """Do what can be done now without waiting."""

    def results(self) -> list[Result]:
        """One result per completion, in the order in which they were added."""
        return self._score(self._groups)


class Scorer(Protocol):
    """Who scores completions: reward functions in processes, reward models, or a mixture of both."""

    def begin(self) -> Scoring:
        """A new scoring; what an earlier one has not finished is given up."""
        ...


def check_unscored(
    reasons: Sequence[str | None], limit: float, sources: Sequence[str] = (), before: Sequence[Sequence[int]] = ()
) -> list[list[int]]:
    """Raise `RewardError` if more than `limit` of the last `WINDOW` completions are unscored through a fault, or if all are.

    `reasons` has one entry per completion of a step: why it is unscored, or None. One to which no function applies is no fault.
    `before` is what the previous step returned: [faults, completions] of each of the last steps, which now ends in this one.
    """
    faults = [None if reason is None or reason.startswith(NOT_APPLICABLE) else reason for reason in reasons]
    window = [*map(list, before), [sum(reason is not None for reason in faults), len(faults)]]
    while sum(total for _, total in window[1:]) >= WINDOW:
        window = window[1:]
    bad, seen = (sum(column) for column in zip(*window, strict=True))
    never = limit < 1 and bad == seen >= _ENOUGH
    if any(faults) and (never or bad / max(seen, WINDOW) > limit):
        all_of = f"; {bad} of the last {seen}" if before else ""
        above = f"{all_of}, above max_unscored {limit:g}"
        raise RewardError(f"{explain_unscored(faults, sources, above)} Fix that or raise the limit.")
    return window


def explain_unscored(reasons: Sequence[str | None], sources: Sequence[str] = (), above: str = "") -> str:
    """Return how many of the completions are unscored, and the reason that most of these have, with their rows.

    `reasons` are as in `check_unscored`. `sources` are the places of the rows in their files.
    """
    counts: dict[str, list[int]] = {}
    for i, reason in enumerate(reasons):
        if reason is not None:
            counts.setdefault(reason, []).append(i)
    reason, samples = max(counts.items(), key=lambda item: len(item[1]))
    places = list(dict.fromkeys(sources[i] for i in samples)) if sources else list(map(str, samples))
    shown = ", ".join(places[:5]) + (", …" if len(places) > 5 else "")
    unscored = sum(map(len, counts.values()))
    most = f"most often ({len(samples)}, {'rows' if sources else 'samples'} {shown}): {reason.rstrip('.')}."
    return f"{unscored} of {len(reasons)} completions stayed unscored{above}; {most}"


def turns_of(completion: Any) -> list[str]:
    """What the policy wrote in a completion, turn by turn: the text, or the contents of the assistant's messages."""
    if isinstance(completion, str):
        return [completion]
    return [_content(message) for message in completion if message.get("role") == "assistant"]


def text_of(completion: Any) -> str:
    """What the policy said last: a text as it is, of messages the assistant's last."""
    return (turns_of(completion) or [""])[-1]


def transcript_of(messages: Any) -> str:
    """All that was said: a text as it is, or the contents of all messages."""
    return messages if isinstance(messages, str) else "\n".join(map(_content, messages))


def _content(message: Mapping[str, Any]) -> str:
    return str(message.get("content") or "")
