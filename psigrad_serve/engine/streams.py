"""The tokens of a completion while it is sampled."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from psigrad.language.rollout.types import Completion, DrawnToken, FinishReason, SamplingParams

if TYPE_CHECKING:
    from psigrad_serve.writer import Writer

Steer = Callable[[Tensor, Sequence[DrawnToken]], Tensor]
"""(logits [V] of the next token, the tokens so far) -> the logits to sample from. Called once for each token, in order."""


@dataclass(eq=False)
class TokenStream:
    """The tokens of one completion, as they are sampled. Iterate over it in a thread or an event loop, or wait for `result`."""

    prompt_ids: tuple[int, ...]
    seed: int
    params: SamplingParams
    top: int
    cancel_in: Callable[[TokenStream], None] = field(repr=False)
    changed: threading.Condition = field(repr=False)
    """A condition that the engine notifies after each step, for readers in threads."""
    loop: asyncio.AbstractEventLoop | None = None
    steer: Steer | None = field(default=None, repr=False)
    tokens: list[DrawnToken] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    """The reason why the completion ended; None if it is running or was cancelled."""
    error: BaseException | None = None
    ended: bool = False

    def __post_init__(self) -> None:
        self.news = asyncio.Event()

    async def chunks(self) -> AsyncGenerator[list[DrawnToken]]:
        """Yield lists of new tokens, each with at least one, as they are sampled. Leaving the loop cancels the completion."""
        seen = 0
        try:
            while True:
                ended, new = self.ended, self.tokens[seen:]
                seen += len(new)
                if new:
                    yield new
                elif ended:
                    break
                else:
                    await self.news.wait()
                    self.news.clear()
        finally:
            self.cancel()
        self._raise()

    async def write(self, writer: Writer) -> int:
        """Sample until the end or a stop string of the writer. Return the number of tokens up to there."""
        count = 0
        async with contextlib.aclosing(self.chunks()) as chunks:  # closing it frees the place in the batch
            async for tokens in chunks:
                count += writer.take([token.id for token in tokens]) if writer.stops else len(tokens)
                if writer.stopped:
                    break
        return count

    async def __aiter__(self) -> AsyncIterator[DrawnToken]:
        async with contextlib.aclosing(self.chunks()) as chunks:
            async for chunk in chunks:
                for token in chunk:
                    yield token

    def __iter__(self) -> Iterator[DrawnToken]:
        seen = 0
        try:
            while True:
                with self.changed:
                    while not self.ended and len(self.tokens) == seen:
                        self.changed.wait()
                new = self.tokens[seen:]
                if not new:
                    break
                seen += len(new)
                yield from new
        finally:
            self.cancel()
        self._raise()

    def result(self) -> Completion:
        """Wait for the complete completion, in a thread, and return it."""
        for _ in self:
            pass
        return self.completion(len(self.tokens))

    async def wait(self) -> Completion:
        """Wait for the complete completion, in an event loop, and return it."""
        async for _ in self.chunks():
            pass
        return self.completion(len(self.tokens))

    def completion(self, count: int) -> Completion:
        """Return the first `count` tokens as a completion."""
        ids, logprobs, sampling, _ = zip(*self.tokens[:count], strict=True) if count else ((), (), (), ())
        return Completion(ids, logprobs, sampling, self.finish_reason or "stop", self.seed)

    def cancel(self) -> None:
        """Stop sampling and free the slot from the next step on. Do nothing if the completion has ended."""
        if not self.ended:
            self.cancel_in(self)

    def add(self, token: DrawnToken, stops: Container[int]) -> None:
        """Append the next token, called by the decoder. A token in `stops` or in the stream's stop tokens ends it."""
        self.tokens.append(token)
        if token.id in stops or token.id in self.params.stop_token_ids:
            self.end("stop")
        elif len(self.tokens) == self.params.max_tokens:
            self.end("length")

    def end(self, reason: FinishReason | None, error: BaseException | None = None) -> None:
        """End the stream, called by the decoder."""
        self.finish_reason, self.error, self.ended = reason, error, True

    def _raise(self) -> None:
        if self.error is not None:
            raise self.error
