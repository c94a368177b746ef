"""What a forward pass keeps for its backward pass: counted on a narrow twin of the model, through the trainer's own code."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from transformers import PreTrainedConfig

from psigrad.language.models import language_model
from psigrad.language.models.backbone import DTYPES
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.models.lora import Lora
from psigrad.language.models.packing import Groups
from psigrad.preflight.plan.shape import Shape, counted, model_of, resized, size

# Widest hidden size of a twin: beyond it every width is divided alike, and what is kept is multiplied again.
_WIDE = 512
_NARROW = 256


@dataclass(frozen=True)
class Terms:
    """Bytes kept for the backward pass: `token` per packed token and layer, `prefix` per layer for each token of a prompt that a
    completion carries with it (0 where the attention shares it), `once` per packed token outside the layers, `input` per token
    for what enters a layer. `fused` is the width in bytes that the fused decoder computes in, 0 where there is none.
    """

    token: float
    prefix: float
    once: float
    input: float
    fused: int = 0

    @classmethod
    def estimated(cls, shape: Shape, width: int) -> Terms:
        """Those of models like Llama in plain PyTorch, for weights of `width` bytes."""
        kept = 6 * shape.hidden + 4 * shape.query + 3 * shape.key + 4 * shape.inner
        return cls(width * kept, 2 * width * shape.query, 4 * width * shape.hidden, width * shape.hidden)

    def scaled(self, factor: float) -> Terms:
        """All of them times `factor`."""
        return Terms(self.token * factor, self.prefix * factor, self.once * factor, self.input * factor, self.fused)

    def kept(self, layers: int, tokens: int, carried: int, *, recompute: bool = False) -> float:
        """Bytes for `tokens` packed tokens, with `carried` = the sum over completions of their prompts' lengths.

        With gradient checkpointing (`recompute`) each layer keeps its input, and one layer at a time everything.
        """
        layer = self.token * tokens + self.prefix * carried
        return self.once * tokens + (layers * self.input * tokens + layer if recompute else layers * layer)


def terms(config: PreTrainedConfig, dtype: str, lora: bool = False, device: str = "cpu") -> Terms:
    """The terms of the architecture; of an architecture that can't be narrowed, those of models like Llama in plain PyTorch.

    A GPU runs transformers' own modules, which a CPU runs in float64 alone: there the twin is counted and its widths converted.
    """
    kind: Any = type(config)
    settings = config.to_json_string(use_diff=False)
    if device == "cpu":
        return _terms(kind, settings, dtype, lora)
    return _terms(kind, settings, "float64", lora).scaled(DTYPES[dtype].itemsize / 8)


@cache
def _terms(kind: type[Any], settings: str, dtype: str, lora: bool) -> Terms:
    config = kind.from_dict(json.loads(settings))
    shape, width = counted(config), DTYPES[dtype].itemsize
    try:
        twins = [_twin(config, shape, layers) for layers in (1, 2)]
        models = [_prepared(twin, dtype, lora) for twin in twins]
        short, long = ([_saved(model, prompt) for model in models] for prompt in (2, 34))
    except (TypeError, ValueError, AttributeError, RuntimeError, IndexError):
        return Terms.estimated(shape, width)
    per_layer = [(two - one, tokens, carried) for (one, tokens, carried), (two, _, _) in (short, long)]
    (a, s, c), (b, t, d) = per_layer
    prefix = max(0.0, (b * s - a * t) / (d * s - c * t))
    token = (a - prefix * c) / s
    once = max(0.0, short[0][0] - a) / s
    narrowing = shape.hidden / size(twins[0].get_text_config(), "hidden")
    fused = models[0].decoder.dtype.itemsize if models[0].decoder is not None else 0
    return Terms(token * narrowing, prefix * narrowing, once * narrowing, width * shape.hidden, fused)


def _twin(config: PreTrainedConfig, shape: Shape, layers: int) -> PreTrainedConfig:
    """The architecture with few layers and a few tokens in its vocabulary, all widths in the proportions they have."""
    factor = 1.0 if shape.hidden <= _WIDE else _NARROW / shape.hidden
    heads = shape.heads if factor == 1 else max(4, round(shape.heads * factor))
    keys = max(1, round(heads * shape.key_heads / shape.heads))
    dim = max(8, round(shape.query * factor / heads / 8) * 8)
    sizes = {"hidden": round(shape.hidden * factor), "heads": heads, "keys": keys, "inner": round(shape.inner * factor / 8) * 8}
    sizes |= {"layers": layers, "vocab_size": 16, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    return resized(config, **sizes, head_dim=dim)


def _prepared(config: PreTrainedConfig, dtype: str, lora: bool) -> LanguageModel:
    """The twin as the trainer has it."""
    with torch.random.fork_rng(devices=[]):
        hf = model_of(config, dtype=DTYPES[dtype])
        tokenizer: Any = SimpleNamespace(eos_token_id=0)
        return language_model.prepare(hf, tokenizer, lora=Lora(rank=2) if lora else None)


def _saved(model: LanguageModel, prompt: int) -> tuple[int, int, int]:
    """(bytes that autograd keeps, packed tokens, prompt tokens that completions carry) of one forward pass."""
    groups, members, length = 2, 4, 33
    inputs = Groups([[3] * prompt] * groups, [[[4] * length] * members] * groups)
    own = {t.untyped_storage().data_ptr() for t in (*model.as_transformers().parameters(), *model.as_transformers().buffers())}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor  # held, so that no other tensor gets its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.stats(inputs)
    total = sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in own)
    return total, groups * (prompt + members * (length - 1)), groups * members * prompt
