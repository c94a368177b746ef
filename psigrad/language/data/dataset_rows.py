"""Checked rows of datasets. A row is checked once, so all other modules can trust the content of a `Row`.

The forms and their columns are TRL's (docs/source/dataset_formats.md). `FORMS` lists them.
"""

from __future__ import annotations

import contextlib
import json
import math
import numbers
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from psigrad.errors import UserError, nearest
from psigrad.language.data.chat.messages import Message, check_answers, read_message, weigh_turns
from psigrad.language.examples import common_prefix

ROLES = ("system", "developer", "user", "assistant", "tool")

# Every reward function gets these keyword arguments; a column of that name would be passed twice.
_TAKEN = ("prompts", "completions")
_FOREIGN_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "ai": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "observation": "tool",
}
_LABELS = {"true": True, "false": False, "1": True, "0": False}
MAX_DEPTH = 100
"""The maximum depth of nested lists and objects in a column. Deeper ones could exhaust the stack of JSON's and pickle's code."""
_KINDS = {"NoneType": "null", "int": "a number", "float": "a number", "str": "a string", "dict": "an object", "list": "a list"}


@dataclass(frozen=True)
class Row:
    """One checked row. `source` is its file, and its line or row number from 1, as in "my.jsonl:12".

    The form decides which fields are set. `completion` is the answer (of a preference pair, the chosen one), or a text without a
    prompt. `columns` holds all other columns, for reward functions. `plain_prompt` is the original of a prompt that `to_turns`
    changed.
    """

    source: str
    prompt: str | list[Message] | None = None
    completion: str | list[Message] | None = None
    messages: list[Message] | None = None
    rejected: str | list[Message] | None = None
    label: bool | None = None
    steps: tuple[str, ...] = ()
    labels: tuple[float, ...] = ()
    columns: dict[str, Any] = field(default_factory=dict)
    plain_prompt: str | None = None
    raw_paths: dict[str, list[Any]] = field(default_factory=dict, compare=False)
    """Column -> [its name in the file, the number to add to a turn's index, the file's key for a turn's content], if they differ.
    """

    @property
    def dataset_prompt(self) -> Any:
        """The prompt as the dataset has it, for reward functions, environments and display."""
        return self.prompt if self.plain_prompt is None else self.plain_prompt

    def raw_path(self, path: str) -> str:
        """Translate a path in the row to the names in the file, such as messages[0].content to conversations[0].value."""
        name, index, rest = re.fullmatch(r"([^[.]*)(?:\[(\d+)\])?(.*)", path, re.DOTALL).groups()  # type: ignore[union-attr]
        if name not in self.raw_paths:
            return "chosen" + path.removeprefix(name) if name == "completion" and self.rejected is not None else path
        own, further, content = self.raw_paths[name]
        if not index or int(index) + further < 0:
            return str(own) if not index else path
        return f"{own}[{int(index) + further}]{f'.{content}' if rest == '.content' else rest}"


@dataclass(frozen=True)
class BadRow:
    """A rejected row and the reason. `column` is "" if the whole row is at fault."""

    source: str
    column: str
    reason: str

    def __str__(self) -> str:
        return f"{self.source}: column {show(self.column)} {self.reason}" if self.column else f"{self.source}: {self.reason}"


class RowError(UserError):
    """An error for a row that cannot be used; `bad` has its source, the column and the reason."""

    def __init__(self, bad: BadRow) -> None:
        super().__init__(str(bad))
        self.bad = bad


def show(value: object, limit: int = 60) -> str:
    """Return `repr(value)` in at most `limit` characters, safe to print: lone surrogates and control characters are escaped."""
    text = repr(value)
    text = text if len(text) <= limit else text[: limit - 1] + "…"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def validate(raw: object, form: str, source: str, *, empty: bool = False) -> Row:
    """Check a raw row and return it as a `Row`. Raise `RowError` if it is invalid.

    `form` is a key of `FORMS`, or "sft". With `empty`, a turn without content is valid.
    """
    check = _Check(source, empty)
    if not isinstance(raw, Mapping):
        check.fail("", f"is {_kind(raw)}; a row must be an object with named columns")
    for name in raw:
        if not isinstance(name, str):
            check.fail("", f"has the column name {show(name)}; names must be strings")
    kind = FORMS[_choose_for_sft(check, raw) if form == "sft" else form]
    columns = {name: value for name, value in raw.items() if name not in kind.columns}
    check.columns(columns, for_rewards=kind.for_rewards)
    _refuse_several_missing(check, raw, kind.needs)
    if form in ("sft", "messages", "prompt-completion"):
        messages = raw.get("messages") if kind is FORMS["messages"] else None
        if (weighed := weigh_turns(messages, columns, check.fail)) is not messages:
            raw = {**raw, "messages": weighed}
    return Row(source, columns=columns, **kind.fields(check, raw))


def rows_of(raw: object, form: str, source: str) -> list[Row]:
    """Return the checked rows of a raw row: one, or the two labelled answers of a pair if the form is unpaired-preference."""
    is_pair = isinstance(raw, Mapping) and raw.get("completion") is None and {"chosen", "rejected"} <= raw.keys()
    if form != "unpaired-preference" or not is_pair:
        return [validate(raw, form, source)]
    pair = validate(raw, "preference", source)
    return [
        replace(pair, completion=answer, rejected=None, label=answer is pair.completion)
        for answer in (pair.completion, pair.rejected)
    ]


def find_form(raw: object) -> str:
    """Return the first form of `FORMS` that a raw row fits; empty if it fits none. Forms with more columns come first."""
    for form in FORMS:
        with contextlib.suppress(RowError):
            validate(raw, form, "row")
            return form
    return ""


def role_of(message: Mapping[str, Any]) -> str:
    """Return the role of a message, with ShareGPT's names (human, gpt) translated to psigrad's; empty if it has none."""
    if "role" in message or "from" not in message:
        return str(message.get("role") or "")
    return _FOREIGN_ROLES.get(str(message["from"]).lower(), str(message["from"]).lower())


def column_names(rows: Iterable[Row]) -> list[str]:
    """Return the names of the rows' extra columns (`Row.columns`), sorted alphabetically."""
    return sorted({name for row in rows for name in row.columns})


def name_columns(raw: Mapping[str, Any]) -> str:
    """Return the names of a row's columns, at most twelve, as text for an error message."""
    return ", ".join(show(name)[1:-1] for name in list(raw)[:12]) or "none"


def _refuse_several_missing(check: _Check, raw: Mapping[str, Any], needs: Sequence[str]) -> None:
    """Raise one `RowError` for all missing columns of `needs` if there are several. A later check reports a single one."""
    first, *others = [name for name in needs if name not in raw] or [""]
    if others:
        are = "are" if others[1:] else "is"
        check.fail(first, f"is missing, and so {are} {' and '.join(others)} (found: {name_columns(raw)})")


def _choose_for_sft(check: _Check, raw: Mapping[str, Any]) -> str:
    """Return the form that "sft" stands for in this row: prompt-completion or messages."""
    if not raw.keys() & {"prompt", "completion", "messages", "text"}:
        what = "is missing, and so are messages and text; sft learns from prompt and completion, from messages or from text"
        check.fail("prompt", f"{what} (found: {name_columns(raw)})")
    present = {name for name in raw if raw[name] is not None}
    if "prompt" in present and "completion" in present:
        return "prompt-completion"
    return "messages" if present & {"messages", "text"} else "prompt-completion"


def _prompt(check: _Check, raw: Mapping[str, Any]) -> dict[str, Any]:
    return {"prompt": check.prompt(raw)}


def _completion(check: _Check, raw: Mapping[str, Any]) -> dict[str, Any]:
    prompt = check.prompt(raw)
    return {"prompt": prompt, "completion": check.completion(raw, prompt)}


def _messages(check: _Check, raw: Mapping[str, Any]) -> dict[str, Any]:
    if raw.get("messages") is None and raw.get("text") is not None:
        return {"completion": check.text(raw["text"], "text", "a string")}
    return {"messages": check.messages(raw)}


def _pair(check: _Check, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a preference row. Without a prompt, the answers' common beginning is the prompt, as in TRL."""
    if raw.get("prompt") is None:
        raw = {**raw, **_split_prompt(check, raw)}
    prompt = check.prompt(raw)
    chosen, rejected = check.completion(raw, prompt, "chosen"), check.completion(raw, prompt, "rejected")
    if chosen == rejected:
        check.fail("rejected", "is the same as chosen, so the pair teaches nothing; remove such rows")
    return {"prompt": prompt, "completion": chosen, "rejected": rejected}


def _split_prompt(check: _Check, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Split the common beginning off `chosen` and `rejected` as the `prompt`. Raise `RowError` if there is none."""
    chosen, rejected = check.present(raw, "chosen"), check.present(raw, "rejected")
    if type(chosen) is not type(rejected) or not isinstance(chosen, str | list):
        check.fail("rejected", f"is {_kind(rejected)} and chosen is {_kind(chosen)}; both must be strings or lists of messages")
    at = common_prefix(chosen, rejected)
    if isinstance(chosen, str) and at and chosen[at - 1] == " ":
        at -= 1  # the space before a word belongs to the word's token
    if not at:
        check.fail(
            "prompt",
            "is missing, and chosen and rejected have no common beginning to take as the prompt; give the prompt in its own "
            "column",
        )
    return {"prompt": chosen[:at], "chosen": chosen[at:], "rejected": rejected[at:]}


def _label(check: _Check, raw: Mapping[str, Any]) -> dict[str, Any]:
    made, value = _completion(check, raw), check.present(raw, "label")
    if isinstance(value, str):  # a cell of CSV
        value = _LABELS.get(value.strip().lower(), value)
    if not isinstance(value, bool) and value not in (0, 1):
        check.fail("label", f"is {show(value)}; it must be true (desirable) or false")
    return {**made, "label": bool(value)}


def _steps(check: _Check, raw: Mapping[str, Any]) -> dict[str, Any]:
    steps, labels = check.present(raw, "completions"), check.present(raw, "labels")
    for column, value in (("completions", steps), ("labels", labels)):
        if not isinstance(value, list) or not value:
            check.fail(column, f"is {_kind(value)}; it must be a list with one entry per step")
    if len(steps) != len(labels):
        check.fail("labels", f"has {len(labels)} entries for {len(steps)} steps; give one per step")
    for i, label in enumerate(labels):
        if not isinstance(label, bool | int | float) or not 0 <= label <= 1:
            check.fail(f"labels[{i}]", f"is {show(label)}; it must be true, false or a number between 0 and 1")
    texts = tuple(check.text(step, f"completions[{i}]", "a string") for i, step in enumerate(steps))
    prompt = check.text(check.present(raw, "prompt"), "prompt", "a string")
    return {"prompt": prompt, "steps": texts, "labels": tuple(map(float, labels))}


@dataclass(frozen=True)
class Form:
    """A form of rows, such as preference. A row must have the columns `needs`. `fields` turns `columns` into fields of `Row`."""

    columns: tuple[str, ...]
    fields: Callable[[_Check, Mapping[str, Any]], dict[str, Any]]
    needs: tuple[str, ...] = ()
    for_rewards: bool = False
    """True if reward functions get all other columns. Then no column may have the name of an argument of reward functions."""


# A row that fits several forms gets the first of them. As in TRL, reward functions get no `completion` from the dataset: that
# name belongs to the sampled completion.
FORMS = {
    "preference": Form(("prompt", "chosen", "rejected"), _pair, ("chosen", "rejected")),
    "unpaired-preference": Form(("prompt", "completion", "label"), _label, ("prompt", "completion", "label")),
    "stepwise": Form(("prompt", "completions", "labels"), _steps, ("prompt", "completions", "labels")),
    "prompt-completion": Form(("prompt", "completion"), _completion, ("prompt", "completion")),
    "messages": Form(("messages", "text"), _messages),
    "prompt-only": Form(("prompt", "completion"), _prompt, for_rewards=True),
}


def _kind(value: object) -> str:
    name = type(value).__name__
    return _KINDS.get(name, f"of type {name}")


@dataclass(frozen=True)
class _Check:
    """The checks of one row. Every method returns the valid value or raises RowError."""

    source: str
    empty: bool = False
    """True if a turn may have no content."""

    def fail(self, column: str, reason: str) -> NoReturn:
        raise RowError(BadRow(self.source, column, reason))

    def present(self, raw: Mapping[str, Any], column: str) -> Any:
        if column not in raw:
            self.fail(column, f"is missing (found: {name_columns(raw)}{nearest(column, raw)})")
        if raw[column] is None:
            self.fail(column, "is empty (null); it must be a string or a list of messages")
        return raw[column]

    def text(self, value: object, column: str, expected: str = "a string or a list of messages") -> str:
        if not isinstance(value, str):
            self.fail(column, f"is {_kind(value)}; it must be {expected}")
        if not value:
            self.fail(column, "is an empty string")
        return value

    def prompt(self, raw: Mapping[str, Any]) -> str | list[Message]:
        value = self.present(raw, "prompt")
        if not isinstance(value, list):
            return self.text(value, "prompt")
        turns = self.turns(value, "prompt")
        last = turns[-1]
        # an assistant turn at the end is the beginning of the answer, which the model continues
        if last["role"] not in ("user", "tool") and not (last["role"] == "assistant" and len(turns) > 1 and last.get("content")):
            self.fail("prompt", f"ends with the role {last['role']!r}; the turn before the model's must be 'user' or 'tool'")
        return turns

    def completion(self, raw: Mapping[str, Any], prompt: str | list[Message], column: str = "completion") -> str | list[Message]:
        value = self.present(raw, column)
        if isinstance(value, list) != isinstance(prompt, list):
            both = "both must be strings or both lists of messages"
            self.fail(column, f"is {_kind(value)} and prompt is {_kind(prompt)}; {both}")
        if not isinstance(value, list):
            return self.text(value, column)
        turns = self.turns(value, column, before="user")
        for index in (0, -1):
            if turns[index]["role"] != "assistant":
                where = "starts" if index == 0 else "ends"
                self.fail(column, f"{where} with the role {turns[index]['role']!r}; it must start and end with 'assistant'")
        return turns

    def messages(self, raw: Mapping[str, Any]) -> list[Message]:
        turns = self.turns(self.present(raw, "messages"), "messages")
        roles = [turn["role"] for turn in turns]
        if "assistant" not in roles:
            self.fail("messages", "has no assistant turn, so there is nothing to learn from")
        if roles[0] == "assistant":
            self.fail("messages[0]", "is an assistant's turn; a system or user turn must come before it")
        return turns

    def turns(self, value: object, column: str, before: str = "") -> list[Message]:
        if not isinstance(value, list):
            self.fail(column, f"is {_kind(value)}; it must be a list of messages")
        if not value:
            self.fail(column, "is an empty list")
        turns = [self.turn(message, f"{column}[{i}]") for i, message in enumerate(value)]
        for i, role in enumerate(turn["role"] for turn in turns):
            if role == "tool" and before not in ("assistant", "tool"):
                self.fail(f"{column}[{i}]", f"is a tool's answer after {before or 'nothing'}; only an assistant can call a tool")
            before = role
        check_answers(turns, column, self.fail)
        return turns

    def turn(self, message: object, path: str) -> Message:
        if not isinstance(message, Mapping):
            self.fail(path, f"is {_kind(message)}; a message must be an object with 'role' and 'content'")
        if "role" not in message and "from" in message and "value" in message:
            rest = {key: value for key, value in message.items() if key not in ("from", "value")}
            message = {"role": role_of(message), "content": message["value"], **rest}
            if message["role"] == "function_call":  # LLaMA-Factory's form: the value is a call, or a list of calls
                message = {"role": "assistant", "content": "", **rest, "tool_calls": self._calls(message["content"], path)}
        if (depth := _depth(message)) > MAX_DEPTH:
            self.fail(path, f"is nested {depth} levels deep; at most {MAX_DEPTH} are read")
        turn = read_message(message, path, self.fail)
        role = turn.get("role")
        if not isinstance(role, str) or role not in ROLES:
            guess = _FOREIGN_ROLES.get(role, "") if isinstance(role, str) else ""
            hint = f"; did you mean {guess!r}?" if guess else nearest(str(role), ROLES)
            self.fail(f"{path}.role", f"is {show(role)}; it must be one of {', '.join(ROLES)}{hint}")
        calls = turn.get("tool_calls")
        content = turn.get("content", "")
        if "content" not in turn and not calls:
            self.fail(f"{path}.content", "is missing or null")
        if not isinstance(content, str):
            self.fail(f"{path}.content", f"is {_kind(content)}; it must be a string, or a list of content parts of text")
        if not content and role in ("user", "assistant") and not calls and not self.empty:
            self.fail(f"{path}.content", "is an empty string")
        return turn

    def _calls(self, value: object, path: str) -> list[Any]:
        try:
            read = json.loads(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(f"{path}.value", f"is a function_call that is not JSON ({error}); it must be {{'name': …, 'arguments': …}}")
        return read if isinstance(read, list) else [read]

    def columns(self, columns: Mapping[str, Any], *, for_rewards: bool) -> None:
        for name, value in columns.items():
            if (depth := _depth(value)) > MAX_DEPTH:
                self.fail(name, f"is nested {depth} levels deep; at most {MAX_DEPTH} are read, so flatten or remove the value")
            if for_rewards and name in _TAKEN:
                self.fail(name, "has a name that reward functions use for another argument; rename the column")
            for path, number in _numbers(name, value):
                if not math.isfinite(number):
                    self.fail(path, f"is {float(number)}; numbers must be finite (use null for a missing one)")
        self.tools(columns.get("tools"))
        kwargs = columns.get("chat_template_kwargs") or {}
        if not isinstance(kwargs, Mapping):
            self.fail("chat_template_kwargs", f"is {_kind(kwargs)}; it must be an object")
        if kwargs.get("tools") is not None:
            self.fail("chat_template_kwargs.tools", "is not read; give the tools in a column named tools")

    def tools(self, value: object) -> None:
        try:
            value = json.loads(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail("tools", f"is a string that is not JSON ({error}); it must be a list of tool schemas")
        if value is not None and not isinstance(value, list):
            self.fail("tools", f"is {_kind(value)}; it must be a list of tool schemas")
        for i, tool in enumerate(value or ()):
            if not isinstance(tool, Mapping):
                self.fail(f"tools[{i}]", f"is {_kind(tool)}; a tool is an object, its JSON schema")


def _depth(value: object) -> int:
    """Return the number of levels of lists and objects, without recursion, since rows may be nested as deep as JSON allows."""
    depth, level = 0, [value]
    while level := [x for x in level if isinstance(x, Mapping | list | tuple)]:
        depth += 1
        level = [inner for x in level for inner in (x.values() if isinstance(x, Mapping) else x)]
    return depth


def _numbers(name: str, value: object) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of every float in a column, such as ("margin[0]", 0.5) in the column margin."""
    stack: list[tuple[str, object]] = [(name, value)]
    while stack:
        path, item = stack.pop()
        if isinstance(item, numbers.Real) and not isinstance(item, numbers.Rational):
            yield path, item
        elif isinstance(item, Mapping):
            stack += [(f"{path}.{key}", inner) for key, inner in item.items()]
        elif isinstance(item, list | tuple):
            stack += [(f"{path}[{i}]", inner) for i, inner in enumerate(item)]
