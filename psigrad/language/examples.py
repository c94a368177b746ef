"""Training examples as token ids, for SFT, preference losses and reward models."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Example:
    """A training text: `ids` [T], and a `mask` [T], True on tokens with loss. `truncated`: True if `max_length` cut its end.

    The first token has no context, so its mask is False. In a truncated text the mask can be all False; drop such an example.
    """

    ids: list[int]
    mask: list[bool]
    truncated: bool


@dataclass(frozen=True)
class Answer:
    """An answer to a prompt: its `ids`, and a `mask` that is True for tokens of the assistant (its end of turn included).

    Some templates render an earlier turn differently once others follow. Such a turn has its own context, and is one of the texts
    `apart`, which follow the same prompt.
    """

    ids: list[int]
    mask: list[bool]
    apart: tuple[Answer, ...] = ()

    @property
    def texts(self) -> tuple[Answer, ...]:
        """This text, then the texts `apart`."""
        return (self, *self.apart)

    @property
    def tokens(self) -> int:
        """The number of tokens in a forward pass."""
        return sum(len(text.ids) for text in self.texts)

    @property
    def targets(self) -> int:
        """The number of tokens that the assistant wrote."""
        return sum(sum(text.mask) for text in self.texts)


@dataclass(frozen=True)
class Pair:
    """A prompt with a better and a worse answer. `margin` is the difference in quality; None if the row has none."""

    prompt: list[int]
    chosen: Answer
    rejected: Answer
    margin: float | None = None

    @property
    def tokens(self) -> int:
        """The number of tokens in a forward pass, which computes the prompt once."""
        return len(self.prompt) + self.chosen.tokens + self.rejected.tokens


@dataclass(frozen=True)
class LabelledAnswer:
    """A prompt with one answer, labelled as desirable or not."""

    prompt: list[int]
    answer: Answer
    desirable: bool

    @property
    def tokens(self) -> int:
        """The number of tokens in a forward pass."""
        return len(self.prompt) + self.answer.tokens


@dataclass(frozen=True)
class Steps:
    """A solution in steps: `ids` of prompt and steps, the index `ends[i]` of step i's last token, and a label of each step."""

    ids: list[int]
    ends: list[int]
    labels: list[float]

    @property
    def tokens(self) -> int:
        """The number of tokens in a forward pass."""
        return len(self.ids)


def pair_of(chosen: Sequence[Example], rejected: Sequence[Example]) -> Pair:
    """Return two answers as a `Pair`. Its prompt is the prefix that all texts share before a trained token."""
    shared = shared_prefix([*chosen, *rejected])
    return Pair(chosen[0].ids[:shared], answer_behind(shared, chosen), answer_behind(shared, rejected))


def shared_prefix(texts: Sequence[Example]) -> int:
    """Return the number of tokens that all texts share before their first trained token.

    It can be less than the prompt, because templates can render the prompt's end differently before different answers.
    """
    return min([text.mask.index(True) for text in texts] + [common_prefix(texts[0].ids, text.ids) for text in texts[1:]])


def answer_behind(start: int, texts: Sequence[Example]) -> Answer:
    """Return texts as an `Answer`, each without its first `start` tokens. The last is the main text, the others are `apart`."""
    *apart, last = (Answer(text.ids[start:], text.mask[start:]) for text in texts)
    return replace(last, apart=tuple(apart))


def common_prefix(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the length of the longest common prefix of two sequences."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
