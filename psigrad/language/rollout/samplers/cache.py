"""Keys and values of the sequences being decoded: one slot each, left-aligned, filled by prefill and grown by decoding."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from psigrad.language.models.attention import PackedLayout

GROWTH = 64  # tokens by which the slots grow at least


class KVCache:
    """Per layer, keys and values [slots, H_kv, capacity, D]; slots 0 … active - 1 are in use and hold `lengths` tokens each."""

    def __init__(self, slots: int, longest: int) -> None:
        """`longest` is what a slot may come to hold, in tokens."""
        self.slots, self.longest = slots, longest
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.lengths = torch.zeros(0, dtype=torch.long)

    @property
    def active(self) -> int:
        """How many sequences are still being sampled; they fill the first slots."""
        return self.lengths.numel()

    def room(self, layer: int, k: Tensor, v: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """The layer's keys and values with room for `tokens` per slot; `k` and `v` [·, H_kv, ·, D] tell heads, widths and type,
        and their widths may differ (multi-head latent attention).
        """
        have = self.layers.get(layer)
        if have is None or have[0].shape[2] < tokens:
            self.layers[layer] = grown(have, k.new_zeros, (self.slots, k.shape[1], k.shape[3], v.shape[3]), tokens, self.longest)
        return self.layers[layer]

    def prefill(self, prompts: PackedLayout, copies: Tensor) -> Prefill:
        """The layout that computes the prompts; `copies` [n] names, for each new slot, the one that it continues."""
        return Prefill(self, prompts, copies)

    def decode(self) -> Decode:
        """The layout of one decoding step: a new token for every active slot."""
        return Decode(self)

    def remove(self, finished: Tensor) -> Tensor:
        """Give up the slots where `finished` [active] is True; the last sequences move into the holes.

        Returns the order [active after] in which the remaining sequences now stand.
        """
        order, holes, movers = moves(finished)
        if holes.numel():
            longest = int(self.lengths[movers].max())
            for pair in self.layers.values():
                for x in pair:
                    x[holes, :, :longest] = x[movers, :, :longest]
        self.lengths = self.lengths[order]
        return order


def grown(
    have: tuple[Tensor, Tensor] | None, zeros: Callable[..., Tensor], shape: tuple[int, int, int, int], tokens: int, longest: int
) -> tuple[Tensor, Tensor]:
    """Keys and values [slots, H_kv, capacity, D] that hold what `have` holds, with room for at least `tokens`; `shape` is slots,
    heads, and the widths of keys and of values.
    """
    slots, heads, *dims = shape
    capacity = min(longest, tokens + max(GROWTH, tokens // 2))
    keys, values = (zeros(slots, heads, capacity, dim) for dim in dims)
    for old, new in zip(have or (), (keys, values), strict=False):
        new[:, :, : old.shape[2]] = old
    return keys, values


def moves(finished: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The order [active after] in which the remaining sequences stand, the holes, and who moves into each."""
    left = int((~finished).sum())
    order = torch.arange(left, device=finished.device)
    holes = finished[:left].nonzero()[:, 0]
    movers = left + (~finished[left:]).nonzero()[:, 0]
    order[holes] = movers
    return order, holes, movers


class Prefill:
    """The layout of a prefill: packed prompts that also leave their keys and values in the slots that continue them."""

    def __init__(self, cache: KVCache, prompts: PackedLayout, copies: Tensor) -> None:
        """`copies` [n] names, for each new slot, the prompt that it continues."""
        self.cache, self.prompts, self.copies = cache, prompts, copies
        self.first = cache.active
        lengths = (prompts.prefix_rows >= 0).sum(1)[copies]
        cache.lengths = torch.cat([cache.lengths.to(lengths.device), lengths])

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        """Keep this layer's keys and values, then attend as the prompts' layout does."""
        self._keep(layer, k[0].transpose(0, 1), v[0].transpose(0, 1))
        return self.prompts.attend(layer, q, k, v, scale, window)

    def _keep(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Copy keys and values [S, H_kv, D] of the prompts into the slots."""
        width = self.prompts.prefix_rows.shape[1]
        rows = self.prompts.prefix_rows[self.copies].clamp(min=0)
        stored = self.cache.room(layer, k.transpose(0, 1)[None], v.transpose(0, 1)[None], width)
        for new, old in zip((k, v), stored, strict=True):
            old[self.first : self.first + len(self.copies), :, :width] = new[rows].transpose(1, 2)


class Decode:
    """The layout of one decoding step: one new token per active slot, which sees its own slot only."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.places = cache.lengths.clone()
        self.width = int(self.places.max()) + 1
        self.slots = torch.arange(cache.active, device=self.places.device)
        self._masks: dict[int | None, Tensor] = {}
        cache.lengths = cache.lengths + 1

    @property
    def positions(self) -> Tensor:
        """[active] of the new tokens."""
        return self.places

    def mask(self, window: int | None) -> Tensor:
        """[active, 1, 1, width] True where a sequence may see a column; `window` limits how far back, in tokens."""
        if window not in self._masks:
            columns = torch.arange(self.width, device=self.places.device)[None]
            seen = columns <= self.places[:, None]
            if window is not None:
                seen &= columns > self.places[:, None] - window
            self._masks[window] = seen[:, None, None, :]
        return self._masks[window]

    @classmethod
    def at(cls, cache: KVCache, places: Tensor) -> Decode:
        """A step of a shape that does not depend on what the slots hold: the first len(places) slots, as wide as they can become;
        their next tokens come to `places`.
        """
        step = cls.__new__(cls)
        step.cache, step.places, step.width, step._masks = cache, places, cache.longest, {}
        step.slots = torch.arange(len(places), device=places.device)
        return step

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        """Write the new tokens' keys and values into the cache, then attend to all of it."""
        keys, values = self.cache.room(layer, k, v, self.width)
        keys[self.slots, :, self.places] = k[:, :, 0]
        values[self.slots, :, self.places] = v[:, :, 0]
        batch, heads, _, dim = q.shape
        # query heads that share a key head stand as its rows, so nothing is repeated
        queries = q.view(batch, k.shape[1], heads // k.shape[1], dim)
        keys, values = (x[:batch, :, : self.width] for x in (keys, values))
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=self.mask(window), scale=scale)
        return out.reshape(batch, 1, heads, v.shape[3])
