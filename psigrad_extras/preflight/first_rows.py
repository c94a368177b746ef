"""The first rows of a dataset as a model would read them, and what rewards, tools and environments say to them, before any
training.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from psigrad import redaction
from psigrad.config import OnlineConfig
from psigrad.errors import UserError
from psigrad.language.data import rendered_rows
from psigrad.language.data.dataset_rows import Row, show
from psigrad.language.data.posted_forms import for_model
from psigrad.language.data.rendered_rows import Rendered
from psigrad.language.data.sources import form_of, from_rows, read_dataset
from psigrad.language.episodes.environments import Fault, Playing, library_of
from psigrad.language.episodes.tools import CallForm, ServerTool, ToolBox
from psigrad.language.loading.load_model import settle_chat
from psigrad.language.loading.model_source import load_tokenizer, tokenizer_path
from psigrad.language.recipes.conversation import list_tools, offer_tools, playing_for
from psigrad.language.recipes.score_rows import score
from psigrad.language.rollout.scoring import Unscored
from psigrad.records.read import show_number

# Rows that the rewards are tried on.
TRIED = 2
_COLOURS = {"prompt": "cyan", "trained": "green", "masked": "yellow", "sampled": "magenta"}
# A value of each type of a JSON schema.
_VALUES: Mapping[str, Any] = {"integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}, "null": None}


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


def lines(rendered: Iterable[Rendered]) -> Iterable[tuple[str, str]]:
    """(line, colour) for a terminal. Each line of text begins with its kind, so that nothing is lost without colours."""
    for title, pieces in rendered:
        yield title, "bold"
        for kind, text in pieces:
            for line in text.removesuffix("\n").split("\n"):
                yield f"  {kind:<7} | {line}", _COLOURS[kind]


def try_rewards(config: OnlineConfig) -> list[tuple[str, str]]:
    """What the reward functions give to the first rows, in a line each: to a row's own answer where it has one, and to "?".

    Raises `UserError` where they cannot judge a row: a wrong signature, a column that is not there, an error of their own.
    """
    if not config.data.dataset or not config.reward:
        return []
    said = [(row, text) for row in _tried_rows(config) for text in dict.fromkeys((str(row.columns.get("answer") or "?"), "?"))]
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


def try_turns(config: OnlineConfig) -> list[tuple[str, str]]:
    """What each tool answers to a call, or the environment to "?", on the first row, in a line each.

    An argument is the row's column of that name and type, or the simplest value of its type. Tools of a server are not called:
    what they do is done elsewhere. Raises `UserError` where the environment, or the process of a tool, gives no answer.
    """
    called = ToolBox([tool for tool in list_tools(config) if not isinstance(tool, ServerTool)]).parameters
    if library_of(config.environment) == "mcp" or not (config.environment or called):
        return []
    with playing_for(config, CallForm("Hermes")) as playing:
        if (row := _first_row(config, playing)) is None:
            return []
        given = {"prompt": row.dataset_prompt, **row.columns}
        turns = {f"tool {name}": _call(name, parameters, given) for name, parameters in called.items()}
        turns = turns or {"the environment": ("?", "'?'")}
        answers: list[Any] = playing.begin([given] * len(turns))
        if not any(isinstance(opening, Fault) for opening in answers):
            answers = list(playing.step({n: text for n, (text, _) in enumerate(turns.values())}).values())
    lines = []
    for (name, (_, shown)), answer in zip(turns.items(), answers, strict=True):
        if isinstance(answer, Fault):
            raise UserError(f"On {row.source} {name} gives no answer to {shown}: {answer.reason.rstrip('.')}.")
        said = answer.observation
        text = said if isinstance(said, str) else "\n".join(str(message.get("content", "")) for message in said)
        reward = "" if called else f" and the reward {show_number(answer.reward)}"
        lines.append((redaction.clear(f"{name} answers {show(text)}{reward} to {shown} on {row.source}"), ""))
    return lines


def _call(name: str, parameters: Mapping[str, Any], row: Mapping[str, Any]) -> tuple[str, str]:
    """A call of a tool without the arguments that have a default, as a model writes it and as people do."""
    asked = {key: _simplest(schema) for key, schema in parameters.items() if "default" not in schema}
    asked |= {key: row[key] for key, value in asked.items() if key in row and type(row[key]) is type(value)}
    written = f"<tool_call>{json.dumps({'name': name, 'arguments': asked})}</tool_call>"
    return written, f"({', '.join(f'{key}={show(value)}' for key, value in asked.items())})"


def _simplest(schema: Mapping[str, Any]) -> Any:
    """A value that a JSON schema allows."""
    if "enum" in schema:
        return schema["enum"][0]
    return _simplest(schema["anyOf"][0]) if "anyOf" in schema else _VALUES.get(str(schema.get("type")), "?")


def _tried_rows(config: OnlineConfig) -> list[Row]:
    """The first rows, and not a word."""
    few = replace(config.data, max_rows=config.data.max_rows or TRIED)
    form = form_of(few) or "prompt-only"
    return read_dataset(few, form, few.dataset, few.split, lambda kind, text, **fields: None).rows[:TRIED]


def _first_row(config: OnlineConfig, playing: Playing) -> Row | None:
    """The dataset's, or one that the environment brings along."""
    if config.data.dataset:
        return _tried_rows(config)[0]
    made = playing.rows(1, config.run.seed)
    return from_rows(made, "prompt-only", "environment").rows[0] if made else None
