"""The first rows of a dataset as a model would read them, before any training."""

from __future__ import annotations

import sys
from typing import Any

from psigrad.config import OnlineConfig
from psigrad.language.data import rendered_rows
from psigrad.language.data.posted_forms import for_model
from psigrad.language.data.rendered_rows import Rendered
from psigrad.language.data.sources import form_of, read_dataset
from psigrad.language.loading.chat_settings import settle_chat
from psigrad.language.loading.model_source import load_tokenizer, tokenizer_path
from psigrad.language.recipes.conversation import offer_tools


def read_first_rows(config: OnlineConfig) -> list[Rendered]:
    """The first rows of the dataset in its own form, with the tools; nothing without one. What was recognised goes to stderr.

    Raises `UserError` where the tokenizer, the dataset or a tool cannot be read.
    """
    if not config.data.dataset:
        return []
    tokenizer, form = load_tokenizer(tokenizer_path(config.model)), form_of(config.data) or "prompt-only"
    settle_chat(tokenizer, config.model)
    rows = read_dataset(config.data, form, config.data.dataset, config.data.split, _say).rows
    (rows,) = for_model(tokenizer, [rows], config.data.plain_prompts, _say)
    return rendered_rows.first_rows(tokenizer, offer_tools(config, rows[: rendered_rows.SHOWN]))


def _say(kind: str, text: str, **fields: Any) -> None:
    print(f"psigrad: {text}", file=sys.stderr)
