"""The tool-call syntax of each model family, with parsers that report malformed calls instead of failing.

Parsing takes linear time: it starts once at each opening mark, and reads at most `MOST_CALLS` calls per turn.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MOST_CALLS = 64
"""The maximum number of calls that are run in one turn. All further calls get one common answer: that they were not run."""
DEEPEST = 64
"""The deepest nesting of arguments that is read."""
SHOWN = 40
"""The maximum number of characters of the policy's text that an error quotes."""


@dataclass(frozen=True)
class ToolCall:
    """A well-formed call. It is not known yet if the tool exists and accepts these arguments."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class BrokenCall:
    """A malformed call: the error that is reported to the policy."""

    reason: str


# For each tool, the JSON schema of each parameter. It decides whether an unquoted value is text or a number.
Parameters = Mapping[str, Mapping[str, Any]]
Reader = Callable[[str, int, Parameters], tuple[list[ToolCall], int]]
Value = Callable[[str, int], tuple[Any, int]]


class CallError(ValueError):
    """An error for a malformed call."""


@dataclass(frozen=True)
class CallFamily:
    """One syntax of tool calls: the marks before and after a call, and the parser of the text between them."""

    name: str
    models: str
    """Some models that write calls in this syntax."""
    opens: str
    shown: str
    """An example of a call, without the marks, for errors and documentation."""
    closes: str
    read: Reader
    """The parser: returns the calls that start at a position of the text, and the position of their end. Raises `CallError`."""
    bare: bool = False
    """True if a turn that is only a JSON object, without marks, is a call."""
    behind_words: bool = False
    """True if a JSON object without marks is a call even after other words. It must have arguments and name an offered tool."""
    thought: str = "</think>"
    """The end mark of the thinking. Calls before it are ignored."""
    lead: str = ""
    """The text that an example has before its mark. Calls need not have it."""

    @property
    def example(self) -> str:
        """An example of a call, with its marks."""
        return f"{self.lead}{self.opens}{self.shown}{self.closes}"

    def calls(self, text: str, parameters: Parameters) -> list[ToolCall | BrokenCall]:
        """Return the calls of a turn, in order."""
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
    """Return the value of a JSON number with a point or an exponent. Raise `ValueError` for NaN, Infinity and overflow."""
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
    """Return the position after white space and `mark`. Raise `CallError` if the mark is missing."""
    at = _skip(text, at) if mark else at
    if not text.startswith(mark, at):
        raise CallError(f"expected {mark} and found {_show(text, at)}")
    return at + len(mark)


def _json(text: str, at: int) -> tuple[Any, int]:
    try:
        value, end = _DECODER.raw_decode(text, _skip(text, at))
    except RecursionError:
        raise CallError(_TOO_DEEP) from None
    except ValueError as error:  # JSONDecodeError, or a number with more digits than Python reads
        where = f" at {_show(text, error.pos)}" if isinstance(error, json.JSONDecodeError) else ""
        raise CallError(f"it is not JSON ({getattr(error, 'msg', error)}{where})") from None
    level, depth = [value], 0
    while level:
        inner = [list(x.values()) if isinstance(x, dict) else x for x in level if isinstance(x, dict | list)]
        level, depth = [x for values in inner for x in values], depth + 1
        if depth > DEEPEST + 2:  # two more levels: a list of calls, and a call
            raise CallError(_TOO_DEEP)
    return value, end


def to_calls(value: Any) -> Iterator[ToolCall]:
    """Yield the calls of one JSON object or of a list of them. Arguments may be a JSON string, as in OpenAI's format."""
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
    """Return a parser of {"name": …, "arguments": {…}}, or of a list of such objects."""

    def read(text: str, at: int, parameters: Parameters) -> tuple[list[ToolCall], int]:
        found, end = value(text, at)
        return list(to_calls(found)), end

    return read


_objects = _list_of()


def _objects_or(other: Reader) -> Reader:
    begin = re.compile(r"\s*(?:\[\s*)?\{")
    return lambda text, at, parameters: (_objects if begin.match(text, at) else other)(text, at, parameters)


def _read_bare(text: str, parameters: Parameters, example: str) -> Iterator[ToolCall | BrokenCall]:
    """Yield the calls of a turn that is only JSON objects without marks, separated by `;`."""
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
    """Yield the calls without marks that follow other words: the first one of an offered tool, and those directly after it.

    An object inside other JSON, or after a tag (which may be an unknown syntax), is not a call.
    """
    at = 0 if text.lstrip()[:1] not in ("{", "[") else len(text)
    for _ in range(MOST_CALLS):  # without this bound, a text of braces alone would take quadratic time
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
    """Return True if a JSON value is the policy's answer, not a call: it has no arguments and names no offered tool."""
    if not isinstance(item, dict) or {"arguments", "parameters"} & set(item):
        return not isinstance(item, dict)
    named = item.get("name") if {"name", "tool_name", "function"} & set(item) else ""
    return isinstance(named, str) and named not in parameters


def _name_then(header: str, value: Value = _json, footer: str = "") -> Reader:
    """Return a parser of calls that have the tool's name before an object of arguments.

    `header` is a pattern whose first group is the name. `value` parses the arguments, and `footer` may follow them.
    """
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
    """Return a parser of calls that write names and arguments in tags, one call or several.

    The patterns `header` and `parameter` match the tags with the tool's and an argument's name. `ends` closes an argument, and
    `closes` closes a call.
    """
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
    """Return an unquoted argument as text if the tool accepts a string; otherwise parse it as JSON if possible."""
    text = text.removeprefix("\n").removesuffix("\n")
    schema = schema if isinstance(schema, Mapping) else {}  # a schema may also be the boolean true
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
# Alternatives, in order: Gemma's quoted text, Python's and JSON's quoted text, a name before its arguments, a key, another word,
# and the end of the arguments. An unclosed quote extends to the end of the text: retrying from each quote inside it would take
# quadratic time.
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
    """Return a parser of values in Python's or Gemma's syntax, up to the text `closes`.

    Keys may have quotes, `<|"|>` or nothing around them. Constants such as True, and calls such as [name(key=value)], are read.
    """

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
"""All syntaxes of calls. The chat template determines which one a model has (`tools.call_form_of`)."""


def find_families(text: str) -> list[CallFamily]:
    """Return the families whose opening mark occurs in a text, and last Llama's, which writes calls without a mark."""
    return [family for family in FAMILIES if family.opens in text or family is FAMILIES[-1]]


def read_calls(text: str, parameters: Parameters, families: Sequence[CallFamily] = ()) -> list[ToolCall | BrokenCall]:
    """Return the calls of a turn, parsed by the first of these families that finds no malformed call.

    By default, these are the families whose marks occur in the text.
    """
    read = [family.calls(text, parameters) for family in families or find_families(text)]
    whole = [calls for calls in read if calls and not any(isinstance(call, BrokenCall) for call in calls)]
    return next(iter([*whole, *filter(None, read)]), [])
