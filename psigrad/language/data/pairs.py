"""Token ids of comparisons: what a preference loss, a reward model and a process reward model train on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from psigrad.language.data.chat.rendering import refuse
from psigrad.language.data.dataset_rows import Row, alike
from psigrad.language.data.templates import Example, encode_after, examples, prompt_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Answer:
    """What follows a prompt: `ids`, and the `mask` of those that the assistant wrote (its end of turn included).

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


def encode_pair(tokenizer: PreTrainedTokenizerBase, row: Row, *, whole: bool = True) -> Pair:
    """The two texts of a preference row, behind the prompt that they share. Plain answers end with EOS.

    `whole` asks for every turn of an answer, of which a template that rewrites earlier turns makes several texts; else the last
    text alone is read. Raises `RowError` where there is no such prompt, or the margin is no number.
    """
    own = {**row.places, "completion": row.places.get("rejected", ["rejected", 0, "content"])}
    other = replace(row, completion=row.rejected, places=own)
    sides = [examples(tokenizer, side)[0 if whole else -1 :] for side in (row, other)]
    pair = pair_of(*sides)
    if not pair.prompt:
        why = "the tokens of chosen and rejected do not begin with the same prompt"
        raise refuse(row, "", f"{why}; give the prompt in a column of its own, or use another tokenizer")
    margin = row.columns.get("margin")
    if margin is not None and not isinstance(margin, int | float):
        raise refuse(row, "margin", f"is {margin!r}; expected a number, or no such column")
    return pair if margin is None else replace(pair, margin=float(margin))


def pair_of(chosen: Sequence[Example], rejected: Sequence[Example]) -> Pair:
    """The texts of two answers, behind what all of them begin with."""
    shared = _shared([*chosen, *rejected])
    return Pair(chosen[0].ids[:shared], _behind(shared, chosen), _behind(shared, rejected))


def encode_judged(tokenizer: PreTrainedTokenizerBase, row: Row) -> Judged:
    """The text of an unpaired-preference row."""
    texts = examples(tokenizer, row)
    start = _shared(texts)
    return Judged(texts[0].ids[:start], _behind(start, texts), bool(row.label))


def _shared(texts: Sequence[Example]) -> int:
    """Tokens that all texts begin with alike, before the first that is trained: a template may render a prompt's end otherwise
    before another answer.
    """
    return min([text.mask.index(True) for text in texts] + [alike(texts[0].ids, text.ids) for text in texts[1:]])


def _behind(start: int, texts: Sequence[Example]) -> Answer:
    *apart, last = (Answer(text.ids[start:], text.mask[start:]) for text in texts)
    return replace(last, apart=tuple(apart))


def encode_steps(tokenizer: PreTrainedTokenizerBase, row: Row, separator: str = "\n") -> Steps:
    """The tokens of a stepwise row: prompt, then every step with `separator` behind it."""
    ids, ends = list(prompt_ids(tokenizer, row)), []
    before = row.prompt if isinstance(row.prompt, str) else str(tokenizer.decode(ids[-1:]))
    for step in row.steps:
        piece = step if step.endswith(separator) else step + separator
        ids += encode_after(tokenizer, before, piece)
        ends.append(len(ids) - 1)
        before = piece
    return Steps(ids, ends, list(row.labels))


def longest(made: Pair | Judged | Steps) -> int:
    """Tokens of the longest text of a pair, or of all that a prompt has with its only answer."""
    if not isinstance(made, Pair):
        return made.tokens
    return len(made.prompt) + max(len(text.ids) for side in (made.chosen, made.rejected) for text in side.texts)
