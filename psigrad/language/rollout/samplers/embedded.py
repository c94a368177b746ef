"""psigrad's own sampler. It decodes with the training model itself: without copied weights, and with the same arithmetic."""

from __future__ import annotations

import contextlib
import math
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from psigrad.errors import UserError, reason_of
from psigrad.language.images import FIRST
from psigrad.language.models.attention import on_device
from psigrad.language.models.experts import Routes
from psigrad.language.models.fused.caches import ActivationCache, CachedCompletion
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.models.packing import Groups
from psigrad.language.models.probe import difference
from psigrad.language.rollout.samplers.cache import KVCache, SharedCache, new_cache, prefill
from psigrad.language.rollout.samplers.cuda_graph import TOKENS_AT_ONCE, CudaGraphDecoding, Room, fitting, prefill_limit
from psigrad.language.rollout.samplers.dialogue import CachedDialogue
from psigrad.language.rollout.samplers.distribution import draw
from psigrad.language.rollout.samplers.grouped import SHORTEST, GroupedCache
from psigrad.language.rollout.types import Completion, Dialogue, Request, Sampler, SamplingParams


class PolicyWeights(Sampler):
    """The base class of samplers that run the training model itself, not a copy of its weights."""

    exact = True
    model: LanguageModel

    @torch.inference_mode()
    def log_probs(
        self, prompt: tuple[int, ...], completions: Sequence[Sequence[int]], params: SamplingParams
    ) -> list[list[float]] | None:
        """Return log-probs from one forward pass of the training model; see `Sampler`.

        Return None in half precision, in which they would be no more exact than the log-probs from sampling.
        """
        if self.model.network.dtype not in (torch.float32, torch.float64):
            return None
        logp = self.model.evaluate(Groups([prompt], [completions]), temperature=params.temperature or 1.0).logp
        return [row[: len(ids)].tolist() for row, ids in zip(logp.float().cpu(), completions, strict=True)]


class EmbeddedSampler(PolicyWeights):
    """A sampler with continuous batching in at most `max_batch` slots.

    A completion depends only on its prompt and seed, except for rounding. After each decoding step, `progress` is called with the
    number of tokens that the step sampled. With `cuda_graphs`, decoding steps on a GPU are recorded and replayed. All calls then
    use the same cache, so two calls must not overlap.
    """

    engine = "embedded 1"

    def __init__(
        self,
        model: LanguageModel,
        max_batch: int = 256,
        progress: Callable[[int], None] | None = None,
        cuda_graphs: bool = True,
    ) -> None:
        self.model, self.max_batch, self.progress, self.cuda_graphs = model, max_batch, progress, cuda_graphs
        self._graphs: CudaGraphDecoding | None = None

    @torch.inference_mode()
    def steps(
        self, requests: list[Request], params: SamplingParams, cache: ActivationCache | None = None
    ) -> Iterator[list[tuple[int, list[Completion]]]]:
        """Sample the requests; see `Sampler`. Training can reuse the activations in `cache` once all requests are complete.

        Raises `UserError` if a prompt and `max_tokens` together exceed the model's maximum length.
        """
        check_room(self.model, requests, params, images=True)
        params = without_placeholders(self.model, params)
        self.model.switch(training=False)
        recorded = self._recording(requests, params)
        slots = self.max_batch if recorded is None else min(self.max_batch, recorded.cache.slots)
        batch = _Batch(self.model, requests, params, slots, recorded, self.model.usable(cache))
        yield batch.pop_complete()
        while batch.waiting or batch.sequences.size:
            batch.admit()
            yield batch.pop_complete()
            while batch.sequences.size and not batch.can_admit():
                tokens = batch.decode()
                if self.progress is not None:
                    self.progress(tokens)
                yield batch.pop_complete()
        batch.name_rows()

    def dialogue(self, prompts: Sequence[tuple[int, ...]], params: SamplingParams) -> Dialogue:
        """Start episodes; see `Sampler`. On a CPU, turns reuse cached keys and values if `max_batch` covers all episodes."""
        model = self.model
        restarts = model.decoder is None and (
            model.device.type != "cpu" or model.router_recorder is not None or model.shard_root is not None
        )
        if restarts or len(prompts) > self.max_batch:
            return super().dialogue(prompts, params)
        check_room(model, [Request(prompt, (0,)) for prompt in prompts], params, images=True)
        return CachedDialogue(model, prompts, without_placeholders(model, params))

    def _recording(self, requests: list[Request], params: SamplingParams) -> CudaGraphDecoding | None:
        """Return recorded decoding steps with room for these requests: the previous call's if they fit, otherwise new ones."""
        own = self.model
        if (
            not self.cuda_graphs
            or own.decoder is not None
            or own.shard_root is not None
            or own.router_recorder is not None
            or (own.vision is not None and own.vision.axes)  # recorded steps do not support M-RoPE
            or not requests
        ):
            return None
        before = None if self._graphs is None else self._graphs.wanted
        need = _graph_size(requests, params, self.max_batch, self.model.max_length, before)
        if self._graphs is None or not self._graphs.fits(need):
            self._graphs = None  # free its memory before the next allocates
            if before is not None and bool(need.prompts) == bool(before.prompts):  # the sizes of earlier calls will recur
                both = Room(*map(max, need, before))
                need = both if fitting(self.model, both) == both else need
            if not (room := fitting(self.model, need)).slots:
                return None
            self._graphs = CudaGraphDecoding(self.model, room, need)
        self._graphs.begin(params)
        return self._graphs


def without_placeholders(model: LanguageModel, params: SamplingParams) -> SamplingParams:
    """Return `params`, with the image placeholder tokens as `forbidden` if the model reads images, so that none is drawn."""
    return params if model.vision is None else replace(params, forbidden=model.vision.forbidden)


@torch.no_grad()
def why_not_embedded(model: LanguageModel) -> str:
    """Return the reason why `EmbeddedSampler` cannot sample from `model`, or "" if it can. `model` must support packed rows."""
    if model.decoder is not None or model.shard_root is not None:
        return ""
    texts = model._texts()
    written = [group[0][:2] for group in texts.completions]
    groups = Groups(texts.prompts, [[ids] for ids in written])

    def decoded() -> torch.Tensor:
        cache = KVCache(len(written), model.max_length)
        first, second = (on_device([ids[i] for ids in written], model.device) for i in (0, 1))
        behind_prompt = prefill(model, cache, texts.prompts, torch.arange(len(written), device=model.device), None)
        step = cache.decode()
        hidden = model.forward(first[:, None], step.positions[:, None], step)
        logits = torch.stack([behind_prompt, model.head(hidden[:, 0], cache.exact)], 1)
        return logits.gather(2, torch.stack([first, second], 1)[..., None])[..., 0]

    try:
        return difference(model.network, lambda: model._probe(groups, packed=True), decoded)
    except (TypeError, ValueError, AttributeError, RuntimeError, IndexError) as error:
        return reason_of(error)


def _room_for(requests: list[Request], params: SamplingParams, max_batch: int) -> tuple[int, int]:
    """Return (the number of slots that these requests need, at most `max_batch`; the capacity of each slot in tokens)."""
    slots = min(max_batch, sum(len(request.seeds) for request in requests))
    return slots, max(len(request.prompt_ids) for request in requests) + params.max_tokens


def _graph_size(requests: list[Request], params: SamplingParams, max_batch: int, most: int, before: Room | None) -> Room:
    """Return the size of a cache for recorded decoding steps. It is rounded up, so that similar later calls can reuse the cache.

    There are up to `max_batch` slots of up to `most` tokens. `before` is the size of the previous call's cache.
    """

    def rounded(tokens: int) -> int:
        return min(most, -(-tokens // 256) * 256)

    slots, longest = _room_for(requests, params, max_batch)
    slots, prompt = min(max_batch, 1 << (slots - 1).bit_length()), longest - params.max_tokens
    members = sum(len(request.seeds) for request in requests) / len(requests)
    if (prompt < SHORTEST or members < 2) and not (before and before.prompts):
        return Room(slots, rounded(longest))  # each slot stores its own prompt
    prompts = min(slots, len(requests), math.ceil(2 * slots / members))
    return Room(slots, rounded(params.max_tokens), prompts, rounded(prompt))


def check_room(model: LanguageModel, requests: list[Request], params: SamplingParams, images: bool = False) -> None:
    """Raise `UserError` if a prompt is empty or longer than `model.max_length` minus `params.max_tokens`.

    Also raise it if a prompt has an image and the sampler cannot read images (`images` is False).
    """
    for request in requests:
        if not images and any(token >= FIRST for token in request.prompt_ids):
            raise UserError(
                "A prompt has an image, but the transformers sampler is in use, and it reads only text. "
                "Set sampler=embedded. If it is set, psigrad's sampler does not support this model, so use another one."
            )
        if not request.prompt_ids:
            raise UserError("A prompt has no tokens; write some text, or give a tokenizer with a BOS token.")
        if len(request.prompt_ids) + params.max_tokens > model.max_length:
            raise UserError(
                f"A prompt of {len(request.prompt_ids)} tokens and max_completion_length {params.max_tokens} together "
                f"exceed the model's {model.max_length} positions; lower max_completion_length or set max_prompt_length."
            )


class _Batch:
    """The state of one call of the sampler: waiting groups, the sequence in each slot of the cache, and all sampled tokens."""

    def __init__(
        self,
        model: LanguageModel,
        requests: list[Request],
        params: SamplingParams,
        max_batch: int,
        graphs: CudaGraphDecoding | None,
        cache: ActivationCache | None,
    ) -> None:
        self.model, self.requests, self.params, self.max_batch = model, requests, params, max_batch
        self.stops = np.array(sorted({*model.eos_token_ids, *params.stop_token_ids}))
        self.seeds = np.array([s for r in requests for s in r.seeds], dtype=np.uint64)
        firsts = np.cumsum([0] + [len(r.seeds) for r in requests])
        # A group larger than the batch enters in parts.
        self.waiting = deque(
            (r, np.arange(start, min(start + max_batch, firsts[r + 1])))
            for r in range(len(requests))
            for start in range(firsts[r], firsts[r + 1], max_batch)
        )
        self.firsts = firsts
        slots, longest = _room_for(requests, params, max_batch)
        self.graphs = graphs
        self.cache: KVCache | SharedCache
        self.cache = new_cache(model, slots, longest, params.max_tokens) if graphs is None else graphs.cache
        self.sequences = np.zeros(0, dtype=np.int64)
        self.ids = np.zeros((len(self.seeds), params.max_tokens), dtype=np.int64)
        self.logprobs = np.zeros((2, len(self.seeds), params.max_tokens), dtype=np.float32)
        self.counts = np.zeros(len(self.seeds), dtype=np.int64)
        self.stopped = np.zeros(len(self.seeds), dtype=bool)
        self.owner = np.repeat(np.arange(len(requests)), np.diff(firsts))
        # The completions that each request still lacks, and the requests that completed since the last `pop_complete`.
        self.lacking, self.complete = np.diff(firsts), [r for r in range(len(requests)) if not requests[r].seeds]
        self.kept = cache
        # The row in the activation cache of each prompt's first token, and of each written token but the last.
        self.prompt_rows: dict[int, int] = {}
        self.rows = np.zeros(self.ids.shape, dtype=np.int64) if self.kept is not None else None
        self.routes = None if model.router_recorder is None else Routes(model.router_recorder, *self.ids.shape)

    def can_admit(self) -> bool:
        free = bool(self.waiting) and self.sequences.size + len(self.waiting[0][1]) <= self.max_batch
        return free and self._free_prompts() > 0

    def _free_prompts(self) -> int:
        """Return how many more prompts fit into the cache: all waiting ones unless the cache is a `GroupedCache`."""
        return self.cache.prompts - self.cache.count if isinstance(self.cache, GroupedCache) else len(self.waiting)

    def admit(self) -> None:
        """Prefill the waiting groups for which there are free slots, and draw their first tokens."""
        groups: list[tuple[int, np.ndarray]] = []
        room, most = self.max_batch - self.sequences.size, self._free_prompts()
        tokens = sys.maxsize if self.model.device.type == "cpu" else prefill_limit(self.model)
        while self.waiting and len(self.waiting[0][1]) <= room and len(groups) < most:
            tokens -= len(self.requests[self.waiting[0][0]].prompt_ids)
            if groups and tokens < 0:
                break
            groups.append(self.waiting.popleft())
            room -= len(groups[-1][1])
        copies = on_device([i for i, (_, members) in enumerate(groups) for _ in members], self.model.device)
        keep = self._keep()
        if keep is not None:
            lengths = [len(self.requests[r].prompt_ids) for r, _ in groups]
            starts = np.cumsum([keep.next_row(sum(lengths)), *lengths])
            self.prompt_rows |= {r: int(start) for (r, _), start in zip(groups, starts, strict=False)}
        prompts = [self.requests[r].prompt_ids for r, _ in groups]
        with self._recording() as seen:
            logits = prefill(self.model, self.cache, prompts, copies, keep)
        if self.routes is not None:
            self.routes.read([r for r, _ in groups], [*map(len, prompts)], seen)
        new = np.concatenate([members for _, members in groups])
        self.sequences = np.concatenate([self.sequences, new])
        self._draw(logits, new)

    def decode(self) -> int:
        """Decode one token, or several with CUDA graphs, for every sequence in the batch. Return the total number of tokens."""
        counts = self.counts[self.sequences]
        last = self.ids[self.sequences, counts - 1]
        if self.graphs is not None:
            steps = min(TOKENS_AT_ONCE, self.params.max_tokens - int(counts.min()))
            ids, logprobs = self.graphs.decode(last, counts, self.seeds[self.sequences], steps)
            return self._write(ids, logprobs, self.sequences)
        step = self.cache.decode()
        keep = self._keep()
        if keep is not None and self.rows is not None:
            count = self.sequences.size
            self.rows[self.sequences, self.counts[self.sequences] - 1] = keep.next_row(count) + np.arange(count)
        tokens = on_device(last, self.model.device)
        with self._recording() as seen:
            hidden = self.model.forward(tokens[:, None], step.positions[:, None], step, keep)
        if self.routes is not None:
            self.routes.write(self.sequences, counts - 1, seen)
        return self._draw(self.model.head(hidden[:, 0], self.cache.exact, self.cache.packed_weights), self.sequences)

    def _recording(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager. It records each token's experts if training replays them, and otherwise does nothing."""
        return contextlib.nullcontext([]) if self.routes is None else self.routes.router_recorder.record()

    def _keep(self) -> ActivationCache | None:
        """Return the activation cache for this forward pass; None if there is none or it is full."""
        return self.kept if self.kept is not None and self.kept.open else None

    def name_rows(self) -> None:
        """Tell the activation cache which of its rows belong to each completion."""
        if self.kept is None or self.rows is None or not self.kept.open:
            return
        rows, logps = self.rows, self.logprobs[0]
        self.kept.set_head(self.model.network.get_output_embeddings().weight, self.params.temperature or 1.0)
        for r, request in enumerate(self.requests):
            start, members = self.prompt_rows[r], range(self.firsts[r], self.firsts[r + 1])
            own = [
                CachedCompletion(tuple(self.ids[i, :n].tolist()), rows[i, : max(n - 1, 0)], logps[i, :n])
                # The last token is never an input, so it has no row.
                for i, n in zip(members, self.counts[members].tolist(), strict=True)
            ]
            self.kept.register(request.prompt_ids, np.arange(start, start + len(request.prompt_ids)), own)

    def _draw(self, logits: torch.Tensor, sequences: np.ndarray) -> int:
        """Draw and record a token for each of `sequences`. Return the number of tokens."""
        drawn = draw(logits, self.params, self.seeds[sequences], self.counts[sequences])
        logprobs = torch.stack([drawn.logprobs, drawn.sampling_logprobs])
        return self._write(drawn.ids.cpu().numpy()[None], logprobs.cpu().numpy()[None], sequences)

    def _write(self, ids: np.ndarray, logprobs: np.ndarray, sequences: np.ndarray) -> int:
        """Record `ids` [K, n], K new tokens for each of n `sequences`. Return the number of recorded tokens.

        `logprobs` [K, 2, n] are under the policy and under the sampling distribution. Slots of ended sequences are released.
        """
        stops = (ids[..., None] == self.stops).any(-1)
        before = self.counts[sequences]
        room = np.minimum(len(ids), self.params.max_tokens - before)
        taken = np.minimum(np.where(stops.any(0), stops.argmax(0) + 1, len(ids)), room)
        step, column = np.nonzero(np.arange(len(ids))[:, None] < taken)
        rows, places = sequences[column], before[column] + step
        self.ids[rows, places] = ids[step, column]
        self.logprobs[:, rows, places] = logprobs[step, :, column].T
        self.counts[sequences] += taken
        self.stopped[sequences] = stops[taken - 1, np.arange(len(sequences))]
        ended = self.stopped[self.sequences] | (self.counts[self.sequences] == self.params.max_tokens)
        if ended.any():
            owners = self.owner[self.sequences[ended]]
            np.subtract.at(self.lacking, owners, 1)
            self.complete += sorted({r for r in owners.tolist() if not self.lacking[r]})
            order = self.cache.remove(torch.from_numpy(ended))
            self.sequences = self.sequences[order.numpy()]
        return int(taken.sum())

    def pop_complete(self) -> list[tuple[int, list[Completion]]]:
        """Return (index of a request, its completions) for each request that was completed since the last call."""
        places, self.complete = self.complete, []
        return [(r, [self._completion(i) for i in range(self.firsts[r], self.firsts[r + 1])]) for r in places]

    def _completion(self, i: int) -> Completion:
        count = self.counts[i]
        return Completion(
            ids=tuple(self.ids[i, :count].tolist()),
            logprobs=tuple(self.logprobs[0, i, :count].tolist()),
            sampling_logprobs=tuple(self.logprobs[1, i, :count].tolist()),
            finish_reason="stop" if self.stopped[i] else "length",
            seed=int(self.seeds[i]),
            **({} if self.routes is None else self.routes.of(int(self.owner[i]), i, int(count))),
        )
