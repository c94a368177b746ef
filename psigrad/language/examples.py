"""Recorded data as token ids: what SFT, preference losses and reward models train on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Example:
    """One row to train on: `ids` [T], `mask` [T] True on the tokens with loss, `truncated` if `max_length` cut its end off.

    The first token is never in the mask: nothing precedes it. After a cut the mask may be all False; leave such a row out.
    """

    ids: list[int]
    mask: list[bool]
    truncated: bool


@dataclass(frozen=True)
class Answer:
    """The text after a prompt: `ids`, and the `mask` of those that the assistant wrote (its end of turn included).

    Turns that the template rewrites once others follow are `apart`, each in its own context behind the same prompt.
    """

    ids: list[int]
    mask: list[bool]
    apart: tuple[Answer, ...] = ()

    @property
    def texts(self) -> tuple[Answer, ...]:
        """All of it: this text and those apart."""
        return (self, *self.apart)

    @property
    def tokens(self) -> int:
        """Tokens of one forward pass."""
        return sum(len(text.ids) for text in self.texts)

    @property
    def targets(self) -> int:
        """Tokens that the assistant wrote."""
        return sum(sum(text.mask) for text in self.texts)


@dataclass(frozen=True)
class Pair:
    """A prompt with a better and a worse answer. `margin` is by how much better, where the row says so."""

    prompt: list[int]
    chosen: Answer
    rejected: Answer
    margin: float | None = None

    @property
    def tokens(self) -> int:
        """Tokens of one forward pass, in which the prompt stands once."""
        return len(self.prompt) + self.chosen.tokens + self.rejected.tokens


@dataclass(frozen=True)
class Judged:
    """A prompt with one answer that is desirable or not."""

    prompt: list[int]
    answer: Answer
    desirable: bool

    @property
    def tokens(self) -> int:
        """Tokens of one forward pass."""
        return len(self.prompt) + self.answer.tokens


@dataclass(frozen=True)
class Steps:
    """A solution in steps: `ids` of the whole text, the places `ends` of each step's last token, and a label for each."""

    ids: list[int]
    ends: list[int]
    labels: list[float]

    @property
    def tokens(self) -> int:
        """Tokens of one forward pass."""
        return len(self.ids)


def pair_of(chosen: Sequence[Example], rejected: Sequence[Example]) -> Pair:
    """Return the pair of two answers, whose prompt is the prefix that all texts share."""
    shared = shared_prefix([*chosen, *rejected])
    return Pair(chosen[0].ids[:shared], answer_behind(shared, chosen), answer_behind(shared, rejected))


def shared_prefix(texts: Sequence[Example]) -> int:
    """Return the number of tokens that all texts share before their first trained token. A template may render the end of a
    prompt differently before another answer.
    """
    return min([text.mask.index(True) for text in texts] + [common_prefix(texts[0].ids, text.ids) for text in texts[1:]])


def answer_behind(start: int, texts: Sequence[Example]) -> Answer:
    """Return the answer whose texts begin at token `start`; the last text is the main one."""
    *apart, last = (Answer(text.ids[start:], text.mask[start:]) for text in texts)
    return replace(last, apart=tuple(apart))


def common_prefix(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the length of the longest common prefix of two sequences."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
