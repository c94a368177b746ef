"""What fits into the model: prompts that leave room for a completion, and rows of at most `max_length` tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from psigrad.config import Data, OnlineConfig, PreferenceConfig, RewardConfig, SFTConfig
from psigrad.errors import UserError
from psigrad.language.data.dataset_rows import Row, RowError
from psigrad.language.data.posted_forms import as_turns
from psigrad.language.data.templates import prompt_for_reward, prompt_ids, said_otherwise
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.models.scalar_model import ScalarModel
from psigrad.language.rollout.types import Prompt
from psigrad.runs.journal import Journal

R = TypeVar("R")
T = TypeVar("T")


def encode_prompts(
    rows: Sequence[Row], model: LanguageModel, data: Data, completion: int, journal: Journal | None = None
) -> list[Prompt]:
    """The rows with their prompt tokens, each of which leaves room for `completion` tokens among the model's positions.

    A prompt that is empty or too long is refused by its place in the file, or left out and counted with `bad_rows: skip`.
    """
    numbered = encode_rows(list(enumerate(rows)), lambda one: (*one, prompt_ids(model.tokenizer, one[1])), data, journal)
    prompts = [Prompt(i, tuple(ids), row) for i, row, ids in numbered]
    room = model.max_length - completion
    bad = {}
    for prompt in prompts:
        tokens = len(prompt.ids)
        if not tokens:
            bad[prompt.index] = "the prompt has no tokens; give it some text, or the tokenizer a BOS token"
        elif 0 < data.max_prompt_length < tokens:
            bad[prompt.index] = (
                f"the prompt has {tokens} tokens, above max_prompt_length {data.max_prompt_length}; shorten it or raise the limit"
            )
        elif tokens > room:
            bad[prompt.index] = (
                f"the prompt has {tokens} tokens, and with max_completion_length {completion} the model's {model.max_length} "
                f"positions leave {max(0, room)}; shorten it or lower max_completion_length"
            )
    if journal is not None:
        tell_translations(model.tokenizer, rows, journal)
    kept = [prompt for prompt in prompts if prompt.index not in bad]
    if bad and (data.bad_rows == "stop" or not kept):
        first = next(iter(bad))
        more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
        raise UserError(f"{rows[first].source}: {bad[first]}, or leave such rows out with bad_rows=skip{more}.")
    if bad and journal is not None:
        text = f"{len(bad)} of {len(rows)} prompts have no tokens or too many and are left out."
        journal.tell("rows_left_out", text, longer_than_max_length=len(bad), kept=len(kept))
    return kept


def encode_rows(rows: Sequence[R], encode: Callable[[R], T], data: Data, journal: Journal | None = None) -> list[T]:
    """What `encode` makes of each row. A row that it refuses stops the run, by its place in the file, or is left out and counted
    with `bad_rows: skip`.
    """
    made: list[T] = []
    refused: list[RowError] = []
    for row in rows:
        try:
            made.append(encode(row))
        except RowError as error:
            refused.append(error)
    if refused and (data.bad_rows == "stop" or not made):
        more = f" (and {len(refused) - 1} more of {len(rows)})" if len(refused) > 1 else ""
        raise UserError(f"{str(refused[0]).rstrip('.')}{more}; or leave such rows out with bad_rows=skip.")
    if refused and journal is not None:
        text = f"{len(refused)} of {len(rows)} rows are refused and left out; the first: {refused[0]}."
        journal.tell("rows_refused", text, count=len(refused), kept=len(made), reasons=[str(error) for error in refused[:5]])
    return made


def tell_translations(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], journal: Journal) -> None:
    """Say once what the chat template has no words for and is said otherwise, of the first row with such among a hundred."""
    for row in rows[:100]:
        if notes := said_otherwise(tokenizer, row):
            text = f"The chat template has no words for some of {row.source}: {'; '.join(notes)}."
            journal.tell("said_otherwise", text, what=notes)
            return


def add_teacher_prompts(
    prompts: Sequence[Prompt], config: OnlineConfig, model: LanguageModel, reference: LanguageModel | None
) -> list[Prompt]:
    """The prompts with the tokens of what the reference reads in their place, from a column of the dataset; without a column, or
    a reference, as they are.

    Raises `UserError` for a row that has none, or one that leaves no room for a completion.
    """
    column, completion = config.teacher_prompt, config.sampling.max_completion_length
    if not column or reference is None:
        return list(prompts)
    found = []
    for prompt in prompts:
        own = prompt.row.columns.get(column)
        if not own:
            known = ", ".join(sorted(prompt.row.columns)) or "none"
            raise UserError(
                f"{prompt.row.source}: teacher_prompt is {column!r} and the row has no such column; it has {known}. Give every "
                "row the prompt that the reference reads, as text or messages like the prompt."
            )
        if isinstance(own, str) != isinstance(prompt_for_reward(prompt.row), str):
            raise UserError(f"{prompt.row.source}: prompt and {column} are text and messages; give both in the same form.")
        read = replace(prompt.row, prompt=own, plain_prompt=None)
        read = read if isinstance(prompt.row.prompt, str) else as_turns(model.tokenizer, read)
        ids = tuple(prompt_ids(model.tokenizer, read))
        if len(ids) > reference.max_length - completion:
            raise UserError(
                f"{prompt.row.source}: {column} has {len(ids)} tokens, and with max_completion_length {completion} the "
                f"reference's {reference.max_length} positions leave {max(0, reference.max_length - completion)}; shorten it."
            )
        found.append(replace(prompt, teacher_ids=ids))
    return found


def token_limit(config: SFTConfig | RewardConfig | PreferenceConfig, model: LanguageModel | ScalarModel) -> int:
    """The most tokens of a row: `max_length`, or the model's positions if they are fewer."""
    return min(config.max_length or model.max_length, model.max_length)


def name_limit(config: SFTConfig | RewardConfig | PreferenceConfig, limit: int) -> str:
    """What a `token_limit` comes from, and what to do about it."""
    if limit == config.max_length:
        return f"max_length {limit} tokens; raise it"
    return f"{limit} tokens, the model's number of positions; shorten them or take a model with more"


def check_row_count(config: RewardConfig | PreferenceConfig, limit: int, kept: int, left_out: int, journal: Journal) -> None:
    """Note how many rows have more tokens than `limit`; refuse a dataset if none is left."""
    if left_out:
        text = f"{left_out} of {left_out + kept} rows have more than {limit} tokens and are left out."
        journal.tell("rows_left_out", text, longer_than_max_length=left_out, kept=kept)
    if not kept:
        raise UserError(f"All {left_out} rows have more than {name_limit(config, limit)}.")
