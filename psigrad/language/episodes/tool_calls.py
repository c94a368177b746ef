"""How each family of models writes a tool call, and reading it back, broken or not.

Reading is linear in the text: from each mark of a call on it is read once, and of a turn `MOST_CALLS` are read.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MOST_CALLS = 64
"""Calls of one turn that are run; those behind them get one answer that says so."""
DEEPEST = 64
"""Levels that the arguments may be nested."""
SHOWN = 40
"""Characters that an error shows of what the policy wrote."""


@dataclass(frozen=True)
class ToolCall:
    """A call that could be read. Whether there is such a tool, and whether it takes these arguments, is not known yet."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class BrokenCall:
    """What is wrong with a call that could not be read, as the policy is told."""

    reason: str


# Of each tool its parameters, and of each of them its JSON schema: by it a value without quotes is text or a number.
Parameters = Mapping[str, Mapping[str, Any]]
Reader = Callable[[str, int, Parameters], tuple[list[ToolCall], int]]
Value = Callable[[str, int], tuple[Any, int]]


class CallError(ValueError):
    """A call cannot be read."""


@dataclass(frozen=True)
class CallFamily:
    """One form of tool calls: the marks before and behind a call, and who reads what is between."""

    name: str
    models: str
    """Some that write it."""
    opens: str
    shown: str
    """A call between the marks, for errors and the documentation."""
    closes: str
    read: Reader
    """The calls from a place of the text on, and where they end. Raises `CallError`."""
    bare: bool = False
    """A turn that is only a JSON object, without the marks, is a call too."""
    behind_words: bool = False
    """Such an object is a call behind words, too, if it has arguments and the name of a tool that is offered."""
    thought: str = "</think>"
    """What ends the thinking; what is called before it is not meant."""
    lead: str = ""
    """What stands before the mark in an example, and is not asked for."""

    @property
    def example(self) -> str:
        """A call with its marks."""
        return f"{self.lead}{self.opens}{self.shown}{self.closes}"

    def calls(self, text: str, parameters: Parameters) -> list[ToolCall | BrokenCall]:
        """The calls of a turn, in order."""
        _, ended, behind = text.partition(self.thought)
        found = list(self._read_marked(behind if ended else text, parameters))
        if not found and self.bare:
            found = list(_read_bare((behind if ended else text).strip(), parameters, self.shown))
        if not found and self.behind_words and not any(family.opens in text for family in FAMILIES):
            found = list(_read_behind_words(behind if ended else text, parameters))
        if len(found) > MOST_CALLS:
            found[MOST_CALLS:] = [BrokenCall(f"only the first {MOST_CALLS} calls of a turn are run")]
        return found

    def _read_marked(self, text: str, parameters: Parameters) -> Iterator[ToolCall | BrokenCall]:
        at, count = text.find(self.opens), 0
        while at >= 0 and count <= MOST_CALLS:
            begin, count = at + len(self.opens), count + 1
            try:
                read, end = self.read(text, begin, parameters)
                at = _expect(text, end, self.closes)
                yield from read
            except CallError as error:
                yield BrokenCall(f"{error}; write a call as {self.example}")
                at = text.find(self.closes, begin) if self.closes else -1
            at = text.find(self.opens, at) if at >= 0 else at


_BEGIN = re.compile(r"[{\[]")
_GAP, _SEPARATOR = re.compile(r"[^\s]"), re.compile(r"[^\s;]")
_TOO_DEEP = f"the arguments are nested more than {DEEPEST} deep"


def finite(number: str) -> float:
    """A number with a point or an exponent as JSON has it; NaN, Infinity and what is beyond a float are none."""
    if not math.isfinite(value := float(number)):
        raise ValueError(f"{number[:SHOWN]} is no number in JSON")
    return value


_DECODER = json.JSONDecoder(parse_float=finite, parse_constant=finite)


def _show(text: str, at: int = 0) -> str:
    return repr(text[at : at + SHOWN]) if at < len(text) else "the end"


def _skip(text: str, at: int, gap: re.Pattern[str] = _GAP) -> int:
    found = gap.search(text, at)
    return found.start() if found else len(text)


def _expect(text: str, at: int, mark: str) -> int:
    """Where the text goes on behind white space and a mark."""
    at = _skip(text, at) if mark else at
    if not text.startswith(mark, at):
        raise CallError(f"expected {mark} and found {_show(text, at)}")
    return at + len(mark)


def _json(text: str, at: int) -> tuple[Any, int]:
    try:
        value, end = _DECODER.raw_decode(text, _skip(text, at))
    except RecursionError:
        raise CallError(_TOO_DEEP) from None
    except ValueError as error:  # JSONDecodeError, or a number of more digits than Python reads
        where = f" at {_show(text, error.pos)}" if isinstance(error, json.JSONDecodeError) else ""
        raise CallError(f"it is not JSON ({getattr(error, 'msg', error)}{where})") from None
    level, depth = [value], 0
    while level:
        inner = [list(x.values()) if isinstance(x, dict) else x for x in level if isinstance(x, dict | list)]
        level, depth = [x for values in inner for x in values], depth + 1
        if depth > DEEPEST + 2:  # a list of calls, and a call
            raise CallError(_TOO_DEEP)
    return value, end


def to_calls(value: Any) -> Iterator[ToolCall]:
    """The calls of one JSON object, or of a list of them; arguments may be JSON in a string, as OpenAI's are."""
    for item in value if isinstance(value, list) else [value]:
        call = item.get("function", item) if isinstance(item, dict) else item
        if not isinstance(call, dict):
            raise CallError(f"a call is an object with name and arguments, and this is {_show(repr(item))}")
        name = call.get("name", call.get("tool_name"))
        arguments: Any = next((call[key] for key in ("arguments", "parameters") if call.get(key) is not None), {})
        if isinstance(arguments, str):
            arguments, _ = _json(arguments, 0)
        if not isinstance(name, str):
            raise CallError("the name is missing" if name is None else f"the name is {_show(repr(name))} and must be text")
        if not isinstance(arguments, dict):
            raise CallError(f"the arguments of {_show(name)} are {_show(repr(arguments))} and must be an object")
        yield ToolCall(name, arguments)


def _list_of(value: Value = _json) -> Reader:
    """{"name": …, "arguments": {…}}, or a list of such objects."""

    def read(text: str, at: int, parameters: Parameters) -> tuple[list[ToolCall], int]:
        found, end = value(text, at)
        return list(to_calls(found)), end

    return read


_objects = _list_of()


def _objects_or(other: Reader) -> Reader:
    begin = re.compile(r"\s*(?:\[\s*)?\{")
    return lambda text, at, parameters: (_objects if begin.match(text, at) else other)(text, at, parameters)


def _read_bare(text: str, parameters: Parameters, example: str) -> Iterator[ToolCall | BrokenCall]:
    """Objects with nothing around them, `;` between them."""
    at = 0 if '"name"' in text else len(text)
    while text.startswith(("{", "["), at):
        try:
            value, at = _json(text, at)
            items = value if isinstance(value, list) else [value]
            yield from to_calls([item for item in items if not _is_answer(item, parameters)])
        except CallError as error:
            yield BrokenCall(f"{error}; write a call as {example}")
            return
        at = _skip(text, at, _SEPARATOR)


def _read_behind_words(text: str, parameters: Parameters) -> Iterator[ToolCall | BrokenCall]:
    """Yield the first call of an offered tool behind words, and those right behind it.

    What is inside other JSON is no call, nor what stands behind a tag: an unknown form of calls.
    """
    at = 0 if text.lstrip()[:1] not in ("{", "[") else len(text)
    for _ in range(MOST_CALLS):  # a text of braces alone would take the square of its length
        if (found := _BEGIN.search(text, at)) is None or "<" in text[: found.start()]:
            return
        try:
            value, at = _json(text, found.start())
        except CallError:
            at = found.end()
            continue
        if isinstance(value, dict) and {"arguments", "parameters"} & set(value) and value.get("name") in parameters:
            yield from _read_bare(text[found.start() :], parameters, "")
            return


def _is_answer(item: Any, parameters: Parameters) -> bool:
    """Whether an object is the policy's answer, which happens to be JSON: it names no tool and has no arguments."""
    if not isinstance(item, dict) or {"arguments", "parameters"} & set(item):
        return not isinstance(item, dict)
    named = item.get("name") if {"name", "tool_name", "function"} & set(item) else ""
    return isinstance(named, str) and named not in parameters


def _name_then(header: str, value: Value = _json, footer: str = "") -> Reader:
    """A name, as the first group of `header`, and an object of arguments behind it."""
    head, foot = re.compile(r"\s*" + header), re.compile(rf"(?:{footer})?")

    def read(text: str, at: int, parameters: Parameters) -> tuple[list[ToolCall], int]:
        found = head.match(text, at)
        if found is None:
            raise CallError(f"expected the name of a tool and found {_show(text, at)}")
        arguments, at = value(text, found.end())
        ended = foot.match(text, at)
        return list(to_calls({"name": found[1], "arguments": arguments})), ended.end() if ended else at

    return read


def _tags_of(header: str, parameter: str, ends: str, closes: str = "") -> Reader:
    """Names and arguments in tags; `ends` closes an argument, `closes` a call. There may be several calls."""
    head, key = re.compile(r"\s*" + header), re.compile(r"\s*" + parameter)

    def read(text: str, at: int, parameters: Parameters) -> tuple[list[ToolCall], int]:
        calls: list[ToolCall] = []
        while len(calls) <= MOST_CALLS and (called := head.match(text, at)):
            name, at = called[1], called.end()
            arguments: dict[str, Any] = {}
            while found := key.match(text, at):
                if (end := text.find(ends, found.end())) < 0:
                    raise CallError(f"the argument {_show(found[1])} does not end with {ends}")
                arguments[found[1]] = _to_type(text[found.end() : end], parameters.get(name, {}).get(found[1], {}))
                at = end + len(ends)
            at = _expect(text, at, closes)
            calls.append(ToolCall(name, arguments))
        if not calls:
            raise CallError(f"expected the name of a tool and found {_show(text, at)}")
        return calls, at

    return read


def _to_type(text: str, schema: Mapping[str, Any]) -> Any:
    """An argument without quotes: as it stands where the tool takes text, else what it is as JSON, where it is that."""
    text = text.removeprefix("\n").removesuffix("\n")
    schema = schema if isinstance(schema, Mapping) else {}  # true is a schema too
    kinds = [part.get("type") for part in (schema, *schema.get("anyOf", ())) if isinstance(part, Mapping)]
    flat = {kind for each in kinds for kind in (each if isinstance(each, list) else [each])}
    if "string" in flat and not (text in ("null", "None") and ("null" in flat or schema.get("nullable"))):
        return text
    try:
        value, end = _json(_CONSTANTS.get(text, text), 0)
    except CallError:
        return text
    return text if text[end:].strip() and text not in _CONSTANTS else value


_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
# Text in the quotes of Gemma, then of Python and JSON; a name before its arguments, a key, another word; what ends arguments.
# Text whose quotes are never closed goes on to the end: tried again from each quote in it, it would take quadratic time.
_LOOSE = re.compile(
    r"""<\|"\|>(?P<raw>(?:[^<]|<(?!\|"\|>))*)(?:<\|"\|>)?|(?P<quote>['"])(?P<text>(?:\\.|(?!(?P=quote))[^\\])*)(?P=quote)?"""
    r"""|(?P<name>[^\W\d][\w.-]*)(?:(?P<call>\()|\s*(?P<key>[=:]))?|(?P<end>\))""",
    re.DOTALL,
)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"'}


def _as_json(found: re.Match[str]) -> str:
    if found["raw"] is not None:
        return json.dumps(found["raw"])
    if found["text"] is not None:
        return json.dumps(re.sub(r"\\(.)", lambda x: _ESCAPES.get(x[1], x[0]), found["text"], flags=re.DOTALL))
    if found["call"]:
        return f'{{"name": {json.dumps(found["name"].removesuffix(".call"))}, "arguments": {{'
    return "}}" if found["end"] else f'"{found["name"]}":' if found["key"] else _CONSTANTS.get(found["name"], found["name"])


def _until(closes: str) -> Value:
    """Up to a mark, what Python or Gemma write: either quote, `<|"|>` or none around keys, True, [name(key=value)]."""

    def read(text: str, at: int) -> tuple[Any, int]:
        end = text.find(closes, at) if closes else len(text)
        if end < 0:
            raise CallError(f"it does not end with {closes}")
        written = _LOOSE.sub(_as_json, text[at:end])
        value, stop = _json(written, 0)
        if written[stop:].strip():
            raise CallError(f"expected {closes or 'the end'} and found {_show(written, stop)}")
        return value, end

    return read


_OBJECT, _TAG = '{"name": "add", "arguments": {"a": 1}}', "</tool_call>"
_GEMMA = _name_then(r"call:([\w.-]+)", _until("<tool_call|>"))
_HARMONY = _name_then(r"([\w.-]+)[^<{]*(?:<\|(?:constrain|channel)\|>[^<{]*){0,2}<\|message\|>")
_LFM2, _LLAMA = _objects_or(_list_of(_until("<|tool_call_end|>"))), _objects_or(_list_of(_until("")))
_MISTRAL = _objects_or(_name_then(r"([^\s\[\]{}]+)(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?"))
_DEEPSEEK = _name_then(r"(?:function<｜tool▁sep｜>)?([\w.-]+)(?:<｜tool▁sep｜>|\s*```json)", footer=r"\s*```")
_KIMI = _name_then(r"(?:functions\.)?([\w.-]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>")
_QWEN = _tags_of(r"<function=([^>\n]+)>", r"<parameter=([^>\n]+)>", "</parameter>", "</function>")
_GLM = _tags_of(r"([^<\s]+)", r"<arg_key>([^<\n]+)</arg_key>\s*<arg_value>", "</arg_value>")
_MUSE = _tags_of(r'<atem:invoke name="([^"\n]+)">', r'<atem:parameter name="([^"\n]+)">', "</atem:parameter>", "</atem:invoke>")
_MINIMAX = _tags_of(r'<invoke name="([^"\n]+)">', r'<parameter name="([^"\n]+)">', "</parameter>", "</invoke>")
_XML = "<function=add><parameter=a>1</parameter></function>"
_KEYS = "add<arg_key>a</arg_key><arg_value>1</arg_value>"
_CHANNEL = 'add <|constrain|>json<|message|>{"a": 1}<|call|>'
_INVOKE = '<{0}invoke name="add"><{0}parameter name="a">1</{0}parameter></{0}invoke>'
_ACTION = '[{"tool_name": "add", "parameters": {"a": 1}}]'
_SEPARATED = 'add<｜tool▁sep｜>{"a": 1}'
_NUMBERED = 'functions.add:0<|tool_call_argument_begin|>{"a": 1}'
_PARAMETERS = '{"name": "add", "parameters": {"a": 1}}'
FAMILIES = (
    CallFamily("Hermes", "Qwen2.5, Qwen3, Granite 4", "<tool_call>", _OBJECT, _TAG, _objects, bare=True),
    CallFamily("Qwen3-Coder", "Qwen3-Coder, Qwen3.5, Nemotron 3", "<tool_call>", _XML, _TAG, _QWEN),
    CallFamily("GLM", "GLM-4.5 to GLM-4.7", "<tool_call>", _KEYS, _TAG, _GLM),
    CallFamily("Gemma", "Gemma 4", "<|tool_call>", "call:add{a:1}", "<tool_call|>", _GEMMA, thought="<channel|>"),
    CallFamily("Harmony", "gpt-oss", "to=functions.", _CHANNEL, "", _HARMONY, thought="<|end|>", lead="<|channel|>commentary "),
    CallFamily("LFM2", "LFM2, LFM2.5", "<|tool_call_start|>", "[add(a=1)]", "<|tool_call_end|>", _LFM2),
    CallFamily("Mistral", "Mistral, Magistral, Devstral", "[TOOL_CALLS]", 'add[ARGS]{"a": 1}', "", _MISTRAL, thought="[/THINK]"),
    CallFamily("DeepSeek", "DeepSeek V3, R1, V3.1", "<｜tool▁call▁begin｜>", _SEPARATED, "<｜tool▁call▁end｜>", _DEEPSEEK),
    CallFamily("Kimi", "Kimi K2", "<|tool_call_begin|>", _NUMBERED, "<|tool_call_end|>", _KIMI),
    CallFamily("Muse", "Muse Glimmer", "<atem:function_calls>", _INVOKE.format("atem:"), "</atem:function_calls>", _MUSE),
    CallFamily("MiniMax", "MiniMax-M2", "<minimax:tool_call>", _INVOKE.format(""), "</minimax:tool_call>", _MINIMAX),
    CallFamily("Nemotron", "Nemotron Nano 2", "<TOOLCALL>", f"[{_OBJECT}]", "</TOOLCALL>", _objects),
    CallFamily("Phi", "Phi-4-mini, Granite 3", "<|tool_call|>", f"[{_OBJECT}]", "", _objects),
    CallFamily("Command", "Command R7B, A", "<|START_ACTION|>", _ACTION, "<|END_ACTION|>", _objects, thought="<|END_THINKING|>"),
    CallFamily("Llama", "Llama 3.1 to 3.3", "<|python_tag|>", _PARAMETERS, "", _LLAMA, bare=True, behind_words=True),
)
"""All forms; which is a model's, its chat template tells (`tools.call_form_of`)."""


def find_families(text: str) -> list[CallFamily]:
    """Those whose mark is in a text, and last the one that needs none."""
    return [family for family in FAMILIES if family.opens in text or family is FAMILIES[-1]]


def read_calls(text: str, parameters: Parameters, families: Sequence[CallFamily] = ()) -> list[ToolCall | BrokenCall]:
    """The calls of a turn: in the first of these forms that reads all of them. Without any, of those whose marks are there."""
    read = [family.calls(text, parameters) for family in families or find_families(text)]
    whole = [calls for calls in read if calls and not any(isinstance(call, BrokenCall) for call in calls)]
    return next(iter([*whole, *filter(None, read)]), [])
