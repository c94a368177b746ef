"""Our attention inside any transformers model.

transformers lets a model's attention be replaced by a registered function. Ours receives the layout of the packed row as a
keyword argument of the forward call; without one it is transformers' own SDPA, so the same model still runs padded batches
and `generate`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from psigrad.language.models.attention import Layout

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
    if layout is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    for name in ("softcap", "position_bias", "s_aux"):
        if kwargs.get(name) is not None:
            raise ValueError(f"The packed forward does not support attention with {name}; the padded one is used instead.")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    index: Any = module.layer_idx
    return layout.attend(index, query, key, value, scale, kwargs.get("sliding_window")), None


AttentionInterface.register(IMPLEMENTATION, attention)
AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
