"""Our attention inside any transformers model, by scaled_dot_product_attention or FlexAttention.

transformers lets a model's attention be replaced by a registered function. Ours receives the layout of the packed row as a
keyword argument of the forward call; without one it is transformers' own SDPA, so the same model still runs padded batches
and `generate`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from psigrad.language.models.attention import SDPA, Layout, PackedLayout, repeat_heads, softened

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
    """transformers' attention signature; with a layout, dropout is off and `attention_mask` is not read."""
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    plain = softcap is None and sinks is None
    if layout is None and plain:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    if kwargs.get("position_bias") is not None:
        raise ValueError("The packed forward does not support attention with position_bias; the padded one is used instead.")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    how = SDPA if plain else functools.partial(softened, softcap=softcap, sinks=sinks)
    if layout is None:
        key, value = (repeat_heads(x, query.shape[1]) for x in (key, value))
        causal = attention_mask is None and query.shape[2] > 1
        return how(query, key, value, attn_mask=attention_mask, is_causal=causal, scale=scale).transpose(1, 2), None
    index: Any = module.layer_idx
    return layout.attend(index, query, key, value, scale, kwargs.get("sliding_window"), how), None


AttentionInterface.register(IMPLEMENTATION, attention)
AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)


@dataclass(frozen=True)
class FlexLayout:
    """A packed layout that attends by FlexAttention inside transformers' modules; see `Layout`.

    One compiled kernel skips the blocks which no query attends to (Dong et al. 2024, arXiv:2412.05496), where
    scaled_dot_product_attention needs padded views and a mask of every pair.
    """

    packed: PackedLayout

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, how: Callable[..., Tensor] = SDPA
    ) -> Tensor:
        """Attention by PyTorch's flex_attention. Shapes as in `Layout.attend`."""
        if how is not SDPA:
            raise ValueError("its attention caps scores or has sinks")
        kernel, mask = _kernel(q.device.type), self._mask(window)
        out: Tensor = kernel(q, k, v, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
        return out.transpose(1, 2)

    @cached_property
    def tokens(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Per token [S]: the prompt that it belongs to (or the sequence, where there are no prompts), the completion (-1: none,
        all that go on from behind it see it), its place in its sequence, and where its sequence begins.
        """
        packed = self.packed
        group, own, position, begin = (torch.zeros(packed.rows, dtype=torch.long, device=packed.order.device) for _ in range(4))
        for rows, groups, owners, starts in (
            (packed.prefix_rows, torch.arange(len(packed.prefix_rows)), None, None),
            (packed.sequence_rows, *self._of_sequences()),
        ):
            number, place = (rows >= 0).nonzero(as_tuple=True)
            at = rows[number, place]
            group[at] = groups.to(at.device)[number]
            own[at] = -1 if owners is None else owners.to(at.device)[number]
            begin[at] = packed.rows if starts is None else starts[number]
            position[at] = place if starts is None else place + starts[number]
        return group, own, position, begin

    def _of_sequences(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Of each sequence its prompt, its own number, and where it begins."""
        numbers = torch.arange(len(self.packed.sequence_rows))
        if not len(self.packed.prefix_rows):
            return numbers, None, None
        return self.packed.sequence_prefix, numbers, self.packed.seen

    def _mask(self, window: int | None) -> BlockMask:
        """Built once for all layers of a window."""
        if window not in self._masks:
            group, own, position, begin = self.tokens

            def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
                # prompts are laid down before completions, so that what comes later in the row is never earlier in a sequence
                before = (own[j] < 0) & (position[j] < begin[i])
                seen = (group[i] == group[j]) & (before | (own[j] == own[i])) & (i >= j)
                return seen if window is None else seen & (position[i] - position[j] < window)

            device, rows = group.device, self.packed.rows
            self._masks[window] = _mask_builder(device.type)(visible, None, None, rows, rows, device=str(device))
        return self._masks[window]

    @cached_property
    def _masks(self) -> dict[int | None, BlockMask]:
        return {}


@functools.cache
def _kernel(device: str) -> Callable[..., Any]:
    """Compiled on a GPU, once for rows of every length; elsewhere the plain form, which makes all scores: an oracle."""
    plain: Callable[..., Any] = flex_attention
    return torch.compile(plain, dynamic=True) if device == "cuda" else plain


@functools.cache
def _mask_builder(device: str) -> Callable[..., BlockMask]:
    """Compiled on a GPU, where the mask of every pair is then never held whole."""
    return torch.compile(create_block_mask, dynamic=True) if device == "cuda" else create_block_mask
