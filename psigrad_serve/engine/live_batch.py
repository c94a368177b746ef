"""The decoders of an engine: the embedded sampler with continuous batching, or any other sampler."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from psigrad.language.models.attention import on_device
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.models.stats import upcast
from psigrad.language.rollout.samplers.cache import KVCache, SharedCache, new_cache, prefill
from psigrad.language.rollout.samplers.distribution import DrawnTokens, draw
from psigrad.language.rollout.samplers.transformers_backend import TransformersSampler
from psigrad.language.rollout.types import DrawnToken, Request, Sampler, SamplingParams
from psigrad_serve.engine.streams import TokenStream

# The maximum number of prompt tokens in one prefill, since running completions wait for it.
_PREFILL = 8192
# If a slot of the KV cache has more tokens than this, the cache is freed when nothing is running.
_KEPT = 1024


class Decoding(ABC):
    """A decoder, which samples the tokens of at most `max_batch` running streams, the `rows`, in steps."""

    def __init__(self, max_batch: int) -> None:
        self.max_batch = max_batch
        self.rows: list[TokenStream] = []

    def admit(self, waiting: deque[TokenStream]) -> list[TokenStream]:
        """Move streams from the left of the queue into the batch while there is room. Return those that already got a token."""
        while waiting and len(self.rows) < self.max_batch:
            self.rows.append(waiting.popleft())
        return []

    @abstractmethod
    def step(self) -> list[TokenStream]:
        """Decode all streams. Return those that got tokens."""

    def leave(self, gone: Iterable[TokenStream]) -> None:
        """Remove streams that have ended."""
        left = set(map(id, gone))
        self.rows = [stream for stream in self.rows if id(stream) not in left]

    def clear(self) -> None:
        """Remove all streams, after a step that failed halfway."""
        self.leave(self.rows)


class LiveBatch(Decoding):
    """A `Decoding` by the embedded sampler with continuous batching: each step samples one token of each stream.

    If adjacent streams in the queue have the same prompt, its forward pass is computed once.
    """

    def __init__(self, model: LanguageModel, max_batch: int) -> None:
        super().__init__(max_batch)
        self.model = model
        self.cache: KVCache | SharedCache | None = None

    @torch.inference_mode()
    def admit(self, waiting: deque[TokenStream]) -> list[TokenStream]:
        """Admit waiting streams, prefill their prompts and sample their first tokens. See `Decoding`."""
        new: list[TokenStream] = []
        prompts: list[tuple[int, ...]] = []
        copies: list[int] = []
        while waiting and len(self.rows) + len(new) < self.max_batch:
            prompt = waiting[0].prompt_ids
            if not prompts or prompts[-1] != prompt:
                if prompts and sum(map(len, prompts)) + len(prompt) > _PREFILL:
                    break
                prompts.append(prompt)
            copies.append(len(prompts) - 1)
            new.append(waiting.popleft())
        if not new:
            return []
        self.rows += new
        self.model.switch(training=False)
        self.cache = self.cache or new_cache(self.model, self.max_batch, self.model.max_length)
        logits = prefill(self.model, self.cache, prompts, on_device(copies, self.model.device), None)
        self._draw(logits, new)
        return new

    @torch.inference_mode()
    def step(self) -> list[TokenStream]:
        """Sample the next token of each stream. See `Decoding`."""
        assert self.cache is not None
        self.model.switch(training=False)
        rows, layout = list(self.rows), self.cache.decode()
        last = on_device([stream.tokens[-1].id for stream in rows], self.model.device)
        hidden = self.model.forward(last[:, None], layout.positions[:, None], layout, None)
        self._draw(self.model.head(hidden[:, 0], self.cache.exact, self.cache.packed_weights), rows)
        return rows

    def clear(self) -> None:
        """Remove all streams and free the KV cache. See `Decoding`."""
        self.rows, self.cache = [], None

    @torch.inference_mode()
    def leave(self, gone: Iterable[TokenStream]) -> None:
        """Remove these streams and their slots of the KV cache. See `Decoding`."""
        left = set(map(id, gone))
        away = [id(stream) in left for stream in self.rows]
        if self.cache is not None and any(away):
            order = self.cache.remove(torch.tensor(away))
            self.rows = [self.rows[i] for i in order.tolist()]
            if not self.rows:
                self._shrink()

    def _draw(self, logits: torch.Tensor, rows: Sequence[TokenStream]) -> None:
        """Sample a token for each of `rows` from its logits, and remove the streams that end."""
        by_params: dict[tuple[SamplingParams, bool], list[int]] = {}
        for i, stream in enumerate(rows):
            alike = replace(stream.params, max_tokens=1, stop_token_ids=())
            by_params.setdefault((alike, stream.steer is not None), []).append(i)
        for (params, _), own in by_params.items():
            self._draw_alike(logits if len(own) == len(rows) else logits[own], params, [rows[i] for i in own])
        ended = [stream for stream in rows if stream.ended]
        if ended:
            self.leave(ended)

    def _draw_alike(self, logits: torch.Tensor, params: SamplingParams, rows: Sequence[TokenStream]) -> None:
        seeds = np.array([stream.seed for stream in rows], dtype=np.uint64)
        counter = np.array([len(stream.tokens) for stream in rows])
        if rows[0].steer is None:
            drawn = draw(logits, params, seeds, counter)
        else:
            drawn = draw(_steered(logits, rows), params, seeds, counter)
            drawn = DrawnTokens(
                drawn.ids, _log_probs(logits, params).gather(-1, drawn.ids[:, None])[:, 0], drawn.sampling_logprobs
            )
        columns = (drawn.ids.tolist(), drawn.logprobs.tolist(), drawn.sampling_logprobs.tolist())
        most = max(stream.top for stream in rows)
        values, places = _top(logits, params, most) if most else ([()] * len(rows), [()] * len(rows))
        stops = self.model.eos_token_ids
        for stream, token, logp, sampling, best, ids in zip(rows, *columns, values, places, strict=True):
            if not stream.ended:
                stream.add(DrawnToken(token, logp, sampling, tuple(zip(ids, best, strict=True))[: stream.top]), stops)

    def _shrink(self) -> None:
        if isinstance(self.cache, SharedCache) and self.cache.slot_tables[0].shape[3] > _KEPT:
            packed, self.cache = self.cache.packed_weights, new_cache(self.model, self.max_batch, self.model.max_length)
            if isinstance(self.cache, SharedCache):
                self.cache.packed_weights = packed
        elif isinstance(self.cache, KVCache) and any(keys.shape[2] > _KEPT for keys, _ in self.cache.layers.values()):
            self.cache = None


def _top(logits: torch.Tensor, params: SamplingParams, most: int) -> tuple[list[list[float]], list[list[int]]]:
    """Return (log-probs, ids) of the `most` most probable tokens in each row of logits."""
    best = _log_probs(logits, params).topk(min(most, logits.shape[-1]), dim=-1)
    return best.values.tolist(), best.indices.tolist()


def _log_probs(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    return torch.log_softmax(upcast(logits) / (params.temperature or 1.0), -1)


def _steered(logits: torch.Tensor, rows: Sequence[TokenStream]) -> torch.Tensor:
    """Return the logits from which these streams sample, changed by their `steer` functions.

    If such a function raises, only its own stream ends.
    """
    made = upcast(logits).clone()
    for i, stream in enumerate(rows):
        assert stream.steer is not None
        try:
            made[i] = stream.steer(made[i], stream.tokens)
        except Exception as error:
            stream.end(None, error)
    return made


class SamplerBatch(Decoding):
    """A `Decoding` by any sampler. A step is one call of the sampler, which returns complete completions."""

    def __init__(self, sampler: Sampler, max_batch: int) -> None:
        super().__init__(max_batch)
        self.sampler = sampler

    def step(self) -> list[TokenStream]:
        """Sample to their end all streams that have the first stream's sampling settings. `top` is ignored."""
        own = [stream for stream in self.rows if stream.params == self.rows[0].params]
        requests = [Request(stream.prompt_ids, (stream.seed,)) for stream in own]
        for stream, (made,) in zip(own, self.sampler.sample(requests, own[0].params), strict=True):
            stream.tokens += map(DrawnToken, made.ids, made.logprobs, made.sampling_logprobs)
            stream.end(made.finish_reason)
        self.leave(own)
        return own


class StepwiseBatch(Decoding):
    """A `Decoding` by transformers, for models that psigrad cannot run in one batch. `top` is ignored.

    Each step samples one token of each completion, one completion after the other.
    """

    def __init__(self, sampler: TransformersSampler, max_batch: int) -> None:
        super().__init__(max_batch)
        self.sampler = sampler
        self._drawn: dict[TokenStream, Iterator[DrawnToken]] = {}

    def step(self) -> list[TokenStream]:
        """Sample the next token of each stream. See `Decoding`."""
        rows = list(self.rows)
        for stream in rows:
            if stream not in self._drawn:
                self._drawn[stream] = self.sampler.stream(Request(stream.prompt_ids, (stream.seed,)), stream.params)
            stream.add(next(self._drawn[stream]), self.sampler.model.eos_token_ids)
        self.leave([stream for stream in rows if stream.ended])
        return rows

    def leave(self, gone: Iterable[TokenStream]) -> None:
        """Remove these streams and end their sampling. See `Decoding`."""
        super().leave(gone)
        self._drawn = {stream: drawn for stream, drawn in self._drawn.items() if stream in self.rows}
