"""The interface of the gateway's APIs: one request, and the format of its answer."""

from __future__ import annotations

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel, Field

from psigrad_serve.forms import PenaltyForm, SamplingForm, read_form
from psigrad_serve.served import Call, Served, ServedPiece

F = TypeVar("F", bound=SamplingForm)
C = TypeVar("C", bound="CompletionForm")


class Api(ABC, Generic[F]):
    """One request in the format of some API: its `calls`, and the format of its answer. The answer's id begins with `prefix`.

    Before sampling, the gateway replaces `calls` with the calls that the recorder returns.
    """

    prefix: ClassVar[str] = ""
    calls: Sequence[Call]

    def __init__(self, served: Served, form: type[F], body: dict[str, Any]) -> None:
        self.served, self.form = served, read_form(form, body)
        served.check_model(self.form.model)
        # The id is not derived from the seed, since clients merge answers with equal ids.
        self.id, self.created = f"{self.prefix}{secrets.token_hex(12)}", int(time.time())

    @abstractmethod
    def begin(self) -> Iterator[str]:
        """Yield the first events of a stream."""

    @abstractmethod
    def piece(self, place: int, piece: ServedPiece) -> Iterator[str]:
        """Yield the events of a piece of new text or tool calls. `place` is its choice's index among those of all calls."""

    @abstractmethod
    def end(self) -> Iterator[str]:
        """Yield the last events."""

    @abstractmethod
    def whole(self, choices: Sequence[Sequence[ServedPiece]]) -> dict[str, Any]:
        """Return the body of an answer that is not streamed. `choices` are the complete choices of each call."""


class StreamOptions(BaseModel):
    """The field `stream_options`. With `include_usage`, a stream ends with the numbers of tokens."""

    include_usage: bool = False


class CompletionForm(PenaltyForm):
    """The fields of OpenAI's two completion APIs about streams."""

    stream_options: StreamOptions = Field(default_factory=StreamOptions)


class CompletionApi(Api[C]):
    """One request of OpenAI's two completion APIs, whose answer and whose chunks of a stream have the same layout."""

    kind: ClassVar[str]
    count = 0
    """The number of sampled tokens in the stream so far."""

    def end(self) -> Iterator[str]:
        """Yield the last events."""
        if self.form.stream_options.include_usage:
            yield self.chunk([], usage=self.usage(self.count))
        yield "data: [DONE]\n\n"

    def usage(self, completion: int) -> dict[str, int]:
        """Return OpenAI's `usage`: the numbers of tokens of the prompts, of the completions, and of both."""
        prompt = sum(len(call.prompt_ids) for call in self.calls)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def body(self, choices: Sequence[Any], kind: str, **more: Any) -> dict[str, Any]:
        """Return an answer with these choices."""
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.form.model}
        return {**head, "choices": choices, **more}

    def chunk(self, choices: Sequence[Any], **more: Any) -> str:
        """Return a chunk of a stream with these choices, as an event."""
        return event(self.body(choices, self.kind, **more))


def event(content: Any, name: str = "") -> str:
    """Format a server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(content, separators=(',', ':'))}\n\n"
