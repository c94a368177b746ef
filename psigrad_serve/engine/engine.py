"""The sampling engine: one model for many clients, whose requests join and leave the batch at any time.

A separate thread decodes. A token depends on its seed, its position and the tokens before it, never on the rest of the batch.
Only rounding may differ, since matrix products of another batch size round differently. The same seed gives the tokens of
`EmbeddedSampler.sample`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Iterator, Sequence

from psigrad.errors import UserError
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.rollout.samplers.embedded import EmbeddedSampler, check_room, without_placeholders
from psigrad.language.rollout.samplers.transformers_backend import TransformersSampler
from psigrad.language.rollout.types import Request, Sampler, SamplingParams
from psigrad_serve.engine.live_batch import Decoding, LiveBatch, SamplerBatch, StepwiseBatch
from psigrad_serve.engine.streams import Steer, TokenStream
from psigrad_serve.threads import await_end


class SamplingEngine:
    """An engine that samples for any number of threads and event loops, at most `max_batch` completions at once; others wait.

    By default the embedded sampler decodes. Another `sampler` may be given. It gets all waiting completions in one call when it
    is free, and returns them complete, not token by token. Close the engine after use. It does not close `sampler`. Raises
    `UserError` if `max_batch` is below 1.
    """

    def __init__(self, model: LanguageModel, max_batch: int = 64, sampler: Sampler | None = None) -> None:
        if max_batch < 1:
            raise UserError(f"max_batch is {max_batch}; expected at least 1.")
        self.model, self.max_batch = model, max_batch
        self._batch: Decoding
        if sampler is None or isinstance(sampler, EmbeddedSampler):
            self._batch = LiveBatch(model, max_batch)
        elif isinstance(sampler, TransformersSampler):
            self._batch = StepwiseBatch(sampler, max_batch)
        else:
            self._batch = SamplerBatch(sampler, max_batch)
        self.changed = threading.Condition()
        self._waiting: deque[TokenStream] = deque()
        self._cancelled: list[TokenStream] = []
        self._holders, self._stepping, self._closed = 0, False, False
        self._thread: threading.Thread | None = None

    @property
    def waiting(self) -> int:
        """The number of completions that wait for a place in the batch."""
        return len(self._waiting)

    @property
    def active(self) -> int:
        """The number of completions that are being sampled."""
        return len(self._batch.rows)

    @property
    def steers(self) -> bool:
        """True if a function can change the logits before each token is drawn. Only the embedded sampler supports this."""
        return isinstance(self._batch, LiveBatch)

    def submit(
        self, prompt_ids: Sequence[int], params: SamplingParams, seed: int, top: int = 0, steer: Steer | None = None
    ) -> TokenStream:
        """Queue one completion and return its stream, which the caller reads in its event loop or, without one, in any thread.

        Each token comes with the `top` most probable ones at its position. It is drawn from the logits that `steer` returns, but
        its log-prob is that of the unchanged logits. Raises `UserError` if the prompt leaves no room for `max_tokens`.
        """
        request = Request(tuple(prompt_ids), (seed,))
        check_room(self.model, [request], params, images=self.steers)
        params = without_placeholders(self.model, params) if self.steers else params
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            loop = None
        stream = TokenStream(request.prompt_ids, seed, params, top, self.cancel, self.changed, loop, steer)
        with self.changed:
            if self._closed:
                raise RuntimeError("This engine is closed; create a new one.")
            self._waiting.append(stream)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
                self._thread.start()
            self.changed.notify_all()
        return stream

    def cancel(self, stream: TokenStream) -> None:
        """Stop sampling a completion. `TokenStream.cancel` calls this."""
        with self.changed:
            self._cancelled.append(stream)
            self.changed.notify_all()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Pause decoding during the block, so that the weights may change.

        Afterwards, running completions continue from the keys and values that the old weights computed. To avoid completions of
        two policies, wait until none is running first.
        """
        with self.changed:
            self._holders += 1
            self.changed.wait_for(lambda: not self._stepping)
        try:
            yield
        finally:
            with self.changed:
                self._holders -= 1
                self.changed.notify_all()

    def close(self) -> None:
        """End all completions, and stop the decoding thread."""
        with self.changed:
            self._closed = True
            self.changed.notify_all()
        if self._thread is not None:
            await_end(self._thread)

    def _run(self) -> None:
        while True:
            with self.changed:
                self._stepping = False
                self.changed.notify_all()
                self.changed.wait_for(lambda: self._closed or (not self._holders and self._has_work()))
                self._stepping = True
                gone = self._take_cancelled()
            if self._closed:
                self._fail(RuntimeError("The engine was closed."))
                self._tell(gone)
                with self.changed:  # a caller in `held` of a closed engine must not wait for a step
                    self._stepping = False
                    self.changed.notify_all()
                return
            try:
                self._batch.leave([stream for stream in self._batch.rows if stream in gone])
                self._tell(self._batch.admit(self._waiting))
                if self._batch.rows:
                    self._tell(self._batch.step())
            except BaseException as error:  # later requests are unaffected, and none may wait for a dead thread
                self._fail(error)
            self._tell(gone)

    def _has_work(self) -> bool:
        return bool(self._waiting or self._cancelled or self._batch.rows)

    def _take_cancelled(self) -> list[TokenStream]:
        gone, self._cancelled = [stream for stream in self._cancelled if not stream.ended], []
        for stream in gone:
            stream.end(None)
            if stream in self._waiting:
                self._waiting.remove(stream)
        return gone

    def _fail(self, error: BaseException) -> None:
        """End all running completions with an error. If the engine is closing, also end those that wait."""
        failed = [*self._batch.rows, *(self._waiting if self._closed else ())]
        for stream in failed:
            stream.end(None, error)
        self._batch.clear()
        self._tell(failed)

    def _tell(self, streams: list[TokenStream]) -> None:
        """Wake the readers of these streams, with one call for each event loop."""
        loops = {stream.loop for stream in streams} - {None}
        for loop in loops:
            own = [stream.news for stream in streams if stream.loop is loop]
            try:
                assert loop is not None
                loop.call_soon_threadsafe(_wake, own)
            except RuntimeError:  # the loop is closed, so nothing reads
                for stream in streams:
                    if stream.loop is loop:
                        stream.cancel()
        if len(streams) > sum(stream.loop is not None for stream in streams):
            with self.changed:
                self.changed.notify_all()


def _wake(events: list[asyncio.Event]) -> None:
    for event in events:
        event.set()
