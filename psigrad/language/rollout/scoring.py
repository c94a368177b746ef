"""The protocol `Scorer`, its input (`Samples`) and its results (`Scored`, `Failed`, `Unscored`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from psigrad.errors import UserError
from psigrad.language import images

WINDOW = 200
"""The number of most recent completions over which `max_unscored` is checked."""
_ENOUGH = 8
"""If no completion has a reward, a run stops once there are this many."""
NOT_APPLICABLE = "no reward function applies to it"
"""The reason of a completion for which no reward function returned a number."""


@dataclass(frozen=True)
class Samples:
    """Completions with their prompts and other data, as sequences of equal length."""

    prompts: Sequence[Any]
    completions: Sequence[Any]
    completion_ids: Sequence[Sequence[int]]
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """The other columns of the prompts' rows, by name."""
    prompt_ids: Sequence[Sequence[int]] | None = None
    """The tokens of each prompt, for scorers that read the policy's own tokens."""
    policy_turns: Sequence[Sequence[str]] | None = None
    """The policy's turns in each completion, if completions also contain other speakers; None: `turns_of` finds the turns."""
    policy_ids: Sequence[Sequence[int]] | None = None
    """The tokens of each completion that the policy wrote; None: all of `completion_ids`."""
    opened_thoughts: Sequence[str] | None = None
    """For each prompt, the tag (such as <think>) at its end that opens a thought, or "". None: no prompt ends with one."""

    def __post_init__(self) -> None:
        lengths = {name: len(values) for name, values in self.arguments.items()}
        if self.prompt_ids is not None:
            lengths["prompt_ids"] = len(self.prompt_ids)
        if len(set(lengths.values())) > 1:
            raise ValueError(f"All columns of samples must have the same length; their lengths are {lengths}.")

    def __len__(self) -> int:
        return len(self.completions)

    @property
    def arguments(self) -> dict[str, Sequence[Any]]:
        """The columns that are sent to the reward functions' worker processes, by name."""
        said = {"prompts": self.prompts, "completions": self.completions}
        own = {name: list(map(images.remove_marks, values)) for name, values in said.items()}
        own |= {"completion_ids": list(self.completion_ids)}
        policy = {"policy_turns": self.policy_turns, "policy_ids": self.policy_ids, "opened_thoughts": self.opened_thoughts}
        return {**self.columns, **own, **{name: values for name, values in policy.items() if values is not None}}


def concatenate(parts: Sequence[Samples]) -> Samples:
    """Return one `Samples` with all samples of `parts`. Raises `ValueError` if the parts have different columns."""
    optional = ("prompt_ids", "policy_turns", "policy_ids", "opened_thoughts")
    kinds = {(*sorted(part.columns), *(name for name in optional if getattr(part, name) is not None)) for part in parts}
    if len(kinds) > 1:
        raise ValueError(f"Concatenated samples need the same columns and optional fields; these have {sorted(kinds)}.")
    if not parts:
        return Samples([], [], [])
    names = ("prompts", "completions", "completion_ids", *optional)
    all_of: dict[str, Any] = {
        name: [value for part in parts for value in getattr(part, name)] for name in names if getattr(parts[0], name) is not None
    }
    columns = {name: [value for part in parts for value in part.columns[name]] for name in parts[0].columns}
    return Samples(**all_of, columns=columns)


def select(columns: Mapping[str, Sequence[Any]], indices: Sequence[int]) -> dict[str, list[Any]]:
    """Return the columns with only the samples at these indices."""
    return {name: [values[i] for i in indices] for name, values in columns.items()}


class Preparable:
    """A reward function with two more methods: `check` is called before a run, and `prepare` when the worker process starts."""

    def check(self) -> None:
        """Raise `UserError` if the parameters are invalid."""

    def prepare(self) -> None:
        """Load the resources that the function needs."""


class SelfLimited:
    """A reward function that enforces its own time limit. Its worker process is not killed while the function runs."""


class FailedTest(float):
    """A reward of 0 for a program that fails a test, with the reason. A run treats it like a raised `Failure`."""

    def __new__(cls, reason: str) -> FailedTest:
        """Create a reward of 0 with this reason."""
        made = super().__new__(cls, 0.0)
        made.reason = reason
        return made

    reason: str


@dataclass(frozen=True)
class Scored:
    """A completion's reward. `parts` has each reward function's value, or None if it does not apply. `value` is the weighted sum.

    `steps` are additional rewards on single tokens: (token index, reward).
    """

    value: float
    parts: dict[str, float | None] = field(default_factory=dict)
    steps: tuple[tuple[int, float], ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Failed:
    """A completion for which a reward function raised `Failure`, because the policy is at fault.

    `parts` maps each reward function's name to its value, and `value` is their weighted sum. If a function raised `Failure`, its
    value is the `failure_value` of `RewardPool`.
    """

    value: float
    reason: str
    parts: dict[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Unscored:
    """A completion without a reward, for a reason that is not the policy's fault: a time-out, an exception, an invalid result.

    It is not trained on. A reward function may return a list with an `Unscored` in place of a reward.
    """

    reason: str


Result = Scored | Failed | Unscored


class Failure(Exception):
    """The exception with which a reward function reports that a completion failed through the policy's fault.

    A reward function raises it, or returns a list that has it in place of a reward.
    """


class RewardError(UserError):
    """Raised if reward functions do not load, or if too many completions have no reward."""


class Scoring:
    """Completions that wait for their rewards. This class scores in `results`. A subclass can start when a group is added."""

    def __init__(self, score: Callable[[Sequence[Samples]], list[Result]]) -> None:
        self._score = score
        self._groups: list[Samples] = []

    def add(self, group: Samples) -> None:
        """Add the samples of one group. A reward function receives all of them in one call."""
        self._groups.append(group)

    def poll(self) -> None:
        """Let the scorer make progress without waiting. In this class, do nothing."""

    def results(self) -> list[Result]:
        """Wait for the scores. Return one result per completion, in the order in which the completions were added."""
        return self._score(self._groups)


class Scorer(Protocol):
    """A scorer of completions: reward functions in worker processes, reward models, or both."""

    def begin(self) -> Scoring:
        """Return a new `Scoring`. Cancel unfinished work of the previous one."""


def check_unscored(
    reasons: Sequence[str | None], limit: float, sources: Sequence[str] = (), before: Sequence[Sequence[int]] = ()
) -> list[list[int]]:
    """Raise `RewardError` if scoring failed for too many of the most recent completions.

    `reasons` has one entry per completion of this step: why it is unscored, or None. `limit` is the allowed share of failures.
    Return [failures, completions] for each recent step, to be passed as `before` in the next step.
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
        raise RewardError(f"{explain_unscored(faults, sources, above)} Fix the cause, or raise max_unscored.")
    return window


def explain_unscored(reasons: Sequence[str | None], sources: Sequence[str] = (), above: str = "") -> str:
    """Return a sentence with the number of unscored completions, the most common reason, and the rows where it occurred.

    `sources[i]` is the file and line of the row of completion i. The text `above` is inserted after the number.
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
    """Return the policy's turns: the contents of the assistant messages, or only `completion` itself if it is a string."""
    if isinstance(completion, str):
        return [completion]
    return [_content(message) for message in completion if message.get("role") == "assistant"]


def text_of(completion: Any) -> str:
    """Return the policy's last turn: the content of the last assistant message, or `completion` itself if it is a string."""
    return (turns_of(completion) or [""])[-1]


def transcript_of(messages: Any) -> str:
    """Return the full conversation as one string: the contents of all messages, or `messages` itself if it is a string."""
    return messages if isinstance(messages, str) else "\n".join(map(_content, messages))


def _content(message: Mapping[str, Any]) -> str:
    said = message.get("content") or ""
    return said if isinstance(said, str) else "".join(str(part.get("text", "")) for part in said)
