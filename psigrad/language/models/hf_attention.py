"""psigrad's attention in transformers models, computed by scaled_dot_product_attention or by GPU kernels that need no padding.

With a `Layout` it reads a packed row, otherwise padded sequences.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from psigrad.kernels.state_kernels import Tensors
from psigrad.language.models.attention import SDPA, Layout, PackedLayout, modified_attention, on_device, repeat_heads
from psigrad.language.models.segments import Recurrence, ShortConvolution

IMPLEMENTATION = "psigrad"


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    layout: Layout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention for transformers. Return (output, None). `attention_mask` and dropout are ignored with a `layout`."""
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    plain = softcap is None and sinks is None
    if layout is None and plain:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    if kwargs.get("position_bias") is not None:
        raise ValueError("Attention with position_bias does not support packed sequences.")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    how = SDPA if plain else functools.partial(modified_attention, softcap=softcap, sinks=sinks)
    if layout is None:
        key, value = (repeat_heads(x, query.shape[1]) for x in (key, value))
        causal = attention_mask is None and query.shape[2] > 1
        return how(query, key, value, attn_mask=attention_mask, is_causal=causal, scale=scale).transpose(1, 2), None
    index: Any = module.layer_idx
    return layout.attend(index, query, key, value, scale, kwargs.get("sliding_window"), how), None


AttentionInterface.register(IMPLEMENTATION, attention)
AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)


# The number of queries, and of keys, in a block of FlexAttention.
BLOCK = 128
# The arguments: queries, keys and values [·, H, D]; the cumulative lengths of the pieces' queries and keys, from 0; the largest
# number of queries and of keys in a piece; the scale; the window.
Varlen = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, int, float, int | None], Tensor]


@functools.cache
def varlen_kernel() -> Varlen:
    """Return a kernel for causal attention over sequences of different lengths in half precision: torch's, or flash-attn's.

    If a sequence has more keys than queries, its queries belong to its last tokens. Raises `ValueError` if neither is installed.
    """

    def left(window: int | None) -> tuple[int, int]:
        return (-1 if window is None else window - 1, 0)

    known: Any
    with contextlib.suppress(ImportError):
        from torch.nn.attention.varlen import varlen_attn

        known = inspect.signature(varlen_attn).parameters
        grouped = {"enable_gqa": True} if "enable_gqa" in known else {}  # torch 2.11 groups heads without this argument
        kernel: Any = varlen_attn
        if "window_size" in known:
            return lambda *of: kernel(*of[:7], scale=of[7], window_size=left(of[8]), **grouped)
    with contextlib.suppress(ImportError):
        known = importlib.import_module("flash_attn").flash_attn_varlen_func
        return lambda *of: known(*of[:7], softmax_scale=of[7], causal=True, window_size=left(of[8]))
    raise ValueError("neither torch 2.11 nor flash-attn is installed")


@dataclass(frozen=True)
class _Unpadded:
    """The base class of layouts that compute attention without padding. `packed` computes convolutions and recurrences."""

    packed: PackedLayout

    def convolve(self, layer: int, x: Tensor, how: ShortConvolution) -> Tensor:
        """Convolve x [S, C] along each sequence; see `Layout.convolve`."""
        return self.packed.convolve(layer, x, how)

    def scan(self, layer: int, recurrence: Recurrence, inputs: Tensors) -> Tensor:
        """Run a recurrence along each sequence; see `Layout.scan`."""
        return self.packed.scan(layer, recurrence, inputs)


@dataclass(frozen=True)
class VarlenLayout(_Unpadded):
    """A packed layout that computes attention with `varlen_kernel`, without padding; see `Layout`."""

    kernel: Varlen

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, how: Callable[..., Tensor] = SDPA
    ) -> Tensor:
        """Compute attention by the kernel; see `Layout.attend`. Raise `ValueError` if the model caps scores or has sinks."""
        if how is not SDPA:
            raise ValueError("its attention caps scores or has sinks")
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        if len(self.packed.pieces.prefixes):
            k, v = (_Copies.apply(x, *self._copies) for x in (k, v))  # a prefix is copied before its completions
        ends_q, ends_k, longest_q, longest_k = self._ends
        return self.kernel(q, k, v, ends_q, ends_k, longest_q, longest_k, scale, window)[None]

    @cached_property
    def _ends(self) -> tuple[Tensor, Tensor, int, int]:
        pieces, device = self.packed.pieces, self.packed.device
        lengths = pieces.lengths[pieces.lengths > 0]
        keys = pieces.before[pieces.lengths > 0] + lengths
        q, k = (on_device([0, *x.cumsum()], device, torch.int32) for x in (lengths, keys))
        return q, k, int(lengths.max(initial=0)), int(keys.max(initial=0))

    @cached_property
    def _copies(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(tokens [K], copies [P, C], missing [P, C, 1, 1], single [S − P]), the arguments of `_Copies`.

        Key i is a copy of the key of token `tokens[i]`. `copies` has the indices of each prefix token's copies, padded where
        `missing` is True. `single` has the index of each other token's only copy.
        """
        pieces, device = self.packed.pieces, self.packed.device
        real = pieces.lengths > 0
        # for each piece: the tokens of a prefix that it sees, then itself
        runs, begin = (np.stack(x, 1)[real].ravel() for x in ((pieces.before, pieces.lengths), (pieces.base, pieces.starts)))
        index = np.arange(runs.sum()) + (begin - runs.cumsum() + runs).repeat(runs)
        by_token, many = index.argsort(kind="stable"), np.bincount(index, minlength=self.packed.rows)
        first, count = many.cumsum() - many, int(pieces.prefixes.sum())
        column = np.arange(many[:count].max(initial=1))
        held = by_token[np.minimum(first[:count, None] + column, len(index) - 1)]
        missing = on_device(column >= many[:count, None], device, torch.bool)[..., None, None]
        return on_device(index, device), on_device(held, device), missing, on_device(by_token[first[count:]], device)


class _Copies(torch.autograd.Function):
    """The autograd function x[index] for x [S, ...] and `index` [K], with reproducible gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, many: Tensor, missing: Tensor, one: Tensor) -> Tensor:
        ctx.save_for_backward(many, missing, one)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        many, missing, one = ctx.saved_tensors
        # PyTorch's own gradient would add in half precision, in an order that varies
        shared = grad.index_select(0, many.flatten()).unflatten(0, many.shape).masked_fill_(missing, 0.0)
        return torch.cat([shared.sum(1), grad.index_select(0, one)]), None, None, None, None


@dataclass(frozen=True)
class FlexLayout(_Unpadded):
    """A packed layout that computes attention with FlexAttention (Dong et al. 2024, arXiv:2412.05496); see `Layout`."""

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, how: Callable[..., Tensor] = SDPA
    ) -> Tensor:
        """Compute attention by flex_attention; see `Layout.attend`. `how` is not called; its `softcap` and `sinks` are used."""
        given: dict[str, Any] = how.keywords if isinstance(how, functools.partial) else {}
        cap: Any = given.get("softcap")
        sinks: Tensor | None = given.get("sinks")

        def capped(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            bent: Tensor = cap * torch.tanh(score / cap)
            return bent

        out, more = _kernel(q.device.type)(
            *(q, k, v, None if cap is None else capped, self._mask(window)),
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
            return_aux=AuxRequest(lse=sinks is not None),
        )
        if sinks is not None:  # a sink is an extra score in the softmax whose probability multiplies no value
            out = out * torch.sigmoid(more.lse - sinks.to(more.lse.dtype)[:, None])[..., None].to(out.dtype)
        turned: Tensor = out.transpose(1, 2)
        return turned

    @cached_property
    def tokens(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Four tensors [S]: indices of each token's prefix and sequence, its position, and the start of its sequence.

        Positions and starts count from the first token of the prefix. A token of a prefix has the sequence -1 and the start S.
        """
        pieces, count, rows = self.packed.pieces, len(self.packed.pieces.prefixes), self.packed.rows
        numbers, nothing = np.arange(len(pieces.sequences)), np.full(len(pieces.sequences), -1)
        group = np.concatenate([np.arange(count), pieces.prefix if count else numbers])
        own = np.concatenate([np.full(count, -1), numbers if count else nothing])
        begin = np.concatenate([np.full(count, rows), pieces.seen if count else nothing + 1 + rows])
        columns = [x.repeat(pieces.lengths) for x in (group, own, pieces.before - pieces.starts, begin)]
        columns[2] += np.arange(rows)
        return tuple(on_device(x, self.packed.device) for x in columns)  # type: ignore[return-value]

    def blocks(self, window: int | None) -> tuple[np.ndarray, np.ndarray]:
        """Return two masks [Q, K] over blocks of `BLOCK` queries and `BLOCK` keys.

        The first is True if any query attends to any key, the second only if all queries attend to all keys.
        """
        pieces, size, reach = self.packed.pieces, -(-self.packed.rows // BLOCK), window or self.packed.rows
        some, whole = np.zeros((2, size, size), dtype=bool)
        for start, length, before, first in zip(pieces.starts, pieces.lengths, pieces.before, pieces.base, strict=True):
            for row in range(start // BLOCK, -(-(start + length) // BLOCK) if length else 0):
                low, high = max(start, row * BLOCK), min(start + length, (row + 1) * BLOCK)
                gone = low - start - reach + 1  # own tokens out of the first query's window; negative if it reaches the prefix
                for begin, end, sure in (
                    (first + max(0, before + gone), first + before, first + before),
                    (start + max(0, gone), high, low + 1),
                ):
                    if begin < end:
                        some[row, begin // BLOCK : -(-end // BLOCK)] = True
                        if high - low == BLOCK and window is None:
                            whole[row, -(-begin // BLOCK) : sure // BLOCK] = True
        return some, whole

    def _mask(self, window: int | None) -> BlockMask:
        """Return the block mask, built once for all layers with this window."""
        if window not in self._masks:
            group, own, position, begin = self.tokens

            def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
                # Prompts precede completions in the row, so a later token in the row is never earlier in a sequence.
                before = (own[j] < 0) & (position[j] < begin[i])
                seen = (group[i] == group[j]) & (before | (own[j] == own[i])) & (i >= j)
                return seen if window is None else seen & (position[i] - position[j] < window)

            parts, full = self.blocks(window)
            some, most, whole, all_of = (
                on_device(x, group.device, torch.int32) for x in (*_list_blocks(parts & ~full), *_list_blocks(full))
            )
            lengths = (self.packed.rows, self.packed.rows)
            made: Any = BlockMask.from_kv_blocks(some, most, whole, all_of, BLOCK, visible, lengths)
            self._masks[window] = made
        return self._masks[window]

    @cached_property
    def _masks(self) -> dict[int | None, BlockMask]:
        return {}


def unpad(packed: PackedLayout, how: str | Varlen) -> Layout:
    """Return a `FlexLayout` or `VarlenLayout` of `packed`, if possible. `how` is "flex", "varlen" or a `Varlen` kernel."""
    if packed.blocks is not None:  # tokens of an image attend to each other
        return packed
    return FlexLayout(packed) if how == "flex" else VarlenLayout(packed, varlen_kernel() if isinstance(how, str) else how)


def _list_blocks(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return, per row of `blocks`, (the number of True values [1, 1, Q], the columns [1, 1, Q, K], those with True first)."""
    return blocks.sum(1)[None, None], (~blocks).argsort(1, kind="stable")[None, None]


@functools.cache
def _kernel(device: str) -> Callable[..., Any]:
    """Return flex_attention, on a GPU compiled once for all lengths."""
    plain: Callable[..., Any] = flex_attention
    return torch.compile(plain, dynamic=True) if device == "cuda" else plain  # uncompiled, it skips no block
