"""The routes of Anthropic's Messages API: /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from psigrad.language.episodes.tool_calls import ToolCall
from psigrad_serve.api_base import Api, event
from psigrad_serve.api_errors import ApiError
from psigrad_serve.chat_completions import tool_calls
from psigrad_serve.forms import Count, SamplingForm, offers, read_form, read_stop
from psigrad_serve.served import Served, ServedPiece
from psigrad_serve.steering import chosen_tool, json_grammar

_BLOCKS = {
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
    "system": ("text",),
}
_ENDS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class AnthropicTool(BaseModel):
    """A tool that the request offers."""

    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None


class AnthropicMessage(BaseModel):
    """A message of the request, whose content is text or blocks."""

    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class OutputConfig(BaseModel):
    """The field `output_config`: the format of the answer. Its other fields, such as `effort`, have no effect here."""

    format: dict[str, Any] | None = None


class MessagesForm(SamplingForm):
    """The body of a request to /v1/messages."""

    messages: Annotated[list[AnthropicMessage], Field(min_length=1)]
    max_tokens: Count
    system: str | list[dict[str, Any]] = ""
    stop_sequences: list[str] = Field(default=[])
    tools: list[AnthropicTool] = Field(default=[])
    tool_choice: Any = None
    thread: Any = None
    output_config: OutputConfig = Field(default_factory=OutputConfig)


class AnthropicMessages(Api[MessagesForm]):
    """One request and its answer in this API's format."""

    prefix = "msg_"

    def __init__(self, served: Served, body: dict[str, Any]) -> None:
        super().__init__(served, MessagesForm, body)
        form = self.form
        if form.thread:  # the client's tool runner then sends whole conversations
            why = "This server stores no conversations; send the whole conversation."
            raise ApiError(why, param="thread", code="thread_unsupported_request")
        tools = [_function(tool) for tool in form.tools] if offers(form.tool_choice) else []
        one = isinstance(form.tool_choice, dict) and bool(form.tool_choice.get("disable_parallel_tool_use"))
        row, offered = served.conversation(list(_messages(form)), tools, form.chat_template_kwargs, single=one)
        stop, place = read_stop(form.stop_sequences), "output_config.format"
        wish = served.wish({}, chosen_tool(form.tool_choice), offered, json_grammar(form.output_config.format, place), place)
        self.calls = [served.call(body, row, None, form.asked(form.max_tokens), stop=stop, offered=offered, wish=wish)]

    def begin(self) -> Iterator[str]:
        """Yield the first events of a stream."""
        self.count, self.block, self.open = 0, 0, False
        yield self._event("message_start", message=self._message([], None, "", 0))

    def piece(self, place: int, piece: ServedPiece) -> Iterator[str]:
        """Yield the events of a piece of new text or tool calls."""
        self.count += len(piece.tokens)
        if piece.text:
            if not self.open:
                self.open = True
                yield self._event("content_block_start", index=self.block, content_block={"type": "text", "text": ""})
            yield self._event("content_block_delta", index=self.block, delta={"type": "text_delta", "text": piece.text})
        if not piece.finish:
            return
        if self.open:
            yield self._event("content_block_stop", index=self.block)
            self.block += 1
        for made in self._uses(piece.calls):
            text = json.dumps(made["input"], ensure_ascii=False)
            yield self._event("content_block_start", index=self.block, content_block={**made, "input": {}})
            yield self._event("content_block_delta", index=self.block, delta={"type": "input_json_delta", "partial_json": text})
            yield self._event("content_block_stop", index=self.block)
            self.block += 1
        ended = {"stop_reason": _reason(piece), "stop_sequence": piece.stopped or None}
        yield self._event("message_delta", delta=ended, usage={"output_tokens": self.count})

    def end(self) -> Iterator[str]:
        """Yield the last events."""
        yield self._event("message_stop")

    def whole(self, choices: Sequence[Sequence[ServedPiece]]) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        ((choice,),) = choices
        content: list[dict[str, Any]] = [{"type": "text", "text": choice.text}] if choice.text or not choice.calls else []
        content += self._uses(choice.calls)
        return self._message(content, _reason(choice), choice.stopped, len(choice.tokens))

    def _uses(self, calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
        names = [one["id"] for one in tool_calls(self.calls[0], calls, 0)]
        return [
            {"type": "tool_use", "id": name, "name": call.name, "input": call.arguments}
            for name, call in zip(names, calls, strict=True)
        ]

    def _message(self, content: list[Any], reason: str | None, stopped: str, count: int) -> dict[str, Any]:
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self.form.model}
        used = {"input_tokens": len(self.calls[0].prompt_ids), "output_tokens": count}
        return {**head, "content": content, "stop_reason": reason, "stop_sequence": stopped or None, "usage": used}

    def _event(self, kind: str, **more: Any) -> str:
        return event({"type": kind, **more}, kind)


def count_tokens(served: Served, body: dict[str, Any]) -> dict[str, Any]:
    """Return the number of tokens of a request's prompt, without sampling an answer."""
    form = read_form(MessagesForm, {**body, "max_tokens": 1})
    served.check_model(form.model)
    tools = [_function(tool) for tool in form.tools]
    row, _ = served.conversation(list(_messages(form)), tools, form.chat_template_kwargs)
    return {"input_tokens": len(served.tokens_of(row))}


def _reason(ended: ServedPiece) -> str:
    return "stop_sequence" if ended.stopped and not ended.calls else _ENDS[ended.finish]


def _function(tool: AnthropicTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    return {"type": "function", "function": function | ({"description": tool.description} if tool.description else {})}


def _messages(form: MessagesForm) -> Iterator[dict[str, Any]]:
    """Yield the conversation in OpenAI's format."""
    if system := _text(form.system, "system"):
        yield {"role": "system", "content": system}
    for i, message in enumerate(form.messages):
        blocks = [{"type": "text", "text": message.content}] if isinstance(message.content, str) else message.content
        yield from _turns(message.role, blocks, f"messages[{i}].content")


def _turns(role: str, blocks: Sequence[Mapping[str, Any]], place: str) -> Iterator[dict[str, Any]]:
    """Yield the turns of one message in OpenAI's format: a user's tool results before its text, an assistant's with its calls."""
    kinds = _BLOCKS[role]
    for i, block in enumerate(blocks):
        if block.get("type") not in kinds:
            raise ApiError(
                f"{place}[{i}] is of type {block.get('type')!r}; a block of the {role} may be {', '.join(kinds)}.",
                param=f"{place}[{i}].type",
            )
    for i, block in enumerate(blocks):
        if block["type"] == "tool_result":
            content = _content(block.get("content") or "", f"{place}[{i}].content")
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content}
    text = _content(blocks, place, ("text", "image"))
    made: dict[str, Any] = {"role": role, "content": text}
    if thought := "".join(str(block.get("thinking", "")) for block in blocks if block["type"] == "thinking"):
        made["reasoning_content"] = thought
    if used := [block for block in blocks if block["type"] == "tool_use"]:
        functions = [{"name": block.get("name"), "arguments": block.get("input") or {}} for block in used]
        made["tool_calls"] = [
            {"id": block.get("id"), "type": "function", "function": function}
            for block, function in zip(used, functions, strict=True)
        ]
    if text or used or not any(block["type"] == "tool_result" for block in blocks):
        yield made


def _content(content: str | Sequence[Mapping[str, Any]], place: str, of: Sequence[str] = ()) -> Any:
    """Return a content's text, or its parts in OpenAI's format if it has an image.

    With `of`, only blocks of these types are read.
    """
    blocks = [(i, block) for i, block in enumerate(() if isinstance(content, str) else content) if not of or block["type"] in of]
    if not any(block.get("type") == "image" for _, block in blocks):
        return _text(content if isinstance(content, str) else [block for _, block in blocks], place)
    return [
        _image(block.get("source"), f"{place}[{i}].source") if block.get("type") == "image"
        else {"type": "text", "text": _text([block], f"{place}[{i}]")}
        for i, block in blocks
    ]  # fmt: skip


def _image(source: Any, place: str) -> dict[str, Any]:
    kind = source.get("type") if isinstance(source, Mapping) else None
    if kind not in ("base64", "url"):
        why = f"{place} is of type {kind!r}; expected 'base64', with the file's content in data."
        raise ApiError(why, param=place)
    url = source.get("url") if kind == "url" else f"data:{source.get('media_type')};base64,{source.get('data')}"
    return {"type": "image_url", "image_url": url, "at": place}


def _text(content: str | Sequence[Mapping[str, Any]], place: str) -> str:
    if isinstance(content, str):
        return content
    for i, block in enumerate(content):
        if block.get("type") != "text" or not isinstance(block.get("text"), str):
            raise ApiError(f"{place}[{i}] is of type {block.get('type')!r}; this model reads only text.", param=f"{place}[{i}]")
    return "".join(block["text"] for block in content)
