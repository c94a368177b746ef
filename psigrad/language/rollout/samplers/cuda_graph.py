"""Decoding on a GPU with CUDA graphs: one decoding step is recorded once, and then replayed for every token.

A small model's step launches hundreds of kernels, and each launch takes longer than its kernel. A replay avoids the launches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from psigrad.language.models.language_model import LanguageModel
from psigrad.language.models.sizes import cached_numbers, size
from psigrad.language.rollout.samplers.cache import Decode, KVCache
from psigrad.language.rollout.samplers.distribution import draw_at
from psigrad.language.rollout.samplers.grouped import GroupedCache, GroupedDecode
from psigrad.language.rollout.types import SamplingParams
from psigrad.seeds import uniform_on_device

# The number of tokens drawn for each sequence between two checks for ended sequences, during which the GPU waits. Tokens drawn
# after an end are discarded.
TOKENS_AT_ONCE = 8
# Columns (cached tokens per slot) that the shortest recording reads. Longer ones read 1.5, 2, 3, 4, 6, … times as many.
_NARROWEST = 128
# The number of distributions whose recordings are kept: training draws from one, evaluation from another.
_KEPT = 4
# The largest share of the free memory that the cache of recordings may take. A prefill's activations have the same limit.
SHARE = 0.5
# The maximum number of tokens in a prefill of several prompts. With more tokens, a GPU is no faster.
PREFILLED = 1 << 15

# A function that records the GPU work of its argument, and returns a function that replays this work.
Recorder = Callable[[Callable[[], None]], Callable[[], None]]


class Room(NamedTuple):
    """The capacity of a cache: `slots` of `longest` tokens each.

    If a prompt is stored once for its group, the cache also has room for `prompts` prompts of `longest_prompt` tokens each.
    """

    slots: int
    longest: int
    prompts: int = 0
    longest_prompt: int = 0

    def covers(self, other: Room) -> bool:
        """Return True if each number is at least that of `other`, and `prompts` is 0 in both or in neither."""
        return bool(self.prompts) == bool(other.prompts) and all(a >= b for a, b in zip(self, other, strict=True))


class CudaGraphDecoding:
    """Recorded decoding steps of a model (CUDA graphs), and their cache.

    There is one recording per sampling distribution, set of active adapters, and shape (the arguments of `_step`).
    """

    def __init__(self, model: LanguageModel, room: Room, wanted: Room | None = None, record: Recorder | None = None) -> None:
        """Create a cache of size `room`. `wanted` is the larger size that was requested, if `fitting` reduced it."""
        self.model, self.wanted = model, wanted or room
        # The recordings contain the cache's memory addresses, so it has its full size from the start.
        self.cache = GroupedCache(*room) if room.prompts else KVCache(*room[:2])
        self.weights = weight_addresses(model)
        self._record = record or cuda_recorder()
        self._kept: dict[Hashable, dict[tuple[int, ...], Callable[[], None]]] = {}
        self._seats: dict[tuple[int, int], list[torch.Tensor]] = {}
        slots, device = room.slots, model.device
        # For each slot: its last token, that token's index in the slot, the number of drawn tokens, and the seed.
        self.state = torch.zeros(4, slots, dtype=torch.long, device=device)
        self.at = torch.zeros(1, dtype=torch.long, device=device)
        self.ids = torch.zeros(TOKENS_AT_ONCE, slots, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(TOKENS_AT_ONCE, 2, slots, device=device)

    def fits(self, room: Room) -> bool:
        """Return True if this cache is large enough for `room` and the weights have kept their addresses. Else make a new one."""
        return self.wanted.covers(room) and self.weights == weight_addresses(self.model)

    def begin(self, params: SamplingParams) -> None:
        """Empty all slots for a new batch. Select the steps recorded for the distribution of `params` and the active adapters."""
        self.cache.clear()
        self.params = replace(params, max_tokens=1, stop_token_ids=())
        drawn_from = self.params, active_adapters(self.model)
        self._replays = self._kept[drawn_from] = self._kept.pop(drawn_from, {})
        for oldest in list(self._kept)[:-_KEPT]:
            del self._kept[oldest]

    def decode(self, last: np.ndarray, counts: np.ndarray, seeds: np.ndarray, steps: int) -> tuple[np.ndarray, np.ndarray]:
        """Decode min(`steps`, `TOKENS_AT_ONCE`) tokens for each active slot.

        `last`, `counts` and `seeds` [active] are each slot's last token, number of drawn tokens and seed. Return (ids [steps,
        active], log-probs [steps, 2, active] under the policy and under the sampling distribution).
        """
        active, steps = self.cache.active, min(steps, TOKENS_AT_ONCE)
        # Few sizes, so few recordings. Tokens of empty slots are ignored.
        size = min(1 << (active - 1).bit_length(), self.cache.slots)
        places = self.cache.lengths.cpu().numpy()
        host = np.zeros((4, size), dtype=np.int64)
        host[:, :active] = last, places, counts, seeds.view(np.int64)
        self.state[:, :size] = torch.from_numpy(host).to(self.state.device)
        self.at.zero_()
        replay = self._replay(size, self._columns(int(places.max()) + steps, self.cache.longest), *self._seated(size))
        for _ in range(steps):
            replay()
        self.cache.lengths = self.cache.lengths + steps
        return self.ids[:steps, :active].cpu().numpy(), self.logprobs[:steps, :, :active].cpu().numpy()

    @staticmethod
    def _columns(wanted: int, most: int) -> int:
        wide = _NARROWEST << max(0, math.ceil(math.log2(wanted / _NARROWEST)))
        between = wide * 3 // 4
        return min(between if _NARROWEST < wanted <= between else wide, most)

    def _seated(self, size: int) -> tuple[int, ...]:
        """Copy a `GroupedCache`'s `Seats` to the GPU. Return (len(grid), `members`, tokens read per prompt)."""
        if not isinstance(self.cache, GroupedCache):
            return ()
        seats = self.cache.seats(size)
        arrays = [torch.from_numpy(x) for x in seats[:3]]
        held = self._seats.setdefault((size, len(seats.grid)), [x.to(self.state.device) for x in arrays])
        for old, new in zip(held, arrays, strict=True):
            old.copy_(new)
        return len(seats.grid), seats.members, self._columns(int(seats.behind.max()), self.cache.longest_prompt)

    def _replay(self, *shape: int) -> Callable[[], None]:
        """Return a function that replays the recording of `_step(self.params, *shape)`. If there is none yet, record it first."""
        if shape not in self._replays:
            moved = [self.state, self.at, *self.cache.states.values()]
            before = [x.clone() for x in moved]
            # Recording also runs the step. The replayed step overwrites the keys and values that this run writes.
            self._replays[shape] = self._record(partial(self._step, self.params, *shape))
            for x, old in zip(moved, before, strict=True):
                x.copy_(old)
        return self._replays[shape]

    def _layout(self, places: torch.Tensor, columns: int, *seated: int) -> Decode:
        if not isinstance(self.cache, GroupedCache):
            return Decode(self.cache, places, columns, self.cache.longest)
        grid, members, width = seated
        return GroupedDecode(self.cache, places, columns, width, self._seats[len(places), grid], members)

    def _step(self, params: SamplingParams, size: int, columns: int, *seated: int) -> None:
        """Decode a token for the first `size` slots. Each slot reads `columns` cached tokens. For `seated` see `_seated`.

        A CUDA graph can record the step, because no operation waits for the CPU.
        """
        tokens, places, counts, seeds = self.state[:, :size]
        step = self._layout(places.clone(), columns, *seated)
        hidden = self.model.forward(tokens[:, None], step.positions[:, None], step)
        drawn = draw_at(self.model.head(hidden[:, 0], False), params, uniform_on_device(seeds, counts)[:, None])
        self.ids[:, :size].index_copy_(0, self.at, drawn.ids[None])
        logprobs = torch.stack([drawn.logprobs, drawn.sampling_logprobs]).to(self.logprobs.dtype)
        self.logprobs[:, :, :size].index_copy_(0, self.at, logprobs[None])
        tokens.copy_(drawn.ids)
        counts.add_(1)
        places.add_(1).clamp_(max=self.cache.longest - 1)  # clamps only ended sequences, whose last tokens are ignored
        self.at.add_(1)


def fitting(model: LanguageModel, room: Room) -> Room:
    """Return `room`, halved until it takes at most half of the GPU's free memory. On a CPU, it has 0 slots."""
    if model.device.type != "cuda":
        return room._replace(slots=0)
    token, most = cached_numbers(model.network.config) * model.network.dtype.itemsize, SHARE * free_memory(model.device)
    while room.slots and token * (room.slots * room.longest + room.prompts * room.longest_prompt) > most:
        room = room._replace(slots=room.slots // 2, prompts=-(-room.prompts // 2))
    return room


def prefill_limit(model: LanguageModel) -> int:
    """Return the token limit of a prefill with several prompts: `PREFILLED`, or fewer if memory is short."""
    hidden, inner = (size(model.network.config, name) for name in ("hidden", "inner"))
    token = (8 * hidden + 4 * (inner or 4 * hidden)) * model.network.dtype.itemsize  # in one layer; the next reuses the memory
    return min(PREFILLED, int(SHARE * free_memory(model.device)) // token)


def free_memory(device: torch.device) -> int:
    """Return the bytes that new tensors can use on a GPU: the driver's free memory, and the blocks that torch keeps for reuse."""
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + kept


def weight_addresses(model: LanguageModel) -> tuple[int, ...]:
    """Return the memory addresses of all weights. A recorded decoding step is valid only while these are the same."""
    return tuple(p.data_ptr() for p in model.network.parameters())


def active_adapters(model: LanguageModel) -> Hashable:
    """Return a key for the LoRA adapters that are active in each layer. A recorded step is valid only for the same adapters."""
    layers: list[Any] = [module for module in model.network.modules() if hasattr(module, "_disable_adapters")]
    return tuple((layer.disable_adapters, *layer.active_adapters, *getattr(layer, "merged_adapters", ())) for layer in layers)


def cuda_recorder() -> Recorder:
    """Return a `Recorder` of CUDA graphs that share a memory pool."""
    pool = torch.cuda.graph_pool_handle()

    def record(run: Callable[[], None]) -> Callable[[], None]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()  # the graph must not contain what only a first run does, such as allocations
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):  # other threads may allocate
            run()
        replay: Callable[[], None] = graph.replay
        return replay

    return record
