"""Keys and values for the fused decoder: a prompt's are kept once for its whole group, each slot holds its own tokens only."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from psigrad.models.attention import Attending, PackedLayout
from psigrad.models.panels import Panels
from psigrad.native.kernels import Heads, Slots
from psigrad.rollout.cache import grown, moves


@dataclass
class Prompt:
    """A prompt's keys and values of each layer, in the order in which a decoding step reads them (`Kernels.prompt_tables`)."""

    length: int
    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class Arrangement:
    """The active slots by the prompt that they continue."""

    prompts: list[Prompt]
    lengths: Tensor
    """[G] of the prompts."""
    members: Tensor
    """[active] slots, group by group."""
    first: Tensor
    """[G + 1] where each group begins in `members`."""

    def pointers(self, layer: int) -> tuple[Tensor, Tensor]:
        """[G] addresses of each prompt's keys, and of its values."""
        if layer not in self._pointers:
            tables = [prompt.layers[layer] for prompt in self.prompts]
            keys, values = (torch.tensor([table[i].data_ptr() for table in tables]) for i in (0, 1))
            self._pointers[layer] = (keys, values)
        return self._pointers[layer]

    @cached_property
    def _pointers(self) -> dict[int, tuple[Tensor, Tensor]]:
        return {}


class SharedCache:
    """As `KVCache`; slots 0 … active - 1 are in use, slot i continues prompt `prompt[i]` by `lengths[i]` tokens."""

    def __init__(self, slots: int, longest: int) -> None:
        """`longest` is what a slot may come to hold behind its prompt, in tokens."""
        self.slots, self.longest = slots, longest
        self.panels = Panels()
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.prompts: dict[int, Prompt] = {}
        self.prompt = torch.zeros(0, dtype=torch.long)
        self.lengths = torch.zeros(0, dtype=torch.long)
        self._met = 0
        self._arranged: Arrangement | None = None

    @property
    def active(self) -> int:
        return self.lengths.numel()

    def prefill(self, prompts: PackedLayout, copies: Tensor) -> SharedPrefill:
        """The layout that computes the prompts; `copies` [n] names, for each new slot, the one that it continues."""
        starts, lengths = prompts.spans.prefixes.t().contiguous()
        new = [Prompt(length) for length in lengths.tolist()]
        self.prompts |= {self._met + i: prompt for i, prompt in enumerate(new)}
        self.prompt = torch.cat([self.prompt, self._met + copies])
        self.lengths = torch.cat([self.lengths, torch.zeros_like(copies)])
        self._met += len(new)
        self._arranged = None
        return SharedPrefill(prompts, new, starts, lengths)

    def decode(self) -> SharedDecode:
        """The layout of one decoding step: a new token for every active slot."""
        return SharedDecode(self)

    def remove(self, finished: Tensor) -> Tensor:
        """As `KVCache.remove`; prompts that nobody continues are let go."""
        order, holes, movers = moves(finished)
        if holes.numel():
            longest = int(self.lengths[movers].max())
            for pair in self.layers.values():
                for x in pair:
                    x[holes, :, :longest] = x[movers, :, :longest]
        self.lengths, self.prompt = self.lengths[order], self.prompt[order]
        alive = set(self.prompt.tolist())
        self.prompts = {number: prompt for number, prompt in self.prompts.items() if number in alive}
        self._arranged = None
        return order

    def room(self, layer: int, dtype: torch.dtype, heads: Heads, tokens: int) -> tuple[Tensor, Tensor]:
        """The layer's own keys and values [slots, H_kv, capacity, D], with room for `tokens` per slot."""
        have = self.layers.get(layer)
        if have is None or have[0].shape[2] < tokens:
            zeros = functools.partial(torch.zeros, dtype=dtype)
            self.layers[layer] = grown(have, zeros, (self.slots, heads.keys, heads.dim), tokens, self.longest)
        return self.layers[layer]

    def arrangement(self) -> Arrangement:
        """The active slots by prompt, worked out when they change."""
        if self._arranged is None:
            numbers, counts = torch.unique(self.prompt, return_counts=True)
            prompts = [self.prompts[number] for number in numbers.tolist()]
            lengths = torch.tensor([prompt.length for prompt in prompts])
            first = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)])
            self._arranged = Arrangement(prompts, lengths, self.prompt.argsort(stable=True), first)
        return self._arranged


@dataclass(frozen=True)
class SharedPrefill:
    """Packed prompts that also leave their keys and values to each `Prompt`, whose first token is at its place in `starts`."""

    prompts: PackedLayout
    new: list[Prompt]
    starts: Tensor
    lengths: Tensor
    panels = None

    def slots(self, layer: Attending) -> None:
        """None: the prompts' keys and values are their own."""

    def mix(self, layer: Attending, rotated: Tensor, qkv: Tensor) -> tuple[Tensor, Tensor]:
        tables = layer.native.prompt_tables(rotated, qkv, self.starts, self.lengths, layer.heads)
        for prompt, table in zip(self.new, tables, strict=True):
            prompt.layers[layer.index] = table
        return self.prompts.mix(layer, rotated, qkv)


class SharedDecode:
    """One new token per active slot, which sees its prompt and its own slot."""

    def __init__(self, cache: SharedCache) -> None:
        self.cache, self.arranged, self.places = cache, cache.arrangement(), cache.lengths
        self.panels = cache.panels
        cache.lengths = cache.lengths + 1

    @cached_property
    def positions(self) -> Tensor:
        """[active] of the new tokens."""
        per_slot = torch.empty_like(self.places)
        counts = self.arranged.first.diff()
        per_slot[self.arranged.members] = self.arranged.lengths.repeat_interleave(counts)
        return per_slot + self.places

    @cached_property
    def _tokens(self) -> int:
        return int(self.places.max()) + 1

    def slots(self, layer: Attending) -> Slots:
        keys, values = self.cache.room(layer.index, layer.dtype, layer.heads, self._tokens)
        arranged = self.arranged
        return Slots(
            keys, values, self.places, *arranged.pointers(layer.index), arranged.lengths, arranged.members, arranged.first
        )

    def mix(self, layer: Attending, rotated: Tensor, qkv: Tensor) -> tuple[Tensor, Tensor]:
        return layer.native.decode(rotated, qkv, self.slots(layer), layer.heads, layer.window)
