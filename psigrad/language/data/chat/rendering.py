"""Conversations rendered as text by the chat template, with the template arguments of the run and of the row."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import TYPE_CHECKING, Any

from psigrad.errors import UserError, reason_of
from psigrad.language import images
from psigrad.language.data.chat.limits import compile_template, limit_rendering
from psigrad.language.data.chat.messages import Message, drop_nulls
from psigrad.language.data.dataset_rows import BadRow, Row, RowError, show

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RENDER_SETTINGS = "psigrad_render_settings"


@dataclass(frozen=True)
class RenderSettings:
    """A run's settings for a tokenizer: template arguments, the date that templates print, and the number of embeddings."""

    kwargs: Mapping[str, Any] = field(default_factory=dict)
    today: date | None = None
    rows: int = 0
    """The number of rows of the model's embedding; 0 if unknown."""


def set_render_settings(tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Any], today: date, rows: int = 0) -> None:
    """Set the template arguments and the date of all later renderings, and `rows`, the number of embeddings (0: unknown)."""
    setattr(tokenizer, RENDER_SETTINGS, RenderSettings(dict(kwargs), today, rows))


def check_embedded(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> None:
    """Raise `UserError` if the model has no embedding for one of the tokens `ids`."""
    rows = getattr(tokenizer, RENDER_SETTINGS, RenderSettings()).rows
    if rows and (worst := max((token for token in ids if token < images.FIRST), default=0)) >= rows:
        raise UserError(
            f"The token {tokenizer.convert_ids_to_tokens(worst)!r} has the id {worst}, but the model's embedding has only {rows} "
            "rows: tokens were added to the tokenizer, but not to the model. Call model.resize_token_embeddings(len(tokenizer)) "
            "and save the model and the tokenizer, or use the model's own tokenizer and template."
        )


def day_of(tokenizer: PreTrainedTokenizerBase) -> date:
    """Return the date that templates print: the date set by `set_render_settings`, or today."""
    settled: RenderSettings = getattr(tokenizer, RENDER_SETTINGS, RenderSettings())
    return settled.today or date.today()


def reads_clock(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return True if a template of the tokenizer reads the clock."""
    return "strftime_now" in json.dumps(tokenizer.chat_template)


def arguments_of(tokenizer: PreTrainedTokenizerBase, row: Row) -> dict[str, Any]:
    """Return the template arguments for a row: those of the run, overridden by those of the row, and the row's `tools`."""
    settled: RenderSettings = getattr(tokenizer, RENDER_SETTINGS, RenderSettings())
    return {**settled.kwargs, **drop_nulls(row.columns.get("chat_template_kwargs") or {}), "tools": tools_of(row)}


def tools_of(row: Row) -> list[Any] | None:
    """Return the tools of a row (a list, or its JSON text) without nulls, or None if there are no tools."""
    # Parquet adds nulls to objects. An empty list makes Llama's template write its tool preamble.
    tools = row.columns.get("tools")
    return drop_nulls(json.loads(tools) if isinstance(tools, str) else tools) or None


def template_of(tokenizer: PreTrainedTokenizerBase, row: Row, arguments: Mapping[str, Any]) -> str:
    """Return the source of the chat template for a row with the template `arguments`. Raise `UserError` if there is none."""
    try:
        return tokenizer.get_chat_template(arguments.get("chat_template"), arguments["tools"])
    except ValueError:
        raise UserError(
            f"{row.source} is a conversation, but the tokenizer has no chat template; name a Jinja file with "
            "--chat-template-path, set tokenizer.chat_template (psigrad.language.data.templates.CHATML is a simple template), or "
            "give prompts and completions as plain strings."
        ) from None


def render(
    tokenizer: PreTrainedTokenizerBase,
    arguments: Mapping[str, Any],
    messages: Sequence[Message],
    *,
    generation_prompt: bool = False,
) -> str:
    """Render `messages` by the chat template with the template `arguments`. Raise whatever the template raises.

    The messages must be in a form that the template understands; see `dialect.rewrite`.
    """
    template = tokenizer.get_chat_template(arguments.get("chat_template"), arguments["tools"])
    with limit_rendering(template):
        _set_clock(tokenizer, template)
        made: Any = tokenizer.apply_chat_template(
            list(messages), **{**arguments, "tokenize": False, "add_generation_prompt": generation_prompt}
        )
    return images.insert_marks(str(made), messages, images.image_format_of(tokenizer))[0]


def generation_blocks(tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any], messages: Sequence[Message]) -> Any:
    """Return (the text of the messages, the spans of characters that the `{% generation %}` blocks of the template wrote)."""
    # apply_chat_template's mask can begin before a turn, and may lack the turns after one that starts with a space.
    from transformers.utils.chat_template_utils import render_jinja_template

    template = tokenizer.get_chat_template(arguments.get("chat_template"), arguments["tools"])
    given: dict[str, Any] = {**tokenizer.special_tokens_map, **arguments, "chat_template": template}
    said = [{name: value for name, value in message.items() if value is not None} for message in messages]
    with limit_rendering(template):
        _set_clock(tokenizer, template)
        rendered: Any = render_jinja_template([said], return_assistant_tokens_mask=True, **given)
    text, moves = images.insert_marks(rendered[0][0], messages, images.image_format_of(tokenizer))
    return text, [[place + sum(more for at, more in moves if at < place) for place in span] for span in rendered[1][0]]


def row_error(row: Row, path: str, why: str) -> RowError:
    """Return an error for a row that the template cannot render: `why`, with the file, the line and the `path` in the row."""
    return RowError(BadRow(row.source, row.raw_path(path), why))


def reject_placeholder(tokenizer: PreTrainedTokenizerBase, row: Row, *texts: Any) -> None:
    """Raise `RowError` if one of the texts contains the placeholder that marks an image in rendered text."""
    image_format = images.image_format_of(tokenizer)
    if image_format is not None and any(image_format.placeholder in str(text) for text in texts):
        raise row_error(
            row, "", f"has the text {image_format.placeholder!r}, which marks the place of an image; remove it from the text"
        )


def template_error(row: Row, error: Exception) -> RowError:
    """Return a `RowError` for an error of the template, which is a program and can raise anything."""
    reason = f"{type(error).__name__}: {show(str(error), 200)}"
    return row_error(row, "", f"the chat template can't render the row ({reason}); fix the row or the template")


def _set_clock(tokenizer: PreTrainedTokenizerBase, template: str) -> None:
    """Make the function `strftime_now` of templates return the run's day.

    transformers passes only plain data to templates, so the function is replaced in the compiled template's globals.
    """
    if "strftime_now" not in template:
        return

    def strftime_now(form: str) -> str:
        return day_of(tokenizer).strftime(form)

    compile_template(template).environment.globals["strftime_now"] = strftime_now


def without_panic(encode: Callable[[Any], Any], text: str | list[str]) -> Any:
    """Return `encode(text)`. Raise `UserError` if the tokenizer's Rust code panics.

    Rather than hang, the code panics if a regular expression needs over 10 million steps (about 0.1 s) at one character.
    """
    try:
        return encode(text)
    except BaseException as error:  # the class is a BaseException, and cannot be imported
        if type(error).__name__ != "PanicException":
            raise
        raise UserError(
            f"The tokenizer cannot encode {show(text if isinstance(text, str) else text[0])} ({reason_of(error)}); "
            "remove such texts, or use another tokenizer."
        ) from error
