"""Strict reading of messages: content that cannot be used raises an error that names it, and is never dropped silently."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from psigrad.errors import several

Message = dict[str, Any]
Fail = Callable[[str, str], NoReturn]
"""A callback that rejects a row, given the path in the row, such as messages[0].content, and the reason."""

WEIGHTS = ("weight", "train", "loss_mask")
"""Fields that decide if an assistant's turn is trained: 1 or true, 0 or false."""
_MASK, _NUMBERS = re.compile(r"(?<!attention_)masks?$"), re.compile(r"[\[(]?\s*[\d.]")
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names of the field with an assistant's thoughts before its answer."""


def drop_nulls(value: Any) -> Any:
    """Return the value without keys that have the value null, at every depth. Arrow writes null for a row's absent keys."""
    if isinstance(value, Mapping):
        return {key: drop_nulls(inner) for key, inner in value.items() if inner is not None}
    return [drop_nulls(inner) for inner in value] if isinstance(value, list | tuple) else value


def read_message(message: Mapping[str, Any], path: str, fail: Fail) -> Message:
    """Check a message, which is at `path` in the row. Return it without nulls and with its content as one string."""
    read: Message = drop_nulls(message)
    if isinstance(read.get("content"), list):
        read["content"] = join_parts(read["content"], f"{path}.content", fail)
    for name in (name for name in WEIGHTS if name in read):
        if read[name] not in (0, 1):
            fail(f"{path}.{name}", f"is {read[name]!r}; expected 1 or true if the turn is trained, else 0 or false")
        if read[name] and read.get("role") != "assistant":
            fail(f"{path}.{name}", f"is {read[name]!r}, but only the assistant's turns are trained; set it to 0 or remove it")
    for name in (name for name in REASONING if not isinstance(read.get(name, ""), str)):
        fail(f"{path}.{name}", f"is {read[name]!r}; expected the thoughts as a string")
    calls = read.get("tool_calls")
    if calls == []:
        del read["tool_calls"]
    elif calls is not None:
        if read.get("role") != "assistant" or not isinstance(calls, list):
            fail(f"{path}.tool_calls", "is allowed only in an assistant's message, and must be a list")
        read["tool_calls"] = [_call(call, f"{path}.tool_calls[{i}]", fail) for i, call in enumerate(calls)]
    return read


def is_trained(message: Message) -> bool:
    """Return True if a turn is the assistant's and its weight is not 0."""
    return message["role"] == "assistant" and all(message.get(name, 1) for name in WEIGHTS)


def weigh_turns(messages: Any, columns: Mapping[str, Any], fail: Fail) -> Any:
    """Return the `messages` of a fine-tuning row, each with its weight if a column named in `WEIGHTS` is a list of weights.

    `messages` is None for a prompt-completion row. Call `fail` if a column of weights does not fit, or if one masks tokens.
    """
    weighed = messages
    for name, given in columns.items():
        says_nothing = given in (None, 1, "1") or (isinstance(given, str) and not _NUMBERS.match(given))
        if says_nothing or not (name in WEIGHTS or _MASK.search(name)):
            continue
        other = f"or, if the column is not a weight, rename it: --columns {name}=other"
        if not isinstance(given, list):
            fail(name, f"is {given!r}; every row has the same weight, so remove the rows that should not be trained, {other}")
        if name not in WEIGHTS or not isinstance(messages, list):
            fail(
                name,
                "looks like a mask of tokens, but psigrad makes the tokens itself; give messages, each with a weight of 0 or 1, "
                f"{other}",
            )
        if (count := len(given) - given.count(None)) != len(messages):
            both = f"{several(count, 'weight')} for {several(len(messages), 'message')}"
            fail(name, f"has {both}; give one weight per message, not one per token")
        if any(isinstance(turn, Mapping) and turn.get(name) is not None for turn in messages):
            fail(name, "is both a column and a field of the messages; keep one of them")
        weighed = [{**turn, name: one} if isinstance(turn, Mapping) else turn for turn, one in zip(weighed, given, strict=True)]
    return weighed


def check_answers(messages: list[Message], column: str, fail: Fail) -> None:
    """Check that tool answers are in the order of the previous turn's calls: templates match answers to calls by order.

    `column` is the place of the messages in the row.
    """
    open_calls: list[Any] = []
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            open_calls, first = [call.get("id") for call in message.get("tool_calls", ())], i + 1
            known = list(open_calls)
        elif message["role"] == "tool" and open_calls:
            made, own = open_calls.pop(0), message.get("tool_call_id")
            if made is not None and own is not None and made != own:
                run = itertools.takewhile(lambda turn: turn["role"] == "tool", messages[first:])
                given = [turn.get("tool_call_id") for turn in run]
                if (wrong := next((j for j, one in enumerate(given) if one not in known), None)) is not None:
                    ids = ", ".join(map(repr, known))
                    fail(
                        f"{column}[{first + wrong}].tool_call_id",
                        f"is {given[wrong]!r}, and the calls before it are {ids}; name one of them",
                    )
                where = f"{column}[{i}].tool_call_id"
                if made not in given:
                    fail(where, f"is {own!r}, and the call {made!r} has no answer; add it before this one")
                fail(where, f"is {own!r} where the answer to {made!r} is expected; put the answers into the order of the calls")


def order_answers(messages: list[Message]) -> list[Message]:
    """Return the messages, with the tool answers to a turn in the order of its calls if each answer has the id of a call."""
    ordered: list[Message] = []
    ids: list[Any] = []
    for role, run in itertools.groupby(messages, key=lambda message: message.get("role")):
        turns = list(run)
        if role == "tool" and all(turn.get("tool_call_id") in ids for turn in turns):
            turns.sort(key=lambda turn: ids.index(turn["tool_call_id"]))
        calls = turns[-1].get("tool_calls")
        ids = [call.get("id") for call in calls if isinstance(call, Mapping)] if isinstance(calls, list) else []
        ordered += turns
    return ordered


def join_parts(parts: list[Any], path: str, fail: Fail) -> str:
    """Return the joined text of content `parts`, which are at `path` in the row. Call `fail` for a part that is not text."""
    texts = []
    for i, part in enumerate(parts):
        part = {"text": part} if isinstance(part, str) else part
        kind, text = (part.get("type") or "text", part.get("text")) if isinstance(part, Mapping) else (type(part).__name__, None)
        if kind != "text":
            images = (
                "expected text, since images are not read in these rows"
                if "image" in str(kind)
                else "expected text or an image; remove sound and video"
            )
            fail(f"{path}[{i}]", f"is of type {kind!r}; {images}")
        if not isinstance(text, str):
            fail(f"{path}[{i}]", "has no text")
        texts.append(text)
    return "".join(texts)


def _call(call: object, path: str, fail: Fail) -> Message:
    """Return a tool call in OpenAI's form, but with its arguments as an object. `path` and `fail`: see `read_message`."""
    made = dict(call) if isinstance(call, Mapping) else fail(path, "must be an object with 'function'")
    function = made.pop("function", None)
    if function is None:  # the short form, {"name", "arguments"}
        function = {key: made.pop(key) for key in ("name", "arguments") if key in made}
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        fail(f"{path}.function", "must be an object with the 'name' of a function and its 'arguments'")
    arguments = {} if function.get("arguments") in (None, "") else function["arguments"]
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            fail(f"{path}.function.arguments", f"is a string that is not JSON ({error}); give an object")
    if not isinstance(arguments, Mapping):
        fail(f"{path}.function.arguments", f"is {arguments!r}; it must be an object with the arguments by name")
    return {"type": "function", **made, "function": {**function, "arguments": dict(arguments)}}
