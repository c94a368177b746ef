"""The route of OpenAI's Chat Completions API: /v1/chat/completions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from psigrad import seeds
from psigrad.language.episodes.tool_calls import ToolCall
from psigrad.language.rollout.types import DrawnToken
from psigrad_serve.api_base import CompletionApi, CompletionForm
from psigrad_serve.forms import MOST_CHOICES, MOST_TOP, Count, Whole, offers, read_stop
from psigrad_serve.served import Call, Served, ServedPiece
from psigrad_serve.steering import chosen_tool, json_grammar
from psigrad_serve.writer import token_bytes


class FunctionForm(BaseModel):
    """A function that the request offers."""

    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolForm(BaseModel):
    """A tool that the request offers."""

    type: Literal["function"]
    function: FunctionForm


class ChatForm(CompletionForm):
    """The body of a request to /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    n: Annotated[Whole, Field(ge=1, le=MOST_CHOICES)] = 1
    stop: str | list[str] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[Whole, Field(ge=0, le=MOST_TOP)] = 0
    tools: list[ToolForm] = Field(default=[])
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    response_format: Any = None


class ChatCompletions(CompletionApi[ChatForm]):
    """One request and its answer in this API's format."""

    prefix, kind = "chatcmpl-", "chat.completion.chunk"

    def __init__(self, served: Served, body: dict[str, Any]) -> None:
        super().__init__(served, ChatForm, body)
        form = self.form
        tools = [tool.model_dump(exclude_none=True) for tool in form.tools] if offers(form.tool_choice) else []
        row, offered = served.conversation(form.messages, tools, form.chat_template_kwargs, single=not form.parallel_tool_calls)
        asked = form.asked(form.max_completion_tokens or form.max_tokens)
        top = form.top_logprobs if form.logprobs else 0
        served.check_top(top, "top_logprobs")
        stop = read_stop(form.stop)
        place = "response_format"
        grammar = json_grammar(form.response_format, place)
        wish = served.wish(form.penalties, chosen_tool(form.tool_choice), offered, grammar, place)
        self.calls = [served.call(body, row, None, asked, n=form.n, stop=stop, top=top, offered=offered, wish=wish)]

    @property
    def call(self) -> Call:
        """The only `Call` of this request, which has one prompt."""
        return self.calls[0]

    def begin(self) -> Iterator[str]:
        """Yield the first events of a stream."""
        for k in range(self.call.n):
            more = self._prompt_ids() if not k else {}
            yield self.chunk([self._choice(k, {"role": "assistant", "content": ""})], **more)

    def piece(self, place: int, piece: ServedPiece) -> Iterator[str]:
        """Yield the events of a piece of new text or tool calls."""
        self.count += len(piece.tokens)
        if piece.text or (piece.tokens and (self.form.logprobs or self.form.return_token_ids)):
            choice = self._choice(piece.choice, {"content": piece.text})
            if self.form.logprobs:
                choice["logprobs"] = self._logprobs(piece.tokens)
            if self.form.return_token_ids:
                choice["token_ids"] = [token.id for token in piece.tokens]
            yield self.chunk([choice])
        for i, call in enumerate(tool_calls(self.call, piece.calls, piece.choice)):
            yield self.chunk([self._choice(piece.choice, {"tool_calls": [{"index": i, **call}]})])
        if piece.finish:
            yield self.chunk([self._choice(piece.choice, {}, piece.finish)])

    def whole(self, choices: Sequence[Sequence[ServedPiece]]) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        form, made = self.form, []
        for k, reply in enumerate(choices[0]):
            message: dict[str, Any] = {"role": "assistant", "content": reply.text, "refusal": None}
            if reply.calls:
                message |= {"content": reply.text or None, "tool_calls": tool_calls(self.call, reply.calls, k)}
            logprobs = self._logprobs(reply.tokens) if form.logprobs else None
            choice = {"index": k, "message": message, "logprobs": logprobs, "finish_reason": reply.finish}
            made.append(choice | ({"token_ids": [t.id for t in reply.tokens]} if form.return_token_ids else {}))
        counted = self.usage(sum(len(reply.tokens) for reply in choices[0]))
        return self.body(made, "chat.completion", usage=counted, **self._prompt_ids())

    def _prompt_ids(self) -> dict[str, Any]:
        shown = self.served.pictures.shown_ids
        return {"prompt_token_ids": shown(self.call.prompt_ids)} if self.form.return_token_ids else {}

    def _choice(self, k: int, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        return {"index": k, "delta": delta, "logprobs": None, "finish_reason": finish}

    def _logprobs(self, tokens: Sequence[DrawnToken]) -> dict[str, Any]:
        return {"content": token_logprobs(self.served, tokens), "refusal": None}


def token_logprobs(served: Served, tokens: Sequence[DrawnToken]) -> list[dict[str, Any]]:
    """Return OpenAI's `logprobs` entries: each token's text, log-prob and bytes, and the most probable tokens at its position."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        return {"token": served.text_of(token), "logprob": logprob, "bytes": token_bytes(served.tokenizer, token)}

    return [one(t.id, t.logprob) | {"top_logprobs": [one(*each) for each in t.top]} for t in tokens]


def tool_calls(call: Call, calls: Sequence[ToolCall], choice: int) -> list[dict[str, Any]]:
    """Return tool calls in OpenAI's format. Their ids have nine letters, because Mistral's templates reject others.

    An id is a hash of the tool call, the prompt and the seed. Some templates write ids into the prompt, so they must not be
    random.
    """
    return [
        {
            "id": f"{seeds.derive(call.seed, choice, i, json.dumps([made.name, made.arguments]), *call.prompt_ids):016x}"[-9:],
            "type": "function",
            "function": {"name": made.name, "arguments": json.dumps(made.arguments, ensure_ascii=False)},
        }
        for i, made in enumerate(calls)
    ]
