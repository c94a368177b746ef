"""Keys and values of the sequences being decoded: one slot each, left-aligned, filled by prefill and grown by decoding."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from psigrad.models.attention import Attending, PackedLayout
from psigrad.native.kernels import Heads

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
        return self.lengths.numel()

    def room(self, layer: int, k: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """The layer's keys and values with room for `tokens` per slot; `k` [·, H_kv, ·, D] tells heads, width and type."""
        have = self.layers.get(layer)
        if have is None or have[0].shape[2] < tokens:
            capacity = min(self.longest, tokens + max(GROWTH, tokens // 2))
            grown = tuple(k.new_zeros(self.slots, k.shape[1], capacity, k.shape[3]) for _ in range(2))
            if have is not None:
                for old, new in zip(have, grown, strict=True):
                    new[:, :, : old.shape[2]] = old
            self.layers[layer] = grown
        return self.layers[layer]

    def remove(self, finished: Tensor) -> Tensor:
        """Give up the slots where `finished` [active] is True; the last sequences move into the holes.

        Returns the order [active after] in which the remaining sequences now stand.
        """
        left = int((~finished).sum())
        order = torch.arange(left, device=finished.device)
        holes = finished[:left].nonzero()[:, 0]
        movers = left + (~finished[left:]).nonzero()[:, 0]
        order[holes] = movers
        if holes.numel():
            longest = int(self.lengths[movers].max())
            for pair in self.layers.values():
                for x in pair:
                    x[holes, :, :longest] = x[movers, :, :longest]
        self.lengths = self.lengths[order]
        return order


class Prefill:
    """The layout of a prefill: packed prompts that also leave their keys and values in the slots that continue them."""

    def __init__(self, cache: KVCache, prompts: PackedLayout, copies: Tensor) -> None:
        """`copies` [n] names, for each new slot, the prompt that it continues."""
        self.cache, self.prompts, self.copies = cache, prompts, copies
        self.first = cache.active
        lengths = (prompts.prefix_rows >= 0).sum(1)[copies]
        cache.lengths = torch.cat([cache.lengths.to(lengths.device), lengths])

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        self._keep(layer, k[0].transpose(0, 1), v[0].transpose(0, 1))
        return self.prompts.attend(layer, q, k, v, scale, window)

    def mix(self, layer: Attending, rotated: Tensor, qkv: Tensor) -> tuple[Tensor, Tensor]:
        heads = layer.heads
        self._keep(layer.index, *(_heads(x[:, -heads.keys * heads.dim :], heads) for x in (rotated, qkv)))
        return self.prompts.mix(layer, rotated, qkv)

    def _keep(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Copy keys and values [S, H_kv, D] of the prompts into the slots."""
        width = self.prompts.prefix_rows.shape[1]
        rows = self.prompts.prefix_rows[self.copies].clamp(min=0)
        stored = self.cache.room(layer, k.transpose(0, 1)[None], width)
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

    def mask(self, window: int | None) -> Tensor:
        if window not in self._masks:
            columns = torch.arange(self.width, device=self.places.device)[None]
            seen = columns <= self.places[:, None]
            if window is not None:
                seen &= columns > self.places[:, None] - window
            self._masks[window] = seen[:, None, None, :]
        return self._masks[window]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        keys, values = self.cache.room(layer, k, self.width)
        keys[self.slots, :, self.places] = k[:, :, 0]
        values[self.slots, :, self.places] = v[:, :, 0]
        batch, heads, _, dim = q.shape
        # query heads that share a key head stand as its rows, so nothing is repeated
        queries = q.view(batch, k.shape[1], heads // k.shape[1], dim)
        keys, values = (x[:batch, :, : self.width] for x in (keys, values))
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=self.mask(window), scale=scale)
        return out.reshape(batch, 1, heads, dim)

    def mix(self, layer: Attending, rotated: Tensor, qkv: Tensor) -> tuple[Tensor, Tensor]:
        heads = layer.heads
        keys, values = self.cache.room(layer.index, _heads(qkv[:, -heads.keys * heads.dim :], heads)[:, :, None], self.width)
        return layer.native.decode(rotated, qkv, keys, values, self.places, heads, layer.window), self.places


def _heads(x: Tensor, heads: Heads) -> Tensor:
    """[S, H_kv·D] -> [S, H_kv, D]."""
    return x.unflatten(1, (heads.keys, heads.dim))
