"""The tokens of a completion while it is being drawn."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from psigrad.language.rollout.types import Completion, DrawnToken, FinishReason, SamplingParams

Steer = Callable[[Tensor, Sequence[DrawnToken]], Tensor]
"""(logits [V] of the next token, the tokens so far) -> the logits that it is drawn from. Called once for each token, in order."""


@dataclass(eq=False)
class TokenStream:
    """The tokens of one completion, as they are drawn. Iterate over it, in a thread or in an event loop, or wait for `result`."""

    prompt_ids: tuple[int, ...]
    seed: int
    params: SamplingParams
    top: int
    cancel_in: Callable[[TokenStream], None] = field(repr=False)
    changed: threading.Condition = field(repr=False)
    """Told after each step, for those who read in a thread."""
    loop: asyncio.AbstractEventLoop | None = None
    steer: Steer | None = field(default=None, repr=False)
    tokens: list[DrawnToken] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    """Why it ended; None while it goes on, and where it was cancelled."""
    error: BaseException | None = None
    ended: bool = False

    def __post_init__(self) -> None:
        self.news = asyncio.Event()

    async def chunks(self) -> AsyncGenerator[list[DrawnToken]]:
        """What has been drawn since the last look, never nothing. Whoever leaves cancels the completion."""
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
        """The completion, when it has ended."""
        for _ in self:
            pass
        return self.completion(len(self.tokens))

    async def wait(self) -> Completion:
        """As `result`, in an event loop."""
        async for _ in self.chunks():
            pass
        return self.completion(len(self.tokens))

    def completion(self, count: int) -> Completion:
        """Its first `count` tokens."""
        ids, logprobs, sampling, _ = zip(*self.tokens[:count], strict=True) if count else ((), (), (), ())
        return Completion(ids, logprobs, sampling, self.finish_reason or "stop", self.seed)

    def cancel(self) -> None:
        """Draw no more of it; its place is free from the next step on. Nothing happens where it has ended."""
        if not self.ended:
            self.cancel_in(self)

    def add(self, token: DrawnToken, stops: Container[int]) -> None:
        """Called by who decodes: the next token, which is the last one where it is among `stops` or those of its own."""
        self.tokens.append(token)
        if token.id in stops or token.id in self.params.stop_token_ids:
            self.end("stop")
        elif len(self.tokens) == self.params.max_tokens:
            self.end("length")

    def end(self, reason: FinishReason | None, error: BaseException | None = None) -> None:
        """Called by who decodes."""
        self.finish_reason, self.error, self.ended = reason, error, True

    def _raise(self) -> None:
        if self.error is not None:
            raise self.error
