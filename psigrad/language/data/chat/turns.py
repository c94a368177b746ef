"""The trained turns of a conversation, each in the context in which it is sampled, and the text between turns."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from psigrad.errors import UserError
from psigrad.language import images
from psigrad.language.data.chat.arguments import check_arguments, templates_of
from psigrad.language.data.chat.dialect import (
    CHANNEL,
    OTHER,
    SENTINEL,
    THINK,
    THIRD,
    USER,
    call_of,
    dialect_of,
    rewrite,
    specials_of,
)
from psigrad.language.data.chat.messages import REASONING, WEIGHTS, Message, is_trained
from psigrad.language.data.chat.rendering import (
    arguments_of,
    generation_blocks,
    reject_placeholder,
    render,
    row_error,
    template_error,
    template_of,
)
from psigrad.language.data.dataset_rows import Row, show
from psigrad.language.examples import common_prefix

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
Span = tuple[int, int]
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
OPEN = re.compile(r"(<think>|<\|channel>thought|\[THINK\])\s*$")
# The pattern ends with line breaks alone: a space belongs to the answer.
_EMPTY = re.compile(r"\s*(?:<think>\s*</think>|<\|channel>thought\s*<channel\|>|\[THINK\]\s*\[/THINK\])\n*")
_CLOSES = {"<think>": "</think>\n\n", "<|channel>thought": "<channel|>", "[THINK]": "[/THINK]"}
_CLOSE = re.compile(r"\s*(?:</think>|<channel\|>|\[/THINK\])\n*")
_THOUGHT = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)


@dataclass(frozen=True)
class Context:
    """A text, and the spans of characters in it that the assistant wrote and that are trained."""

    text: str
    spans: Sequence[Span] = ()


class Conversation:
    """A row's conversation, with the chat template that renders it and the template's features (`Dialect`)."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, row: Row) -> None:
        self.tokenizer, self.row, self.arguments = tokenizer, row, arguments_of(tokenizer, row)
        self.template = template_of(tokenizer, row, self.arguments)
        if own := row.columns.get("chat_template_kwargs"):
            try:
                check_arguments([self.template, *templates_of(tokenizer)], own)
            except UserError as error:
                raise row_error(row, "", str(error)) from None
        self.special = specials_of(tokenizer).pattern
        self.dialect = dialect_of(tokenizer, self.arguments)
        self._made: dict[Any, Any] = {}
        if self.dialect.header:
            raise UserError(
                "The chat template does not open the assistant's turn: add_generation_prompt changes nothing, although "
                f"assistant turns begin with {show(self.dialect.header)}. Set --chat-template-path to a template that opens them."
            )

    def render(self, messages: Sequence[Message], *, generation_prompt: bool = False) -> str:
        """Return the text of the messages. Raise `RowError` if the template cannot render them."""
        key = (generation_prompt, *map(id, messages))
        if key not in self._made:  # the messages are stored, so that their ids are not reused
            self._made[key] = self._run(partial(render, generation_prompt=generation_prompt), messages), messages
        return str(self._made[key][0])

    def prompt(self, messages: Sequence[Message]) -> str:
        """Return the text from which the model samples: the messages, then the generation prompt.

        If the last message is the assistant's, its content follows the generation prompt.
        """
        *before, last = messages
        if last["role"] != "assistant":
            return self.render(messages, generation_prompt=True)
        for name in last.keys() - {"role", "content", *WEIGHTS}:
            why = (
                "is in the last turn, which the model continues; psigrad reads only the content of that turn, so move the text "
                "into the content, or remove the field"
            )
            raise row_error(self.row, f"prompt[{len(before)}].{name}", why)
        return self.render(before, generation_prompt=True) + str(last["content"])

    def blocks(self, messages: Sequence[Message]) -> list[Span] | None:
        """Return the spans that {% generation %} blocks wrote; None if the template has none. Cache the text for `render`."""
        if not _has_blocks(self.template):
            return None
        text, spans = self._run(generation_blocks, messages)
        found: list[Span] = spans
        self._made[False, *map(id, messages)] = text, messages
        return found

    def _run(self, template: Callable[..., T], messages: Sequence[Message]) -> T:
        reject_placeholder(self.tokenizer, self.row, *(value for message in messages for value in message.values()))
        try:
            spoken, tools = rewrite(messages, self.arguments["tools"], self.dialect)
            return template(self.tokenizer, {**self.arguments, "tools": tools}, spoken)
        except Exception as error:  # a template is a program: it can raise anything
            raise template_error(self.row, error) from error

    def closing(self, message: Message) -> str:
        """Return the text with which the template ends the assistant turn `message`."""
        return self.dialect.call_end if message.get("tool_calls") else self.dialect.turn_end


@functools.lru_cache(maxsize=8)
def _has_blocks(template: str) -> bool:
    return _GENERATION.search(template) is not None


def contexts(conversation: Conversation, *, empty_thinking: bool = False) -> list[Context]:
    """Return the row's `Context`s, in which each trained turn follows the same text that precedes it in sampling.

    An empty thought that the template adds is trained only if `empty_thinking` is True.
    """
    row = conversation.row
    prompt = row.prompt if isinstance(row.prompt, list) else []
    answer = list(row.completion) if isinstance(row.completion, list) else []
    first = len(prompt)
    if answer and prompt and prompt[-1]["role"] == "assistant":  # the prompt contains the beginning of the answer
        first -= 1
        answer[0] = {**answer[0], "content": prompt[-1]["content"] + answer[0].get("content", "")}
    messages = row.messages or [*prompt[:first], *answer]
    made: list[Context] = []
    texts: dict[int, str] = {}
    known = ""  # The last context up to the end of its turn. No policy samples the text after it, such as Phi-3's EOS.
    for i in range(first, len(messages)):
        if not is_trained(messages[i]):
            continue
        before, text, spans = _render_turn(conversation, messages[: i + 1], empty_thinking)
        if i < len(prompt):  # the policy writes the text after the prompt
            begun = len(conversation.prompt(prompt))
            spans = [(max(start, begun), end) for start, end in spans if end > begun]
        if not spans:
            continue
        # A turn gets a new context if the template has changed the text before it (Qwen3 drops thoughts).
        if made and before.startswith(known):
            made[-1] = Context(text, [*((start, min(end, len(known))) for start, end in made[-1].spans), *spans])
        else:
            made.append(Context(text, spans))
        closing = conversation.closing(messages[i])
        ended, closed, _ = text.rpartition(closing) if closing and closing in text[spans[-1][0] :] else (text, "", "")
        texts[i], known = text[len(before) :], (ended + closed).rstrip()
    if not made:
        raise row_error(row, "messages", "has no trained assistant turn; check weights and the template's generation blocks")
    whole = conversation.render(messages)
    if whole.startswith(made[-1].text.rstrip()):
        made[-1] = Context(whole, made[-1].spans)
    check_rendered(conversation, messages, {i: texts.get(i, whole) for i in range(len(messages))}, set(texts))
    return made


def _render_turn(conversation: Conversation, messages: Sequence[Message], empty_thinking: bool) -> tuple[str, str, list[Span]]:
    """Return (text before the last turn, text up to its end, trained spans in that text). `empty_thinking`: see `contexts`."""
    said = messages[-1]
    before, blocks = conversation.render(messages[:-1], generation_prompt=True), conversation.blocks(messages)
    text = as_rendered = conversation.render(messages)
    begun = common_prefix(before, text)
    if blocks is not None and all(end <= begun for _, end in blocks):
        return before, text, []
    thought = _thought_of(said)
    if not text.startswith(before):
        opened = OPEN.search(before)
        own_words = None if opened else _find_last_turn(conversation, messages, before, text)
        if own_words is None:
            before, text = _continue_thought(conversation, said, before, text, len(messages))
            begun = opened.start() if opened else begun
        else:
            text, begun = before + own_words, len(text) - len(own_words)
    elif conversation.dialect.reasoning == "hidden" and thought and thought not in text[len(before) :]:
        form = CHANNEL + "\n{}\n<channel|>" if CHANNEL in conversation.template else THINK
        text = before + form.format(thought) + text[len(before) :]
    ends = conversation.special.findall(conversation.closing(said))
    if ends and ends[-1] not in text[len(before) :]:  # GLM: the next turn's token ends this one
        text = text if text.endswith(str(said.get("content")) or "\0") else text.rstrip()  # spaces of the answer stay
        text += conversation.dialect.call_next if said.get("tool_calls") else conversation.dialect.turn_next
    start = len(before)
    if thought and said.get("tool_calls") and thought in text[text.find(said["tool_calls"][0]["function"]["name"], start) :]:
        raise row_error(conversation.row, "", "has a thought that the chat template writes after the call; use another template")
    if not empty_thinking and not _EMPTY.match(str(said.get("content", ""))):
        empty = (_CLOSE if OPEN.search(before) else _EMPTY).match(text, start)
        start = empty.end() if empty else start
    if blocks is None or not text.startswith(as_rendered):
        return before, text, [(start, len(text))] if blocks is None or any(end > begun for _, end in blocks) else []
    own = [(first, end) for first, end in blocks if end > begun]
    # The policy continues at the end of the prompt, even if the template's first block starts elsewhere. It has stopped before a
    # later block of special tokens alone (Phi-3: the EOS).
    later = [(first, end) for first, end in own[1:] if conversation.special.sub("", text[first:end]).strip()]
    return before, text, [(start, own[0][1]), *later] if own else []


def _find_last_turn(conversation: Conversation, messages: Sequence[Message], before: str, text: str) -> str | None:
    """Return the text of the last turn in `text`, the rendering of `messages`; None if the turn's beginning is not found.

    `before` is the text from which this turn is sampled. `text` does not start with it.
    """
    # Gemma 4 drops an earlier turn's end.
    unended = before.rstrip().removesuffix(conversation.dialect.turn_end)
    if unended != before.rstrip() and text.startswith(unended):
        return text[len(unended) :]
    # gpt-oss drops an earlier call's thought.
    past, asked = conversation.render(messages[:-1]), conversation.render([USER], generation_prompt=True)
    stem, found, _ = conversation.render([*messages[:-1], {"role": "assistant", "content": SENTINEL}]).partition(SENTINEL)
    alone, _, _ = conversation.render([USER, {"role": "assistant", "content": SENTINEL}]).partition(SENTINEL)
    if not (found and before.startswith(past) and alone.startswith(asked)):
        return None
    opener, lead = before.removeprefix(past), alone.removeprefix(asked)
    head = stem.removesuffix(lead)
    return text[len(head) :] if opener and head.endswith(opener) and stem.endswith(lead) and text.startswith(head) else None


def _continue_thought(conversation: Conversation, message: Message, before: str, text: str, index: int) -> tuple[str, str]:
    """Return (`before`, `text`), the text without and with the turn `message`, changed so that `text` starts with `before`.

    `index` is the message's number, for the error.
    """
    opened, thought = OPEN.search(before), _thought_of(message)
    tail = "" if opened is None else text[opened.start() :]
    begins = opened is not None and tail.startswith(opened.group(1))
    if opened is None or not text.startswith(before[: opened.start()]) or (thought and thought in tail and not begins):
        why = (
            f"the chat template changes the generation prompt before message {index} (assistant) once the message follows, so "
            "psigrad cannot know the context in which that turn is sampled; set chat_template_kwargs as for sampling (such as "
            "enable_thinking), or use another template"
        )
        raise row_error(conversation.row, "", why)
    if (empty := _EMPTY.match(tail)) is not None:  # an empty thought
        stem = before[: opened.start()] + empty.group()
        return stem, stem + tail[empty.end() :]
    if begins:  # other spaces after the tag
        return before, before + tail[len(opened.group(1)) :].lstrip("\n")
    return before, f"{before}{thought}\n{_CLOSES[opened.group(1)]}{tail}"


def _thought_of(message: Message) -> str:
    """Return the thought before the answer, given as a field or in <think> tags."""
    found = _THOUGHT.match(str(message.get("content", "")))
    return str(next((message[name] for name in REASONING if message.get(name)), found.group(1) if found else "")).strip("\n")


def check_rendered(
    conversation: Conversation, messages: Sequence[Message], texts: dict[int, str], trained: set[int], *, every_field: bool = True
) -> None:
    """Raise `RowError` if the template drops a part of a message.

    `texts[j]` is the text that should contain message j: this turn alone if j is in `trained`, else all messages. If
    `every_field` is False, check only content, thoughts and calls.
    """
    for j, message in enumerate(messages):
        part = messages[: j + 1] if j in trained else messages
        calls = message.get("tool_calls", ())
        for k, call in enumerate(calls[1:] if j in trained else (), 1):
            fewer = {**message, "tool_calls": [*calls[:k], *calls[k + 1 :]]}
            if conversation.render(part) == conversation.render([*part[:-1], fewer]):
                raise _missing_error(conversation.row, j, f"tool_calls[{k}]", call["function"])
        for name, piece in _pieces(message, j in trained or j == len(messages) - 1):
            if piece not in texts[j] and conversation.render(part) == conversation.render(_without(part, j, name, piece)):
                raise _missing_error(conversation.row, j, name, piece)
        for name in message.keys() - _KNOWN if every_field else ():
            if name == "name" and message["role"] == "tool":
                continue  # the call names the tool
            other = [{k: v for k, v in m.items() if k != name} if i == j else m for i, m in enumerate(part)]
            if message[name] not in (None, "", [], {}) and conversation.render(part) == conversation.render(other):
                raise _missing_error(conversation.row, j, name, message[name])


_KNOWN = {"role", "content", "tool_calls", "tool_call_id", *WEIGHTS, *REASONING}


def _pieces(message: Message, thoughts: bool) -> Iterator[tuple[str, str]]:
    """Yield (field, text) for each text of a message. `thoughts` is False to skip thoughts: templates drop those of old turns."""
    parts = re.split(r"</?think>", str(message.get("content", "")))
    texts = [text for part in (parts if thoughts else parts[-1:]) for text in images.MARK.split(part)[::2]]
    yield from (("content", text.strip()) for text in texts if text.strip())
    if thoughts:
        yield from ((name, str(message[name]).strip()) for name in REASONING if message.get(name))
    for call in message.get("tool_calls", ()):
        function = call["function"]
        values = [value.strip() for value in function["arguments"].values() if isinstance(value, str)]
        yield from (("tool_calls", value) for value in [function["name"], *values] if value)


def _without(messages: Sequence[Message], index: int, name: str, piece: str) -> list[Message]:
    """Return the messages, with `piece` removed from the texts in the field `name` of message `index`."""

    def cut(value: Any) -> Any:
        if isinstance(value, str):
            return value.replace(piece, "")
        if isinstance(value, dict):
            return {key: cut(inner) for key, inner in value.items()}
        return [cut(inner) for inner in value] if isinstance(value, list) else value

    return [{**m, name: cut(m[name])} if i == index else m for i, m in enumerate(messages)]


def _missing_error(row: Row, index: int, name: str, value: Any) -> Exception:
    # The place uses the row's own columns: in messages, or in the completion after the prompt.
    count = len(row.prompt) if isinstance(row.prompt, list) else 0
    column, at = ("messages", index) if row.messages else ("prompt", index) if index < count else ("completion", index - count)
    reason = (
        f"is dropped by the chat template ({show(value)} is nowhere in the turn); remove the field from the row, or use a "
        "template that shows it"
    )
    return row_error(row, f"{column}[{at}].{name}", reason)


@dataclass(frozen=True)
class TurnForm:
    """The texts that a chat template writes before and after the thought and the content of an assistant turn."""

    lead: str = ""
    """The text between the prompt and an answer without a thought."""
    opens: str = ""
    closes: str = ""
    """`opens` is the text before a thought, and `closes` is the text between a thought and the answer. Both are empty if the
    template drops thoughts."""
    ends: str = ""
    """The beginning of `closes` that ends a thought even if a call follows it in place of an answer."""
    content_end: str = ""
    """The text that ends a turn whose content follows a call (Gemma 4); empty if the content comes before the call."""

    def read_back(self, text: str) -> Message:
        """Return the assistant's message that the template renders as `text`, which must not contain tool calls."""
        said: Message = {"role": "assistant"}
        opens, end = self.opens.rstrip(), self.ends.strip()
        if end and text.startswith(opens) and end in text:
            thought, _, text = text[len(opens) :].partition(end)
            said["reasoning_content"] = thought.strip("\n")
            rest = self.closes.partition(end)[2]
            text = text.removeprefix(rest) if text.startswith(rest) else text.lstrip("\n")
        else:
            text = text.removeprefix(self.lead)
        return {**said, "content": text}


def turn_form(conversation: Conversation, role: str) -> TurnForm:
    """Return the texts that the template writes around an assistant turn after a message of this role. The result is cached."""
    kept = conversation.dialect.probes
    if role not in kept:
        kept[role] = _probe_turn_form(
            conversation, [USER, call_of(), {"role": "tool", "name": OTHER, "content": "b"}] if role == "tool" else [USER]
        )
    found: TurnForm = kept[role]
    return found


def _probe_turn_form(conversation: Conversation, before: Sequence[Message]) -> TurnForm:
    def around(answer: Message, *words: str) -> list[str]:
        try:
            _, text, spans = _render_turn(conversation, [*before, answer], False)
        except UserError:
            return [""] * len(words)
        rest, found = text[spans[0][0] :], []
        for word in words:
            between, _, rest = rest.partition(word)
            found.append(between)
        return found

    (lead,) = around({"role": "assistant", "content": SENTINEL}, SENTINEL)
    opens, closes = around({"role": "assistant", "content": SENTINEL, "reasoning_content": THIRD}, THIRD, SENTINEL)
    _, called = around({**call_of(), "reasoning_content": THIRD}, THIRD, OTHER)
    first, behind = around(call_of(content=THIRD), THIRD, OTHER)
    ends = closes[: common_prefix(closes, called)] if called else closes
    return TurnForm(lead, opens, closes, ends, behind.strip() if OTHER in first else "")


def render_between(conversation: Conversation, observation: Sequence[Message]) -> tuple[str, str]:
    """Return (the special token that ends the policy's turn, the text between this token and the policy's next turn).

    The text contains `observation`.
    """
    name = next((str(m["name"]) for m in observation if m["role"] == "tool" and m.get("name")), "")
    # A dummy turn precedes the observation, since templates may drop the thought of a real turn.
    calls = [call_of(name or "call")] if observation[0]["role"] == "tool" else []
    for turn in [*calls, {"role": "assistant", "content": SENTINEL}]:
        try:
            text = conversation.render([USER, turn, *observation], generation_prompt=True)
        except UserError:
            if turn.get("tool_calls"):
                continue
            raise
        _, found, behind = text.partition(SENTINEL)
        closing = conversation.closing(turn)
        first = conversation.special.search(behind)
        if found and (behind.startswith(closing) and closing):
            return conversation.special.findall(closing)[-1], behind[len(closing) :]
        if found and first is not None:
            return first.group(), behind[first.end() :]
    raise row_error(
        conversation.row, "prompt", "is a conversation, but the template does not end the assistant's turn; use another template"
    )


def stop_tokens(conversation: Conversation) -> list[str]:
    """Return the special tokens that end an assistant's answer and, if the row offers tools, those that end a tool call."""
    ends = [conversation.dialect.turn_end, *([conversation.dialect.call_end] if conversation.arguments["tools"] else [])]
    return list(dict.fromkeys(found[-1] for end in ends if (found := conversation.special.findall(end))))
