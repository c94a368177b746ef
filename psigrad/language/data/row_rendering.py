"""Dataset rows rendered for display: the text of the tokens that the model reads, and which of them are trained."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from psigrad.language import images
from psigrad.language.data.dataset_rows import Row, RowError
from psigrad.language.data.pairs import encode_steps
from psigrad.language.data.templates import examples, prompt_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHOWN, _LONGEST = 3, 2000


class Segment(NamedTuple):
    """Adjacent tokens as text. The `kind` is "prompt", "trained", "masked" (no loss), or "sampled" (a completion to come)."""

    kind: str
    text: str


class RenderedRow(NamedTuple):
    """One of the texts that the model reads for a row, for display. The two answers of a preference pair are separate texts."""

    title: str
    pieces: list[Segment]


def render(tokenizer: PreTrainedTokenizerBase, row: Row, separator: str = "\n") -> list[RenderedRow]:
    """Return one `RenderedRow`, with special tokens, for each text that the model reads for `row`.

    `separator` ends each step of a stepwise row.
    """
    if row.steps:
        made = encode_steps(tokenizer, row, separator)
        first = len(prompt_ids(tokenizer, row))
        return [_render(tokenizer, row.source, made.ids, [i >= first for i in range(len(made.ids))])]
    if row.completion is None and row.messages is None:
        ids = prompt_ids(tokenizer, row)
        found = _render(tokenizer, row.source, ids, [False] * len(ids))
        return [found._replace(pieces=[*found.pieces, Segment("sampled", "(the model's completion, which is trained)")])]
    answers = {"": row} if row.rejected is None else {", chosen": row, ", rejected": replace(row, completion=row.rejected)}
    made_of = {name: examples(tokenizer, one) for name, one in answers.items()}
    return [
        _render(tokenizer, f"{row.source}{name}{f', text {n}' if len(made) > 1 else ''}", one.ids, one.mask)
        for name, made in made_of.items()
        for n, one in enumerate(made, 1)
    ]


def first_rows(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], separator: str = "\n") -> list[RenderedRow]:
    """Render the first three rows. A row that cannot be rendered has one `RenderedRow`, and its text says why."""
    found: list[RenderedRow] = []
    for row in rows[:SHOWN]:
        try:
            found += render(tokenizer, row, separator)
        except RowError as error:
            found.append(RenderedRow(row.source, [Segment("masked", f"(left out: {error})")]))
    return found


def _render(tokenizer: PreTrainedTokenizerBase, title: str, ids: Sequence[int], mask: Sequence[bool]) -> RenderedRow:
    pieces: list[Segment] = []
    for trained, group in itertools.groupby(zip(ids, mask, strict=True), key=lambda one: one[1]):
        text = images.decode(tokenizer, [token for token, _ in group], clean_up_tokenization_spaces=False)
        if len(text) > _LONGEST:
            text = f"{text[: _LONGEST // 2]} … {text[-_LONGEST // 2 :]}"
        pieces.append(Segment("trained" if trained else "masked" if pieces else "prompt", text))
    return RenderedRow(title, pieces)
