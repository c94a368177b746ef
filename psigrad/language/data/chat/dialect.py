"""Detect what a chat template can render, and rewrite conversations so that it can render them.

A feature that the template lacks is replaced by one that it has (see `describe_rewrites`). The template itself is not changed.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from psigrad.language import images
from psigrad.language.data.chat.messages import REASONING, WEIGHTS, Message
from psigrad.language.data.chat.rendering import render
from psigrad.language.images import MARK

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SENTINEL, OTHER, THIRD = "Zanzibar", "Yokohama", "Xanadu"
"""Words that occur in no template. If a rendering has one, it comes from the probe's messages."""
USER: Message = {"role": "user", "content": "a"}
THINK = "<think>\n{}\n</think>\n\n"
THOUGHT = re.compile(r"\s*<think>(?=.*?\S.*?</think>)(.*?)</think>\n*", re.DOTALL)
"""A non-empty thought at the start of the content, and the line breaks after it."""
CHANNEL = "<|channel>thought"
"""The text that opens a thought in Gemma 4. Its template renders <think> tags as ordinary text."""
_OFFER = (
    "# Tools\n\nYou may call functions. Their signatures are within <tools></tools>:\n<tools>\n{}\n</tools>\n\nTo call one, "
    'write a JSON object with its name and arguments within <tool_call></tool_call>:\n<tool_call>\n{{"name": <function-name>, '
    '"arguments": <args-json-object>}}\n</tool_call>'
)
_ANSWER = "<tool_response>\n{}\n</tool_response>"


def call_of(name: str = OTHER, value: str = SENTINEL, content: str = "") -> Message:
    """Return an assistant's turn that calls one function with one argument."""
    call = {"type": "function", "function": {"name": name, "arguments": {"x": value}}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def tool_of(name: str = OTHER) -> Message:
    """Return the schema of a tool, a function called `name` with one argument."""
    inner = {"type": "object", "properties": {"x": {"type": "string", "description": "b"}}, "required": ["x"]}
    return {"type": "function", "function": {"name": name, "description": SENTINEL, "parameters": inner}}


@dataclass(frozen=True)
class Dialect:
    """The features of conversations that a template can render, found by probes and cached for each template."""

    parts: bool = False
    """True if the template drops contents that are plain strings, so that contents must be lists of parts."""
    system: bool = True
    developer: bool = True
    reasoning: str = "field"
    """The place in a message from which the template renders thoughts: field, content (in <think> tags), or hidden.

    Hidden means that the template removes thoughts.
    """
    calls: str = "object"
    """The type that the template expects for the arguments of tool calls: object, or text (JSON). hermes means that the template
    renders no calls, so they are written as text into the content."""
    empty: str | None = None
    """The content that a turn with only tool calls must have: None or ""."""
    answers: bool = True
    tools: bool = True
    turn_end: str = ""
    """The text after the content of an assistant's turn, up to and including the special token that ends the turn. Empty if no
    special token ends it."""
    call_end: str = ""
    """The text that ends a turn with a tool call, before the tool's answer."""
    turn_next: str = ""
    call_next: str = ""
    """`turn_next` and `call_next`: the parts of `turn_end` and `call_end` that the template writes only with the next turn (GLM).
    If it writes the end with the turn itself, they equal `turn_end` and `call_end`."""
    header: str = ""
    """The text that opens the assistant's turn if the template ignores add_generation_prompt."""
    probes: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """A cache of further results of probing the template (`turns.turn_form`)."""


@dataclass(frozen=True)
class Specials:
    """The special tokens of a tokenizer: their ids, and the patterns that find them in a text."""

    ids: frozenset[int]
    pattern: re.Pattern[str]
    cuts: re.Pattern[str] | None = None
    """A pattern of the added tokens at which the tokenizer splits every text first; None if there are none, or if a split may
    depend on the text around the token."""
    backend: Any = None
    """The underlying tokenizer of the library `tokenizers`; None if transformers changes the ids that it returns."""
    named_tokens: str = ""
    """The named special tokens (EOS, BOS, …) as text. Templates refer to them by name, so a change makes cached dialects invalid.
    """
    prefix_ids: dict[str, list[int]] | None = field(default=None, compare=False)
    """Inside `cache_specials`, a cache for `templates.encode_after`: preceding text -> its token ids. None outside that block."""
    encoded: dict[str, list[int]] = field(default_factory=dict, compare=False)
    """Text -> its token ids, from `templates.encode_batch`. `conversations`: Python's `id` of a row -> the row's rendered
    conversation."""
    conversations: dict[int, Any] = field(default_factory=dict, compare=False)


_specials: WeakKeyDictionary[Any, tuple[Any, Specials]] = WeakKeyDictionary()
_dialects: WeakKeyDictionary[Any, dict[Any, Dialect]] = WeakKeyDictionary()
_fixed: WeakKeyDictionary[Any, Specials] = WeakKeyDictionary()


def specials_of(tokenizer: PreTrainedTokenizerBase) -> Specials:
    """Return the tokenizer's special tokens, cached until they change."""
    if (known := _fixed.get(tokenizer)) is not None:
        return known
    key = (len(tokenizer), len(tokenizer.extra_special_tokens), *tokenizer.special_tokens_map.values())
    if _specials.get(tokenizer, (None,))[0] != key:
        every = tokenizer.added_tokens_decoder
        found = {token: added.content for token, added in every.items() if added.special}
        words = sorted(found.values(), key=len, reverse=True)
        pattern = re.compile("|".join(map(re.escape, words)) or r"(?!)")
        named = str(tokenizer.special_tokens_map)
        _specials[tokenizer] = (key, Specials(frozenset(found), pattern, *_backend_of(tokenizer, list(every.values())), named))
    return _specials[tokenizer][1]


@contextlib.contextmanager
def cache_specials(tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
    """Cache special tokens, encoded texts and conversations inside the `with` block, in which the tokenizer must not change."""
    _fixed[tokenizer] = replace(specials_of(tokenizer), prefix_ids={}, encoded={}, conversations={})
    try:
        yield
    finally:
        _fixed.pop(tokenizer, None)


def _backend_of(tokenizer: PreTrainedTokenizerBase, added: list[Any]) -> tuple[re.Pattern[str] | None, Any]:
    """Return (`cuts`, `backend`) of the tokenizer's `Specials`. `added` are its added tokens."""
    from transformers import PreTrainedTokenizerBase, TokenizersBackend

    own = type(tokenizer)
    if not isinstance(tokenizer, TokenizersBackend) or (own._encode_plus, own.__call__) != (
        TokenizersBackend._encode_plus,
        PreTrainedTokenizerBase.__call__,
    ):
        return None, None
    # the backend splits a text at these tokens before it normalises it
    sound = [one.content for one in added if not one.normalized and not one.single_word]
    inside = any(one != other and one[:1] and one in other[1:] for one in sound for other in (a.content for a in added))
    if not sound or inside or len(sound) < sum(not one.normalized for one in added):
        return None, tokenizer.backend_tokenizer
    return re.compile("|".join(map(re.escape, sorted(sound, key=len, reverse=True)))), tokenizer.backend_tokenizer


def dialect_of(tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any]) -> Dialect:
    """Return the `Dialect` of the tokenizer's chat template with these template arguments. The result is cached."""
    settings = {name: value for name, value in arguments.items() if name != "tools"}
    template, special = tokenizer.get_chat_template(arguments.get("chat_template"), arguments["tools"]), specials_of(tokenizer)
    key = (template, json.dumps(settings, sort_keys=True, default=str), special)
    held = _dialects.setdefault(tokenizer, {})
    if key not in held:
        held[key] = _probe(tokenizer, {**settings, "tools": None}, special.pattern)
    return held[key]


def _probe(tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any], special: re.Pattern[str]) -> Dialect:
    def shows(words: Sequence[str], *messages: Message, tools: Any = None, **dialect: Any) -> bool:
        spoken, offered = rewrite(messages, tools, Dialect(**dialect))
        try:
            text = render(tokenizer, {**arguments, "tools": offered}, spoken)
        except Exception:  # a template is a program: it can raise anything
            return False
        return all(word in text for word in words)

    word = SENTINEL
    told, user = {"role": "assistant", "content": word}, {"role": "user", "content": word}
    parts = not shows([word], user) and shows([word], user, parts=True)
    system = shows([word, OTHER], {"role": "system", "content": word}, {"role": "user", "content": OTHER}, parts=parts)
    developer = shows([word, OTHER], {"role": "developer", "content": word}, {"role": "user", "content": OTHER}, parts=parts)
    thought = {**told, "reasoning_content": OTHER}
    spots = ("field",) if CHANNEL in str(tokenizer.get_chat_template(arguments.get("chat_template"))) else ("field", "content")
    reasoning = next((spot for spot in spots if shows([word, OTHER], USER, thought, parts=parts, reasoning=spot)), "hidden")
    ways: list[dict[str, Any]] = [
        {"parts": parts, "calls": calls, "empty": empty} for calls in ("object", "text") for empty in (None, "")
    ]
    called = next((way for way in ways if shows([word, OTHER], USER, call_of(), **way)), {"parts": parts, "calls": "hermes"})
    answer = {"role": "tool", "name": OTHER, "content": THIRD}
    answers = shows([THIRD, OTHER], USER, call_of(), answer, **called)
    tools = shows([OTHER], USER, tools=[tool_of()], parts=parts)
    found = Dialect(**called, system=system, developer=developer, reasoning=reasoning, answers=answers, tools=tools)

    def text_of(*messages: Message, generation_prompt: bool = False) -> str:
        try:
            return render(tokenizer, arguments, rewrite(messages, None, found)[0], generation_prompt=generation_prompt)
        except Exception:
            return ""

    ends = {
        name: _closing(special, text_of(USER, turn), text_of(USER, turn, reply))
        for name, turn, reply in (("turn_end", told, {**USER, "content": THIRD}), ("call_end", call_of(), answer))
    }
    opened, whole = text_of(USER, generation_prompt=True), text_of(USER, told)
    header = (
        whole.removeprefix(opened).partition(word)[0] if opened and whole.startswith(opened) and opened == text_of(USER) else ""
    )
    # A header is a special token or words, as in "Assistant: ". White space alone is neither.
    header = header if special.search(header) or re.search(r"\w", header) else ""
    (turn_end, turn_next), (call_end, call_next) = ends["turn_end"], ends["call_end"]
    return replace(found, turn_end=turn_end, turn_next=turn_next, call_end=call_end, call_next=call_next, header=header)


def _closing(special: re.Pattern[str], last: str, followed: str) -> tuple[str, str]:
    """Return (`turn_end`, `turn_next`) of a `Dialect`, found in two renderings of a turn with the content `SENTINEL`.

    `last` ends with this turn; in `followed`, another turn follows it. `special` matches special tokens.
    """
    ending, behind = last.rpartition(SENTINEL)[2], followed.rpartition(SENTINEL)[2]
    shared = next((i for i, (a, b) in enumerate(zip(ending, behind, strict=False)) if a != b), min(len(ending), len(behind)))
    for text in (ending[:shared], ending):  # `ending`: the last turn ends differently (gpt-oss: <|return|>)
        if found := list(special.finditer(text)):
            return text[: found[-1].end()], text[: found[-1].end()]
    first = special.search(behind)  # the next turn's first token ends the turn (GLM: <|user|>)
    end, own = behind[: first.end()] if first else "", behind[:shared].rstrip()
    return end, end.removeprefix(own)


def rewrite(messages: Sequence[Message], tools: Any, dialect: Dialect) -> tuple[list[Message], Any]:
    """Return (messages, tools), rewritten where necessary so that the template renders all of them."""
    spoken: list[Message] = []
    if tools and not dialect.tools:
        offer = _OFFER.format("\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        head = messages[0]["content"] + "\n\n" if messages[0]["role"] in ("system", "developer") else ""
        rest = messages[1:] if head else messages
        messages, tools = [{"role": "system", "content": head + offer}, *rest], None
    before = ""
    for message in messages:
        said = {name: value for name, value in message.items() if name not in WEIGHTS}
        if said["role"] == "developer" and not dialect.developer:
            said["role"] = "system"
        if said["role"] == "system" and not dialect.system:
            before += said["content"] + "\n\n"
            continue
        if said["role"] == "assistant":
            said = _assistant(said, dialect)
        elif said["role"] == "tool" and not dialect.answers:
            said = {"role": "user", "content": _ANSWER.format(said.get("content", ""))}
            if spoken and spoken[-1].get("role") == "user":  # answers to the calls of one turn form one user turn
                said["content"] = f"{spoken.pop()['content']}\n{said['content']}"
        if before and said["role"] == "user":
            said["content"], before = before + said["content"], ""
        spoken.append(said)
    if before:
        spoken.append({"role": "user", "content": before.rstrip("\n")})
    for said in spoken:
        content = said.get("content") or ""
        if isinstance(content, str) and (dialect.parts or MARK.search(content)):
            said["content"] = images.parts_of(content)
    return spoken, tools


def describe_rewrites(messages: Sequence[Message], tools: Any, dialect: Dialect) -> list[str]:
    """Return a note for each feature that `rewrite` rewrites in these messages, and one if turns have no end token."""
    roles = {message["role"] for message in messages}
    calls = any(message.get("tool_calls") for message in messages)
    thoughts = any(message.get(name) for message in messages for name in REASONING)
    notes = {
        "tools are listed in the system prompt, in the format of Hermes": tools and not dialect.tools,
        "tool calls are written in the format of Hermes": (tools or calls) and dialect.calls == "hermes",
        "tools' answers are written as user turns": (tools or "tool" in roles) and not dialect.answers,
        "the developer's message is written as the system prompt": "developer" in roles and not dialect.developer,
        "the system prompt is written before the text of the user's first turn": "system" in roles and not dialect.system,
        "thoughts are written in <think> tags before the answer": thoughts and dialect.reasoning == "content",
        "turns have no end token, so only the EOS (and --stop-token-ids) ends a completion": not dialect.turn_end,
    }
    return [note for note, holds in notes.items() if holds]


def _assistant(message: Message, dialect: Dialect) -> Message:
    thought = next((message[name] for name in REASONING if message.get(name)), "")
    if not thought and dialect.reasoning != "content" and (found := THOUGHT.match(str(message.get("content") or ""))):
        # Move the thought to its field: a template that renders the field may render tags in the content as plain text.
        message = {**message, "reasoning_content": found[1].strip("\n"), "content": message["content"][found.end() :]}
    if thought and dialect.reasoning == "content":
        message = {name: value for name, value in message.items() if name not in REASONING}
        message["content"] = THINK.format(thought.strip("\n")) + message.get("content", "")
    if not (calls := message.get("tool_calls")):
        return message
    if dialect.calls == "hermes":
        texts = [json.dumps({key: call["function"][key] for key in ("name", "arguments")}, ensure_ascii=False) for call in calls]
        content = "\n".join([*filter(None, [message.get("content")]), *(f"<tool_call>\n{text}\n</tool_call>" for text in texts)])
        return {**{name: value for name, value in message.items() if name != "tool_calls"}, "content": content}
    if dialect.calls == "text":
        functions = [call["function"] for call in calls]
        texts = [json.dumps(function["arguments"], ensure_ascii=False) for function in functions]
        message["tool_calls"] = [
            {**call, "function": {**function, "arguments": text}}
            for call, function, text in zip(calls, functions, texts, strict=True)
        ]
    if not message.get("content"):
        message["content"] = dialect.empty
    return message
