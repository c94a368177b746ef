"""Previews before training: a dataset's first rows as the model reads them, and results of rewards, tools and environments."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from psigrad import redaction
from psigrad.config import OnlineConfig
from psigrad.errors import UserError
from psigrad.language import images
from psigrad.language.data import row_rendering
from psigrad.language.data.dataset_layouts import to_model_rows
from psigrad.language.data.dataset_rows import Row, show
from psigrad.language.data.image_rows import observation_text, to_json_row
from psigrad.language.data.row_rendering import RenderedRow
from psigrad.language.data.sources import form_of, from_rows, read_dataset
from psigrad.language.episodes.environments import Fault, Playing, library_of
from psigrad.language.episodes.tools import CallForm, ServerTool, ToolBox
from psigrad.language.images import COLUMNS
from psigrad.language.loading.load_model import configure_chat
from psigrad.language.loading.model_source import load_tokenizer, tokenizer_path
from psigrad.language.recipes.conversation import list_tools, offer_tools, start_environments
from psigrad.language.recipes.score_rows import score
from psigrad.language.recipes.scorers import describe_hidden_tokens
from psigrad.language.rollout.scoring import Unscored
from psigrad.records.read import show_number

# The number of rows for which the rewards are tried.
TRIED = 2
_COLOURS = {"prompt": "cyan", "trained": "green", "masked": "yellow", "sampled": "magenta"}
# A value of each type of a JSON schema.
_VALUES: Mapping[str, Any] = {"integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}, "null": None}


def read_first_rows(config: OnlineConfig, form: str = "") -> list[RenderedRow]:
    """Return the first rows of the dataset as the model reads them, with the tools; [] without a dataset.

    `form` is the dataset type; by default it is recognised from the rows and printed on stderr. Raises `UserError` if the
    tokenizer, the dataset or a tool cannot be read.
    """
    if not config.data.dataset:
        return []
    tokenizer, form = load_tokenizer(tokenizer_path(config.model)), form or form_of(config.data) or "prompt-only"
    configure_chat(tokenizer, config.model)
    rows = read_dataset(config.data, form, config.data.dataset, config.data.split, redaction.log).rows
    (rows,) = to_model_rows(tokenizer, [rows], config.data.plain_prompts, redaction.log)
    return row_rendering.first_rows(tokenizer, offer_tools(config, rows[: row_rendering.SHOWN]))


def lines(rendered: Iterable[RenderedRow]) -> Iterable[tuple[str, str]]:
    """Yield (line, colour) for a terminal. Each line starts with the kind of its text, so that colours are not needed."""
    for title, pieces in rendered:
        yield title, "bold"
        for kind, text in pieces:
            for line in text.removesuffix("\n").split("\n"):
                yield f"  {kind:<7} | {line}", _COLOURS[kind]


def try_rewards(config: OnlineConfig) -> list[tuple[str, str]]:
    """Call the reward functions on the first rows, and return (line, colour) for each result.

    The completions are the row's answer, if it has one, and "?". Raises `UserError` if a function cannot score a row: because of
    its signature, a missing column, or an error inside it.
    """
    if not config.data.dataset or not config.reward:
        return []
    said = [(row, text) for row in _tried_rows(config) for text in dict.fromkeys((str(row.columns.get("answer") or "?"), "?"))]
    asked = [
        _as_given({**row.columns, "prompt": row.prompt,
                  "completion": text if isinstance(row.prompt, str) else [{"role": "assistant", "content": text}]})
        for row, text in said
    ]  # fmt: skip
    how: dict[str, Any] = {"weights": config.reward_weights, "timeout": config.reward_timeout}
    lines = []
    for found, (row, text) in zip(score(config.reward, asked, tokenizer=tokenizer_path(config.model), **how), said, strict=True):
        if isinstance(found.result, Unscored):
            why = found.result.reason.rstrip(".")
            raise UserError(f"The reward did not score {row.source} ({why}); correct the reward or the row.")
        lines.append((f"reward {show_number(found.result.value)} for the answer {text[:60]!r} to {row.source}", ""))
    if text := describe_hidden_tokens(config, load_tokenizer(tokenizer_path(config.model))):
        lines.append((text, "yellow"))
    return lines


def _as_given(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a raw row with its images as reward functions get them in training: in the same column, of the same type."""
    made = to_json_row(raw)
    name = next((name for name in COLUMNS if raw.get(name)), "")
    own = raw[name] if name and isinstance(raw[name], list) else [raw[name]] if name else []
    if own and len(own) == len(made.get("images") or ()):
        kept = [new if isinstance(one, str) else one for one, new in zip(own, made.pop("images"), strict=True)]
        made[name] = kept if isinstance(raw[name], list) else kept[0]
    return made


def try_turns(config: OnlineConfig) -> list[tuple[str, str]]:
    """Call each tool once, or send "?" to the environment, on the first row. Return (line, colour) for each answer.

    An argument of a call is the row's column of that name and type, or the simplest value of its type. Tools of a server are not
    called, since they may change something elsewhere. Raises `UserError` if the environment or a tool's process does not answer.
    """
    called = ToolBox([tool for tool in list_tools(config) if not isinstance(tool, ServerTool)]).parameters
    if library_of(config.environment) == "mcp" or not (config.environment or called):
        return []
    with start_environments(config, CallForm("Hermes")) as playing:
        if (row := _first_row(config, playing)) is None:
            return []
        given = {"prompt": images.remove_marks(row.dataset_prompt), **row.columns}
        turns = {f"tool {name}": _call(name, parameters, given) for name, parameters in called.items()}
        turns = turns or {"the environment": ("?", "'?'")}
        answers: list[Any] = playing.begin([given] * len(turns))
        if not any(isinstance(opening, Fault) for opening in answers):
            answers = list(playing.step({n: text for n, (text, _) in enumerate(turns.values())}).values())
    lines = []
    for (name, (_, shown)), answer in zip(turns.items(), answers, strict=True):
        if isinstance(answer, Fault):
            raise UserError(f"On {row.source}, {name} did not answer {shown}: {answer.reason.rstrip('.')}.")
        said = observation_text(answer.observation)
        text = said if isinstance(said, str) else "\n".join(str(message.get("content", "")) for message in said)
        reward = "" if called else f" and the reward {show_number(answer.reward)}"
        lines.append(
            (redaction.clear(f"{name} answers {show(images.label_images(text))}{reward} to {shown} on {row.source}"), "")
        )
    return lines


def _call(name: str, parameters: Mapping[str, Any], row: Mapping[str, Any]) -> tuple[str, str]:
    """Return (a call of a tool without optional arguments, as a model writes it; the same call in readable form)."""
    asked = {key: _simplest(schema) for key, schema in parameters.items() if "default" not in schema}
    asked |= {key: row[key] for key, value in asked.items() if key in row and type(row[key]) is type(value)}
    written = f"<tool_call>{json.dumps({'name': name, 'arguments': asked})}</tool_call>"
    return written, f"({', '.join(f'{key}={show(value)}' for key, value in asked.items())})"


def _simplest(schema: Mapping[str, Any]) -> Any:
    """Return a value that a JSON schema allows."""
    if "enum" in schema:
        return schema["enum"][0]
    return _simplest(schema["anyOf"][0]) if "anyOf" in schema else _VALUES.get(str(schema.get("type")), "?")


def _tried_rows(config: OnlineConfig) -> list[Row]:
    """Return the dataset's first rows, without printing messages."""
    few = replace(config.data, max_rows=config.data.max_rows or TRIED)
    form = form_of(few) or "prompt-only"
    return read_dataset(few, form, few.dataset, few.split, lambda kind, text, **fields: None).rows[:TRIED]


def _first_row(config: OnlineConfig, playing: Playing) -> Row | None:
    """Return the first row of the dataset, or one that the environment provides."""
    if config.data.dataset:
        return _tried_rows(config)[0]
    made = playing.rows(1, config.run.seed)
    return from_rows(made, "prompt-only", "environment").rows[0] if made else None
