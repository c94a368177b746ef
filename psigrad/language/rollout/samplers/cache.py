"""Caches of keys and values of the sequences being decoded: `KVCache` for any model, `SharedCache` for the fused CPU decoder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from psigrad.kernels.kernels import Heads, Slots
from psigrad.kernels.state_kernels import Tensors
from psigrad.language.models.attention import SDPA, AttentionLayer, PackedLayout, on_device, rows_at
from psigrad.language.models.fused.caches import ActivationCache, CachedPrompt, PackedWeights, prompt_addresses
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.models.packing import Groups, Ids, pack
from psigrad.language.models.segments import Recurrence, ShortConvolution

GROWTH = 64  # the least number of tokens by which slots grow
BLOCK = 16  # the number of tokens whose keys the fused decoder reads at once


Key = tuple[str, int, int]  # the kind of a layer, its index, and the number of earlier calls in the same pass
Where = slice | Tensor  # a selection of slots


class StateCache:
    """The states of recurrent layers and the last inputs (windows) of convolutions: one tensor [slots, ...] per layer call."""

    def __init__(self, slots: int) -> None:
        self.states: dict[Key, Tensor] = {}
        self._count = slots

    def store_states(self, layer: Key, slots: Where, states: Tensor) -> None:
        """Store the states [n, ...] of a layer in n slots."""
        if layer not in self.states:
            self.states[layer] = states.new_zeros(self._count, *states.shape[1:])
        self.states[layer][slots] = states


class KVCache(StateCache):
    """Keys and values [slots, H_kv, capacity, D] of each attention call. The first `active` slots hold `lengths` tokens."""

    exact = False

    def __init__(self, slots: int, longest: int, packed_weights: PackedWeights | None = None) -> None:
        """Create `slots` empty slots of `longest` tokens each. `packed_weights` caches the model's packed weight matrices."""
        super().__init__(slots)
        self.slots, self.longest, self.packed_weights = slots, longest, packed_weights
        self.layers: dict[Key, tuple[Tensor, Tensor]] = {}
        self.lengths = torch.zeros(0, dtype=torch.long)
        # [active] the position of the next token minus its index in the slot: 0, unless a prompt has images (M-RoPE)
        self.shifts = torch.zeros(0, dtype=torch.long)

    @property
    def active(self) -> int:
        """The number of sequences that are still being sampled. They have the first slots."""
        return self.lengths.numel()

    def reserve(self, layer: Key, k: Tensor, v: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """Return all slots' (keys, values) for an attention call. Enlarge slots that have room for fewer than `tokens` tokens.

        New tensors have the H_kv, D and dtype of `k` and `v` [·, H_kv, ·, D].
        """
        have = self.layers.get(layer)
        if have is None or have[0].shape[2] < tokens:
            capacity = min(self.longest, tokens + max(GROWTH, tokens // 2))
            keys, values = (x.new_zeros(self.slots, x.shape[1], capacity, x.shape[3]) for x in (k, v))
            for old, new in zip(have or (), (keys, values), strict=False):
                new[:, :, : old.shape[2]] = old
            self.layers[layer] = keys, values
        return self.layers[layer]

    def clear(self) -> None:
        """Empty all slots, and set their tensors to 0, because a failed step may have left NaN in them."""
        self.lengths = self.shifts = torch.zeros(0, dtype=torch.long)
        for x in (*(x for pair in self.layers.values() for x in pair), *self.states.values()):
            x.zero_()

    def prefill(self, prompts: PackedLayout, copies: Tensor, shifts: Tensor | None = None) -> Prefill:
        """Add len(copies) slots, and return the layout of the prompts' forward pass. New slot i continues prompt `copies[i]`.

        `shifts` is the position of each prompt's next token minus the prompt's length.
        """
        new = torch.zeros_like(copies) if shifts is None else shifts[copies]
        self.shifts = torch.cat([self.shifts.to(new.device), new])
        return Prefill(self, prompts, copies)

    def decode(self) -> Decode:
        """Return the layout of one decoding step: a new token for every active slot."""
        places, self.lengths = self.lengths, self.lengths + 1
        room = int(places.max()) + 1
        return Decode(self, places, room, room, self.shifts)

    def remove(self, finished: Tensor) -> Tensor:
        """Release the slots where `finished` [active] is True, and move the last sequences into these slots.

        Return each remaining sequence's previous slot, in the order of the new slots.
        """
        left = int((~finished).sum())
        order = torch.arange(left)
        holes = finished[:left].nonzero()[:, 0]
        movers = order[holes] = left + (~finished[left:]).nonzero()[:, 0]
        there, holes, movers = (on_device(x, self.lengths.device) for x in (order, holes, movers))
        if holes.numel():
            longest = int(self.lengths[movers].max())
            for pair in self.layers.values():
                for x in pair:
                    x[holes, :, :longest] = x[movers, :, :longest]
            for state in self.states.values():
                state[holes] = state[movers]
        self.lengths, self.shifts = self.lengths[there], self.shifts[there]
        return order


class _CallCounter:
    """The base class of layouts for one forward pass. It counts the calls of each layer."""

    def __init__(self) -> None:
        self._calls: Counter[tuple[str, int]] = Counter()

    def next_call(self, kind: str, layer: int) -> Key:
        """Count a call of a layer, and return its key in the cache. `kind` is "attention", "convolution" or "recurrence"."""
        # DiffLlama's layers attend twice in a pass, and HRM-Text runs its layers repeatedly.
        self._calls[kind, layer] += 1
        return kind, layer, self._calls[kind, layer] - 1


class StatePrefill(_CallCounter):
    """The base class of prefill layouts. It stores the state after each packed prompt in the new slots that continue the prompt.

    The i-th of the slots `new` continues prompt `copies[i]`.
    """

    def __init__(self, states: StateCache, prompts: PackedLayout, copies: Tensor, new: Where) -> None:
        super().__init__()
        self.states, self.prompts, self.copies, self.new = states, prompts, copies, new

    def convolve(self, layer: int, x: Tensor, how: ShortConvolution) -> Tensor:
        """Apply the convolution `how` to the prompts' inputs x. Store each prompt's last inputs as the window of its slots."""
        pieces, before = self.prompts.pieces, np.arange(1 - how.weight.shape[1], 0)
        last = pieces.lengths[:, None] + before
        rows = np.where(last >= 0, pieces.starts[:, None] + last, -1)
        windows = rows_at(x, on_device(rows.ravel(), x.device)).unflatten(0, rows.shape)
        self.states.store_states(self.next_call("convolution", layer), self.new, windows[self.copies])
        return self.prompts.convolve(layer, x, how)

    def scan(self, layer: int, recurrence: Recurrence, inputs: Tensors) -> Tensor:
        """Run the recurrence over the packed prompts, and store the state after each prompt in its slots."""
        out, states = self.prompts.scan_with_states(recurrence, inputs)
        assert states is not None
        self.states.store_states(self.next_call("recurrence", layer), self.new, states[self.copies])
        return out


class Prefill(StatePrefill):
    """The layout of a prefill of packed prompts. It stores a prompt's keys and values in the slots that continue the prompt."""

    def __init__(self, cache: KVCache, prompts: PackedLayout, copies: Tensor) -> None:
        """Add len(copies) slots to the cache. The i-th new slot continues prompt `copies[i]`."""
        self.cache, self.first = cache, cache.active
        super().__init__(cache, prompts, copies, slice(self.first, self.first + len(copies)))
        lengths = (prompts.prefix_rows >= 0).sum(1)[copies]
        cache.lengths = torch.cat([cache.lengths.to(lengths.device), lengths])

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, how: Callable[..., Tensor] = SDPA
    ) -> Tensor:
        """Store this layer's keys and values in the slots. Return the attention within the prompts; see `Layout.attend`."""
        self._keep(layer, k[0].transpose(0, 1), v[0].transpose(0, 1))
        return self.prompts.attend(layer, q, k, v, scale, window, how)

    def _keep(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Copy keys and values [S, H_kv, D] of all S prompt tokens to the new slots. A slot gets only its own prompt's tokens."""
        width = self.prompts.prefix_rows.shape[1]
        rows = self.prompts.prefix_rows[self.copies].clamp(min=0)
        stored = self.cache.reserve(self.next_call("attention", layer), k.transpose(0, 1)[None], v.transpose(0, 1)[None], width)
        for new, old in zip((k, v), stored, strict=True):
            old[self.first : self.first + len(self.copies), :, :width] = new[rows].transpose(1, 2)


class StateDecode(_CallCounter):
    """The base class of layouts of a decoding step. Row i of the step continues slot `rows[i]`; slot i if `rows` is None."""

    def __init__(self, states: StateCache, count: int, rows: Tensor | None = None) -> None:
        super().__init__()
        self.states, self.rows = states, rows
        self.where: Where = slice(count) if rows is None else rows

    def convolve(self, layer: int, x: Tensor, how: ShortConvolution) -> Tensor:
        """Append the new inputs x [active, C] to the slots' windows. Return the convolution `how` of the windows."""
        windows = self.states.states[self.next_call("convolution", layer)]
        wide = torch.cat([windows[self.where], x[:, None]], 1)
        windows[self.where] = wide[:, 1:]
        rows = torch.arange(wide.shape[0] * wide.shape[1], device=x.device).view(wide.shape[:2])
        ready = how.kernel(wide.flatten(0, 1), rows)
        return how.finish((wide * how.weight.t()).sum(1)) if ready is None else ready

    def scan(self, layer: int, recurrence: Recurrence, inputs: Tensors) -> Tensor:
        """Advance the recurrence by one token from the stored states, and store the new states."""
        states = self.states.states[self.next_call("recurrence", layer)]
        states = states if self.rows is not None else states[self.where]
        out, after = recurrence.step(inputs, states, self.rows)
        if after is not states:
            states[slice(None) if self.rows is None else self.rows] = after
        return out


class Decode(StateDecode):
    """The layout of one decoding step: one new token per active slot. A token attends only to the tokens of its slot."""

    def __init__(self, cache: KVCache, places: Tensor, columns: int, room: int, shifts: Tensor | None = None) -> None:
        """Prepare a step that stores one new token in each of the first len(places) slots: in slot i at index `places[i]`.

        The token's position is `places[i] + shifts[i]`. The step reads `columns` tokens of each slot. A slot gets room for `room`
        tokens.
        """
        super().__init__(cache, len(places))
        self.cache, self.places, self.width, self.room = cache, places, columns, room
        self.positions = places if shifts is None else places + shifts
        self.packed_weights = cache.packed_weights
        self.slots = torch.arange(len(places), device=places.device)
        self._masks: dict[int | None, Tensor] = {}

    def mask(self, window: int | None) -> Tensor:
        """Return a mask [active, 1, 1, columns]: True on the slot's last `window` tokens; if `window` is None, on all tokens."""
        if window not in self._masks:
            columns = torch.arange(self.width, device=self.places.device)[None]
            seen = columns <= self.places[:, None]
            if window is not None:
                seen &= columns > self.places[:, None] - window
            self._masks[window] = seen[:, None, None, :]
        return self._masks[window]

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, how: Callable[..., Tensor] = SDPA
    ) -> Tensor:
        """Write the new tokens' keys and values into their slots. Return their attention to these slots; see `Layout.attend`."""
        keys, values = self.cache.reserve(self.next_call("attention", layer), k, v, self.room)
        keys[self.slots, :, self.places] = k[:, :, 0]
        values[self.slots, :, self.places] = v[:, :, 0]
        batch, heads, _, dim = q.shape
        # Query heads that share a key head become its rows, so keys are not repeated.
        queries = q.view(batch, k.shape[1], heads // k.shape[1], dim)
        keys, values = (x[:batch, :, : self.width] for x in (keys, values))
        out = how(queries, keys, values, attn_mask=self.mask(window), scale=scale)
        return out.reshape(batch, 1, heads, v.shape[3])


@dataclass(frozen=True)
class Arrangement:
    """The rows of a decoding step, divided into G groups of adjacent rows. The rows of a group continue the same prompt."""

    prompts: Tensor
    """[layers, 2, G] addresses of the prompts' keys and values."""
    lengths: Tensor
    """[G] length of each prompt."""
    first: Tensor
    """[G + 1] first row of each group."""
    prompt_lengths: Tensor
    """[active] prompt length of each row."""


class SharedCache(StateCache):
    """A cache for the fused decoder, with the methods of `KVCache`. A prompt is stored once. A slot has only the tokens after it.

    Row i of a step continues the sequence in slot `slots[i]`, which has `lengths[i]` tokens after prompt `prompt[i]`. A prompt's
    rows are adjacent.
    """

    def __init__(self, slots: int, longest: int, heads: Sequence[Heads], dtype: torch.dtype, may_dequantise: bool = True) -> None:
        """Create empty slots of `longest` tokens, not counting prompts. `heads` has an entry per layer with keys and values."""
        super().__init__(slots)
        self.longest, self.layers, self.heads = longest, len(heads), heads
        self.packed_weights = PackedWeights(may_dequantise=may_dequantise)
        self.slot_tables = [torch.empty(2, slots, one.keys, 0, one.dim, dtype=dtype) for one in heads]
        self.prompts: dict[int, CachedPrompt] = {}
        self.prompt = np.zeros(0, dtype=np.int64)
        self.lengths = np.zeros(0, dtype=np.int64)
        self.slots = np.zeros(0, dtype=np.int64)
        self._addresses = torch.zeros(len(heads), dtype=torch.long)
        self._free = np.arange(slots)
        self._num_prompts = 0
        self._arrangement: Arrangement | None = None

    @property
    def active(self) -> int:
        """The number of sequences still being sampled."""
        return self.lengths.size

    @property
    def exact(self) -> bool:
        """True if weight matrices are packed: the layers then use the same kernels as in training, and produce the same bits."""
        return self.packed_weights.bytes > 0

    def prefill(self, prompts: PackedLayout, copies: Tensor, shifts: Tensor | None = None) -> SharedPrefill:
        """Add slots; see `KVCache.prefill`. `shifts` is ignored: it is for models with M-RoPE, which never use this cache."""
        new = [CachedPrompt(length, self.heads) for length in prompts.pieces.prefixes.tolist()]
        self.prompts |= {self._num_prompts + i: prompt for i, prompt in enumerate(new)}
        self.prompt = np.concatenate([self.prompt, self._num_prompts + copies.numpy()])
        self.lengths = np.concatenate([self.lengths, np.zeros(len(copies), dtype=np.int64)])
        taken, self._free = np.split(self._free, [len(copies)])
        self.slots = np.concatenate([self.slots, taken])
        self._num_prompts += len(new)
        self._arrangement = None
        return SharedPrefill(self, prompts, copies, torch.from_numpy(taken), prompt_addresses(new, self.layers))

    def decode(self) -> SharedDecode:
        """Return the layout of one decoding step: a new token for every active slot."""
        return SharedDecode(self)

    def remove(self, finished: Tensor) -> Tensor:
        """Release the slots of the rows where `finished` [active] is True. Release prompts that no remaining row continues.

        Return the previous indices of the remaining rows, in order.
        """
        order = np.flatnonzero(~finished.numpy())
        self._free = np.concatenate([self._free, self.slots[finished.numpy()]])
        self.lengths, self.prompt, self.slots = self.lengths[order], self.prompt[order], self.slots[order]
        alive = set(self.prompt.tolist())
        self.prompts = {number: prompt for number, prompt in self.prompts.items() if number in alive}
        self._arrangement = None
        return torch.from_numpy(order)

    @property
    def selection(self) -> np.ndarray:
        """The arguments of `select_slots` for the active rows, as an array [3, active]: prompt, number of tokens, slot."""
        return np.stack([self.prompt, self.lengths, self.slots])

    def select_slots(self, prompt: np.ndarray, lengths: np.ndarray, slots: np.ndarray) -> None:
        """Decode `slots` in the next steps, in this order. Slots of the same prompt must be adjacent.

        `prompt` and `lengths` are each slot's prompt and number of tokens.
        """
        self.prompt, self.lengths, self.slots = prompt, lengths, slots
        self._arrangement = None

    def retain_slots(self, prompt: np.ndarray, slots: np.ndarray) -> None:
        """Free all prompts and slots except `prompt` and `slots`. Afterwards no slot is active until `select_slots` is called."""
        self.select_slots(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
        self._free = np.setdiff1d(np.arange(self.slot_tables[0].shape[1]), slots)
        kept = set(prompt.tolist())
        self.prompts = {number: table for number, table in self.prompts.items() if number in kept}

    def reserve(self, tokens: int) -> tuple[list[Tensor], Tensor]:
        """Return (each layer's keys and values [2, slots, H_kv, capacity, D], the memory addresses of these tensors).

        First enlarge the slots if they have room for fewer than `tokens` tokens.
        """
        have = self.slot_tables[0].shape[3]
        if have < tokens:
            capacity = -(-min(self.longest, tokens + max(GROWTH, tokens // 2)) // BLOCK) * BLOCK
            for i, old in enumerate(self.slot_tables):  # layer by layer, to save memory
                self.slot_tables[i] = old.new_empty(*old.shape[:3], capacity, old.shape[4])
                self.slot_tables[i][..., :have, :] = old
            self._addresses = torch.tensor([x.data_ptr() for x in self.slot_tables])
        return self.slot_tables, self._addresses

    def arrangement(self) -> Arrangement:
        """Return the active rows, grouped by their prompts. The result is cached until the rows change."""
        if self._arrangement is None:
            first = np.flatnonzero(np.diff(self.prompt, prepend=-1, append=-1))
            prompts = [self.prompts[number] for number in self.prompt[first[:-1]].tolist()]
            lengths = np.array([prompt.length for prompt in prompts])
            tables = (lengths, first, lengths.repeat(np.diff(first)))
            self._arrangement = Arrangement(prompt_addresses(prompts, self.layers), *map(torch.from_numpy, tables))
        return self._arrangement


class SharedPrefill(StatePrefill):
    """The layout of a prefill for fused layers. `tables` [layers, 2, G] are the addresses of the keys and values of G prompts."""

    slots = None

    def __init__(self, cache: SharedCache, prompts: PackedLayout, copies: Tensor, new: Tensor, tables: Tensor) -> None:
        super().__init__(cache, prompts, copies, new)
        self.tables, self.packed_weights = tables, cache.packed_weights
        self.starts, self.lengths = prompts.spans.prefixes.t().contiguous()

    def mix(self, layer: AttentionLayer, rotated: Tensor, qkv: Tensor) -> tuple[Tensor, Tensor]:
        """Store this layer's keys and values of the prompts. Return the attention within the prompts (`PackedLayout.mix`)."""
        layer.native.prompt_tables(rotated, qkv, self.starts, self.lengths, layer.heads, self.tables[layer.order])
        return self.prompts.mix(layer, rotated, qkv)


class SharedDecode(StateDecode):
    """The layout of a decoding step for fused layers. Each row has one new token, which attends to its prompt and its slot."""

    def __init__(self, cache: SharedCache) -> None:
        (own, addresses), arrangement = cache.reserve(int(cache.lengths.max()) + 1), cache.arrangement()
        slots, places = torch.from_numpy(cache.slots), torch.from_numpy(cache.lengths)
        super().__init__(cache, len(slots), slots)
        self.slots = Slots(own, addresses, slots, places, arrangement.prompts, arrangement.lengths, arrangement.first)
        self.packed_weights = cache.packed_weights
        self.positions = arrangement.prompt_lengths + places
        """[active] positions of the new tokens."""
        cache.lengths = cache.lengths + 1

    def mix(self, layer: AttentionLayer, rotated: Tensor, qkv: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the attention of each new token to its prompt and slot in the native kernel; see `FusedLayout.mix`."""
        return layer.native.decode(rotated, qkv, self.slots, layer.order, layer.heads, layer.window)


def new_cache(model: LanguageModel, slots: int, longest: int, behind: int = 0) -> KVCache | SharedCache:
    """Return an empty cache for `slots` sequences of at most `longest` tokens each.

    `behind` is the maximum number of tokens after a sequence's prompt. If it is 0, only `longest` limits them.
    """
    if model.decoder is None:
        return KVCache(slots, longest, None if model.module_kernels is None else PackedWeights())
    decoder = model.decoder
    return SharedCache(slots, behind or longest, decoder.heads, decoder.dtype, decoder.may_dequantise)


def prefill(
    model: LanguageModel,
    cache: KVCache | SharedCache,
    prompts: Sequence[Ids],
    copies: Tensor,
    keep: ActivationCache | None,
) -> Tensor:
    """Prefill n new slots, and return the logits [n, V] of their next tokens. New slot i continues prompt `copies[i]`.

    If `keep` is given, the prompts' activations are stored in it.
    """
    inputs, shifts = model.placed(pack(Groups(prompts, [[] for _ in prompts]), model.device)), None
    if inputs.has_images and model.vision is not None:
        shifts = on_device([model.vision.shift(ids) for ids in prompts], model.device)
    assert isinstance(inputs.layout, PackedLayout) and inputs.prefix_ends is not None
    layout = cache.prefill(inputs.layout, copies, shifts)
    hidden = model.forward(inputs.input_ids, inputs.position_ids, layout, keep, target_rows=inputs.prefix_ends)
    return model.head(hidden, cache.exact).index_select(0, copies)
