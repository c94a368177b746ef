"""Token ids of comparisons: what a preference loss, a reward model and a process reward model train on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from psigrad.errors import UserError
from psigrad.language.data.chat.rendering import refuse
from psigrad.language.data.dataset_rows import Row
from psigrad.language.data.templates import Example, encode_after, example, examples, prompt_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Answer:
    """What follows a prompt: `ids`, and the `mask` of those that the assistant wrote (its end of turn included)."""

    ids: list[int]
    mask: list[bool]


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
        return len(self.prompt) + len(self.chosen.ids) + len(self.rejected.ids)


@dataclass(frozen=True)
class Judged:
    """A prompt with one answer that is desirable or not."""

    prompt: list[int]
    answer: Answer
    desirable: bool

    @property
    def tokens(self) -> int:
        """Tokens of one forward pass."""
        return len(self.prompt) + len(self.answer.ids)


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

    `whole` asks for every turn of an answer in one text, which a template that rewrites earlier turns cannot give.
    """
    read = _whole if whole else example
    texts = [read(tokenizer, row), read(tokenizer, replace(row, completion=row.rejected))]
    # a template may render the prompt's end differently before unlike answers: what they share is what both see
    starts = [text.mask.index(True) for text in texts]
    shared = next((i for i in range(min(starts)) if texts[0].ids[i] != texts[1].ids[i]), min(starts))
    if not shared:
        raise UserError(
            f"{row.source}: the tokens of chosen and rejected do not begin with the same prompt; give the prompt in a column of "
            "its own, or use another tokenizer."
        )
    chosen, rejected = (Answer(text.ids[shared:], text.mask[shared:]) for text in texts)
    margin = row.columns.get("margin")
    if margin is not None and not isinstance(margin, int | float):
        raise UserError(f"{row.source}: column 'margin' is {margin!r}; expected a number, or no such column.")
    return Pair(texts[0].ids[:shared], chosen, rejected, None if margin is None else float(margin))


def encode_judged(tokenizer: PreTrainedTokenizerBase, row: Row) -> Judged:
    """The text of an unpaired-preference row."""
    text = _whole(tokenizer, row)
    start = text.mask.index(True)
    return Judged(text.ids[:start], Answer(text.ids[start:], text.mask[start:]), bool(row.label))


def _whole(tokenizer: PreTrainedTokenizerBase, row: Row) -> Example:
    found = examples(tokenizer, row)
    if len(found) > 1:
        why = "has turns that the chat template rewrites once others follow, so they are no one text; give a row for each turn"
        raise refuse(row, "completion", why)
    return found[0]


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
    """Tokens of the longer text of a pair, or of the only one."""
    return len(made.prompt) + max(len(made.chosen.ids), len(made.rejected.ids)) if isinstance(made, Pair) else made.tokens
