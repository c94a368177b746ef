"""The route of OpenAI's Responses API, /v1/responses, for text and functions, which is what agents use.

The latest conversations are stored for `previous_response_id`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from psigrad.language.rollout.types import DrawnToken
from psigrad_serve.api_base import Api, event
from psigrad_serve.api_errors import ApiError
from psigrad_serve.chat_completions import token_logprobs, tool_calls
from psigrad_serve.forms import MOST_TOP, Count, SamplingForm, Whole, offers
from psigrad_serve.served import Served, ServedPiece, joined
from psigrad_serve.steering import chosen_tool, json_grammar


class ResponsesTool(BaseModel):
    """A function that the request offers."""

    type: Literal["function"]
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponsesForm(SamplingForm):
    """The body of a request to /v1/responses."""

    input: str | Annotated[list[dict[str, Any]], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    previous_response_id: str | None = None
    include: list[str] = Field(default=[])
    top_logprobs: Annotated[Whole, Field(ge=0, le=MOST_TOP)] = 0
    tools: list[ResponsesTool] = Field(default=[])
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    text: dict[str, Any] = Field(default={})
    store: bool = True
    metadata: dict[str, Any] = Field(default={})


class Responses(Api[ResponsesForm]):
    """One request and its answer in this API's format."""

    def __init__(self, served: Served, body: dict[str, Any]) -> None:
        super().__init__(served, ResponsesForm, body)
        form = self.form
        served.check_top(form.top_logprobs, "top_logprobs")
        shown = form.tools if offers(form.tool_choice) else []
        tools = [{"type": "function", "function": tool.model_dump(exclude_none=True, exclude={"type"})} for tool in shown]
        self.messages = [*_before(served, form.previous_response_id), *_turns(form.input)]
        opening = [{"role": "system", "content": form.instructions}] if form.instructions else []
        talk, single = [*opening, *self.messages], not form.parallel_tool_calls
        row, offered = served.conversation(talk, tools, form.chat_template_kwargs, single=single)
        self.logprobs = "message.output_text.logprobs" in form.include or form.top_logprobs > 0
        asked = form.asked(form.max_output_tokens)
        place = "text.format"
        wish = served.wish({}, chosen_tool(form.tool_choice), offered, json_grammar(form.text.get("format"), place), place)
        self.calls = [served.call(body, row, None, asked, offered=offered, top=form.top_logprobs, wish=wish)]

    def begin(self) -> Iterator[str]:
        """Yield the first events of a stream."""
        self.number, self.pieces, self.has_text = itertools.count(), list[ServedPiece](), False
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._response("in_progress", [], 0))

    def piece(self, place: int, piece: ServedPiece) -> Iterator[str]:
        """Yield the events of a piece of new text or tool calls."""
        at = {"item_id": self._name("msg"), "output_index": 0, "content_index": 0}
        self.pieces.append(piece)
        if piece.text:
            if not self.has_text:
                yield self._event("response.output_item.added", output_index=0, item=self._said("", (), "in_progress"))
                yield self._event("response.content_part.added", **at, part=self._part("", ()))
            self.has_text = True
            logprobs = token_logprobs(self.served, piece.tokens) if self.logprobs else []
            yield self._event("response.output_text.delta", **at, delta=piece.text, logprobs=logprobs)
        if piece.finish:
            yield from self._ended(joined(self.pieces), at)

    def end(self) -> Iterator[str]:
        """Yield nothing: the last piece's events end the stream."""
        return iter(())

    def whole(self, choices: Sequence[Sequence[ServedPiece]]) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        ((choice,),) = choices
        self._remember(choice)
        cut = choice.finish == "length"
        return self._response("incomplete" if cut else "completed", self._output(choice), len(choice.tokens))

    def _ended(self, choice: ServedPiece, at: Mapping[str, Any]) -> Iterator[str]:
        output = self._output(choice)
        self._remember(choice)
        for place, item in enumerate(output):
            if item["type"] == "message":
                if not choice.text:  # without text no item was started
                    yield self._event("response.output_item.added", output_index=0, item=self._said("", (), "in_progress"))
                    yield self._event("response.content_part.added", **at, part=self._part("", ()))
                part = item["content"][0]
                yield self._event("response.output_text.done", **at, text=part["text"], logprobs=part["logprobs"])
                yield self._event("response.content_part.done", **at, part=part)
            else:
                begun = {**item, "arguments": "", "status": "in_progress"}
                yield self._event("response.output_item.added", output_index=place, item=begun)
                its, text = {"item_id": item["id"], "output_index": place}, item["arguments"]
                yield self._event("response.function_call_arguments.delta", **its, delta=text)
                yield self._event("response.function_call_arguments.done", **its, arguments=text, name=item["name"])
            yield self._event("response.output_item.done", output_index=place, item=item)
        status = "incomplete" if choice.finish == "length" else "completed"
        yield self._event(f"response.{status}", response=self._response(status, output, len(choice.tokens)))

    def _output(self, choice: ServedPiece) -> list[dict[str, Any]]:
        said = [self._said(choice.text, choice.tokens, "completed")] if choice.text or not choice.calls else []
        return said + [
            {"type": "function_call", "id": f"fc_{made['id']}", "call_id": made["id"], "status": "completed", **made["function"]}
            for made in tool_calls(self.calls[0], choice.calls, 0)
        ]

    def _said(self, text: str, tokens: Sequence[DrawnToken], status: str) -> dict[str, Any]:
        content = [self._part(text, tokens)] if status == "completed" else []
        return {"type": "message", "id": self._name("msg"), "status": status, "role": "assistant", "content": content}

    def _part(self, text: str, tokens: Sequence[DrawnToken]) -> dict[str, Any]:
        logprobs = token_logprobs(self.served, tokens) if self.logprobs else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _remember(self, choice: ServedPiece) -> None:
        if not self.form.store:
            return
        said: dict[str, Any] = {"role": "assistant", "content": choice.text}
        if choice.calls:
            said["tool_calls"] = tool_calls(self.calls[0], choice.calls, 0)
        self.served.kept.add(self._name("resp"), [*self.messages, said])

    def _name(self, prefix: str) -> str:
        return f"{prefix}_{self.id}"

    def _response(self, status: str, output: list[Any], count: int) -> dict[str, Any]:
        form, prompt = self.form, len(self.calls[0].prompt_ids)
        used = {"input_tokens": prompt, "output_tokens": count, "total_tokens": prompt + count}
        details = {"input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                   "output_tokens_details": {"reasoning_tokens": 0}}  # fmt: skip
        return {
            "id": self._name("resp"),
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            **{name: getattr(form, name) for name in ("instructions", "max_output_tokens", "model", "previous_response_id")},
            "output": output,
            "parallel_tool_calls": form.parallel_tool_calls,
            "temperature": form.temperature,
            "top_p": form.top_p,
            "text": {"format": form.text.get("format") or {"type": "text"}},
            "tool_choice": form.tool_choice or "auto",
            "metadata": form.metadata,
            "tools": [tool.model_dump() for tool in form.tools],
            "truncation": "disabled",
            "store": form.store,
            "usage": None if status == "in_progress" else used | details,
        }

    def _event(self, kind: str, **more: Any) -> str:
        return event({"type": kind, "sequence_number": next(self.number), **more}, kind)


def _before(served: Served, name: str | None) -> list[dict[str, Any]]:
    if name is None:
        return []
    found = served.kept.find(name)
    if found is None:
        raise ApiError(
            f"The response {name!r} is not stored on this server; send its conversation as input.",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return found


def _turns(given: str | Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the input as messages in OpenAI's chat format; consecutive calls belong to one turn."""
    if isinstance(given, str):
        yield {"role": "user", "content": given}
        return
    said: dict[str, Any] | None = None
    for i, item in enumerate(given):
        kind = item.get("type", "message")
        if said is not None and kind not in ("function_call", "reasoning"):
            yield said
            said = None
        if kind == "message":
            turn = {"role": item.get("role"), "content": _content(item.get("content"), f"input[{i}].content")}
            if turn["role"] == "assistant":  # calls may follow
                said = turn
            else:
                yield turn
        elif kind == "function_call":
            said = said or {"role": "assistant", "content": ""}
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            said.setdefault("tool_calls", []).append({"id": item.get("call_id"), "type": "function", "function": function})
        elif kind == "function_call_output":
            output = item.get("output")
            content = _content(output, f"input[{i}].output")
            yield {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
        elif kind != "reasoning":
            kinds = "message, function_call, function_call_output, reasoning"
            raise ApiError(f"input[{i}] is of type {kind!r}; this server reads {kinds}.", param=f"input[{i}].type")
    if said is not None:
        yield said


def _content(content: Any, place: str) -> Any:
    """Return the text of a content, or its parts if it has an image. Invalid parts are rejected later, with the messages."""
    if not isinstance(content, list):
        return content
    parts: list[dict[str, Any]] = []
    for i, part in enumerate(content):
        kind, where = part.get("type") if isinstance(part, dict) else type(part).__name__, f"{place}[{i}]"
        if kind == "input_image" and not part.get("file_id"):
            parts.append({"type": "image_url", "image_url": part.get("image_url"), "at": where})
        elif kind in ("input_text", "output_text", "text"):
            parts.append({"type": "text", "text": str(part.get("text", ""))})
        else:
            what = "an image by its file_id" if kind == "input_image" else f"of type {kind!r}"
            raise ApiError(f"{where} is {what}; send text, or an image as a data URL.", param=where)
    return parts if any(part["type"] != "text" for part in parts) else "".join(part["text"] for part in parts)
