"""The served model: it turns a request of any API into a `Call`, and samples the call as pieces of text and tokens.

`Recorder` is the interface for training. It may change how a session's calls are sampled, and it receives each completion before
the client does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from psigrad import seeds
from psigrad.errors import UserError
from psigrad.language.data.chat.messages import order_answers
from psigrad.language.data.dataset_rows import Row, RowError, validate
from psigrad.language.data.templates import prompt_ids, stop_token_ids
from psigrad.language.episodes.tool_calls import ToolCall
from psigrad.language.episodes.tools import CallForm, call_form_of
from psigrad.language.rollout.types import Completion, DrawnToken, SamplingParams
from psigrad_serve.api_errors import ApiError
from psigrad_serve.engine.engine import SamplingEngine
from psigrad_serve.engine.streams import Steer
from psigrad_serve.pictures import Pictures
from psigrad_serve.remembered import Remembered
from psigrad_serve.steering import Forms, Wish, call_grammar
from psigrad_serve.writer import Offered, Writer

MOST_WAITING = 1024
"""The maximum number of completions that wait for the engine. Further requests are rejected, and clients may retry them."""
MOST_FORMS = 64
"""The maximum number of sets of chat template arguments whose tool-call syntax is cached; the oldest are dropped first."""


@dataclass(frozen=True)
class Call:
    """A request for completions of one prompt, from any API. Choice k is sampled with `seed_of(seed, k)`."""

    request: Mapping[str, Any]
    """The body as received."""
    row: Row
    """The prompt as a dataset's row: text, or messages with their tools."""
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    n: int = 1
    stop: tuple[str, ...] = ()
    top: int = 0
    offered: Offered | None = None
    wish: Wish = field(default_factory=Wish)


@dataclass(frozen=True)
class ServedPiece:
    """New text of a choice (one completion of a call), and its tokens. The last piece has the finish reason and tool calls.

    A complete choice is a piece with all text and tokens (`joined`).
    """

    choice: int
    text: str
    tokens: Sequence[DrawnToken]
    finish: str = ""
    """The finish reason: stop, length or tool_calls; "" until the end."""
    calls: Sequence[ToolCall] = ()
    stopped: str = ""
    """The stop string that ended the choice."""


def joined(pieces: Sequence[ServedPiece]) -> ServedPiece:
    """Return all pieces of a choice as one."""
    text, tokens = "".join(piece.text for piece in pieces), [token for piece in pieces for token in piece.tokens]
    return replace(pieces[-1], text=text, tokens=tokens)


class Recorder:
    """A receiver of requests and completions. This base class ignores them.

    The methods are called in the server's event loop, so they must be fast.
    """

    def prepare(self, session_id: str, call: Call) -> Call:
        """Return the call to sample: this one, or one with another prompt, seed or settings. Raise `ApiError` to reject it."""
        return call

    def on_completion(self, session_id: str, call: Call, completion: Completion, reason: str, choice: int) -> None:
        """Record the completion of a choice, before the client receives it.

        `reason` is stop, length or cancelled (the client disconnected). If a stop string ended the completion, its last token is
        the one that completes that string.
        """


def seed_of(seed: int, choice: int) -> int:
    """Return the seed of a choice. The first choice has the request's seed, so that it equals what the sampler alone gives."""
    return seeds.derive(seed, "choice", choice) if choice else seed


class Served:
    """A model with its engine, which clients request by one of `names` (if there are none, by any name).

    `recorder` receives its completions. Conversations are stored in the folder `state`, or in memory if that is "".
    """

    def __init__(
        self, engine: SamplingEngine, names: Sequence[str] = (), recorder: Recorder | None = None, state: str = ""
    ) -> None:
        self.engine, self.names, self.recorder = engine, tuple(names), recorder or Recorder()
        self.tokenizer, self.forms = engine.model.tokenizer, Forms(engine.model)
        self.kept, self.pictures = Remembered(state), Pictures(engine)
        self.longest = max(map(len, self.tokenizer.get_vocab()), default=1)
        self._forms: dict[str, CallForm] = {}

    def check_model(self, name: str) -> None:
        """Raise `ApiError` if this server's model does not have this name."""
        if self.names and name not in self.names:
            raise ApiError(
                f"The model {name!r} does not exist; this server has {', '.join(self.names)}.",
                status=404, param="model", code="model_not_found",
            )  # fmt: skip

    def conversation(
        self, messages: list[Any], tools: Any, arguments: Any = None, *, single: bool = False
    ) -> tuple[Row, Offered | None]:
        """Convert messages in OpenAI's format, with their tools, to a row. If `single`, an answer has at most one tool call."""
        messages, held = self.pictures.marked(messages, {"tools": tools, "chat_template_kwargs": arguments})
        check_size(self, *([m.get("content"), m.get("tool_calls")] for m in messages), tools)
        messages = order_answers(messages)
        columns = {"tools": tools, "chat_template_kwargs": arguments}
        raw = {"prompt": messages, **{name: value for name, value in columns.items() if value}}
        try:
            # A policy may answer with nothing, and a client that continues sends that back.
            row = validate(raw, "prompt-only", "the request", empty=True)
        except RowError as error:
            place = error.bad.column.replace("prompt", "messages", 1)
            raise ApiError(f"{place or 'The request'} {error.bad.reason}.", param=place or None) from None
        self.pictures.hold(row)
        del held  # the row keeps the images now
        if not tools:
            return row, None
        key = json.dumps(arguments, sort_keys=True)
        if (form := self._forms.get(key)) is None:
            for first in list(self._forms)[: len(self._forms) + 1 - MOST_FORMS]:
                self._forms.pop(first, None)
            form = self._forms[key] = call_form_of(self.tokenizer, **(arguments or {}))
        functions = [tool["function"] for tool in tools]
        schemas = {function["name"]: function.get("parameters") or {"type": "object"} for function in functions}
        properties = {name: schema.get("properties") for name, schema in schemas.items()}
        parameters = {name: held if isinstance(held, dict) else {} for name, held in properties.items()}
        return row, Offered(form, parameters, schemas, single)

    def wish(self, penalties: Mapping[str, Any], forced: str | None, offered: Offered | None, form: str, place: str) -> Wish:
        """Return a request's constraints on sampling: its penalties, and a grammar.

        The grammar requires a call of the tool `forced` ("": any tool). If `forced` is None, the grammar is `form`, from the
        request's field `place`. Raises `ApiError` if it is invalid.
        """
        if forced is not None:
            form, place = call_grammar(offered, forced, self.tokenizer.get_added_vocab()), "tool_choice"
        found = Wish(grammar=form, **penalties)
        if not found:
            return found
        if not self.engine.steers:
            names = {"frequency": "frequency_penalty", "presence": "presence_penalty", "bias": "logit_bias"}
            raise _needs_embedded(place if form else next(names[one] for one, given in penalties.items() if given))
        if any(token >= self.engine.model.vocabulary for token in found.bias):
            raise ApiError(
                "logit_bias names a token that the model does not have; remove it.", param="logit_bias", code="invalid_value"
            )
        if form:
            self.forms.check(form, place)
        return found

    def check_top(self, top: int, name: str) -> None:
        """Raise `ApiError` if the field `name` asks for the `top` most probable tokens and the sampler does not report them."""
        if top and not self.engine.steers:
            raise _needs_embedded(name)

    def tokens_of(self, row: Row) -> tuple[int, ...]:
        """Return the tokens of a row's prompt. Raises `ApiError` if it can't be rendered."""
        place = "messages" if isinstance(row.prompt, list) else "prompt"
        try:
            return tuple(prompt_ids(self.tokenizer, row, strict=False))
        except RowError as error:
            where, why = error.bad.column.replace("prompt", place, 1), error.bad.reason
            where = where or (place if why.startswith("has ") else "")
            reason = f"{where} {why}" if where else f"{why[:1].upper()}{why[1:]}"
            raise ApiError(f"{reason}.", param=place) from None
        except UserError as error:
            raise ApiError(str(error), param=place) from None

    def check_tokens(self, ids: Sequence[int]) -> None:
        """Raise `ApiError` for token ids that the model does not have."""
        size = self.engine.model.vocabulary
        if max(ids) >= size:
            raise ApiError(f"The prompt has the token id {max(ids)}, but the model's ids end at {size - 1}.", param="prompt")

    def call(
        self, request: Mapping[str, Any], row: Row, ids: tuple[int, ...] | None, asked: Mapping[str, Any], **more: Any
    ) -> Call:
        """Return the `Call` of a request whose prompt is `row`, or the tokens `ids` if they are not None.

        `asked` may have max_tokens (0: as many as fit), temperature, top_p, top_k, min_p, seed and stop_token_ids. A max_tokens
        beyond the model's positions is reduced to the tokens that fit.
        """
        ids = ids or self.tokens_of(row)
        chat = stop_token_ids(self.tokenizer, row) if isinstance(row.prompt, list) else ()
        params = SamplingParams(
            max_tokens=asked.get("max_tokens") or self.engine.model.max_length,
            temperature=asked.get("temperature", 1.0),
            top_p=asked.get("top_p", 1.0),
            top_k=max(0, asked.get("top_k", 0)),
            min_p=asked.get("min_p", 0.0),
            stop_token_ids=(*asked.get("stop_token_ids", ()), *chat),
        )
        seed = asked.get("seed")
        return Call(request, row, ids, params, secrets.randbits(63) if seed is None else seed % 2**64, **more)

    def begin(self, session: str, call: Call) -> ServedAnswer:
        """Queue a call, and return its answer, which is sampled from now on."""
        return ServedAnswer(self, session, self.settled(session, call))

    def settled(self, session: str, call: Call) -> Call:
        """Return the call to sample, as the recorder changed it.

        Raises `ApiError` if the queue is full or the prompt too long.
        """
        if self.engine.waiting > MOST_WAITING:
            raise ApiError(f"{MOST_WAITING} completions are waiting; try again later.", status=429, code="rate_limit_exceeded")
        call, most = self.recorder.prepare(session, call), self.engine.model.max_length
        room = most - len(call.prompt_ids)
        if room < 1:
            raise ApiError(
                f"This model's maximum context length is {most} tokens, but the prompt has {len(call.prompt_ids)}; shorten it.",
                param="messages" if isinstance(call.row.prompt, list) else "prompt", code="context_length_exceeded",
            )  # fmt: skip
        params = replace(call.params, max_tokens=min(call.params.max_tokens, room))
        return replace(call, params=params)

    def text_of(self, token: int) -> str:
        """Return the text of one token."""
        text = self.tokenizer.decode([token])
        return text if isinstance(text, str) else "".join(text)


def check_size(served: Served, *texts: Any) -> None:
    """Raise `ApiError` if the strings in `texts`, also in lists and objects, have more characters than the context can hold."""
    most = served.engine.model.max_length * served.longest
    if (size := sum(map(_characters, texts))) > most:
        raise ApiError(
            f"The prompt has {size:,} characters, but this model's context of {served.engine.model.max_length} tokens holds "
            f"at most {most:,}; shorten the prompt.",
            code="context_length_exceeded",
        )  # fmt: skip


def _characters(value: Any) -> int:
    """Return the number of characters of all strings in a value, also in its lists and objects."""
    if isinstance(value, str):
        return len(value)
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sum(map(_characters, inner))


def _needs_embedded(name: str) -> ApiError:
    why = f"{name} needs the embedded sampler, but this server uses another sampler; remove {name}."
    return ApiError(why, param=name, code="unsupported_parameter")


class ServedAnswer:
    """The answer to a call: its completions (choices), which are being sampled."""

    def __init__(self, served: Served, session: str, call: Call) -> None:
        self.served, self.session, self.call = served, session, call
        engine = served.engine
        try:
            self.streams = [
                engine.submit(call.prompt_ids, call.params, seed_of(call.seed, k), call.top, self._steer()) for k in range(call.n)
            ]
        except UserError as error:
            raise ApiError(str(error), code="context_length_exceeded") from None
        self._recorded = [asyncio.Event() for _ in self.streams]

    def _steer(self) -> Steer | None:
        return self.call.wish.steer(self.served.forms) if self.call.wish else None

    async def choice(self, k: int) -> AsyncGenerator[ServedPiece]:
        """Yield the pieces of choice `k` as they are sampled. Leaving the loop cancels the choice.

        The recorder receives the complete choices in order.
        """
        call, stream, count, ended = self.call, self.streams[k], 0, False
        writer = Writer(self.served.tokenizer, call.stop, call.offered)
        try:
            async with contextlib.aclosing(stream.chunks()) as chunks:
                async for tokens in chunks:
                    wanted = tokens[: writer.take([token.id for token in tokens])]
                    count += len(wanted)
                    yield ServedPiece(k, writer.news(), wanted)
                    if writer.stopped:
                        break
            for before in self._recorded[:k]:
                await before.wait()
            ended = True
        finally:
            if not ended:
                self._record(k, count, "cancelled")
        writer.flush()
        reason = "stop" if writer.stopped else stream.finish_reason or "stop"
        self._record(k, count, reason)
        text, calls = writer.end()
        yield ServedPiece(k, text, (), "tool_calls" if calls else reason, calls, writer.stopped)

    def _record(self, k: int, count: int, reason: str) -> None:
        self._recorded[k].set()
        self.served.recorder.on_completion(self.session, self.call, self.streams[k].completion(count), reason, k)


async def merged(answers: Sequence[ServedAnswer]) -> AsyncGenerator[tuple[int, ServedPiece]]:
    """Yield (index of the choice among those of all answers, piece) as they are sampled. Leaving the loop cancels all."""
    sources = [(answer, k) for answer in answers for k in range(answer.call.n)]
    queue: asyncio.Queue[tuple[int, ServedPiece] | BaseException] = asyncio.Queue()

    async def pump(place: int, answer: ServedAnswer, k: int) -> None:
        try:
            async for piece in answer.choice(k):
                queue.put_nowait((place, piece))
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(pump(place, *source)) for place, source in enumerate(sources)]
    try:
        left = len(tasks)
        while left:
            found = await queue.get()
            if isinstance(found, BaseException):
                raise found
            left -= bool(found[1].finish)
            yield found
    finally:
        for task in tasks:
            task.cancel()
        for answer, k in sources:  # a task that never started cannot cancel its stream; do it before an await is cancelled
            answer.streams[k].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def gathered(answers: Sequence[ServedAnswer]) -> list[list[ServedPiece]]:
    """Wait for all choices and return those of each answer."""
    parts: dict[int, list[ServedPiece]] = defaultdict(list)
    async with contextlib.aclosing(merged(answers)) as pieces:
        async for place, piece in pieces:
            parts[place].append(piece)
    whole = (joined(parts[place]) for place in sorted(parts))
    return [list(islice(whole, answer.call.n)) for answer in answers]
