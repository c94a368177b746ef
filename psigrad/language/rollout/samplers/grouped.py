"""A cache for decoding with CUDA graphs. It stores and reads a prompt once for its group, not once for each completion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from psigrad.language.models.attention import SDPA, PackedLayout, on_device
from psigrad.language.rollout.samplers.cache import Decode, Key, KVCache, Prefill

# The shortest prompt that is stored once, in tokens. For shorter ones the additional kernels take longer than they save.
SHORTEST = 256


class GroupedCache(KVCache):
    """A `KVCache` that stores a prompt's keys and values once, in a row of `tables` [prompts, H_kv, longest_prompt, D].

    The first `count` rows of the tables are in use.
    """

    def __init__(self, slots: int, longest: int, prompts: int, longest_prompt: int) -> None:
        """Create empty slots with room for `longest` tokens, and room for `prompts` prompts of up to `longest_prompt` tokens."""
        super().__init__(slots, longest)
        self.prompts, self.longest_prompt = prompts, longest_prompt
        self.tables: dict[Key, tuple[Tensor, Tensor]] = {}
        self.count = 0
        self.owners = np.zeros(0, dtype=np.int64)
        """[active] the row of each slot's prompt."""
        self.behind = np.zeros(0, dtype=np.int64)
        """[active] the number of tokens of each slot's prompt."""

    def clear(self) -> None:
        """Empty all slots and remove all prompts; see `KVCache.clear`."""
        super().clear()
        self.count, self.owners, self.behind = 0, self.owners[:0], self.behind[:0]
        for x in (x for pair in self.tables.values() for x in pair):
            x.zero_()

    def prefill(self, prompts: PackedLayout, copies: Tensor, shifts: Tensor | None = None) -> GroupedPrefill:
        """Add slots; see `KVCache.prefill`. `shifts` is ignored: it is for models with M-RoPE, which never use this cache."""
        self.shifts = torch.cat([self.shifts.to(copies.device), torch.zeros_like(copies)])
        return GroupedPrefill(self, prompts, copies)

    def remove(self, finished: Tensor) -> Tensor:
        """Release the slots `finished` (see `KVCache.remove`), and the rows of prompts that no remaining slot continues."""
        order = super().remove(finished)
        kept = order.numpy()
        self.owners, self.behind = self.owners[kept], self.behind[kept]
        alive = np.zeros(self.count, dtype=bool)
        alive[self.owners] = True
        left = int(alive.sum())
        holes, movers = np.flatnonzero(~alive[:left]), left + np.flatnonzero(alive[left:])
        if holes.size:
            to, from_ = (on_device(x, self.lengths.device) for x in (holes, movers))
            for x in (x for pair in self.tables.values() for x in pair):
                x[to] = x[from_]
            places = np.arange(self.count)
            places[movers] = holes
            self.owners = places[self.owners]
        self.count = left
        return order

    def seats(self, size: int) -> Seats:
        """Return the `Seats` of the active slots, padded to `size`."""
        members = np.bincount(self.owners, minlength=self.count)
        rows, most = (1 << (int(n) - 1).bit_length() for n in (self.count, members.max()))  # few sizes need few CUDA graphs
        by_owner = self.owners.argsort(kind="stable")
        place = np.arange(len(by_owner)) - (members.cumsum() - members).repeat(members)
        seat, behind = np.zeros((2, size), dtype=np.int64)
        seat[by_owner], behind[: len(self.behind)] = self.owners[by_owner] * most + place, self.behind
        grid = np.zeros(min(rows, self.prompts) * most, dtype=np.int64)
        grid[seat[: len(self.owners)]] = np.arange(len(self.owners))
        return Seats(grid, seat, behind, most)


class Seats(NamedTuple):
    """The slots arranged by prompt: `grid` [P · `members`] has `members` places for the slots of each of P prompts.

    `seat` has each slot's index in `grid`. `behind` has the number of tokens of each slot's prompt.
    """

    grid: np.ndarray
    seat: np.ndarray
    behind: np.ndarray
    members: int


class GroupedPrefill(Prefill):
    """The layout of a prefill whose prompts are stored once."""

    def __init__(self, cache: GroupedCache, prompts: PackedLayout, copies: Tensor) -> None:
        """Add len(copies) slots to the cache. The i-th new slot continues prompt `copies[i]`."""
        super().__init__(cache, prompts, copies)
        self.grouped, lengths, own = cache, prompts.pieces.prefixes, copies.cpu().numpy()
        cache.lengths[self.first :] = 0
        self.row, cache.count = cache.count, cache.count + len(lengths)
        cache.owners = np.concatenate([cache.owners, self.row + own])
        cache.behind = np.concatenate([cache.behind, lengths[own]])

    def _keep(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Copy keys and values [S, H_kv, D] of the S prompt tokens into the cache's `tables`, in one row for each prompt."""
        cache, rows = self.grouped, self.prompts.prefix_rows.clamp(min=0)
        key = self.next_call("attention", layer)
        if key not in cache.tables:
            shape = (cache.prompts, k.shape[1], cache.longest_prompt)
            cache.tables[key] = k.new_zeros(*shape, k.shape[2]), v.new_zeros(*shape, v.shape[2])
        for new, old in zip((k, v), cache.tables[key], strict=True):
            old[self.row : self.row + len(rows), :, : rows.shape[1]] = new[rows].transpose(1, 2)


class GroupedDecode(Decode):
    """The layout of a decoding step in a CUDA graph. All queries of a group are multiplied by its prompt's keys at once."""

    def __init__(
        self, cache: GroupedCache, places: Tensor, columns: int, width: int, seats: Sequence[Tensor], members: int
    ) -> None:
        """Prepare a `Decode` that also reads `width` tokens of each prompt. `seats` and `members` are the fields of a `Seats`."""
        self.grid, self.seat, self.behind = seats
        super().__init__(cache, places, columns, cache.longest, self.behind)
        self.grouped, self.prompt_width, self.members = cache, width, members

    def mask(self, window: int | None) -> Tensor:
        """Return a mask [active, 1, 1, prompt_width + columns]: True on the prompt's and slot's tokens that are attended to."""
        if window not in self._masks:
            columns = torch.arange(self.prompt_width, device=self.places.device)[None]
            seen = columns < self.behind[:, None]
            if window is not None:
                seen &= columns > (self.positions - window)[:, None]
            self._masks[window] = torch.cat([seen[:, None, None], super().mask(window)], 3)
        return self._masks[window]

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, how: Callable[..., Tensor] = SDPA
    ) -> Tensor:
        """Store the new keys and values in their slots. Return the attention to prompts and slots; see `Layout.attend`."""
        key = self.next_call("attention", layer)
        stored, tables = self.cache.reserve(key, k, v, self.room), self.grouped.tables[key]
        batch, heads, _, dim = q.shape
        for new, old in zip((k, v), stored, strict=True):
            old[self.slots, :, self.places] = new[:, :, 0]
        keys, values = (x[:batch, :, : self.width] for x in stored)
        queries, mask = q.view(batch, k.shape[1], heads // k.shape[1], dim), self.mask(window)
        if how is not SDPA:  # softcapped scores or attention sinks
            owner = self.seat // self.members
            keys, values = (
                torch.cat([x[owner, :, : self.prompt_width], y], 2) for x, y in zip(tables, (keys, values), strict=True)
            )
            out = how(queries, keys, values, attn_mask=mask, scale=scale)
            return out.reshape(batch, 1, heads, v.shape[3])
        prompts = [x[: len(self.grid) // self.members, :, : self.prompt_width] for x in tables]
        scores = torch.cat([self._by_group(queries, prompts[0].transpose(2, 3)), queries @ keys.transpose(2, 3)], 3)
        weights = (scores.float() * scale).masked_fill(~mask, -torch.inf).softmax(3).to(v.dtype)
        before, own = weights.split([self.prompt_width, self.width], 3)
        both: Tensor = self._by_group(before, prompts[1]) + own @ values
        return both.reshape(batch, 1, heads, v.shape[3])

    def _by_group(self, x: Tensor, table: Tensor) -> Tensor:
        """Multiply each slot's `x` [active, H_kv, R, A] by its prompt's `table` [P, H_kv, A, B]. Return [active, H_kv, R, B]."""
        wide: Tensor = x.index_select(0, self.grid).unflatten(0, (-1, self.members)).transpose(1, 2)
        made: Tensor = (wide.flatten(2, 3) @ table).unflatten(2, (self.members, -1)).transpose(1, 2)
        return made.flatten(0, 1).index_select(0, self.seat)
