"""Common dataset layouts, such as ShareGPT and Alpaca, converted to the columns of `dataset_rows`, and plain prompts to turns."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from psigrad.errors import UserError, nearest, several
from psigrad.language.data.chat.dialect import specials_of
from psigrad.language.data.chat.messages import WEIGHTS, Message, join_parts
from psigrad.language.data.dataset_rows import BadRow, Row, RowError, name_columns, role_of, show
from psigrad.language.examples import common_prefix

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Log = Callable[..., None]
ANSWERS = ("completion", "chosen", "rejected")
SYSTEM = ("system", "system_prompt")
_FIELD = re.compile(r"\{\{|\}\}|\{([^{}]+)\}")
_COPY = re.compile(r"\{([^{}]+)\}")
_PROMPT_NAMES = ("question", "problem", "query", "instruction", "input", "user")
_ANSWER_NAMES = ("answer", "final_answer", "solution", "ground_truth", "target", "response", "output")


def map_columns(raw: Mapping[str, Any], columns: Mapping[str, str], source: str) -> dict[str, Any]:
    """Return the row with columns renamed, copied or combined as `columns` says.

    {"question": "prompt"} renames a column, {"new": "{old}"} copies one, and {"prompt": "{question} Think."} makes one from
    others. "a.b" reads the entry b of the object in column a. In a template, {{ and }} stand for braces.
    """
    row = dict(raw)

    def at(name: str) -> Any:
        value: Any = raw
        for part in [name] if name in raw else name.split("."):
            value = value[part] if isinstance(value, Mapping) and part in value else _MISSING
        return value

    def fill(found: re.Match[str]) -> str:
        if found[1] is None:
            return found[0][0]
        value = at(found[1])
        if value is None or value == "" or isinstance(value, Mapping | list):
            _fail(
                source,
                found[1],
                "is empty, but columns builds text from it"
                if value is None or value == ""
                else f"is {show(value)}; a template takes text and numbers",
            )
        return str(value)

    renamed = {name: new for name, new in columns.items() if not is_template(new)}
    if len(twice := [name for name, new in renamed.items() if list(columns.values()).count(new) > 1]) > 1:
        raise UserError(f"The columns {', '.join(twice)} are all renamed to {columns[twice[0]]}; rename only one of them.")
    if both := next((name for name, new in renamed.items() if is_template(columns.get(new, ""))), ""):
        new = columns[both]
        raise UserError(f"--columns makes {new!r} twice: from {both!r} and from the template {columns[new]!r}; remove one.")
    asked = [*renamed, *(name for text in columns.values() if is_template(text) for name in _FIELD.findall(text) if name)]
    if absent := [name for name in asked if at(name) is _MISSING]:
        name, wanted = absent[0], renamed.get(absent[0], "")
        turned = f"; to rename {wanted!r} write {wanted}={name}" if wanted in raw else nearest(name, raw)
        nor = "".join(f", nor is {show(other)}" for other in absent[1:])
        _fail(source, name, f"is named in columns but is not in the row{nor} (found: {name_columns(raw)}{turned})")
    made = {new: at(name) for name, new in renamed.items()}
    for name, text in ((name, text) for name, text in columns.items() if is_template(text)):
        copied = _COPY.fullmatch(text) if name != "prompt" else None
        made[name] = at(copied[1]) if copied else _FIELD.sub(fill, text)
    return {**{name: value for name, value in row.items() if name not in renamed}, **made}


_MISSING = object()


def is_template(text: str) -> bool:
    """Return True if a value of `columns` is a template that makes a column from others: "{question} Think.", for example."""
    return any(found[1] is not None for found in _FIELD.finditer(text))


def translate(raw: Mapping[str, Any], form: str, source: str) -> tuple[dict[str, Any], list[str]]:
    """Convert the row `raw` to the columns of the dataset form `form`. Return (the row, a note on each recognised layout).

    `form` is a key of `dataset_rows.FORMS`, or "sft". Errors name `source`.
    """
    row, found = dict(raw), []
    for step in (_conversations, _alpaca, _split_messages, _unify_kinds, _system_turn):
        if said := step(row, form, source):
            found.append(said)
    return row, found


def to_raw_path(raw: Mapping[str, Any], row: Mapping[str, Any], column: str) -> str:
    """Return the place in `raw` of the path `column` in the translated `row`: conversations[0].from for messages[0].role."""
    name, index, rest = re.fullmatch(r"([^[.]*)(?:\[(\d+)\])?(.*)", column, re.DOTALL).groups()  # type: ignore[union-attr]
    if index and row.get("prompt") is None and "chosen" in row:  # the prompt is the common beginning of both answers
        shift = 0 if name == "prompt" else common_prefix(row["chosen"], row["rejected"])
        name, index = "chosen" if name == "prompt" else name, str(int(index) + shift)
    value = row.get(name)
    turn = value[int(index)] if index and isinstance(value, list) and int(index) < len(value) else None
    if turn is None:
        same = (own for own in raw if name not in raw and value is not None and raw[own] is value)
        return next((f"{own}{column.removeprefix(name)}" for own in same), column)
    lists = [own for own in (name, *raw) if isinstance(raw.get(own), list)]
    at = next((f"{own}[{i}]" for own in lists for i, held in enumerate(raw[own]) if held is turn), f"{name}[{index}]")
    if isinstance(turn, Mapping) and "role" not in turn and "from" in turn:
        rest = re.sub(r"^\.(role|content)", lambda found: {"role": ".from", "content": ".value"}[found[1]], rest)
    return at + rest


def to_raw_paths(raw: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the value of `Row.raw_paths`: for each column of the translated `row` its place in `raw`, if that differs."""
    found: dict[str, list[Any]] = {}
    # the prompt is the common beginning of both answers
    split = row.get("prompt") is None and isinstance(row.get("chosen"), list)
    shared = common_prefix(row["chosen"], row["rejected"]) if split else 0
    for name, read in (("messages", "messages"), ("prompt", "prompt"), ("completion", "completion"), *_PAIR):
        last = len(row[name]) - 1 - shared if isinstance(row.get(name), list) else -1
        own = re.fullmatch(r"(.*)\[(\d+)\]\.(\w+)", to_raw_path(raw, row, f"{name}[{last}].content")) if last >= 0 else None
        if own is not None and own[0] != f"{read}[{last}].content":
            found[read] = [own[1], int(own[2]) - last, own[3]]
    return found


_PAIR = (("chosen", "completion"), ("rejected", "rejected"))


def _conversations(row: dict[str, Any], form: str, source: str) -> str:
    """Rename ShareGPT's column `conversations` or `conversation` to `messages` in `row`. Return a note for the log, or ""."""
    for name in ("conversations", "conversation"):
        if isinstance(row.get(name), list) and row[name] and row.get("messages") is None and row.get("prompt") is None:
            row["messages"] = row.pop(name)
            return f"{name} is read as messages"
    return ""


def _alpaca(row: dict[str, Any], form: str, source: str) -> str:
    asked = row.get("instruction")
    answered = row.get("output") is not None or row.get("chosen") is not None
    if not isinstance(asked, str) or not answered or any(row.get(name) is not None for name in ("prompt", "messages")):
        return ""
    asked += f"\n\n{row['input']}" if row.get("input") else ""
    history = row.get("history") or []
    if not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in history):
        _fail(source, "history", "must be a list of pairs, each a question and its answer")
    turns = [turn for question, answer in history for turn in (_turn("user", question), _turn("assistant", answer))]
    row["prompt"] = [*turns, _turn("user", asked)] if turns else asked
    if row.get("output") is not None and row.get("completion") is None:
        row["completion"] = row["output"]
    return "instruction, input and output (Alpaca) are read as prompt and completion"


def _split_messages(row: dict[str, Any], form: str, source: str) -> str:
    """Split the row's `messages` into its prompt and last answer. Return a note for the log, or "" if nothing is split.

    Do nothing if the dataset type `form` itself has a column `messages`.
    """
    said = row.get("messages")
    if form in ("sft", "messages", "stepwise") or not isinstance(said, list) or not said or row.get("prompt") is not None:
        return ""
    own = _answers(row, form)
    if form == "preference" and not own:
        return ""
    ends = isinstance(said[-1], Mapping) and role_of(said[-1]) == "assistant" and not own and len(said) > 1
    row["prompt"] = said[:-1] if ends else said
    if ends:
        row["completion"] = said[-1:]
    return "the messages before the last answer are read as the prompt" if ends else "messages are read as the prompt"


def _unify_kinds(row: dict[str, Any], form: str, source: str) -> str:
    """If the prompt or the answers are messages, convert the others to messages, and remove the prompt from the answers.

    `form`: see `translate`. Errors name `source`. Return a note for the log, or "".
    """
    prompt, names = row.get("prompt"), _answers(row, form)
    row |= {name: [row[name]] for name in names if isinstance(row[name], Mapping)}
    lists = [row[name] for name in names if isinstance(row[name], list)]
    if isinstance(prompt, list) and prompt:
        begin = {name: turns for name in names if isinstance(turns := row[name], list) and turns[: len(prompt)] == prompt}
        row |= {name: turns[len(prompt) :] for name, turns in begin.items()}
        texts = {name: [_turn("assistant", row[name])] for name in names if isinstance(row[name], str) and row[name]}
        row |= texts
        return (
            "the answers are text, and become messages like the prompt"
            if texts
            else "the answers begin with the prompt, which is removed from them"
            if begin
            else ""
        )
    if not isinstance(prompt, str) or not lists or len(lists) < len(names):
        return ""
    # In ultrafeedback_binarized, the prompt is text, and the answers are conversations that begin with it.
    lead = _common_lead(lists)
    users = [_text_of(turn, source) for turn in lists[0] if isinstance(turn, Mapping) and role_of(turn) == "user"]
    if users and prompt.strip() not in users:
        _fail(source, "prompt", f"is text, but {names[0]} has no user's turn with this text; remove or correct the column")
    row["prompt"] = lead if users else [*lead, _turn("user", prompt)]
    row |= {name: turns[len(lead) :] for name, turns in zip(names, lists, strict=True)}
    return "the prompt is text, and becomes messages like the answers"


def _system_turn(row: dict[str, Any], form: str, source: str) -> str:
    """Insert the text of a system column as the first turn of the row's conversations. Return a note for the log, or "".

    `form`: see `translate`. Errors name `source`.
    """
    name, text = system_of(row)
    if not text or form == "stepwise":
        return ""
    talks = form == "messages" or (form == "sft" and row.get("completion") is None and row.get("messages") is not None)
    places = ["messages"] if talks else ["prompt"] if row.get("prompt") is not None else _answers(row, form)
    lists = [place for place in places if isinstance(row.get(place), list) and row[place] and isinstance(row[place][0], Mapping)]
    for place in lists:
        first = row[place][0]
        if role_of(first) not in ("system", "developer"):
            row[place] = [_turn("system", text), *row[place]]
            row |= {weights: [0, *row[weights]] for weights in WEIGHTS if isinstance(row.get(weights), list)}
        elif _text_of(first, source) != text.strip():
            _fail(source, name, f"and the first turn of {place} are two system turns that differ; keep one of them")
    return f"{name} is read as the system turn" if lists or (places == ["prompt"] and isinstance(row["prompt"], str)) else ""


def system_of(row: Mapping[str, Any]) -> tuple[str, str]:
    """Return (name, text) of the column with the system turn; two empty strings if there is none."""
    return next(((n, row[n]) for n in SYSTEM if isinstance(row.get(n), str) and row[n].strip()), ("", ""))


def suggest_columns(raw: Mapping[str, Any], form: str) -> str:
    """Return a hint for an error message: `--columns` with the likely prompt and answer columns, or "" if none are found."""
    found = next((name for name in _PROMPT_NAMES if isinstance(raw.get(name), str)), "")
    if not found or "prompt" in raw:
        return ""
    wanted = {"prompt-only": "answer", "sft": "completion", "prompt-completion": "completion"}.get(form, "")
    answer = next((name for name in _ANSWER_NAMES if raw.get(name) is not None), "")
    more = f",{answer}={wanted}" if wanted and answer and wanted not in raw else ""
    return f"; to read another column as the prompt give --columns {found}=prompt{more}"


def to_model_rows(
    tokenizer: PreTrainedTokenizerBase | None, parts: Sequence[Sequence[Row]], plain_prompts: bool, log: Log | None = None
) -> list[list[Row]]:
    """Return the parts of the data, such as training and held-out rows, with every row converted by `to_turns`.

    Log whether prompts go to the model as chat turns or as plain text. For a server's model, pass None as the tokenizer.
    """
    made = [[to_turns(tokenizer, row, plain_prompts) for row in part] for part in parts]
    rows = [row for part in made for row in part]
    sent = [isinstance(row.prompt, list) for row in rows if row.plain_prompt is not None or isinstance(row.prompt, str)]
    begun = sum(isinstance(row.prompt, list) and row.prompt[-1]["role"] == "assistant" for row in rows)
    if log is not None and begun:
        log(
            "prefill",
            f"{several(begun, 'prompt', 'ends', 'end')} with an assistant's turn, which the model continues.",
            count=begun,
        )
    if log is not None and sent and (_has_template(tokenizer) or not plain_prompts):
        turns, rest = sum(sent), len(sent) - sum(sent)
        why = "plain_prompts is set" if plain_prompts else "the prompts hold special tokens, as rendered text does"
        why = why if _has_template(tokenizer) else "the tokenizer has no chat template"
        said = several(turns, "plain prompt", "is sent as a user turn", "are sent as user turns")
        text = f"{said} of the chat template; --plain-prompts sends them unchanged."
        said = several(rest, "plain prompt", "is sent unchanged", "are sent unchanged")
        told = ([text] if turns else []) + ([f"{said}: {why}."] if rest else [])
        log("prompt_form", " ".join(told), user_turns=turns, plain=rest)
    return made


def to_turns(tokenizer: PreTrainedTokenizerBase | None, row: Row, plain_prompts: bool = False) -> Row:
    """Return the row with its plain prompt as a user turn and its plain answers as assistant turns.

    The prompt stays plain if `plain_prompts` is True, the tokenizer has no chat template, or the prompt has special tokens.
    """
    if not isinstance(row.prompt, str) or row.plain_prompt is not None:
        return row
    _, system = system_of(row.columns)
    was_rendered = tokenizer is not None and specials_of(tokenizer).pattern.search(row.prompt)
    if plain_prompts or not _has_template(tokenizer) or was_rendered:
        return replace(row, prompt=f"{system}\n\n{row.prompt}", plain_prompt=row.prompt) if system else row
    asked = _turn("user", row.prompt.rstrip("\n") or row.prompt)
    turns = [*([_turn("system", system)] if system else []), asked]
    answer, worse = _answer(row.completion), _answer(row.rejected)
    return replace(row, prompt=turns, completion=answer, rejected=worse, plain_prompt=row.prompt)


def _has_template(tokenizer: PreTrainedTokenizerBase | None) -> bool:
    return tokenizer is None or bool(tokenizer.chat_template)


def _answer(answer: str | list[Message] | None) -> list[Message] | None:
    return [_turn("assistant", answer)] if isinstance(answer, str) else answer


def _turn(role: str, content: Any) -> Message:
    return {"role": role, "content": content}


def _text_of(turn: Mapping[str, Any], source: str) -> str:
    content = turn.get("content", turn.get("value"))
    return str(join_parts(content, "content", partial(_fail, source)) if isinstance(content, list) else content).strip()


def _common_lead(answers: Sequence[Sequence[Any]]) -> list[Any]:
    """Return the common first turns of the conversations `answers`; for one conversation, the turns before its first answer."""
    lead: list[Any] = []
    for turns in itertools.islice(zip(*answers, strict=False), min(map(len, answers)) - 1):
        is_answer = isinstance(turns[0], Mapping) and role_of(turns[0]) == "assistant"
        if (is_answer and len(answers) == 1) or any(turn != turns[0] for turn in turns):
            break
        lead.append(turns[0])
    return lead


def _answers(row: Mapping[str, Any], form: str) -> list[str]:
    """Return the columns of `ANSWERS` that the row has and the dataset form `form` reads; see `translate`."""
    names = {"prompt-only": (), "preference": ANSWERS[1:], "unpaired-preference": ANSWERS}.get(form, ANSWERS[:1])
    return [name for name in names if row.get(name) is not None]


def _fail(source: str, column: str, reason: str) -> NoReturn:
    raise RowError(BadRow(source, column, reason))
