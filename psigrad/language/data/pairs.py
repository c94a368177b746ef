"""Preference, unpaired-preference and stepwise rows as training items: `Pair`, `LabelledAnswer` and `Steps`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from psigrad.language import images
from psigrad.language.data.chat.rendering import row_error
from psigrad.language.data.dataset_rows import Row
from psigrad.language.data.templates import encode_after, examples, prompt_ids
from psigrad.language.examples import LabelledAnswer, Pair, Steps, answer_behind, pair_of, shared_prefix

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def encode_pair(tokenizer: PreTrainedTokenizerBase, row: Row, *, whole: bool = True) -> Pair:
    """Return a preference row as a `Pair`: the prompt that both answers share, and the two answers.

    If an answer becomes several texts (see `examples`) and `whole` is False, keep only the last.
    """
    own = {**row.raw_paths, "completion": row.raw_paths.get("rejected", ["rejected", 0, "content"])}
    other = replace(row, completion=row.rejected, raw_paths=own)
    sides = [examples(tokenizer, side)[0 if whole else -1 :] for side in (row, other)]
    pair = pair_of(*sides)
    if not pair.prompt:
        why = "the tokens of chosen and rejected do not begin with the same prompt"
        raise row_error(row, "", f"{why}; give the prompt in its own column, or use another tokenizer")
    margin = row.columns.get("margin")
    if margin is not None and not isinstance(margin, int | float):
        raise row_error(row, "margin", f"is {margin!r}; expected a number; remove the column if no pair has a margin")
    return pair if margin is None else replace(pair, margin=float(margin))


def encode_labelled(tokenizer: PreTrainedTokenizerBase, row: Row) -> LabelledAnswer:
    """Return an unpaired-preference row as a `LabelledAnswer`."""
    texts = examples(tokenizer, row)
    start = shared_prefix(texts)
    return LabelledAnswer(texts[0].ids[:start], answer_behind(start, texts), bool(row.label))


def encode_steps(tokenizer: PreTrainedTokenizerBase, row: Row, separator: str = "\n") -> Steps:
    """Return a stepwise row as `Steps`: the tokens of the prompt and the steps. A step without `separator` at its end gets it."""
    ids, ends = list(prompt_ids(tokenizer, row)), []
    before = row.prompt if isinstance(row.prompt, str) else images.decode(tokenizer, ids[-1:])
    for step in row.steps:
        piece = step if step.endswith(separator) else step + separator
        ids += encode_after(tokenizer, before, piece)
        ends.append(len(ids) - 1)
        before = piece
    return Steps(ids, ends, list(row.labels))


def longest_text(made: Pair | LabelledAnswer | Steps) -> int:
    """Return the number of tokens of an encoded row: its prompt with the answer; for a pair, with the longest answer text."""
    if not isinstance(made, Pair):
        return made.tokens
    return len(made.prompt) + max(len(text.ids) for side in (made.chosen, made.rejected) for text in side.texts)
