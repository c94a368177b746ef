"""The first rows of a dataset as a model would read them, before any training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from psigrad import redaction
from psigrad.config import OnlineConfig
from psigrad.errors import UserError
from psigrad.language.data import rendered_rows
from psigrad.language.data.posted_forms import for_model
from psigrad.language.data.rendered_rows import Rendered
from psigrad.language.data.sources import form_of, read_dataset
from psigrad.language.loading.load_model import settle_chat
from psigrad.language.loading.model_source import load_tokenizer, tokenizer_path
from psigrad.language.recipes.conversation import offer_tools
from psigrad.language.recipes.score_rows import score
from psigrad.language.rewards.outcomes import Unscored
from psigrad.records.read import show_number

# Rows that the rewards are tried on.
TRIED = 2


def read_first_rows(config: OnlineConfig) -> list[Rendered]:
    """The first rows of the dataset in its own form, with the tools; nothing without one. What was recognised goes to stderr.

    Raises `UserError` where the tokenizer, the dataset or a tool cannot be read.
    """
    if not config.data.dataset:
        return []
    tokenizer, form = load_tokenizer(tokenizer_path(config.model)), form_of(config.data) or "prompt-only"
    settle_chat(tokenizer, config.model)
    rows = read_dataset(config.data, form, config.data.dataset, config.data.split, redaction.tell).rows
    (rows,) = for_model(tokenizer, [rows], config.data.plain_prompts, redaction.tell)
    return rendered_rows.first_rows(tokenizer, offer_tools(config, rows[: rendered_rows.SHOWN]))


def try_rewards(config: OnlineConfig) -> list[tuple[str, str]]:
    """What the reward functions give to the first rows, in a line each: to a row's own answer where it has one, and to "?".

    Raises `UserError` where they cannot judge a row: a wrong signature, a column that is not there, an error of their own.
    """
    if not config.data.dataset or not config.reward:
        return []
    few = replace(config.data, max_rows=config.data.max_rows or TRIED)
    form = form_of(few) or "prompt-only"
    rows = read_dataset(few, form, few.dataset, few.split, lambda kind, text, **fields: None).rows[:TRIED]
    said = [(row, text) for row in rows for text in dict.fromkeys((str(row.columns.get("answer") or "?"), "?"))]
    asked = [
        {**row.columns, "prompt": row.prompt,
         "completion": text if isinstance(row.prompt, str) else [{"role": "assistant", "content": text}]}
        for row, text in said
    ]  # fmt: skip
    how: dict[str, Any] = {"weights": config.reward_weights, "timeout": config.reward_timeout}
    lines = []
    for found, (row, text) in zip(score(config.reward, asked, tokenizer=tokenizer_path(config.model), **how), said, strict=True):
        if isinstance(found.result, Unscored):
            raise UserError(f"The reward cannot judge {row.source}: {found.result.reason.rstrip('.')}.")
        lines.append((f"reward {show_number(found.result.value)} for the answer {text[:60]!r} to {row.source}", ""))
    return lines
