"""The bytes of activations that a forward pass keeps for its backward pass.

They are counted by running the trainer's code on a twin: a model of the same architecture with smaller sizes. For a GPU, the
twin's norms and attention are functions that keep what the GPU's kernels keep, and compute nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from psigrad.language.models import language_model
from psigrad.language.models.backbone import DTYPES
from psigrad.language.models.fused.gpu_parts import GpuParts
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.models.lora import Lora
from psigrad.language.models.packing import Groups
from psigrad.language.models.sizes import size
from psigrad_extras.preflight.plan.shape import Shape, count_shape, layer_kinds, model_of, resize

# The widest hidden size of a twin. For a wider model, all widths are divided by one factor, and the counts multiplied by it.
_WIDE = 512
_NARROW = 256
# The lengths of the prompts in the two passes that are counted.
_PROMPTS = (2, 34)
# The settings with the widths of layers with a state: numbers of heads, and the width of Falcon-H1's Mamba-2.
_STATE_WIDTHS = ("linear_num_key_heads", "linear_num_value_heads", "mamba_n_heads", "mamba_num_heads", "mamba_d_ssm")


@dataclass(frozen=True)
class Terms:
    """The coefficients of the bytes that are kept for the backward pass.

    `token` is per packed token and layer. `prefix` is per layer and prompt token, once for each completion of the prompt (0 if
    the attention does not repeat prompts). `once` is per packed token outside the layers. `input` is per packed token for the
    input of a layer. `fused` is the bytes per number in the fused decoder, 0 without it.
    """

    token: float
    prefix: float
    once: float
    input: float
    fused: int = 0

    @classmethod
    def estimate(cls, shape: Shape, width: int) -> Terms:
        """Return estimated terms for a model like Llama in plain PyTorch, with weights of `width` bytes."""
        kept = 6 * shape.hidden + 4 * shape.query + 3 * shape.key + 4 * shape.inner
        return cls(width * kept, 2 * width * shape.query, 4 * width * shape.hidden, width * shape.hidden)

    def scale(self, factor: float) -> Terms:
        """Return the terms multiplied by `factor`."""
        return Terms(self.token * factor, self.prefix * factor, self.once * factor, self.input * factor, self.fused)

    def bytes_for(self, layers: int, tokens: int, carried: int, *, recompute: bool = False) -> float:
        """Return the bytes for `tokens` packed tokens. `carried` is the sum of the prompt lengths over all completions.

        With gradient checkpointing (`recompute`), each layer keeps only its input, and one layer at a time keeps everything.
        """
        layer = self.token * tokens + self.prefix * carried
        return self.once * tokens + (layers * self.input * tokens + layer if recompute else layers * layer)


def terms(config: PreTrainedConfig, dtype: str, lora: bool = False, device: str = "cpu") -> Terms:
    """Return the terms of an architecture, counted on a small twin of the model, or estimated as for Llama if it has none.

    A GPU runs transformers' modules, which a CPU runs only in float64. So for a GPU the twin is counted in float64, and scaled.
    """
    kind: Any = type(config)
    settings = json.dumps(config.to_dict(), sort_keys=True)  # to_json_string writes infinity in a form that from_dict rejects
    if device == "cpu":
        return _terms(kind, settings, dtype, lora)
    return _terms(kind, settings, "float64", lora, on_gpu=True).scale(DTYPES[dtype].itemsize / 8)


@cache
def _terms(kind: type[Any], settings: str, dtype: str, lora: bool, on_gpu: bool = False) -> Terms:
    config = kind.from_dict(json.loads(settings))
    shape, width = count_shape(config), DTYPES[dtype].itemsize
    try:
        kinds = layer_kinds(config)
        # Each twin has a layer of every kind: the fused decoder and some architectures support no model with a single kind.
        twin = _twin(config, shape, [*kinds])
        model = _prepare(twin, dtype, lora, on_gpu)
        some = [_count_saved(model, prompt) for prompt in _PROMPTS]
        more = {kind: _prepare(_twin(config, shape, sorted([*kinds, kind])), dtype, lora, on_gpu) for kind in kinds}
        layers = {kind: _per_layer(some, [_count_saved(one, prompt) for prompt in _PROMPTS]) for kind, one in more.items()}
    except Exception:  # an architecture's code may raise anything at unexpected sizes
        return Terms.estimate(shape, width)
    token, prefix = (sum(layers[kind][i] * count for kind, count in kinds.items()) / shape.layers for i in (0, 1))
    whole, tokens, carried = some[0]
    once = max(0.0, whole - sum(own * tokens + repeated * carried for own, repeated in layers.values())) / tokens
    narrowing = shape.hidden / size(twin, "hidden")
    fused = model.decoder.dtype.itemsize if model.decoder is not None else 0
    return Terms(token * narrowing, prefix * narrowing, once * narrowing, width * shape.hidden, fused)


def _per_layer(some: Sequence[tuple[int, int, int]], more: Sequence[tuple[int, int, int]]) -> tuple[float, float]:
    """Return `Terms.token` and `Terms.prefix` of a layer from counts by `_count_saved` without it and with it, for `_PROMPTS`."""
    (a, s, c), (b, t, d) = [
        (more - less, tokens, carried) for (less, tokens, carried), (more, _, _) in zip(some, more, strict=True)
    ]
    prefix = max(0.0, (b * s - a * t) / (d * s - c * t))
    return (a - prefix * c) / s, prefix


def _twin(config: PreTrainedConfig, shape: Shape, like: Sequence[int]) -> PreTrainedConfig:
    """Return the configuration of a twin: the layers with indices `like`, a tiny vocabulary, and widths in proportion."""
    factor = 1.0 if shape.hidden <= _WIDE else _NARROW / shape.hidden
    heads = shape.heads if factor == 1 else max(4, round(shape.heads * factor))
    keys = max(1, round(heads * shape.key_heads / shape.heads))
    dim = max(8, round(shape.query * factor / heads / 8) * 8)
    sizes = {"hidden": round(shape.hidden * factor), "inner": round(shape.inner * factor / 8) * 8}
    sizes |= {"heads": heads, "key_heads": keys, "vocab_size": 16, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    given = config.get_text_config().to_dict()
    sizes |= {name: max(1, round(given[name] * factor)) for name in _STATE_WIDTHS if given.get(name)}
    return resize(config, like, **sizes, head_dim=dim)


def _prepare(config: PreTrainedConfig, dtype: str, lora: bool, on_gpu: bool) -> Any:
    """Return the twin as a model with random weights, prepared for training as the trainer does it."""
    with torch.random.fork_rng(devices=[]):
        hf = model_of(config, dtype=DTYPES[dtype])
        tokenizer: Any = SimpleNamespace(bos_token_id=None, eos_token_id=0)
        model: Any = language_model.prepare(hf, tokenizer, lora=Lora(rank=2) if lora else None)
    if on_gpu and not model.why_padded:
        _TwinParts(model.network)
        model.attention_kernel = _Attention.apply
    return model


class _Norm(torch.autograd.Function):
    """An RMS norm that keeps what PyTorch's kernel keeps on a GPU: the input, the weight, and a number for each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_zeros(x.shape[:-1]))
        return torch.zeros_like(x)


class _Attention(torch.autograd.Function):
    """An attention that keeps what `hf_attention.varlen_kernel` keeps: inputs, output, and a number per query and head."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *given: Any) -> Tensor:
        out = torch.zeros_like(q)
        ctx.save_for_backward(q, k, v, out, q.new_zeros(q.shape[:2]))
        return out


class _TwinParts(GpuParts):
    """The forward methods for a GPU, with parts that run on a CPU and only keep tensors."""

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        found: Tensor = _Norm.apply(x, weight)
        return found

    def runs(self, x: Tensor, *weights: Tensor) -> bool:
        return True


def _count_saved(model: LanguageModel, prompt: int) -> tuple[int, int, int]:
    """Return (bytes that autograd keeps, packed tokens, prompt tokens that completions carry) of one forward pass."""
    groups, members, length = 2, 4, 33
    inputs = Groups([[3] * prompt] * groups, [[[4] * length] * members] * groups)
    own = {t.untyped_storage().data_ptr() for t in (*model.network.parameters(), *model.network.buffers())}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor  # a reference, so that no other tensor reuses its memory
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.stats(inputs)
    total = sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in own)
    return total, groups * (prompt + members * (length - 1)), groups * members * prompt
