"""A conversation as text: the chat template with its arguments, those of the run and those of the row."""

from __future__ import annotations

import inspect
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import TYPE_CHECKING, Any, Protocol

from psigrad.errors import UserError
from psigrad.language.data.chat.messages import REASONING, Message, without_nulls
from psigrad.language.data.dataset_rows import BadRow, Row, RowError, show

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SETTLED = "psigrad_settled"


@dataclass(frozen=True)
class Settled:
    """What a run settles for every rendering of a tokenizer: arguments of its template, and the date that it prints."""

    kwargs: Mapping[str, Any] = field(default_factory=dict)
    today: date | None = None
    rows: int = 0
    """Rows of the model's embedding; 0: unknown."""


def settle(tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Any], today: date, rows: int = 0) -> None:
    """Render with these arguments from now on, where a row does not say otherwise, and on this day; `rows` are those of the
    model's embedding.
    """
    setattr(tokenizer, SETTLED, Settled(dict(kwargs), today, rows))


def check_known(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> None:
    """Refuse tokens that the model has no embedding for."""
    rows = getattr(tokenizer, SETTLED, Settled()).rows
    if rows and ids and (worst := max(ids)) >= rows:
        raise UserError(
            f"The token {tokenizer.convert_ids_to_tokens(worst)!r} has the id {worst}, and the model's embedding {rows} rows: "
            "the tokenizer was given tokens that the model was not. Call model.resize_token_embeddings(len(tokenizer)) and save "
            "both, or take the model's own tokenizer and template."
        )


def day_of(tokenizer: PreTrainedTokenizerBase) -> date:
    """The day that templates print: the one settled, or today."""
    settled: Settled = getattr(tokenizer, SETTLED, Settled())
    return settled.today or date.today()


def prints_date(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a template of the tokenizer reads the clock."""
    return "strftime_now" in json.dumps(tokenizer.chat_template)


def arguments_of(tokenizer: PreTrainedTokenizerBase, row: Row) -> dict[str, Any]:
    """What the template is given besides the messages: the run's arguments, the row's over them, and its tools."""
    settled: Settled = getattr(tokenizer, SETTLED, Settled())
    return {**settled.kwargs, **without_nulls(row.columns.get("chat_template_kwargs") or {}), "tools": tools_of(row)}


def tools_of(row: Row) -> list[Any] | None:
    """The tools of a row, a list or JSON text of one, without the nulls with which Parquet fills objects; None where there are
    none, since a list of no tools makes Llama's template write its tool preamble.
    """
    tools = row.columns.get("tools")
    return without_nulls(json.loads(tools) if isinstance(tools, str) else tools) or None


def template_of(tokenizer: PreTrainedTokenizerBase, row: Row, arguments: Mapping[str, Any]) -> str:
    """The text of the template that renders a row."""
    try:
        return tokenizer.get_chat_template(arguments.get("chat_template"), arguments["tools"])
    except ValueError:
        raise UserError(
            f"{row.source} is a conversation and the tokenizer has no chat template; set tokenizer.chat_template or "
            "name a file with one with --chat-template-path (psigrad.language.data.templates.CHATML is a simple one), or give "
            "prompts and completions as plain strings."
        ) from None


def render(
    tokenizer: PreTrainedTokenizerBase,
    arguments: Mapping[str, Any],
    messages: Sequence[Message],
    *,
    generation_prompt: bool = False,
) -> str:
    """The text of messages that the template understands (`dialect.speak`). Raises whatever the template raises."""
    _set_clock(tokenizer, arguments)
    made: Any = tokenizer.apply_chat_template(
        list(messages), **{**arguments, "tokenize": False, "add_generation_prompt": generation_prompt}
    )
    return str(made)


class Rendering(Protocol):
    """`render`, or one that gives the same."""

    def __call__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        arguments: Mapping[str, Any],
        messages: Sequence[Message],
        *,
        generation_prompt: bool = False,
    ) -> str:
        """See `render`."""
        ...


def compiled(tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any], probes: Sequence[Sequence[Message]]) -> Rendering:
    """`render` of a template without what transformers does anew at every call; `render` itself where the two differ on the
    `probes`, where a tokenizer renders in a way of its own, and where a template reads the clock.
    """
    from transformers import PreTrainedTokenizerBase
    from transformers.utils import chat_template_utils as utils

    text = tokenizer.get_chat_template(arguments.get("chat_template"), arguments["tools"])
    own = type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template
    plain, alias = getattr(utils, "_plain_template_data", None), getattr(utils, "_alias_reasoning_fields", None)
    options = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters.keys() - {"chat_template", "tools"}
    if own or plain is None or alias is None or options & arguments.keys() or "strftime_now" in text:
        return render
    try:
        template = utils._compile_jinja_template(text)
    except Exception:  # it is no Jinja, as whoever renders it says
        return render
    given = {**tokenizer.special_tokens_map, **plain(dict(arguments)), "documents": None}
    given.pop("chat_template", None)

    def rendered(
        tokenizer: PreTrainedTokenizerBase,
        arguments: Mapping[str, Any],
        messages: Sequence[Message],
        *,
        generation_prompt: bool = False,
    ) -> str:
        if not messages:  # transformers refuses it
            return render(tokenizer, arguments, messages, generation_prompt=generation_prompt)
        # a template sees plain data alone; nearly all messages are nothing else
        said = [m if all(type(v) is str for v in m.values()) else plain(_without_none(m)) for m in messages]
        said = alias(said) if any(name in m for m in said for name in REASONING) else said
        tools = arguments["tools"] and plain(arguments["tools"])
        return str(template.render(**{**given, "messages": said, "tools": tools, "add_generation_prompt": generation_prompt}))

    return rendered if all(_alike(rendered, tokenizer, arguments, one) for one in probes) else render


def _alike(
    other: Rendering, tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any], messages: Sequence[Message]
) -> bool:
    """Whether `render` and another rendering give the same for messages, with the generation prompt and without it."""
    found = []
    for way, prompt in itertools.product((render, other), (False, True)):
        try:
            found.append(way(tokenizer, arguments, messages, generation_prompt=prompt))
        except Exception as error:  # a template is a program: it can raise anything
            found.append(f"{type(error)}: {error}")
    return found[:2] == found[2:]


def _without_none(message: Message) -> Message:
    return {name: value for name, value in message.items() if value is not None}


def generation_blocks(tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any], messages: Sequence[Message]) -> Any:
    """(the text of the messages, the spans of characters in it that the template's `{% generation %}` blocks wrote).

    `apply_chat_template(return_assistant_tokens_mask=True)` is not used: it lets tokens merge across the start of a turn, and
    where a tokenizer trims offsets it loses every turn after one that starts with a space.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    template = tokenizer.get_chat_template(arguments.get("chat_template"), arguments["tools"])
    given: dict[str, Any] = {**tokenizer.special_tokens_map, **arguments, "chat_template": template}
    _set_clock(tokenizer, arguments)
    said = [*map(_without_none, messages)]
    rendered: Any = render_jinja_template([said], return_assistant_tokens_mask=True, **given)
    return rendered[0][0], rendered[1][0]


def refuse(row: Row, what: str, why: str) -> RowError:
    """A row that the template cannot say: it alone is refused, by file, line and place."""
    return RowError(BadRow(row.source, row.place_of(what), why))


def refusal(row: Row, error: Exception) -> RowError:
    """What a template raised; it is a program, and can raise anything."""
    reason = f"{type(error).__name__}: {show(str(error), 200)}"
    return refuse(row, "", f"the chat template can't render the row ({reason}); mend the row or the template")


def _set_clock(tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any]) -> None:
    """Let `strftime_now` be the run's day. transformers gives templates plain data alone, so the clock is set where it stands."""
    template = tokenizer.get_chat_template(arguments.get("chat_template"), arguments["tools"])
    if "strftime_now" not in template:
        return
    from transformers.utils.chat_template_utils import _compile_jinja_template

    def strftime_now(form: str) -> str:
        return day_of(tokenizer).strftime(form)

    _compile_jinja_template(template).environment.globals["strftime_now"] = strftime_now
