"""Keys and values for the fused decoder: a prompt's are kept once for its whole group, each slot holds its own tokens only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from psigrad.language.models.attention import Attending, PackedLayout
from psigrad.language.models.fused.packed_weights import MIN_ROWS_TO_PACK, PackedWeights
from psigrad.language.models.native.kernels import Heads, Slots, table_sizes
from psigrad.language.rollout.samplers.cache import GROWTH


class CachedPrompt:
    """A prompt's keys and values [layers, keys and then values], in the order in which a decoding step reads them
    (`Kernels.prompt_tables`), float32.
    """

    def __init__(self, length: int, layers: int, heads: Heads) -> None:
        keys, values = table_sizes(length, heads)
        self.length = length
        self.tables = torch.empty(layers, keys + values)
        first, size = self.tables.data_ptr(), self.tables.element_size()
        self.addresses = (first, first + size * keys, size * (keys + values))
        """Of the first layer's keys and values, and how far apart the layers are."""


def addresses(prompts: list[CachedPrompt], layers: int) -> Tensor:
    """[layers, 2, G] of the prompts' keys and values."""
    *first, apart = np.array([p.addresses for p in prompts], dtype=np.int64).reshape(-1, 3).T
    return torch.from_numpy(np.stack(first) + np.arange(layers)[:, None, None] * apart)


@dataclass(frozen=True)
class Arrangement:
    """The rows of a decoding step by the prompt that they continue: those of a prompt stand together."""

    prompts: Tensor
    """[layers, 2, G] addresses."""
    lengths: Tensor
    """[G] of the prompts."""
    first: Tensor
    """[G + 1] where each group begins."""
    before: Tensor
    """[active] length of the prompt of each row."""


class SharedCache:
    """As `KVCache`, but that no sequence moves: row i of a step continues slot `slots[i]`, which holds `lengths[i]` tokens behind
    prompt `prompt[i]`. Rows stand in the order in which they came, and so by their prompts.
    """

    def __init__(self, slots: int, longest: int, layers: int, heads: Heads, dtype: torch.dtype) -> None:
        """`longest` is what a slot may come to hold behind its prompt, in tokens."""
        self.longest, self.layers, self.heads = longest, layers, heads
        self.packed_weights = PackedWeights()
        self.own = [torch.empty(2, slots, heads.keys, 0, heads.dim, dtype=dtype) for _ in range(layers)]
        self.prompts: dict[int, CachedPrompt] = {}
        self.prompt = np.zeros(0, dtype=np.int64)
        self.lengths = np.zeros(0, dtype=np.int64)
        self.slots = np.zeros(0, dtype=np.int64)
        self._addresses = torch.zeros(layers, dtype=torch.long)
        self._free = np.arange(slots)
        self._met = 0
        self._arranged: Arrangement | None = None

    @property
    def active(self) -> int:
        """How many sequences are still being sampled; they fill the first slots."""
        return self.lengths.size

    def prefill(self, prompts: PackedLayout, copies: Tensor) -> SharedPrefill:
        """The layout that computes the prompts; `copies` [n] names, for each new slot, the one that it continues."""
        starts, lengths = prompts.spans.prefixes.t().contiguous()
        new = [CachedPrompt(length, self.layers, self.heads) for length in lengths.tolist()]
        self.prompts |= {self._met + i: prompt for i, prompt in enumerate(new)}
        self.prompt = np.concatenate([self.prompt, self._met + copies.numpy()])
        self.lengths = np.concatenate([self.lengths, np.zeros(len(copies), dtype=np.int64)])
        taken, self._free = np.split(self._free, [len(copies)])
        self.slots = np.concatenate([self.slots, taken])
        self._met += len(new)
        self._arranged = None
        packed_weights = self.packed_weights if self.active >= MIN_ROWS_TO_PACK else None  # decoding will turn them anyhow
        return SharedPrefill(prompts, addresses(new, self.layers), starts, lengths, packed_weights)

    def decode(self) -> SharedDecode:
        """The layout of one decoding step: a new token for every active slot."""
        return SharedDecode(self)

    def remove(self, finished: Tensor) -> Tensor:
        """Give up the slots of the rows where `finished` [active] is True, and prompts that nobody continues any more.

        Returns the order [active after] in which the remaining sequences now stand.
        """
        order = np.flatnonzero(~finished.numpy())
        self._free = np.concatenate([self._free, self.slots[finished.numpy()]])
        self.lengths, self.prompt, self.slots = self.lengths[order], self.prompt[order], self.slots[order]
        alive = set(self.prompt.tolist())
        self.prompts = {number: prompt for number, prompt in self.prompts.items() if number in alive}
        self._arranged = None
        return torch.from_numpy(order)

    def seat(self, prompt: np.ndarray, lengths: np.ndarray, slots: np.ndarray) -> None:
        """Make these the rows of the next steps, [active] each, those of a prompt together. The other slots wait."""
        self.prompt, self.lengths, self.slots = prompt, lengths, slots
        self._arranged = None

    def room(self, tokens: int) -> tuple[list[Tensor], Tensor]:
        """Keys and values of each layer [2, slots, H_kv, capacity, D], with room for `tokens` per slot, and where they are.

        They grow layer by layer, so that no more than one lies there twice.
        """
        *shape, have, dim = self.own[0].shape
        if have < tokens:
            capacity = min(self.longest, tokens + max(GROWTH, tokens // 2))
            for i, old in enumerate(self.own):
                self.own[i] = old.new_empty(*shape, capacity, dim)
                self.own[i][..., :have, :] = old
            self._addresses = torch.tensor([x.data_ptr() for x in self.own])
        return self.own, self._addresses

    def arrangement(self) -> Arrangement:
        """The active slots by prompt, worked out when they change."""
        if self._arranged is None:
            first = np.flatnonzero(np.diff(self.prompt, prepend=-1, append=-1))
            prompts = [self.prompts[number] for number in self.prompt[first[:-1]].tolist()]
            lengths = np.array([prompt.length for prompt in prompts])
            tables = (lengths, first, lengths.repeat(np.diff(first)))
            self._arranged = Arrangement(addresses(prompts, self.layers), *map(torch.from_numpy, tables))
        return self._arranged


@dataclass(frozen=True)
class SharedPrefill:
    """Packed prompts whose keys and values also go to `tables` [layers, 2, G]; the first token of each is at its place in
    `starts`.
    """

    prompts: PackedLayout
    tables: Tensor
    starts: Tensor
    lengths: Tensor
    packed_weights: PackedWeights | None
    slots = None

    def mix(self, layer: Attending, rotated: Tensor, qkv: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the prompts' keys and values for this layer, then attend as the prompts' layout does."""
        layer.native.prompt_tables(rotated, qkv, self.starts, self.lengths, layer.heads, self.tables[layer.index])
        return self.prompts.mix(layer, rotated, qkv)


class SharedDecode:
    """One new token per active slot, which sees its prompt and its own slot."""

    def __init__(self, cache: SharedCache) -> None:
        (own, addresses), arranged = cache.room(int(cache.lengths.max()) + 1), cache.arrangement()
        slots, places = torch.from_numpy(cache.slots), torch.from_numpy(cache.lengths)
        self.slots = Slots(own, addresses, slots, places, arranged.prompts, arranged.lengths, arranged.first)
        self.packed_weights = cache.packed_weights
        self.positions = arranged.before + places
        """[active] of the new tokens."""
        cache.lengths = cache.lengths + 1

    def mix(self, layer: Attending, rotated: Tensor, qkv: Tensor) -> tuple[Tensor, Tensor]:
        """Attend from one new token per sequence to its prompt and its earlier tokens, by the native kernel."""
        return layer.native.decode(rotated, qkv, self.slots, layer.index, layer.heads, layer.window)
