"""The route of OpenAI's Completions API, /v1/completions. It takes one or several prompts, as text or token ids."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from psigrad.language.data.dataset_rows import Row
from psigrad.language.data.templates import decode
from psigrad.language.models.packing import Groups
from psigrad.language.rollout.types import DrawnToken
from psigrad_serve.api_base import CompletionApi, CompletionForm
from psigrad_serve.api_errors import ApiError
from psigrad_serve.forms import MOST_CHOICES, MOST_TOP, Whole, read_stop
from psigrad_serve.pictures import refuse_marks
from psigrad_serve.served import Call, Served, ServedPiece, check_size
from psigrad_serve.writer import Writer

Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class TextForm(CompletionForm):
    """The body of a request to /v1/completions."""

    prompt: str | Ids | Annotated[list[str], Field(min_length=1)] | Annotated[list[Ids], Field(min_length=1)]
    max_tokens: Annotated[Whole, Field(ge=0)] | None = 16
    n: Annotated[Whole, Field(ge=1, le=MOST_CHOICES)] = 1
    stop: str | list[str] | None = None
    logprobs: Annotated[Whole, Field(ge=0, le=MOST_TOP)] | None = None
    echo: bool = False
    return_tokens_as_token_ids: bool = False


class TextCompletions(CompletionApi[TextForm]):
    """One request and its answer in this API's format."""

    prefix, kind = "cmpl-", "text_completion"

    def __init__(self, served: Served, body: dict[str, Any]) -> None:
        super().__init__(served, TextForm, body)
        form = self.form
        self.scores = form.max_tokens == 0  # only the prompt's log-probs are returned
        if self.scores and not form.echo:
            raise ApiError(
                "max_tokens is 0, which returns no text without echo; raise max_tokens, or set echo.",
                param="max_tokens",
                code="invalid_value",
            )
        stop, asked, top = read_stop(form.stop), form.asked(form.max_tokens or 1), form.logprobs or 0
        if not form.echo:  # with echo, `_read` computes the prompt's log-probs without the sampler
            served.check_top(top, "logprobs")
        more: dict[str, Any] = {"n": form.n, "stop": stop, "top": top, "wish": served.wish(form.penalties, None, None, "", "")}
        self.calls = [served.call(body, *each, asked, **more) for each in self._prompts(form.prompt)]

    def begin(self) -> Iterator[str]:
        """Yield the first events of a stream."""
        of_choices = [call for call in self.calls for _ in range(call.n)]
        self.places = [len(self._echoed(call)) for call in of_choices]
        self.writers = [self._writer() for _ in of_choices]
        for place, call in enumerate(of_choices if self.form.echo else ()):
            yield self.chunk([self._choice(place, self._echoed(call), (), 0, self._writer())])

    def piece(self, place: int, piece: ServedPiece) -> Iterator[str]:
        """Yield the events of a piece of new text. `place` is its choice's index among those of all prompts."""
        piece = self._scored(piece)
        self.count += len(piece.tokens)
        if piece.text or piece.finish or (piece.tokens and (self.form.logprobs is not None or self.form.return_token_ids)):
            choice = self._choice(place, piece.text, piece.tokens, self.places[place], self.writers[place])
            yield self.chunk([choice | {"finish_reason": piece.finish or None}])

    def whole(self, choices: Sequence[Sequence[ServedPiece]]) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        made: list[dict[str, Any]] = []
        for call, own in zip(self.calls, choices, strict=True):
            read, echoed = self._read(call), self._echoed(call)
            more = {"prompt_token_ids": call.prompt_ids} if self.form.return_token_ids else {}
            for reply in map(self._scored, own):
                self.count += len(reply.tokens)
                offset, tokens = 0 if read else len(echoed), (*read, *reply.tokens)
                choice = self._choice(len(made), echoed + reply.text, tokens, offset, self._writer())
                made.append(choice | {"finish_reason": reply.finish} | more)
        return self.body(made, self.kind, usage=self.usage(self.count))

    def _scored(self, piece: ServedPiece) -> ServedPiece:
        """Return a piece of an answer. If only the prompt is scored, remove the text and tokens."""
        return replace(piece, text="", tokens=(), finish=piece.finish and "length") if self.scores else piece

    def _prompts(self, given: Any) -> Iterator[tuple[Row, tuple[int, ...] | None]]:
        many = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
        for prompt in many:
            if isinstance(prompt, str):
                refuse_marks({"prompt": prompt})
                check_size(self.served, prompt)
                yield Row("the request", prompt=prompt), None
            else:
                self.served.check_tokens(prompt)
                yield Row("the request", prompt=decode(self.served.tokenizer, prompt)), tuple(prompt)

    def _echoed(self, call: Call) -> str:
        return str(call.row.prompt) if self.form.echo else ""

    def _read(self, call: Call) -> list[DrawnToken]:
        """Return the prompt's tokens with their log-probs, if the request asks for both; otherwise an empty list."""
        if not self.form.echo or self.form.logprobs is None:
            return []
        engine, first, rest = self.served.engine, call.prompt_ids[:1], call.prompt_ids[1:]
        told = [DrawnToken(first[0], math.nan, math.nan, ())]
        if rest:
            with engine.held():
                logp, top = engine.model.most_probable(Groups([first], [[rest]]), max(self.form.logprobs, 1))
            for i, own, ids, best in zip(rest, logp[0].tolist(), top.ids[0].tolist(), top.logp[0].tolist(), strict=True):
                told.append(DrawnToken(i, own, own, tuple(zip(ids, best, strict=True))))
        return told

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self.form.return_tokens_as_token_ids else self.served.text_of(token)

    def _writer(self) -> Writer:
        return Writer(self.served.tokenizer)

    def _choice(self, place: int, text: str, tokens: Sequence[DrawnToken], offset: int, writer: Writer) -> dict[str, Any]:
        made: dict[str, Any] = {"index": place, "text": text, "logprobs": None, "finish_reason": None}
        if self.form.return_token_ids:
            made["token_ids"] = [token.id for token in tokens]
        if self.form.logprobs is not None:
            offsets = []
            for token in tokens:  # a token that is a part of a character has the character's offset
                offsets.append(offset + len(writer.text))
                writer.take([token.id])
            tops = [{self._name(i): logprob for i, logprob in token.top} or None for token in tokens]
            made["logprobs"] = {
                "tokens": [self._name(token.id) for token in tokens],
                # The first token of a prompt has no log-prob.
                "token_logprobs": [None if math.isnan(token.logprob) else token.logprob for token in tokens],
                "top_logprobs": tops if self.form.logprobs else None,
                "text_offset": offsets,
            }
        return made
