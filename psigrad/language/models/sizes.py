"""The sizes of a model, read from its configuration. Architectures name the same size differently."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

NAMES = {
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "heads": ("num_attention_heads", "n_head"),
    "key_heads": ("num_key_value_heads", "num_attention_heads", "n_head"),
    "head_dim": ("head_dim",),
    "inner": ("intermediate_size", "n_inner", "ffn_dim"),
    "vocabulary": ("vocab_size",),
    "positions": ("max_position_embeddings", "n_positions"),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "chosen": ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk"),
}
"""The names of each size in transformers' configurations, the preferred one first."""
# The kinds of layers that store a state of fixed size, or nothing, instead of keys and values.
_WITHOUT_KEYS = frozenset(("linear_attention", "conv", "mamba", "mlp", "moe"))


def size(config: Any, what: str) -> int:
    """Return the size `what`, a key of `NAMES`, of the language model: the largest if layers differ, and 0 if it is not given."""
    return max(_values(config.get_text_config(), what), default=0)


def layer_sizes(config: Any, what: str) -> tuple[int, ...]:
    """Return the size `what`, a key of `NAMES`, of every layer of the language model."""
    found = _values(config.get_text_config(), what)
    return tuple(found) if len(found) > 1 else tuple(found) * size(config, "layers")


def cached_numbers(config: Any) -> int:
    """Return the number of elements in the key-value cache per token: Σ over attention layers of H_kv · (D_key + D_value)."""
    text = config.get_text_config()
    if _first(text, ("kv_lora_rank",)):  # multi-head latent attention, cached for all heads
        width = sum(_first(text, (name,)) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        layers = [size(config, "heads") * width] * size(config, "layers")
    else:
        pairs = zip(layer_sizes(config, "key_heads"), layer_sizes(config, "head_dim"), strict=True)
        layers = [2 * heads * dim for heads, dim in pairs]
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or [""] * len(layers)
    return sum(numbers for numbers, kind in zip(layers, kinds, strict=False) if kind not in _WITHOUT_KEYS)


def _values(text: Any, what: str) -> Sequence[int]:
    """Return the size `what` in the configuration `text`: one value per layer if layers have their own, otherwise one for all."""
    names = NAMES[what]
    read = (*names, *NAMES["hidden"], *NAMES["heads"]) if what == "head_dim" else names
    differ = getattr(text, "per_layer_attributes", None) or ()
    # Gemma 4: transformers raises an error if code reads the model's own head_dim
    layers = list(text.per_layer_config) if any(name in differ for name in read) else [text]
    found: list[int] = []
    for layer in layers:
        value = _first(layer, names)
        if what == "head_dim" and not value:
            value = _first(layer, NAMES["hidden"]) // max(_first(layer, NAMES["heads"]), 1)
        found += value if isinstance(value, list) else [value]
    return found


def _first(config: Any, names: Sequence[str]) -> Any:
    """Return the first attribute in `names` that is set, a number or a list with one per layer. If none is set, return 0."""
    found = (getattr(config, name, None) for name in names)
    value = next((value for value in found if value is not None), 0)
    return [int(one) for one in value] if isinstance(value, list | tuple) else int(value)
