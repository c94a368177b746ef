"""Attention, convolutions and recurrences over a packed row: concatenated sequences that share prefixes, without padding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from psigrad.kernels.kernels import Heads, Kernels, Slots, Spans
from psigrad.kernels.state_kernels import Tensors, Trees
from psigrad.language.models.fused.caches import PackedWeights
from psigrad.language.models.segments import Recurrence, ShortConvolution, Wave, trees, waves
from psigrad.objective.batch import copy_to

SDPA: Any = F.scaled_dot_product_attention


class AttentionLayer(Protocol):
    """The properties of a fused layer that `FusedLayout.mix` reads. `window` is the sliding window in tokens; 0: no window.

    `order` is the index of the keys and values that the layer uses.
    """

    order: int
    heads: Heads
    window: int
    native: Kernels


def modified_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention like `scaled_dot_product_attention`, optionally with capped scores or sinks.

    `softcap` c caps scores s to c·tanh(s/c). `sinks` [H] is an extra score per head in the softmax, without a value.
    """
    scores = q @ k.mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if attn_mask is not None:
        unseen = torch.finfo(scores.dtype).min  # -inf would give NaN in rows of padding, which attend to nothing
        scores = scores.masked_fill(~attn_mask, unseen) if attn_mask.dtype == torch.bool else scores + attn_mask
    if sinks is not None:
        beside = sinks.to(scores.dtype).view(1, scores.shape[1], -1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, beside], -1)
    shares = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(q.dtype)
    return shares[..., : k.shape[-2]] @ v


class StateLayout(Protocol):
    """The division of a forward pass's S tokens into sequences, as recurrent and convolutional layers use it."""

    def convolve(self, layer: int, x: Tensor, how: ShortConvolution) -> Tensor:
        """Apply the convolution `how` to x [S, C] along each sequence."""

    def scan(self, layer: int, recurrence: Recurrence, inputs: Tensors) -> Tensor:
        """Run a recurrence along each sequence, from the state of its prefix (zero if it has none). Tensors are [S, ...]."""


class Layout(StateLayout, Protocol):
    """The division of a forward pass's S tokens into sequences, for transformers' modules in which psigrad computes attention."""

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, how: Callable[..., Tensor] = SDPA
    ) -> Tensor:
        """Return the output [1, S, H, D] of attention within each sequence. q is [1, H, S, D]; k and v are [1, H_kv, S, D].

        `window` is the sliding window in tokens; None: no window. `how` computes attention on padded tensors.
        """


class FusedLayout(StateLayout, Protocol):
    """The division of a forward pass's S tokens into sequences, as fused layers use it."""

    @property
    def packed_weights(self) -> PackedWeights | None:
        """The cache of weight matrices that are packed for the decoding kernels; None in passes that do not use it."""

    @property
    def slots(self) -> Slots | None:
        """The slots of the key-value cache in which a decoding step stores its new tokens; None in any other pass."""

    def mix(self, layer: AttentionLayer, rotated: Tensor, qkv: Tensor) -> tuple[Tensor, Tensor]:
        """Compute attention with H heads of width D. Return (output [S, H·D], log-sum-exp of each query's scores [S, H]).

        `rotated` [S, (H + H_kv)·D] has the queries and keys after the rotary embedding, and `qkv` is [q | k | v] before it.
        """


@cache  # since nothing can be copied to the device while a CUDA graph is captured
def no_mask(device: torch.device) -> Tensor:
    """Return a dummy 4-D mask. With it, transformers builds no [S, S] mask."""
    return torch.zeros(1, 1, 1, 1, device=device)


def rows_at(x: Tensor, index: Tensor) -> Tensor:
    """Gather the rows `index` of x [S, ...] -> [len(index), ...]. An index of -1 gives a row of zeros."""
    return x.index_select(0, index.clamp(min=0)).masked_fill_((index < 0).view(-1, *[1] * (x.dim() - 1)), 0.0)


class _Take(torch.autograd.Function):
    """The autograd function `rows_at(x, index)` for an `index` that takes no row of x twice.

    Row i of x goes to the output's row `inverse[i]` (-1: nowhere).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows_at(x, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        # a gather, which is faster than autograd's scatter
        return rows_at(grad, ctx.saved_tensors[0]), None, None


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat [B, H_kv, L, D] -> [B, heads, L, D] for grouped-query attention."""
    batch, kv_heads, length, dim = x.shape
    if kv_heads == heads:
        return x
    return x[:, :, None].expand(batch, kv_heads, heads // kv_heads, length, dim).reshape(batch, heads, length, dim)


class Pieces(NamedTuple):
    """The pieces of a packed row: B prefixes with the lengths `prefixes` [B], then N sequences with the lengths `sequences` [N].

    `prefix` [N] has the index of each sequence's prefix, and `seen` [N] the number of prefix tokens that the sequence attends to.
    """

    prefixes: np.ndarray
    sequences: np.ndarray
    prefix: np.ndarray
    seen: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """[B + N] the number of tokens of each prefix, then of each sequence."""
        return np.concatenate([self.prefixes, self.sequences])

    @property
    def starts(self) -> np.ndarray:
        """[B + N] the position in the row where each prefix starts, then where each sequence starts."""
        lengths = self.lengths
        return np.asarray(lengths.cumsum() - lengths)

    @property
    def before(self) -> np.ndarray:
        """[B + N] the number of prefix tokens before each piece: 0 for each prefix, then `seen` for each sequence."""
        return np.concatenate([0 * self.prefixes, self.seen])

    @property
    def base(self) -> np.ndarray:
        """[B + N] 0 for each prefix, then for each sequence the position in the row where its prefix starts."""
        return np.concatenate([0 * self.prefixes, self.starts[self.prefix] if len(self.prefixes) else self.prefix])


def on_device(numbers: Any, device: torch.device | str, dtype: torch.dtype = torch.long) -> Tensor:
    """Return integers on `device`; see `copy_to`."""
    return copy_to(torch.as_tensor(numbers, dtype=dtype), device)


def _table(lengths: np.ndarray, start: int, device: torch.device) -> Tensor:
    """Return the row positions [pieces, longest] of each piece's tokens; -1: padding. The first piece starts at `start`."""
    first, steps = start + lengths.cumsum() - lengths, np.arange(lengths.max(initial=0))
    return on_device(np.where(steps < lengths[:, None], first[:, None] + steps, -1), device)


@dataclass(frozen=True)
class PackedLayout:
    """The layout of a packed row of S tokens: B prefixes, then N sequences. Each sequence continues a prefix, unless B is 0."""

    pieces: Pieces
    device: torch.device
    blocks: Tensor | None = None
    """[S] the index of each token's block; 0: no block. Tokens of a block, such as an image in Gemma 3, attend to each other."""
    packed_weights = slots = None

    @cached_property
    def rows(self) -> int:
        """The number of tokens, S."""
        return int(self.pieces.lengths.sum())

    @cached_property
    def prefix_rows(self) -> Tensor:
        """[B, P] the positions of each prefix's tokens in the packed row; -1: padding."""
        return _table(self.pieces.prefixes, 0, self.device)

    @cached_property
    def sequence_rows(self) -> Tensor:
        """[N, L] the positions of each sequence's tokens in the packed row; -1: padding."""
        return _table(self.pieces.sequences, int(self.pieces.prefixes.sum()), self.device)

    @cached_property
    def sequence_prefix(self) -> Tensor:
        """[N] the index of the prefix that each sequence continues, as a tensor on the layout's device."""
        return on_device(self.pieces.prefix, self.device)

    @cached_property
    def seen(self) -> Tensor:
        """[N] the number of prefix tokens that each sequence attends to, as a tensor on the layout's device."""
        return on_device(self.pieces.seen, self.device)

    @cached_property
    def _order(self) -> Tensor:
        """[B·P + N·L] `prefix_rows` and then `sequence_rows`, flattened: the packed position of each token; -1: padding."""
        return torch.cat([self.prefix_rows.flatten(), self.sequence_rows.flatten()])

    @cached_property
    def _inverse(self) -> Tensor:
        """[S] the position of each packed token in `_order`."""
        # Computing it on the CPU avoids a synchronisation with the GPU.
        pieces, count, width = self.pieces, len(self.pieces.prefixes), int(self.pieces.prefixes.max(initial=0))
        wide = np.concatenate([np.full(count, width), np.full(len(pieces.sequences), pieces.sequences.max(initial=0))])
        begin = wide.cumsum() - wide
        return on_device((begin - pieces.starts).repeat(pieces.lengths) + np.arange(self.rows), self.device)

    def _prefix_mask(self, window: int | None) -> Tensor | None:
        """Return the mask of attention within prefixes, [P, P] or [B, 1, P, P]; None if a causal mask is enough."""
        length = self.prefix_rows.shape[1]
        if self.blocks is None and (window is None or window >= length):
            return None
        distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]
        near = (distance < (window or length)).to(self._order.device)
        return near & self._or_same_block((distance >= 0).to(near.device), self.prefix_rows)

    def _or_same_block(self, causal: Tensor, rows: Tensor) -> Tensor:
        """Return `causal` [L, L] without `blocks`, else a mask [K, 1, L, L] that also allows attention within each block.

        `rows` [K, L] has the positions of K pieces' tokens in the packed row.
        """
        if self.blocks is None:
            return causal
        own = rows_at(self.blocks, rows.flatten()).view(rows.shape)
        return (causal | ((own[:, :, None] == own[:, None, :]) & (own[:, :, None] > 0)))[:, None]

    def _sequence_mask(self, window: int | None) -> Tensor:
        """Return the mask [N, 1, L, P + L] of attention from sequences to their prefixes and themselves, within the `window`."""
        n, length = self.sequence_rows.shape
        device = self._order.device
        steps = torch.arange(length, device=device)
        own = self._or_same_block(steps[:, None] >= steps[None, :], self.sequence_rows)
        if self.prefix_rows.shape[0] == 0:
            mask = own.expand(n, 1, length, length)
            return mask if window is None else mask & (steps[:, None] - steps[None, :] < window)
        prefix_len = self.seen
        places = torch.arange(self.prefix_rows.shape[1], device=device)
        seen = (places[None, :] < prefix_len[:, None])[:, None, None, :].expand(n, 1, length, places.numel())
        mask = torch.cat([seen, own.expand(n, 1, length, length)], dim=-1)
        if window is not None:
            query = prefix_len[:, None] + steps[None, :]
            key = torch.cat([places.expand(n, -1), query], dim=1)
            mask = mask & (query[:, None, :, None] - key[:, None, None, :] < window)
        return mask

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, how: Callable[..., Tensor] = SDPA
    ) -> Tensor:
        """Compute attention within each prefix, and from each sequence to its prefix and itself; see `Layout.attend`."""
        heads = q.shape[1]
        split = self.prefix_rows.numel()
        q, k, v = (_Take.apply(x[0].transpose(0, 1), self._order, self._inverse) for x in (q, k, v))
        parts = []
        if split:
            views = [repeat_heads(_view(x[:split], self.prefix_rows), heads) for x in (q, k, v)]
            mask = self._prefix_mask(window)
            out = how(*views, attn_mask=mask, is_causal=mask is None, scale=scale)
            parts.append(out.transpose(1, 2).flatten(0, 1))
        if self.sequence_rows.numel():
            views = [_view(x[split:], self.sequence_rows) for x in (q, k, v)]
            if split:  # each sequence also sees the keys and values of its prefix
                for i, x in ((1, k), (2, v)):
                    shared = _view(x[:split], self.prefix_rows).index_select(0, self.sequence_prefix)
                    views[i] = torch.cat([shared, views[i]], dim=2)
            views = [repeat_heads(x, heads) for x in views]
            if split or window is not None or self.blocks is not None:
                out = how(*views, attn_mask=self._mask(window), scale=scale)
            else:
                out = how(*views, is_causal=True, scale=scale)
            parts.append(out.transpose(1, 2).flatten(0, 1))
        taken: Tensor = _Take.apply(torch.cat(parts), self._inverse, self._order)
        return taken[None]

    def convolve(self, layer: int, x: Tensor, how: ShortConvolution) -> Tensor:
        """Apply the convolution `how` to x [S, C]. A sequence's first tokens also read the last tokens of its prefix."""
        taps = how.weight.shape[1]
        rows, own, windows = self._windows(taps)
        if (ready := how.kernel(x, windows)) is not None:
            return ready
        wide, count = rows_at(x, rows), len(rows) - taps + 1
        made = sum((wide[k : k + count] * how.weight[:, k] for k in range(taps)), x.new_zeros(()))
        return how.finish(made).index_select(0, own)

    def _windows(self, taps: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return (rows [E], begin [S], windows [S, taps]), the positions of the tokens that a convolution reads; -1: none.

        `rows` lists for each piece the `taps - 1` tokens before it, then its own tokens. `windows[s]` has the last `taps` tokens
        up to token s; they start at index `begin[s]` of `rows`.
        """
        if taps not in self._taps:
            pieces, before = self.pieces, np.arange(1 - taps, 0)
            seen = pieces.before[:, None] + before
            context = np.where(seen >= 0, pieces.base[:, None] + seen, -1)
            own = np.split(np.arange(self.rows), pieces.starts[1:])
            rows = np.concatenate([part for pair in zip(context, own, strict=True) for part in pair])
            begin = np.arange(self.rows) + (np.arange(len(own)) * (taps - 1)).repeat(pieces.lengths)
            tables = (rows, begin, rows[begin[:, None] + np.arange(taps)])
            self._taps[taps] = tuple(on_device(x, self.device) for x in tables)  # type: ignore[assignment]
        return self._taps[taps]

    @cached_property
    def _taps(self) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
        return {}

    def scan(self, layer: int, recurrence: Recurrence, inputs: Tensors) -> Tensor:
        """Run the recurrence over each prefix once, and over each sequence from its prefix's state; see `Layout.scan`."""
        return self.scan_with_states(recurrence, inputs, every=False)[0]

    def scan_with_states(self, recurrence: Recurrence, inputs: Tensors, every: bool = True) -> tuple[Tensor, Tensor | None]:
        """Return (the outputs of `scan`, the final state of each of the `segments`). If `every` is False, states
        that no segment continues may be missing.
        """
        if self.device.type == "cpu" and (ready := recurrence.scan_trees(inputs, self._trees(every))) is not None:
            return ready
        order, inverse, waves = self.segments
        taken, outputs, states, done = [_Take.apply(x, order, inverse) for x in inputs], [], None, 0
        for shape, source in waves:
            part = tuple(x[done : done + shape[0] * shape[1]].unflatten(0, shape) for x in taken)
            out, after = recurrence.scan(part, None if source is None or states is None else rows_at(states, source))
            outputs.append(out.flatten(0, 1))
            states = after if states is None else torch.cat([states, after])
            done += shape[0] * shape[1]
        made: Tensor = _Take.apply(torch.cat(outputs), inverse, order)
        return made, states

    @cached_property
    def _waves(self) -> list[Wave]:
        return waves(self.pieces)

    def _trees(self, every: bool) -> Trees:
        """Return the `segments` as trees: a segment's parent is the one that it continues. `every`: see `scan_with_states`."""
        if every not in self._forests:
            self._forests[every] = trees(self._waves, every)
        return self._forests[every]

    @cached_property
    def _forests(self) -> dict[bool, Trees]:
        return {}

    @cached_property
    def segments(self) -> tuple[Tensor, Tensor, list[tuple[tuple[int, int], Tensor | None]]]:
        """The row's segments: (`order`, `inverse` [S], waves). A prefix is cut into segments where a sequence branches off.

        A wave is a batch of padded segments: ((number of segments, longest length), `source`). Its segment i continues
        segment `source[i]`, counted over all waves (-1: none). If all are -1, `source` is None.
        `order` has the packed positions of all waves' tokens (-1: padding); `order[inverse[s]]` is s.
        """
        tables, shapes = [], []
        for wave in self._waves:
            first, lengths, source = np.array(wave).T
            steps = np.arange(lengths.max())
            tables.append(np.where(steps < lengths[:, None], first[:, None] + steps, -1))
            shapes.append((tables[-1].shape, on_device(source, self.device) if (source >= 0).any() else None))
        order = np.concatenate([table.ravel() for table in tables])
        inverse = np.empty(self.rows, dtype=np.int64)
        inverse[order[order >= 0]] = np.flatnonzero(order >= 0)
        return on_device(order, self.device), on_device(inverse, self.device), shapes

    def mix(self, layer: AttentionLayer, rotated: Tensor, qkv: Tensor) -> tuple[Tensor, Tensor]:
        """Compute attention in the C++ kernel; see `FusedLayout.mix`."""
        return layer.native.attention(rotated, qkv, self.spans, layer.heads, layer.window)

    @cached_property
    def spans(self) -> Spans:
        """The layout in the form that the kernels read. A sequence without a prefix is stored as a prefix without sequences."""
        spans = list(zip(self.pieces.starts.tolist(), self.pieces.lengths.tolist(), strict=True))
        count = len(self.pieces.prefixes)
        if not count:
            return Spans(spans, [[] for _ in spans])
        members: list[list[tuple[int, int, int]]] = [[] for _ in range(count)]
        for prefix, span, seen in zip(self.pieces.prefix.tolist(), spans[count:], self.pieces.seen.tolist(), strict=True):
            members[prefix].append((*span, seen))
        return Spans(spans[:count], members)

    def _mask(self, window: int | None) -> Tensor:
        """Return `_sequence_mask(window)`. It is computed once and shared by all layers with this sliding window."""
        if window not in self._masks:
            self._masks[window] = self._sequence_mask(window)
        return self._masks[window]

    @cached_property
    def _masks(self) -> dict[int | None, Tensor]:
        return {}


def _view(x: Tensor, rows: Tensor) -> Tensor:
    """Reshape x [B·L, H, D] -> [B, H, L, D]. `rows` gives the shape [B, L]."""
    return x.view(*rows.shape, *x.shape[1:]).transpose(1, 2)
