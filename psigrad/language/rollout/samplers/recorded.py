"""Decoding on a GPU without the CPU: several tokens for every slot by replays of one recording.

A small model's step has hundreds of launches that each take longer than their kernel, and reading each token makes the GPU wait.
So a step, including the draw, is recorded once and replayed `TOKENS_AT_ONCE` times before its tokens are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from psigrad.language.models.language_model import LanguageModel
from psigrad.language.models.sizes import cached_numbers
from psigrad.language.rollout.samplers.cache import Decode, KVCache
from psigrad.language.rollout.samplers.distribution import draw_at
from psigrad.language.rollout.types import SamplingParams
from psigrad.seeds import uniform_on_device

# Tokens of a sequence between two checks for ended sequences. Tokens drawn after an end are discarded.
TOKENS_AT_ONCE = 8
# Columns of keys and values that the shortest recording reads. Longer ones read 1.5, 2, 3, 4, 6, … times as many.
_NARROWEST = 128
# Distributions whose recordings are kept: training draws from one, evaluation from another.
_KEPT = 4
# The largest share of the free memory that recorded keys and values may take.
SHARE = 0.5

# A function that turns a function without arguments into its replay.
Recorder = Callable[[Callable[[], None]], Callable[[], None]]


class RecordedDecoding:
    """The decoding steps of a model on a cache whose slots have full capacity from the start.

    The cache and the recordings persist between calls, since a recording contains their addresses and those of the weights. A
    recording is specific to one distribution and one shape: 1, 2, 4, … slots and a number of columns. Empty slots write keys and
    values where the next prompt will overwrite them, and their draws are ignored.
    """

    def __init__(self, model: LanguageModel, slots: int, longest: int, wanted: int = 0, record: Recorder | None = None) -> None:
        """Create the cache; `longest` is the capacity of a slot, in tokens. Call `begin` before each batch.

        `wanted` is the number of slots that the call needs, if memory has fewer.
        """
        self.model, self.wanted = model, max(slots, wanted)
        self.cache = KVCache(slots, longest)
        self.weights = addresses(model)
        self._record = record or on_cuda()
        self._kept: dict[Hashable, dict[tuple[int, int], Callable[[], None]]] = {}
        device = model.device
        # For each slot: its last token, the position of the next, the number of drawn tokens, and the seed.
        self.state = torch.zeros(4, slots, dtype=torch.long, device=device)
        self.at = torch.zeros(1, dtype=torch.long, device=device)
        self.ids = torch.zeros(TOKENS_AT_ONCE, slots, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(TOKENS_AT_ONCE, 2, slots, device=device)

    def serves(self, slots: int, longest: int) -> bool:
        """Return True if these recordings are of the model's current weights and have enough room."""
        room = self.wanted >= slots and self.cache.longest >= longest
        return room and self.weights == addresses(self.model)

    def begin(self, params: SamplingParams) -> None:
        """Empty all slots, and select the recordings of this distribution and of the active adapters."""
        self.cache.clear()
        self.params = replace(params, max_tokens=1, stop_token_ids=())
        drawn_from = self.params, active_adapters(self.model)
        self._replays = self._kept[drawn_from] = self._kept.pop(drawn_from, {})
        for oldest in list(self._kept)[:-_KEPT]:
            del self._kept[oldest]

    def decode(self, last: np.ndarray, counts: np.ndarray, seeds: np.ndarray, steps: int) -> tuple[np.ndarray, np.ndarray]:
        """Decode up to `steps` more tokens for every active slot, given its last token, number of tokens and seed, [active] each.

        Returns their ids [steps, active] and log-probs [steps, 2, active]: the policy's, and those of the sampling distribution.
        """
        active, steps = self.cache.active, min(steps, TOKENS_AT_ONCE)
        size = min(1 << (active - 1).bit_length(), self.cache.slots)
        places = self.cache.lengths.cpu().numpy()
        host = np.zeros((4, size), dtype=np.int64)
        host[:, :active] = last, places, counts, seeds.view(np.int64)
        self.state[:, :size] = torch.from_numpy(host).to(self.state.device)
        self.at.zero_()
        replay = self._replay(size, self._columns(int(places.max()) + steps))
        for _ in range(steps):
            replay()
        self.cache.lengths = self.cache.lengths + steps
        return self.ids[:steps, :active].cpu().numpy(), self.logprobs[:steps, :, :active].cpu().numpy()

    def _columns(self, wanted: int) -> int:
        wide = _NARROWEST << max(0, math.ceil(math.log2(wanted / _NARROWEST)))
        between = wide * 3 // 4
        return min(between if _NARROWEST < wanted <= between else wide, self.cache.longest)

    def _replay(self, size: int, columns: int) -> Callable[[], None]:
        """Return the recording of this shape, made on first use."""
        if (size, columns) not in self._replays:
            moved = [self.state, self.at, *self.cache.states.values()]
            before = [x.clone() for x in moved]
            # The recorder runs the step. It writes keys and values where this same step will write them again.
            self._replays[size, columns] = self._record(partial(self._step, self.params, size, columns))
            for x, old in zip(moved, before, strict=True):
                x.copy_(old)
        return self._replays[size, columns]

    def _step(self, params: SamplingParams, size: int, columns: int) -> None:
        """Decode one token for the first `size` slots without waiting for the CPU."""
        tokens, places, counts, seeds = self.state[:, :size]
        step = Decode(self.cache, places.clone(), columns, self.cache.longest)
        hidden = self.model.forward(tokens[:, None], places[:, None], step)
        drawn = draw_at(self.model.head(hidden[:, 0], False), params, uniform_on_device(seeds, counts)[:, None])
        self.ids[:, :size].index_copy_(0, self.at, drawn.ids[None])
        logprobs = torch.stack([drawn.logprobs, drawn.sampling_logprobs]).to(self.logprobs.dtype)
        self.logprobs[:, :, :size].index_copy_(0, self.at, logprobs[None])
        tokens.copy_(drawn.ids)
        counts.add_(1)
        places.add_(1).clamp_(max=self.cache.longest - 1)  # clamps only ended sequences, whose last tokens are ignored
        self.at.add_(1)


def fitting(model: LanguageModel, slots: int, longest: int) -> int:
    """Return how many slots of `longest` tokens to record on a GPU: `slots`, halved until they take at most half of its free
    memory.

    The other half is for training, which runs while the cache exists. Returns 0 on a CPU, and if not even one slot fits.
    """
    if model.device.type != "cuda":
        return 0
    size = cached_numbers(model.network.config) * longest * model.network.dtype.itemsize
    while slots and slots * size > SHARE * free_memory(model.device):
        slots //= 2
    return slots


def free_memory(device: torch.device) -> int:
    """Return the bytes that tensors could use on a GPU now: those of its driver, and blocks that torch keeps for reuse."""
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + kept


def addresses(model: LanguageModel) -> tuple[int, ...]:
    """Return the addresses of the weights."""
    return tuple(p.data_ptr() for p in model.network.parameters())


def active_adapters(model: LanguageModel) -> Hashable:
    """Return the LoRA adapters that each layer adds, since a recording is valid only for the same adapters."""
    layers: list[Any] = [module for module in model.network.modules() if hasattr(module, "_disable_adapters")]
    return tuple((layer.disable_adapters, *layer.active_adapters, *getattr(layer, "merged_adapters", ())) for layer in layers)


def on_cuda() -> Recorder:
    """Return a recorder of CUDA graphs, which share their memory.

    Allocations and choices of a function's first run are not recorded.
    """
    pool = torch.cuda.graph_pool_handle()

    def record(run: Callable[[], None]) -> Callable[[], None]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):  # other threads may allocate
            run()
        replay: Callable[[], None] = graph.replay
        return replay

    return record
